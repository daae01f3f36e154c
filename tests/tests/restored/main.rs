//! A namenode whose directory was restored from an older copy, that runs twice, or that was wiped:
//! no file shows wrong bytes, and no replica is deleted before an operator could have noticed.

mod group;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use harvestfs_tests::{
    Cluster, ClusterOptions, Pattern, can_mount, copy_directory, harvestfs, skip, wait_until,
};
use serde_json::Value;

const MIB: usize = 1 << 20;
const BLOCK_BYTES: usize = MIB;
const DATANODES: usize = 4;
const REPLICAS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(120);
/// Log message of a datanode when it obeys a namenode that has begun an epoch.
const OBEYED: &str = "an epoch of the namenode is obeyed";

fn options() -> ClusterOptions {
    ClusterOptions {
        datanodes: DATANODES,
        block_size: "1MiB",
        ..ClusterOptions::default()
    }
}

/// Number of times that each datanode has begun to obey an epoch.
fn obeyed(cluster: &Cluster) -> Vec<usize> {
    (1..=DATANODES)
        .map(|number| {
            let log = cluster.log(&Cluster::datanode(number));
            log.matches(OBEYED).count()
        })
        .collect()
}

/// Waits until every datanode has begun to obey an epoch since `before` was recorded.
fn wait_obeyed(cluster: &Cluster, before: &[usize]) {
    wait_until("every datanode obeys", DEADLINE, || {
        obeyed(cluster)
            .iter()
            .zip(before)
            .all(|(now, was)| now > was)
    });
}

fn status(cluster: &Cluster) -> Value {
    let status = cluster.output_of(&["admin", "status", "--json"]);
    serde_json::from_str(&status).expect("JSON")
}

fn wait_recovering(cluster: &Cluster) {
    wait_until("recovery begins", DEADLINE, || {
        !status(cluster)["recovery"].is_null()
    });
}

/// The blocks in quarantine, with the names of the datanodes that have each.
fn quarantine(cluster: &Cluster) -> Vec<Value> {
    let blocks = cluster.output_of(&["admin", "quarantine", "--json"]);
    serde_json::from_str(&blocks).expect("JSON")
}

/// Waits until `blocks` blocks are in quarantine with all their replicas.
fn wait_quarantined(cluster: &Cluster, blocks: usize) {
    wait_until("what is not known is in quarantine", DEADLINE, || {
        let held = quarantine(cluster);
        let complete = held.iter().filter(|block| {
            let nodes = block["nodes"].as_array().expect("a list");
            nodes.len() >= REPLICAS
        });
        complete.count() >= blocks
    });
}

/// The block files on the disks of all datanodes.
fn replicas(cluster: &Cluster) -> BTreeSet<PathBuf> {
    fn add(directory: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                add(&path, found);
            } else {
                found.insert(path);
            }
        }
    }
    let mut found = BTreeSet::new();
    for number in 1..=DATANODES {
        let volume = cluster.path(&format!("datanode-{number}/volume"));
        for directory in ["sealed", "open"] {
            add(&volume.join(directory), &mut found);
        }
    }
    found
}

fn put(cluster: &Cluster, path: &str, content: &[u8]) -> Output {
    let source = cluster.path("source");
    fs::write(&source, content).expect("a file");
    cluster.command(&["fs", "put", &source.to_string_lossy(), path])
}

fn store(cluster: &Cluster, path: &str, content: &[u8]) {
    let output = put(cluster, path, content);
    assert!(output.status.success(), "{path}: {output:?}");
}

/// The content of a file, or why it cannot be read.
fn get(cluster: &Cluster, path: &str) -> Result<Vec<u8>, String> {
    let output = cluster.command(&["fs", "cat", path]);
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(stderr(&output))
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn start_everything(cluster: &mut Cluster) {
    cluster.start_namenode();
    for number in 1..=DATANODES {
        cluster.start_datanode(number);
    }
}

fn stop_everything(cluster: &mut Cluster) {
    for number in 1..=DATANODES {
        cluster.stop(&Cluster::datanode(number));
    }
    cluster.stop("namenode");
}

/// Copies the directory of the namenode, which then continues and is obeyed again.
fn copy_of_the_namenode(cluster: &mut Cluster) -> PathBuf {
    let copied = cluster.path("copied");
    let before = obeyed(cluster);
    cluster.stop("namenode");
    copy_directory(&cluster.path("namenode"), &copied);
    cluster.start_namenode();
    wait_obeyed(cluster, &before);
    copied
}

fn accept_loss(cluster: &Cluster) {
    let before = obeyed(cluster);
    cluster.output_of(&["admin", "recover", "--accept-loss"]);
    wait_obeyed(cluster, &before);
}

fn put_back(cluster: &Cluster, copied: &Path) {
    copy_directory(copied, &cluster.path("namenode"));
}

#[test]
fn an_older_copy_serves_what_it_knows_and_loses_nothing_by_itself() {
    let mut cluster = Cluster::start(&options());
    let content = |seed, blocks: usize| Pattern { seed }.bytes(blocks * BLOCK_BYTES);
    let (old, newer, after) = (content(1, 3), content(2, 5), content(3, 6));
    store(&cluster, "/old", &old);
    let copied = copy_of_the_namenode(&mut cluster);
    store(&cluster, "/newer", &newer);
    stop_everything(&mut cluster);
    let on_disks = replicas(&cluster);

    put_back(&cluster, &copied);
    start_everything(&mut cluster);
    wait_recovering(&cluster);
    // Once this holds, everything that was reported has been processed.
    wait_quarantined(&cluster, newer.len() / BLOCK_BYTES);
    assert_eq!(get(&cluster, "/old").as_ref(), Ok(&old));
    assert!(get(&cluster, "/newer").is_err());
    let refused = put(&cluster, "/after", &after);
    assert!(!refused.status.success());
    assert!(stderr(&refused).contains("recover"), "{refused:?}");
    check_reasons(&cluster);
    assert_eq!(replicas(&cluster), on_disks);

    // A restart does not change that.
    let before = obeyed(&cluster);
    cluster.stop("namenode");
    cluster.start_namenode();
    wait_recovering(&cluster);
    wait_quarantined(&cluster, newer.len() / BLOCK_BYTES);
    assert_eq!(obeyed(&cluster), before);

    cluster.output_of(&["admin", "recover", "--accept-loss"]);
    wait_obeyed(&cluster, &before);
    assert!(status(&cluster)["recovery"].is_null());
    assert!(
        !cluster
            .command(&["admin", "recover", "--accept-loss"])
            .status
            .success(),
        "there is nothing to accept any more"
    );
    store(&cluster, "/after", &after);
    store(&cluster, "/newer", &after);
    for (path, content) in [("/old", &old), ("/after", &after), ("/newer", &after)] {
        assert_eq!(get(&cluster, path).as_ref(), Ok(content), "{path}");
    }
    check_read_back(&cluster, &newer);
    check_read_back_to_a_full_disk(&cluster);
    // The same after a restart of everything, and then nothing is missing.
    stop_everything(&mut cluster);
    let before = obeyed(&cluster);
    start_everything(&mut cluster);
    wait_obeyed(&cluster, &before);
    wait_quarantined(&cluster, newer.len() / BLOCK_BYTES);
    assert!(status(&cluster)["recovery"].is_null());
    for (path, content) in [("/old", &old), ("/after", &after), ("/newer", &after)] {
        assert_eq!(get(&cluster, path).as_ref(), Ok(content), "{path}");
    }
    let lost: Vec<_> = on_disks.difference(&replicas(&cluster)).cloned().collect();
    assert!(lost.is_empty(), "{lost:?}");
}

/// Checks that both sides log why nothing is changed.
fn check_reasons(cluster: &Cluster) {
    assert!(cluster.log("namenode").contains("recovery begins"));
    for number in 1..=DATANODES {
        let log = cluster.log(&Cluster::datanode(number));
        assert!(log.contains("the namenode is in recovery"), "{log}");
    }
    let doctor = cluster.command(&["admin", "doctor"]);
    assert!(!doctor.status.success());
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(doctor.contains("recover --accept-loss"), "{doctor}");
    let fsck = cluster.fsck();
    assert_eq!(fsck["healthy"], false, "{fsck}");
}

/// Checks that blocks in quarantine are read back as files, one for each block of a lost file.
fn check_read_back(cluster: &Cluster, lost: &[u8]) {
    let directory = cluster.path("read-back");
    cluster.output_of(&["admin", "fsck", "--recover", &directory.to_string_lossy()]);
    let mode = |path: &Path| {
        let metadata = fs::metadata(path).expect("it is there");
        metadata.permissions().mode() & 0o7777
    };
    assert_eq!(mode(&directory), 0o700);
    let files: Vec<Vec<u8>> = fs::read_dir(&directory)
        .expect("a directory")
        .map(|entry| {
            let path = entry.expect("a file").path();
            assert_eq!(mode(&path), 0o600, "{}", path.display());
            fs::read(path).expect("its content")
        })
        .collect();
    for (number, block) in lost.chunks(BLOCK_BYTES).enumerate() {
        let is_there = files.iter().any(|file| file.starts_with(block));
        assert!(
            is_there,
            "block {number} is in none of {} files",
            files.len()
        );
    }
}

/// Checks that a block that cannot be written is not reported as read back, and that no file has zeros instead.
fn check_read_back_to_a_full_disk(cluster: &Cluster) {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can mount a tmpfs");
    }
    let directory = cluster.path("full");
    fs::create_dir(&directory).expect("a directory");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k", "none"])
        .arg(&directory)
        .status();
    assert!(mounted.expect("mount runs").success());
    let output = cluster.command(&["admin", "fsck", "--recover", &directory.to_string_lossy()]);
    let lengths: Vec<u64> = fs::read_dir(&directory)
        .expect("a directory")
        .map(|entry| entry.and_then(|it| it.metadata()).expect("a file").len())
        .collect();
    let unmounted = Command::new("umount").arg(&directory).status();
    assert!(unmounted.expect("umount runs").success());
    assert!(!output.status.success(), "{output:?}");
    assert!(
        lengths.iter().all(|length| *length <= 64 << 10),
        "{lengths:?}"
    );
}

/// The files in the file system: some that grow, and some small ones that share a block.
struct Files {
    mount: PathBuf,
}

impl Files {
    const SMALL: u64 = 20;

    fn write(&self, name: &str, seed: u64, offset: usize, length: usize) {
        let path = self.mount.join(name);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path);
        let file = file.expect("it can be opened");
        let mut bytes = vec![0; length];
        Pattern { seed }.fill(offset as u64, &mut bytes);
        file.write_all_at(&bytes, offset as u64).expect("write");
        file.sync_all().expect("fsync");
    }

    /// Checks that the content is that of the copy, as far as it can be read without an error. Returns the number of
    /// files read.
    fn check_old(&self) -> usize {
        let mut expected = vec![("grown".to_owned(), Pattern { seed: 100 }.bytes(GROWN_BYTES))];
        for seed in 0..Self::SMALL {
            expected.push((format!("small-{seed}"), Pattern { seed }.bytes(SMALL_BYTES)));
        }
        let read = |(name, content): &(String, Vec<u8>)| match fs::read(self.mount.join(name)) {
            Ok(found) => {
                assert!(found == *content, "{name}: {} bytes are wrong", found.len());
                true
            }
            Err(error) => {
                eprintln!("{name} cannot be read: {error}");
                false
            }
        };
        expected.iter().filter(|it| read(it)).count()
    }
}

const GROWN_BYTES: usize = 3 * MIB / 2;
const SMALL_BYTES: usize = 9_000;

#[test]
fn files_that_grew_since_the_copy_are_as_they_were_in_it() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&options());
    let files = Files {
        mount: cluster.mount("mnt"),
    };
    files.write("grown", 100, 0, GROWN_BYTES);
    for seed in 0..Files::SMALL {
        files.write(&format!("small-{seed}"), seed, 0, SMALL_BYTES);
    }
    let copied = copy_of_the_namenode(&mut cluster);
    // The mount continues in the blocks that it has begun.
    files.write("grown", 100, GROWN_BYTES, 3 * MIB);
    files.write("grown", 200, 8 * 1024, 300 * 1024);
    for seed in 0..Files::SMALL / 2 {
        files.write(&format!("small-{seed}"), 300 + seed, 0, SMALL_BYTES);
        files.write(&format!("new-{seed}"), 400 + seed, 0, SMALL_BYTES);
    }
    fs::remove_file(files.mount.join("small-19")).expect("remove");
    cluster.stop("mnt");
    stop_everything(&mut cluster);

    put_back(&cluster, &copied);
    start_everything(&mut cluster);
    wait_recovering(&cluster);
    wait_quarantined(&cluster, 1);
    cluster.mount("mnt");
    let expected = 1 + Files::SMALL as usize;
    assert_eq!(files.check_old(), expected);
    let refused = File::create(files.mount.join("refused")).expect_err("nothing is changed");
    assert_eq!(
        refused.kind(),
        std::io::ErrorKind::ReadOnlyFilesystem,
        "{refused}"
    );

    accept_loss(&cluster);
    let write = || -> std::io::Result<()> {
        let mut file = File::create(files.mount.join("after"))?;
        file.write_all(b"after")?;
        file.sync_all()
    };
    wait_until("the mount writes again", DEADLINE, || write().is_ok());
    files.write("grown", 100, GROWN_BYTES, MIB);
    let file = File::open(files.mount.join("grown")).expect("it is there");
    Pattern { seed: 100 }.check(&file, 0, GROWN_BYTES + MIB);
    drop(file);
    // The caches of a new mount are empty.
    cluster.stop("mnt");
    cluster.mount("mnt");
    let file = File::open(files.mount.join("grown")).expect("it is there");
    Pattern { seed: 100 }.check(&file, 0, GROWN_BYTES + MIB);
    drop(file);
    let file = File::options().write(true).open(files.mount.join("grown"));
    let truncated = file.and_then(|file| file.set_len(GROWN_BYTES as u64));
    truncated.expect("it can be truncated");
    assert_eq!(files.check_old(), expected);
}

/// A cluster directory for commands, with another address of the namenode.
fn directory_for(cluster: &Cluster, name: &str, namenode: SocketAddr) -> PathBuf {
    let directory = cluster.path(name);
    fs::create_dir_all(&directory).expect("a directory");
    for part in ["ca", "admin", "client"] {
        copy_directory(&cluster.path(part), &directory.join(part));
    }
    for part in ["admin", "client"] {
        let path = directory.join(part).join("client.toml");
        let config = fs::read_to_string(&path).expect("a configuration");
        let other = config.replace(&cluster.namenode().to_string(), &namenode.to_string());
        fs::write(&path, other).expect("it can be written");
    }
    directory
}

#[test]
fn a_copy_that_is_started_elsewhere_does_no_harm_to_the_original() {
    let mut cluster = Cluster::start(&options());
    let content = |seed| Pattern { seed }.bytes(4 * BLOCK_BYTES);
    store(&cluster, "/old", &content(1));
    let copied = copy_of_the_namenode(&mut cluster);
    store(&cluster, "/newer", &content(2));

    let address = cluster.start_copied_namenode(&copied);
    let elsewhere = directory_for(&cluster, "elsewhere", address);
    let ask_copy = |arguments: &[&str]| {
        let mut command = Command::new(harvestfs());
        command
            .args(arguments)
            .env("HARVESTFS_DATA", &elsewhere)
            .env_remove("HARVESTFS_CLIENT_CONFIG");
        let output = command.output().expect("the binary runs");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        output.stdout
    };
    // A datanode that connects to the copy finds that it knows less, and leaves everything unchanged.
    cluster.wait_healthy();
    let on_disks = replicas(&cluster);
    let before = obeyed(&cluster);
    cluster.stop("datanode-4");
    cluster.start_datanode_with(4, &[&format!("--namenodes={address}")]);
    let recovery = || -> Value {
        let status = ask_copy(&["admin", "status", "--json"]);
        serde_json::from_slice::<Value>(&status).expect("JSON")["recovery"].clone()
    };
    wait_until("the copy recovers", DEADLINE, || !recovery().is_null());
    assert_eq!(obeyed(&cluster), before);
    for (path, seed) in [("/old", 1), ("/newer", 2)] {
        assert_eq!(get(&cluster, path), Ok(content(seed)), "{path}");
    }

    // After the loss is accepted at the copy, that datanode obeys it, and no other.
    ask_copy(&["admin", "recover", "--accept-loss"]);
    wait_until("the datanode obeys the copy", DEADLINE, || {
        obeyed(&cluster)[3] > before[3]
    });
    cluster.stop("datanode-4");
    cluster.begin_datanode(4);
    let advice = "take the datanode back";
    wait_until("the operator sees it", DEADLINE, || {
        let doctor = cluster.command(&["admin", "doctor"]);
        String::from_utf8_lossy(&doctor.stdout).contains(advice)
    });
    assert!(cluster.log("namenode").contains("datanode-4"));
    wait_until("the datanode says why it is refused", DEADLINE, || {
        cluster.log("datanode-4").contains("two namenodes run")
    });
    assert!(status(&cluster)["recovery"].is_null());
    store(&cluster, "/after", &content(3));
    cluster.stop("copy");
    accept_loss(&cluster);
    for (path, seed) in [("/old", 1), ("/newer", 2), ("/after", 3)] {
        assert_eq!(get(&cluster, path), Ok(content(seed)), "{path}");
    }
    cluster.wait_healthy();
    let now = replicas(&cluster);
    let lost: Vec<_> = on_disks.difference(&now).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

#[test]
fn a_wiped_namenode_does_not_start_and_a_new_one_takes_no_datanode() {
    let mut cluster = Cluster::start(&options());
    let content = Pattern { seed: 1 }.bytes(4 * BLOCK_BYTES);
    store(&cluster, "/old", &content);
    stop_everything(&mut cluster);
    let on_disks = replicas(&cluster);
    let data = cluster.path("namenode/data");
    let kept = cluster.path("kept");
    fs::rename(&data, &kept).expect("it can be moved");
    let config = cluster.path("namenode/namenode.toml");
    let mut start = Command::new("timeout");
    start
        .arg("60")
        .arg(harvestfs())
        .args(["namenode", "--config"]);
    let refused = start.arg(&config).output().expect("it runs");
    assert!(!refused.status.success());
    assert!(stderr(&refused).contains("disk may"), "{refused:?}");

    // A new namenode belongs to another cluster, even with a certificate of this one.
    let _ = fs::remove_dir_all(&data);
    let other = cluster.path("other");
    let made = cluster.command(&["init", "cluster", "--data", &other.to_string_lossy()]);
    assert!(made.status.success(), "{made:?}");
    fs::rename(other.join("namenode/data"), &data).expect("it can be moved");
    cluster.start_namenode();
    for number in 1..=DATANODES {
        cluster.begin_datanode(number);
    }
    wait_until("every datanode refuses", DEADLINE, || {
        (1..=DATANODES).all(|number| {
            let log = cluster.log(&Cluster::datanode(number));
            log.contains("not of this cluster")
        })
    });
    stop_everything(&mut cluster);
    assert_eq!(replicas(&cluster), on_disks);

    fs::remove_dir_all(&data).expect("it is there");
    fs::rename(&kept, &data).expect("it can be moved");
    start_everything(&mut cluster);
    cluster.wait_healthy();
    assert_eq!(get(&cluster, "/old"), Ok(content));
    assert_eq!(replicas(&cluster), on_disks);
}
