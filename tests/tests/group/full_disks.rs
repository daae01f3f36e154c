//! The disks of a majority of namenodes, including the leader's, are full, and then space is freed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, skip, wait_until};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use tempfile::TempDir;

use super::{address, hand_over, voters};

const NAMENODES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(120);
/// Three segments of a journal, of 64 MiB each, which is more than is written.
const DISK_BYTES: u64 = 256 << 20;
/// Large records, so that a segment ends soon.
const ATTRIBUTE_BYTES: usize = 60_000;
const PROGRAMS: u64 = 4;
/// Time without an acknowledgement, after both namenodes said that their disks are full, after which nothing more is
/// expected.
const STUCK: Duration = Duration::from_secs(4);
/// Time for which the disks are full: less than the timeout of programs on a mount.
const FULL_FOR: Duration = Duration::from_secs(10);

/// A small disk, mounted until it is dropped.
struct Disk {
    at: TempDir,
}

impl Disk {
    fn mount() -> Self {
        let at = tempfile::tempdir().expect("a directory");
        let options = format!("size={DISK_BYTES},mode=700");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(at.path())
            .status();
        assert!(mount.expect("mount runs").success());
        Self { at }
    }

    fn filler(&self) -> PathBuf {
        self.at.path().join("filler")
    }

    /// Leaves no byte free.
    fn fill(&self) {
        let mut filler = File::create(self.filler()).expect("a file");
        for bytes in [1 << 20, 1 << 10, 1] {
            loop {
                match filler.write_all(&vec![1; bytes]) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    fn make_space(&self) {
        fs::remove_file(self.filler()).expect("it is there");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.at.path())
            .status();
    }
}

/// Programs that create files with large attributes, and report which of them are durable: a name, and the number
/// from which the attribute is generated.
struct Programs {
    stop: Arc<AtomicBool>,
    safe: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<BTreeSet<(String, u64)>>>,
}

impl Programs {
    fn start(directory: &Path) -> Self {
        let (stop, safe) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let threads = (0..PROGRAMS).map(|program| {
            let (stop, safe) = (Arc::clone(&stop), Arc::<AtomicU64>::clone(&safe));
            let directory = directory.to_owned();
            thread::spawn(move || {
                let mut names = BTreeSet::new();
                for number in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let name = format!("file-{program}-{number}");
                    let path = directory.join(&name);
                    let file = File::create_new(&path).expect("create");
                    let value = vec![number as u8; ATTRIBUTE_BYTES];
                    setxattr(&path, "user.large", &value, XattrFlags::empty()).expect("setxattr");
                    file.sync_all().expect("fsync");
                    names.insert((name, number));
                    safe.fetch_add(1, Ordering::Relaxed);
                }
                names
            })
        });
        Self {
            threads: threads.collect(),
            stop,
            safe,
        }
    }

    fn safe(&self) -> u64 {
        self.safe.load(Ordering::Relaxed)
    }

    fn end(self) -> BTreeSet<(String, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        let names = self.threads.into_iter();
        names
            .flat_map(|it| it.join().expect("nothing failed"))
            .collect()
    }
}

/// Restarts parts that have ended, as systemd does.
fn revive(cluster: &mut Cluster) {
    let running = cluster.running();
    for number in 1..=NAMENODES {
        let name = Cluster::namenode_name(number);
        if !running.contains(&name) {
            // Reaps the process that has ended.
            cluster.kill(&name);
            cluster.begin_namenode(number);
        }
    }
}

/// Whether a namenode ended, or did not start, since its disk is full. A checkpoint that fails for that reason stops
/// nothing.
fn has_no_space(cluster: &Cluster, number: usize) -> bool {
    let log = cluster.log(&Cluster::namenode_name(number)).to_lowercase();
    let mut lines = log.lines();
    lines.any(|line| line.contains("no space left") && !line.contains("checkpoint"))
}

#[test]
fn when_most_disks_were_full_the_group_goes_on_by_itself_and_nothing_is_lost() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root mounts small disks: run it as root");
    }
    // They must outlive the cluster.
    let mut disks = Vec::new();
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    }) else {
        return;
    };
    for _ in 1..NAMENODES {
        let number = cluster.make_namenode_on(|directory| {
            let disk = Disk::mount();
            let copied = Command::new("cp")
                .arg("-aT")
                .args([directory, disk.at.path()])
                .status();
            assert!(copied.expect("cp runs").success());
            fs::remove_dir_all(directory).expect("it was just made");
            symlink(disk.at.path(), directory).expect("a link");
            disks.push(disk);
        });
        cluster.output_of(&["admin", "namenode", "add", &address(&cluster, number)]);
    }
    hand_over(&cluster, 2);
    let directory = mount.join("d");
    fs::create_dir(&directory).expect("mkdir");
    let programs = Programs::start(&directory);
    wait_until("files are written", DEADLINE, || programs.safe() > 20);

    disks.iter().for_each(Disk::fill);
    let (mut safe, mut since, began) = (programs.safe(), Instant::now(), Instant::now());
    while since.elapsed() < STUCK {
        assert!(
            began.elapsed() < DEADLINE,
            "it goes on with full disks, or does not say that they are full"
        );
        revive(&mut cluster);
        thread::sleep(Duration::from_millis(500));
        // An election, and the start of the one that is elected, may take as long.
        let is_full = [2, 3].iter().all(|it| has_no_space(&cluster, *it));
        if !is_full || programs.safe() > safe {
            (safe, since) = (programs.safe(), Instant::now());
        }
    }
    println!("{safe} files were safe when the disks were full");
    let full = Instant::now();
    while full.elapsed() < FULL_FOR {
        revive(&mut cluster);
        thread::sleep(Duration::from_secs(1));
    }
    assert_eq!(programs.safe(), safe, "nothing is acknowledged");
    let log = cluster.log(&Cluster::namenode_name(2));
    assert!(log.contains("no space left"), "{log}");

    // With the first of them, there is a majority.
    for disk in &disks {
        disk.make_space();
        let (safe, again) = (programs.safe(), Instant::now());
        wait_until("it goes on", DEADLINE, || {
            revive(&mut cluster);
            thread::sleep(Duration::from_millis(200));
            programs.safe() > safe + PROGRAMS
        });
        println!("it goes on {:?} after there is space", again.elapsed());
    }
    let names = programs.end();
    wait_until("all follow", DEADLINE, || {
        revive(&mut cluster);
        cluster.all_follow()
    });
    assert_eq!(voters(&cluster).len(), NAMENODES);
    let other = cluster.mount("other").join("d");
    for (name, number) in &names {
        let mut value = vec![0; ATTRIBUTE_BYTES];
        let length = getxattr(other.join(name), "user.large", &mut value)
            .unwrap_or_else(|error| panic!("{name}, of {}: {error}", names.len()));
        assert_eq!(length, ATTRIBUTE_BYTES, "{name}");
        assert!(value.iter().all(|it| *it == *number as u8), "{name}");
    }
}
