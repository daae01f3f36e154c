//! A sync of the disk of the namenode or of a datanode fails, the process is restarted, and then the power
//! fails: everything that was acknowledged is preserved.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use harvestfs_chaos::live::FailingDisk;
use harvestfs_tests::{Cluster, ClusterOptions, Pattern, can_mount, wait_until};
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(60);
const FILE_BYTES: usize = 20_000;
const DISK_BYTES: usize = 64 << 30;

/// Moves the directory of a stopped part of a cluster to a disk that can fail. The returned mount point must be removed
/// after the disk.
fn move_to_disk(cluster: &Cluster, directory: &str) -> (TempDir, FailingDisk) {
    let at = tempfile::tempdir().expect("a directory");
    let path = cluster.path(directory);
    let status = Command::new("cp")
        .args(["-r", "--preserve=mode", "-T"])
        .args([&*path, at.path()])
        .status();
    assert!(status.expect("cp runs").success());
    fs::remove_dir_all(&path).expect("remove");
    symlink(at.path(), &path).expect("symlink");
    let disk = FailingDisk::over(at.path(), DISK_BYTES).expect("it is mounted");
    (at, disk)
}

/// Begins to write a file with a sync. Uses a separate process, since one that has a file open cannot start a part
/// that the file needs.
fn begin(cluster: &Cluster, mount: &Path, seed: u64) -> Child {
    let local = cluster.path(&format!("file-{seed}"));
    fs::write(&local, Pattern { seed }.bytes(FILE_BYTES)).expect("write");
    let path = mount.join(format!("file-{seed}"));
    Command::new("dd")
        .arg(format!("if={}", local.display()))
        .arg(format!("of={}", path.display()))
        .args(["conv=fsync", "status=none"])
        .spawn()
        .expect("dd runs")
}

fn write(cluster: &Cluster, mount: &Path, seed: u64) {
    let status = begin(cluster, mount, seed).wait();
    assert!(status.expect("it is ours").success(), "file {seed}");
}

fn check(mount: &Path, count: u64) {
    for seed in 0..count {
        let path = mount.join(format!("file-{seed}"));
        Pattern { seed }.check_file(&path, FILE_BYTES as u64);
    }
}

#[test]
fn what_the_namenode_acknowledged_survives_a_failed_sync_and_a_power_loss() {
    if !can_mount() {
        return;
    }
    // It must outlive the cluster.
    let (_at, disk);
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    });
    cluster.stop("namenode");
    (_at, disk) = move_to_disk(&cluster, "namenode");
    cluster.start_namenode();
    let mount = cluster.mount("mnt");
    write(&cluster, &mount, 0);

    disk.fail_next_sync(Some("journal"));
    let mut waits = begin(&cluster, &mount, 1);
    wait_until("the namenode has stopped", DEADLINE, || {
        !cluster.running().contains(&"namenode".to_owned())
    });
    assert!(disk.failed_bytes() > 0);
    let log = cluster.log("namenode");
    assert!(log.contains("Input/output error"), "{log}");
    // Reaps the process that has ended.
    cluster.kill("namenode");
    cluster.start_namenode();
    assert!(waits.wait().expect("it is ours").success());
    write(&cluster, &mount, 2);
    check(&mount, 3);

    cluster.kill("namenode");
    disk.lose_power();
    cluster.start_namenode();
    check(&mount, 3);
    // Makes sure that nothing comes from the mount's memory.
    cluster.stop("mnt");
    let mount = cluster.mount("mnt");
    check(&mount, 3);
}

#[test]
fn what_a_datanode_acknowledged_survives_a_failed_sync_and_a_power_loss() {
    if !can_mount() {
        return;
    }
    // It must outlive the cluster.
    let (_at, disk);
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    let datanode = Cluster::datanode(1);
    cluster.stop(&datanode);
    (_at, disk) = move_to_disk(&cluster, &datanode);
    cluster.start_datanode(1);
    let mount = cluster.mount("mnt");
    write(&cluster, &mount, 0);

    disk.fail_next_sync(Some("volume"));
    // Data that could not be stored is written again elsewhere.
    write(&cluster, &mount, 1);
    assert!(disk.failed_bytes() > 0);
    cluster.kill(&datanode);
    cluster.start_datanode(1);
    write(&cluster, &mount, 2);
    check(&mount, 3);

    cluster.kill(&datanode);
    disk.lose_power();
    cluster.start_datanode(1);
    cluster.stop("mnt");
    let mount = cluster.mount("mnt");
    check(&mount, 3);
}
