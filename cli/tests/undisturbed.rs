//! Tests that `.ci/run` runs while nothing else does, since the cluster of `harvestfs chaos slowdown` gets
//! only resources that other processes leave over.

use std::process::Command;

const BINARY: &str = env!("CARGO_BIN_EXE_harvestfs");

#[test]
fn what_a_primary_loses_is_measured_on_one_cpu_after_the_other() {
    let disk = tempfile::tempdir().expect("a directory");
    let memory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(BINARY);
    command.args(["chaos", "slowdown", "--pairs", "2", "--memory"]);
    command.arg(memory.path());
    let output = command.env("TMPDIR", disk.path()).output();
    let output = output.expect("the binary runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaint}");
    let pairs = said.lines().filter(|line| line.starts_with("on CPU"));
    assert_eq!(pairs.count(), 2, "{said}");
    assert!(said.contains("(median of 2 pairs of turns)"), "{said}");
    for directory in [disk.path(), memory.path()] {
        let left = directory.read_dir().expect("the directory").count();
        assert_eq!(left, 0, "something is left in {}", directory.display());
    }
}

#[test]
fn to_measure_no_turns_is_refused() {
    let arguments = ["chaos", "slowdown", "--pairs", "0"];
    let output = Command::new(BINARY).args(arguments).output();
    let output = output.expect("the binary runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
