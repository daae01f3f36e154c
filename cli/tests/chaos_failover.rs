//! Tests `harvestfs chaos failover` on real processes, and its cleanup when it ends early.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use harvestfs_tests::{KillOnDrop, can_mount, have_program, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_harvestfs");
/// Other suites may keep this machine busy.
const DEADLINE: Duration = Duration::from_secs(300);

/// Whether this machine can cut links; skips if not.
fn can_run() -> bool {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        skip("networks for namenodes need root and /dev/net/tun");
        return false;
    }
    can_mount() && have_program("ip", "apt install iproute2").is_some()
}

fn failover(temporary: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command
        .args(["chaos", "failover"])
        .args(arguments)
        .env("TMPDIR", temporary);
    command
}

fn said(output: &Output) -> String {
    let texts = [&output.stdout, &output.stderr];
    texts.map(|it| String::from_utf8_lossy(it)).concat()
}

fn left_in(directory: &Path) -> usize {
    fs::read_dir(directory).expect("a directory").count()
}

#[test]
fn nothing_is_missing_when_the_leader_is_killed() {
    if !can_run() {
        return;
    }
    let temporary = tempfile::tempdir().expect("a directory");
    let results = tempfile::tempdir().expect("a directory");
    let json = results.path().join("failover.json");
    let arguments = ["--kind", "kill", "--rounds", "2", "--seed", "3", "--json"];
    let mut command = failover(temporary.path(), &arguments);
    let output = command.arg(&json).output().expect("the binary runs");
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains(" 0 errors; "), "{said}");
    assert_eq!(left_in(temporary.path()), 0, "{said}");

    let text = fs::read_to_string(&json).expect("what was seen");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["seed"], 3);
    let fault = &report["faults"][0];
    assert_eq!(fault["kind"], "kill");
    assert_eq!(fault["errors"]["count"], 0, "{text}");
    assert_eq!(fault["missing"]["count"], 0, "{text}");
    assert!(fault["looked_for"].as_u64() > Some(10), "{text}");
    let rounds = fault["rounds"].as_array().expect("rounds");
    assert_eq!(rounds.len(), 2);
    for round in rounds {
        // Followers wait at least this long before they call an election: an operation that ends sooner did not
        // need the leader.
        for needs_the_leader in ["stat_ms", "create_ms", "write_ms"] {
            assert!(round[needs_the_leader].as_f64() > Some(100.0), "{text}");
        }
    }
}

/// The processes of a cluster: its directory is in their arguments.
fn processes_of(directory: &Path) -> usize {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let belongs = |process: &fs::DirEntry| {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&arguments).contains(&*directory.to_string_lossy())
    };
    processes.filter(belongs).count()
}

#[test]
fn ctrl_c_ends_everything() {
    if !can_run() {
        return;
    }
    let temporary = tempfile::tempdir().expect("a directory");
    let child = failover(temporary.path(), &["--kind", "hang"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = KillOnDrop(child.expect("the binary runs"));
    // Namenodes, datanodes and the mount.
    wait_until("all is started", DEADLINE, || {
        processes_of(temporary.path()) == 7
    });
    kill_process(Pid::from_child(&child.0), Signal::INT).expect("it runs");
    let mut ended = None;
    wait_until("it ends", DEADLINE, || {
        ended = child.0.try_wait().expect("a child");
        ended.is_some()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(1));
    let mut complaint = String::new();
    let mut stderr = child.0.stderr.take().expect("it was asked for");
    stderr.read_to_string(&mut complaint).expect("text");
    assert!(complaint.contains("interrupted"), "{complaint}");
    assert_eq!(processes_of(temporary.path()), 0);
    assert_eq!(left_in(temporary.path()), 0);
}

#[test]
fn a_fault_that_is_not_known_is_refused() {
    let temporary = tempfile::tempdir().expect("a directory");
    let mut command = failover(temporary.path(), &["--kind", "melt"]);
    let output = command.output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(2));
    let said = said(&output);
    let names = "kill, hang, partition, disk, transfer";
    assert!(said.contains(names), "{said}");
}

#[test]
fn no_rounds_are_refused() {
    let temporary = tempfile::tempdir().expect("a directory");
    let mut command = failover(temporary.path(), &["--rounds", "0"]);
    let output = command.output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(2));
    let said = said(&output);
    assert!(said.contains("--rounds <N>"), "{said}");
}

#[test]
fn results_that_cannot_be_written_are_refused_at_once() {
    let temporary = tempfile::tempdir().expect("a directory");
    let mut command = failover(temporary.path(), &["--json", "/nonexistent/x"]);
    let output = command.output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(said.contains("cannot write /nonexistent/x"), "{said}");
    assert_eq!(left_in(temporary.path()), 0, "{said}");
}
