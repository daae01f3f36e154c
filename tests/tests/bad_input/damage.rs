//! Damage by disks to replicas and volumes.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, wait_until};
use rustix::fs::OFlags;

use crate::{assert_serves, files_below};

/// A replica file's header: a page that no other replica of the block shares.
const HEADER_BYTES: usize = 4096;
/// Offset of the first chunk in a replica file.
const FIRST_CHUNK: u64 = 8192;
const FILE_BYTES: usize = 3 << 20;

fn sealed_replicas(cluster: &Cluster, number: usize) -> Vec<PathBuf> {
    let mut files = files_below(
        &cluster
            .path(&Cluster::datanode(number))
            .join("volume/sealed"),
    );
    files.sort();
    files
}

/// Number of datanodes that have the block in the file `name` with exactly this content.
fn good_replicas(cluster: &Cluster, datanodes: usize, name: &Path, content: &[u8]) -> usize {
    (1..=datanodes)
        .flat_map(|number| sealed_replicas(cluster, number))
        .filter(|path| path.file_name() == name.file_name())
        // It may have been removed in the meantime.
        .filter_map(|path| fs::read(path).ok())
        .filter(|bytes| bytes.get(HEADER_BYTES..) == Some(&content[HEADER_BYTES..]))
        .count()
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .expect("a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("read");
    file.write_all_at(&[byte[0] ^ 0x10], offset).expect("write");
    file.sync_all().expect("fsync");
}

#[test]
fn damaged_replicas_are_never_read_and_are_replaced() {
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        replication: 2,
        block_size: "1MiB",
        ..ClusterOptions::default()
    }) else {
        return;
    };
    // Enough files that the first datanode has five replicas, wherever they are placed.
    let file_names: Vec<String> = (0..12).map(|number| format!("f{number}")).collect();
    for (seed, name) in (0..).zip(&file_names) {
        let path = mount.join(name);
        fs::write(&path, Pattern { seed }.bytes(FILE_BYTES)).expect("write");
        File::open(&path).and_then(|f| f.sync_all()).expect("fsync");
    }
    // Unmounting seals every block.
    cluster.stop("mnt");
    cluster.wait_healthy();

    let replicas = sealed_replicas(&cluster, 1);
    assert!(replicas.len() >= 5, "{replicas:?}");
    let contents: Vec<Vec<u8>> = replicas
        .iter()
        .take(5)
        .map(|path| fs::read(path).expect("a replica"))
        .collect();
    // While it runs: flips a bit of data.
    flip(&replicas[0], FIRST_CHUNK + 100);
    // While it is stopped: damages a later bit of data, a checksum, the end, and a whole file.
    cluster.stop(&Cluster::datanode(1));
    let last = contents[1].len() as u64 - 1;
    flip(&replicas[1], last);
    flip(&replicas[2], HEADER_BYTES as u64 + 5);
    let short = OpenOptions::new().write(true).open(&replicas[3]);
    short
        .and_then(|file| file.set_len(contents[3].len() as u64 - 8192))
        .expect("truncate");
    fs::remove_file(&replicas[4]).expect("remove");
    cluster.start_datanode(1);
    cluster.wait_alive(3, Duration::from_secs(30));

    // Clients may choose the good replicas; sooner or later one reads the bad ones, or the scrubber
    // does. Data that is read is correct in any case.
    wait_until("good replicas only", Duration::from_secs(60), || {
        for (seed, name) in (0..).zip(&file_names) {
            let path = format!("/{name}");
            let output = cluster.command(&["fs", "cat", &path]);
            assert!(output.status.success(), "{name}: {output:?}");
            let expected = Pattern { seed }.bytes(FILE_BYTES);
            assert!(output.stdout == expected, "{name}: wrong bytes");
        }
        replicas
            .iter()
            .zip(&contents)
            .all(|(name, content)| good_replicas(&cluster, 3, name, content) == 2)
    });
    let mount = cluster.mount("mnt");
    for (seed, name) in (0..).zip(&file_names) {
        Pattern { seed }.check_file(&mount.join(name), FILE_BYTES as u64);
    }
    assert_serves(&mut cluster, &mount, 5);
}

/// The disk is a pipe, which blocks readers as long as its other end is open.
#[test]
fn a_datanode_ends_in_good_order_while_a_disk_does_not_answer_at_the_start() {
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    let name = Cluster::datanode(1);
    cluster.stop(&name);
    let version = cluster.path(&name).join("volume/VERSION");
    fs::remove_file(&version).expect("the volume was made");
    let made = Command::new("mkfifo").arg(&version).status();
    assert!(made.expect("mkfifo runs").success());
    cluster.begin_datanode(1);
    let mut silent = None;
    let deadline = Duration::from_secs(60);
    wait_until("it waits for the disk", deadline, || {
        let mut options = OpenOptions::new();
        options.write(true);
        // This fails until there is a reader.
        options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
        silent = options.open(&version).ok();
        silent.is_some()
    });
    cluster.stop(&name);
    drop(silent);
}
