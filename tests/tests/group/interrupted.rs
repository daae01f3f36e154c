//! The creation of a cluster with three namenodes is interrupted.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use harvestfs_tests::{DownOnDrop, can_mount, harvestfs, run_on};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};

use super::stderr;

const CLUSTERS: u64 = 3;
/// Number of attempts for each cluster that are interrupted before one is not.
const INTERRUPTED: usize = 4;
/// Milliseconds within which a cluster is created and its parts start.
const MADE_WITHIN_MS: u64 = 4_000;
const MAKE: [&str; 7] = [
    "up",
    "--namenodes",
    "3",
    "--datanodes",
    "3",
    "--quota",
    "1GiB",
];

/// Begins to create a cluster, and interrupts that at a random time. Returns when and how.
fn interrupt(data: &Path, rng: &mut StdRng) -> String {
    let mut up = Command::new(harvestfs())
        .args(MAKE)
        .arg("--data")
        .arg(data)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary runs");
    // Most failures are possible near the beginning.
    let after_ms = match rng.random_range(0..3) {
        0 => rng.random_range(0..MADE_WITHIN_MS),
        _ => rng.random_range(0..MADE_WITHIN_MS / 8),
    };
    thread::sleep(Duration::from_millis(after_ms));
    let signal = if rng.random_bool(0.6) {
        Signal::KILL
    } else {
        Signal::INT
    };
    let pid = Pid::from_raw(up.id().try_into().expect("a pid")).expect("not 0");
    kill_process(pid, signal).expect("it is our child");
    let status = up.wait().expect("it ends");
    format!("{signal:?} after {after_ms} ms: {status}")
}

#[test]
fn what_is_interrupted_while_it_is_made_is_gone_on_with() {
    if !can_mount() {
        return;
    }
    for seed in 0..CLUSTERS {
        let mut rng = StdRng::seed_from_u64(seed);
        let directory = tempfile::tempdir().expect("a directory");
        let data = directory.path().join("cluster");
        let _down = DownOnDrop(&data);
        let attempts: Vec<String> = (0..INTERRUPTED)
            .map(|_| interrupt(&data, &mut rng))
            .collect();
        println!("{attempts:#?}");
        if data.is_dir() {
            // As left by a process that was killed while it wrote.
            fs::write(data.join(".up.toml.0123456789abcdef.tmp"), "half").expect("write");
        }
        let made = run_on(&data, &[&MAKE[..], &["--detach"]].concat());
        assert!(made.status.success(), "{attempts:#?}: {}", stderr(&made));
        let file = data.join("mnt/file");
        fs::write(&file, "kept").expect("write");
        let listed = run_on(&data, &["admin", "namenode", "list", "--json"]);
        assert!(listed.status.success(), "{listed:?}");
        let group: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("JSON");
        let members = group["members"].as_array().expect("members");
        assert_eq!(members.len(), 3, "{group:#}");
        assert!(members.iter().all(|it| it["is_voter"] == true), "{group:#}");
        let hidden: Vec<_> = fs::read_dir(&data)
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name())
            .filter(|name| name.to_string_lossy().starts_with('.'))
            .collect();
        assert!(hidden.is_empty(), "{hidden:?} is left");
        let down = run_on(&data, &["down"]);
        assert!(down.status.success(), "{down:?}");
        let again = run_on(&data, &["up", "--detach"]);
        assert!(again.status.success(), "{}", stderr(&again));
        assert_eq!(fs::read_to_string(&file).expect("read"), "kept");
        let down = run_on(&data, &["down"]);
        assert!(down.status.success(), "{down:?}");
    }
}
