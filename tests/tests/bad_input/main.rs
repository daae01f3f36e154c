//! Invalid input of every kind, sent to real processes: each gets a clear, typed error, nothing panics,
//! nothing acknowledged is lost, and all others continue to be served.

mod configuration;
mod damage;
mod journal;
mod peers;
mod space;
mod strangers;
mod wire;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use harvestfs_tests::{Cluster, Pattern, harvestfs, wait_until};

/// Checks that a cluster with the mount `mount` works perfectly: it stores and returns data, fsck
/// is healthy, every process that was started still runs, and none has panicked.
fn assert_serves(cluster: &mut Cluster, mount: &Path, running: usize) {
    let pattern = Pattern { seed: 77 };
    let path = mount.join("still-served");
    fs::write(&path, pattern.bytes(300_000)).expect("write");
    let file = File::open(&path).expect("open");
    file.sync_all().expect("fsync");
    pattern.check(&file, 0, 300_000);
    fs::remove_file(&path).expect("remove");
    drop(file);
    cluster.wait_healthy();
    assert_eq!(cluster.running().len(), running, "{:?}", cluster.running());
    assert_no_panic(cluster);
}

/// Checks that no part of the cluster has panicked.
fn assert_no_panic(cluster: &mut Cluster) {
    for part in cluster.running() {
        let log = cluster.log(&part);
        assert!(!log.contains("panicked"), "{part}:\n{log}");
    }
}

/// Runs a part that must refuse to start. Returns its exit status and output.
fn refused(cluster: &Cluster, part: &str, config: &Path) -> (i32, String) {
    let said = cluster.path("refused.log");
    let mut child = Command::new(harvestfs())
        .args(["--supervised-by", &std::process::id().to_string(), part])
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said).expect("a file for its errors"))
        .spawn()
        .expect("the binary runs");
    let mut status = None;
    for _ in 0..200 {
        status = child.try_wait().expect("it is our child");
        if status.is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let said = fs::read_to_string(&said).expect("text");
    let Some(status) = status else {
        child.kill().expect("it is our child");
        child.wait().expect("it is our child");
        panic!("{part} did not refuse to start:\n{said}");
    };
    assert!(!said.contains("panicked"), "{said}");
    (status.code().expect("it was not killed"), said)
}

/// Changes a configuration or another text file.
fn edit(path: &Path, change: impl FnOnce(String) -> String) {
    let text = fs::read_to_string(path).expect("a text file");
    fs::write(path, change(text)).expect("write");
}

/// All files below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(directory) = pending.pop() {
        // A running datanode may move or remove files in the meantime.
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => pending.push(entry.path()),
                Ok(kind) if kind.is_file() => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found
}

/// Waits until a part's log has a line with these words.
fn wait_for_log(cluster: &Cluster, part: &str, words: &str) {
    wait_until(
        &format!("`{words}` in the log of {part}"),
        Duration::from_secs(20),
        || cluster.log(part).contains(words),
    );
}
