//! Reasons why some commands in the documents are not run.

use std::fs;
use std::path::Path;

use crate::blocks::{Block, blocks_of};

/// Document, beginning of the line, and the reason.
const NOT_RUN: &[(&str, &str, &str)] = &[
    (
        "README.md",
        "cargo run --release -- up",
        "ends with Ctrl-C; `up.rs` runs it",
    ),
    (
        "README.md",
        "apt install git gcc fuse3",
        "`.ci/run` installs them",
    ),
    ("README.md", "apt install g++", "as above"),
    (
        "README.md",
        "cargo test --workspace",
        "runs this test, and all others",
    ),
    (
        "docs/OPERATIONS.md",
        "cargo build --release",
        "the binary that the tests use is built already",
    ),
    (
        "docs/OPERATIONS.md",
        "journalctl",
        "no part runs under systemd in tests; `metrics.rs` follows a request through the logs",
    ),
    (
        "docs/OPERATIONS.md",
        "sysctl",
        "changes the kernel for everybody on this machine",
    ),
    (
        "docs/OPERATIONS.md",
        "0 3 * * *",
        "a line for cron; its two commands are run above",
    ),
    (
        "docs/OPERATIONS.md",
        "HARVESTFS_DATA=/var/lib/harvestfs",
        "a line of the same crontab",
    ),
    (
        "docs/OPERATIONS.md",
        "harvestfs up --detach --data DIR",
        "README's are run, without DIR",
    ),
    (
        "docs/OPERATIONS.md",
        "harvestfs down --data DIR",
        "README's are run, without DIR",
    ),
    (
        "docs/CYCLES.md",
        "harvestfs cycles yarn",
        "needs Hadoop; `yarn` runs it beside a ResourceManager",
    ),
    (
        "docs/CYCLES.md",
        "harvestfs cycles run",
        "needs Hadoop; `yarn` runs both jobs",
    ),
    (
        "docs/CYCLES.md",
        "harvestfs cycles kubernetes",
        "needs Kubernetes; tests of the controller have an API server",
    ),
    (
        "docs/PERFORMANCE.md",
        "cargo build --release && cargo run --release -p harvestfs-tests --bin mount-bench",
        "takes half an hour and a quiet machine, and installs MooseFS",
    ),
    (
        "docs/SEMANTICS.md",
        "cargo test",
        "runs tests that are run with all others",
    ),
    (
        "docs/SEMANTICS.md",
        "setfattr",
        "needs another package; tests set the attributes by system calls",
    ),
    (
        "docs/SEMANTICS.md",
        "getfattr",
        "needs another package; tests read the attributes by system calls",
    ),
    (
        "docs/SIMULATION.md",
        "cargo test --workspace --features harvestfs-chaos/planted-bugs",
        "builds everything anew and takes minutes",
    ),
    (
        "docs/SIMULATION.md",
        "harvestfs simulate",
        "takes minutes in a release build; tests of the crate `chaos` simulate less",
    ),
    (
        "fuzz/README.md",
        "cargo test -p harvestfs-fuzz",
        "`.ci/run` does",
    ),
    ("fuzz/README.md", "cargo run -p harvestfs-fuzz", "as above"),
    ("fuzz/README.md", "cargo +nightly", "needs another compiler"),
    (
        "fuzz/README.md",
        "TMPDIR=/dev/shm cargo +nightly",
        "needs another compiler",
    ),
    (
        "fuzz/README.md",
        "for target in $(cargo fuzz list)",
        "needs another compiler",
    ),
];

/// Beginnings of lines with a command.
const BEGINNINGS: [&str; 15] = [
    "harvestfs ",
    "cargo ",
    "TMPDIR=",
    "HARVESTFS_",
    "systemctl ",
    "journalctl ",
    "sysctl ",
    "setfattr ",
    "getfattr ",
    "apt ",
    "scp ",
    "curl ",
    "mkdir ",
    "for ",
    "0 3 ",
];

fn documents() -> Vec<String> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut documents = vec!["README.md".to_owned(), "fuzz/README.md".to_owned()];
    for entry in fs::read_dir(repository.join("docs")).expect("the documents") {
        let name = entry.expect("an entry").file_name();
        let name = name.to_str().expect("a name of ours");
        if name.ends_with(".md") {
            documents.push(format!("docs/{name}"));
        }
    }
    documents
}

/// The commands of a block that is not run.
fn commands_of(block: &Block) -> impl Iterator<Item = &str> {
    let is_command = |line: &&str| {
        let is_picture = line.contains('─');
        !is_picture && BEGINNINGS.iter().any(|it| line.starts_with(it))
    };
    let lines = block.lines.iter().map(|line| line.trim_start());
    lines.filter(is_command)
}

#[test]
fn every_command_is_run_or_has_a_reason_not_to_be() {
    let mut used = vec![false; NOT_RUN.len()];
    for document in documents() {
        let blocks = blocks_of(&document);
        for block in blocks.iter().filter(|block| block.machines().is_none()) {
            for command in commands_of(block) {
                let reason = NOT_RUN.iter().position(|(in_document, beginning, _)| {
                    *in_document == document && command.starts_with(beginning)
                });
                let reason = reason.unwrap_or_else(|| {
                    panic!(
                        "{}: nobody runs `{command}`: fence it as `sh run`",
                        block.place
                    )
                });
                used[reason] = true;
            }
        }
    }
    for ((document, beginning, _), used) in NOT_RUN.iter().zip(used) {
        assert!(used, "{document} has no `{beginning}` any more");
    }
}
