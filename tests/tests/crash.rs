//! kill -9 of every part during writes: everything for which `fsync` returned is durable.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle, sleep};
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, can_mount, wait_until};
use parking_lot::Mutex;
use rustix::process::Signal;

/// Acknowledged data: for each file, the length for which `fsync` returned.
type Acknowledged = Arc<Mutex<BTreeMap<String, u64>>>;

const DATANODES: usize = 5;

/// Environment variable with mount and number of a writer, for its process.
const WRITER: &str = "HARVESTFS_TEST_WRITER";

/// Writes files, some small and some growing, each piece followed by `fsync`, until it is killed
/// or an error shows that the mount died. A separate process, since a process that starts a namenode
/// while it has files open first closes its copies of them, which waits for the namenode.
struct Writer {
    process: Child,
    reader: JoinHandle<()>,
}

impl Writer {
    fn start(mount: &Path, number: u64, acknowledged: &Acknowledged) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("the test"))
            .args(["--exact", "writes_where_it_is_told", "--nocapture"])
            .env(WRITER, format!("{number}:{}", mount.display()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test runs");
        let stdout = process.stdout.take().expect("piped");
        let acknowledged = acknowledged.clone();
        let reader = thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let mut words = line.split(' ');
                if words.next() == Some("acknowledged") {
                    let name = words.next().expect("a name").to_owned();
                    let length = words.next().expect("a length").parse().expect("a number");
                    let mut acknowledged = acknowledged.lock();
                    acknowledged.insert(name, length);
                }
            }
        });
        Self { process, reader }
    }

    fn is_running(&mut self) -> bool {
        let ended = self.process.try_wait();
        ended.expect("it is our child").is_none()
    }

    fn stop(mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        self.process.wait().expect("it is our child");
        self.reader.join().expect("no reader panics");
    }
}

/// Not a test by itself, but the code that a [`Writer`] runs.
#[test]
fn writes_where_it_is_told() {
    let Ok(told) = std::env::var(WRITER) else {
        return;
    };
    let (number, mount) = told.split_once(':').expect("number and mount");
    let number: u64 = number.parse().expect("a number");
    println!();
    for round in 0_u64.. {
        let name = format!("w{number}-{round}");
        let seed = number << 32 | round;
        let Ok(file) = File::create(Path::new(mount).join(&name)) else {
            return;
        };
        let (pieces, piece_bytes) = match round % 3 {
            0 => (1, 1_000),
            1 => (8, 70_000),
            _ => (4, 3 << 20),
        };
        let mut length: u64 = 0;
        for _ in 0..pieces {
            let mut bytes = vec![0; piece_bytes];
            // Offsets of the pattern are multiples of 8, and so are these lengths.
            Pattern { seed }.fill(length, &mut bytes);
            if file.write_all_at(&bytes, length).is_err() || file.sync_all().is_err() {
                return;
            }
            length += piece_bytes as u64;
            println!("acknowledged {name} {length}");
        }
    }
}

fn check(mount: &Path, acknowledged: &Acknowledged) -> usize {
    let acknowledged = acknowledged.lock();
    for (name, &length) in acknowledged.iter() {
        let (number, round) = name[1..].split_once('-').expect("our names");
        let seed = number.parse::<u64>().expect("a number") << 32
            | round.parse::<u64>().expect("a number");
        let file = File::open(mount.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let found = file.metadata().expect("its attributes").len();
        assert!(found >= length, "{name}: {found} of {length} bytes");
        Pattern { seed }.check(&file, 0, usize::try_from(length).expect("it fits"));
    }
    acknowledged.len()
}

#[test]
fn what_fsync_returned_for_survives_kill_9_of_the_mount_and_of_the_namenode() {
    kill_one_after_another(&["mnt".to_owned(), "namenode".to_owned()]);
}

#[test]
fn what_fsync_returned_for_survives_kill_9_of_every_datanode() {
    let datanodes: Vec<String> = (1..=DATANODES).map(Cluster::datanode).collect();
    kill_one_after_another(&datanodes);
}

fn kill_one_after_another(victims: &[String]) {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: DATANODES,
        ..ClusterOptions::default()
    });
    let acknowledged = Acknowledged::default();
    let mut mount = cluster.mount("mnt");
    for (round, victim) in victims.iter().enumerate() {
        let before = acknowledged.lock().len();
        let writers: Vec<_> = (0..3)
            .map(|n| Writer::start(&mount, round as u64 * 10 + n, &acknowledged))
            .collect();
        sleep(Duration::from_millis(1_200));
        wait_until("writers make progress", Duration::from_secs(60), || {
            acknowledged.lock().len() > before
        });
        cluster.kill(victim);
        sleep(Duration::from_millis(300));
        match victim.as_str() {
            "namenode" => cluster.start_namenode(),
            "mnt" => mount = cluster.mount("mnt"),
            datanode => {
                let number = datanode.rsplit('-').next().expect("a number");
                cluster.start_datanode(number.parse().expect("a number"));
            }
        }
        sleep(Duration::from_millis(1_000));
        for mut writer in writers {
            let is_without_mount = victim == "mnt";
            assert!(
                is_without_mount || writer.is_running(),
                "a writer got an error when {victim} was killed"
            );
            writer.stop();
        }
        let files = check(&mount, &acknowledged);
        eprintln!("killed {victim}: {files} files as acknowledged");
    }
    // The session of a killed mount ends, and its uncommitted data is collected.
    cluster.wait_healthy();
    cluster.stop("mnt");
    let mount = cluster.mount("mnt");
    check(&mount, &acknowledged);
    for entry in fs::read_dir(&mount).expect("the root") {
        fs::remove_file(entry.expect("an entry").path()).expect("remove");
    }
    cluster.wait_healthy();
}

/// The kernel has no pages of files opened for appending, and leaves syncing to the mount.
#[test]
fn what_was_appended_with_o_sync_or_o_dsync_survives_kill_9_of_the_mount() {
    let Some((mut cluster, mount, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let ways = [
        ("sync", libc::O_SYNC),
        ("dsync", libc::O_DSYNC),
        ("direct", libc::O_DIRECT | libc::O_DSYNC),
    ];
    let records =
        |name: &str| -> Vec<String> { (0..20).map(|n| format!("{name}:{n:04}\n")).collect() };
    let mut open = Vec::new();
    for (name, flags) in ways {
        let mut log = File::options()
            .create(true)
            .append(true)
            .custom_flags(flags)
            .open(mount.join(name))
            .expect("open");
        for record in records(name) {
            log.write_all(record.as_bytes()).expect("append");
        }
        // Not closed, since that would also store it.
        open.push(log);
    }
    cluster.kill("one");
    drop(open);
    for (name, _) in ways {
        let text = fs::read_to_string(other.join(name)).expect("read");
        assert_eq!(text, records(name).concat(), "{name}");
    }
}

#[test]
fn everything_at_once_killed_and_started_again() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let acknowledged = Acknowledged::default();
    let mount = cluster.mount("mnt");
    let writers: Vec<_> = (0..3)
        .map(|number| Writer::start(&mount, number, &acknowledged))
        .collect();
    sleep(Duration::from_secs(2));
    for victim in cluster.running() {
        cluster.kill(&victim);
    }
    for writer in writers {
        writer.stop();
    }
    cluster.start_namenode();
    for number in 1..=4 {
        cluster.start_datanode(number);
    }
    let mount = cluster.mount("mnt");
    assert!(check(&mount, &acknowledged) > 0);
    cluster.wait_healthy();
}

/// Five servers, and a mount with a fully replicated file; `None` if nothing can be mounted.
fn five_servers_with_a_file(bytes: usize) -> Option<(Cluster, PathBuf)> {
    let (cluster, mount) = Cluster::mounted(&ClusterOptions {
        datanodes: 5,
        block_size: "1MiB",
        ..ClusterOptions::default()
    })?;
    let path = mount.join("f");
    fs::write(&path, Pattern { seed: 1 }.bytes(bytes)).expect("write");
    File::open(&path).and_then(|f| f.sync_all()).expect("fsync");
    Some((cluster, mount))
}

/// An owner who clears a disk does not stop the datanode first, which has files open and does not notice.
#[test]
fn what_was_on_a_volume_that_is_cleared_under_a_running_datanode_is_copied() {
    let Some((cluster, mount)) = five_servers_with_a_file(20 << 20) else {
        return;
    };
    cluster.wait_healthy();
    let cleared = Cluster::datanode(1);
    let replicas = || -> u64 {
        let nodes = cluster.output_of(&["admin", "nodes"]);
        let line = nodes.lines().find(|line| line.starts_with(&cleared));
        let of_node = line.and_then(|line| line.split_whitespace().nth(5)?.parse().ok());
        of_node.unwrap_or_else(|| panic!("{nodes}"))
    };
    assert!(replicas() > 0, "20 blocks have 60 replicas on 5 servers");
    fs::remove_dir_all(cluster.path(&cleared).join("volume")).expect("its volume");
    let deadline = Duration::from_secs(30);
    wait_until("nothing counts that was cleared", deadline, || {
        replicas() == 0
    });
    cluster.wait_healthy();
    // Whichever replicas are read, none is on that volume.
    let again = mount.join("again");
    fs::copy(mount.join("f"), &again).expect("copy");
    File::open(&again)
        .and_then(|f| f.sync_all())
        .expect("fsync");
    Pattern { seed: 1 }.check_file(&again, 20 << 20);
    cluster.wait_healthy();
}

#[test]
fn a_reimaged_datanode_and_a_returning_one_end_with_the_right_number_of_replicas() {
    let Some((mut cluster, _)) = five_servers_with_a_file(40 << 20) else {
        return;
    };
    cluster.stop("mnt");
    cluster.wait_healthy();

    // Reimaged: this is noticed immediately, since the server comes back with a new storage id.
    let victim = Cluster::datanode(1);
    cluster.stop(&victim);
    cluster.reimage(1);
    cluster.start_datanode(1);
    cluster.wait_healthy();

    // Away for a while, and back with its data: no excess replica remains.
    let victim = Cluster::datanode(2);
    cluster.kill(&victim);
    cluster.wait_alive(4, Duration::from_secs(60));
    cluster.wait_healthy();
    cluster.start_datanode(2);
    cluster.wait_alive(5, Duration::from_secs(60));
    cluster.wait_healthy();

    let mount = cluster.mount("mnt");
    Pattern { seed: 1 }.check_file(&mount.join("f"), 40 << 20);
}

/// Sends the signal that closing a terminal sends to programs started in it.
#[test]
fn a_mount_that_is_hung_up_on_stores_everything_and_a_datanode_stays() {
    const DEADLINE: Duration = Duration::from_secs(90);
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    }) else {
        return;
    };
    // It is not closed, so that its content is still in flight.
    let mut file = File::create(mount.join("f")).expect("a file");
    file.write_all(b"kept").expect("write");
    for _ in 0..2 {
        cluster.signal("mnt", Signal::HUP);
    }
    wait_until("the mount ends", DEADLINE, || {
        !cluster.running().contains(&"mnt".to_owned())
    });
    drop(file);
    let again = cluster.mount("again");
    assert_eq!(fs::read(again.join("f")).expect("read"), b"kept");
    cluster.stop("again");

    // Also before it is registered.
    let name = Cluster::datanode(1);
    cluster.stop(&name);
    cluster.stop("namenode");
    cluster.begin_datanode(1);
    let volume = format!("{name}/volume");
    wait_until("its volume is open", DEADLINE, || {
        let mut open = cluster.open_files(&name).into_iter();
        open.any(|it| it.to_string_lossy().contains(&volume))
    });
    cluster.signal(&name, Signal::HUP);
    cluster.start_namenode();
    cluster.wait_alive(3, DEADLINE);
}
