//! The commands in the documents are run: blocks that are fenced as `sh run`, those of one document in
//! their order and in one shell.

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Output},
};

use harvestfs_tests::{can_mount, harvestfs, skip};

/// Longest that the commands of one document may take, in seconds.
const DEADLINE_S: &str = "300";

/// A shell in an empty directory, with `harvestfs` in its path and a data directory of its own.
struct Shell {
    directory: tempfile::TempDir,
}

impl Shell {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let programs = directory.path().join("bin");
        fs::create_dir(&programs).expect("a directory");
        std::os::unix::fs::symlink(harvestfs(), programs.join("harvestfs")).expect("a symlink");
        fs::create_dir(directory.path().join("work")).expect("a directory");
        Self { directory }
    }

    fn run(&self, script: &str) -> Output {
        let path = std::env::var("PATH").expect("a path");
        Command::new("timeout")
            .args([
                "--kill-after=10",
                DEADLINE_S,
                "bash",
                "-euo",
                "pipefail",
                "-c",
                script,
            ])
            .current_dir(self.directory.path().join("work"))
            .env(
                "PATH",
                format!("{}:{path}", self.directory.path().join("bin").display()),
            )
            .env("HARVESTFS_DATA", self.directory.path().join("data"))
            .output()
            .expect("bash runs")
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Fails when the commands have stopped the cluster themselves.
        self.run("harvestfs down 2>/dev/null || true");
    }
}

/// The blocks to run, each behind a line that says where it is.
fn script_of(document: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(document);
    let text = fs::read_to_string(path).expect("the document");
    let mut script = String::new();
    let mut inside = false;
    for (number, line) in (1..).zip(text.lines()) {
        if inside && line == "```" {
            inside = false;
        } else if inside {
            writeln!(script, "{line}").expect("a string takes everything");
        } else if line == "```sh run" {
            inside = true;
            writeln!(script, "echo '--- {document}:{number}' >&2").expect("as above");
        }
    }
    assert!(!inside, "{document}: a block does not end");
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
        // The document is about a cluster that runs.
        check(&shell, "harvestfs up --detach");
        check(&shell, &script_of("docs/OPERATIONS.md"));
    }
}
