//! Runs the commands in the documents: blocks that are fenced as `sh run`, those of one document in
//! order and in one shell; and those that are fenced as `sh run MACHINE...`, in order on several
//! machines. For every other command, `reasons.rs` contains the reason why it is not run.

mod blocks;
mod machines;
mod reasons;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harvestfs_tests::{can_mount, harvestfs, have_program, skip};

use self::blocks::blocks_of;
use self::machines::Machines;

/// Maximum time in seconds for the commands of one document, or of one block on a machine.
const DEADLINE_S: &str = "300";

/// A shell in an empty directory, with `harvestfs` in its path and a data directory of its own.
struct Shell {
    directory: tempfile::TempDir,
}

impl Shell {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        make_programs(directory.path());
        fs::create_dir(directory.path().join("work")).expect("a directory");
        Self { directory }
    }

    fn run(&self, script: &str) -> Output {
        let directory = self.directory.path();
        bash(script, directory, "work")
            .env("HARVESTFS_DATA", directory.join("data"))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .output()
            .expect("bash runs")
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // This fails if the commands have stopped the cluster themselves.
        self.run("harvestfs down 2>/dev/null || true");
    }
}

/// Creates the directory that is first in the PATH of scripts, with `harvestfs` in it.
fn make_programs(directory: &Path) -> PathBuf {
    let programs = directory.join("bin");
    fs::create_dir(&programs).expect("a directory");
    std::os::unix::fs::symlink(harvestfs(), programs.join("harvestfs")).expect("a symlink");
    programs
}

/// A command that runs a script in a directory, with that of the programs first in its PATH.
fn bash(script: &str, directory: &Path, below: &str) -> Command {
    let path = std::env::var("PATH").expect("a path");
    let programs = directory.join("bin");
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=10", DEADLINE_S])
        .args(["bash", "-euo", "pipefail", "-c", script])
        .current_dir(directory.join(below))
        .env("PATH", format!("{}:{path}", programs.display()));
    command
}

/// The commands of a document that need one machine, each block after a line with its place.
fn script_of(document: &str) -> String {
    let mut script = String::new();
    for block in blocks_of(document) {
        if block.machines().is_some_and(|machines| machines.is_empty()) {
            writeln!(script, "echo '--- {}' >&2\n{}", block.place, block.script())
                .expect("a string takes everything");
        }
    }
    assert!(!script.is_empty(), "{document} has no block to run");
    script
}

fn check(shell: &Shell, script: &str) {
    let output = shell.run(script);
    assert!(
        output.status.success(),
        "{}\n--- standard output:\n{}\n--- standard error:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
}

#[test]
fn the_commands_of_the_readme_work() {
    if can_mount() {
        check(&Shell::new(), &script_of("README.md"));
    }
}

#[test]
fn the_commands_of_operations_work() {
    if !rustix::process::geteuid().is_root() {
        return skip("operators set quotas: run it as root");
    }
    if can_mount() {
        let shell = Shell::new();
        // The document assumes a running cluster.
        check(&shell, "harvestfs up --detach");
        check(&shell, &script_of("docs/OPERATIONS.md"));
    }
}

#[test]
fn a_cluster_on_three_machines_is_installed_saved_restored_and_upgraded() {
    if !rustix::process::geteuid().is_root() {
        return skip("the units of systemd are for root: run it as root");
    }
    for (program, how) in [
        ("curl", "apt install curl"),
        ("openssl", "apt install openssl"),
    ] {
        if have_program(program, how).is_none() {
            return;
        }
    }
    if !can_mount() {
        return;
    }
    let machines = Machines::new(&["a", "b", "c", "desk", "ops"]);
    let blocks = blocks_of("docs/OPERATIONS.md");
    let on_machines = blocks.iter().filter(|block| {
        block
            .machines()
            .is_some_and(|machines| !machines.is_empty())
    });
    let on_machines: Vec<_> = on_machines.collect();
    assert!(!on_machines.is_empty(), "the document has no block to run");
    for block in on_machines {
        eprintln!("--- {}", block.place);
        machines.run(block);
    }
}
