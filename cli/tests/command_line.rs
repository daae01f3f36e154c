//! The command line as a user meets it.

use std::process::{Command, Output};

fn harvestfs(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_harvestfs"))
        .args(arguments)
        .output()
        .expect("the binary runs")
}

#[test]
fn every_command_explains_itself() {
    let help = harvestfs(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).expect("text");
    for command in [
        "up", "down", "init", "namenode", "datanode", "mount", "fs", "admin",
    ] {
        assert!(
            text.contains(&format!("\n  {command}")),
            "{command}: {text}"
        );
        let help = harvestfs(&[command, "--help"]);
        assert!(help.status.success(), "{command}");
        assert!(!help.stdout.is_empty(), "{command}");
    }
}

#[test]
fn what_is_not_understood_is_an_error_of_use() {
    for arguments in [
        &["frobnicate"][..],
        &["fs", "ls", "--colour"],
        &["admin"],
        &["mount"],
        &["init", "datanode", "dn", "--volume", "here"],
    ] {
        let output = harvestfs(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn shells_get_completions() {
    for shell in ["bash", "zsh", "fish"] {
        let output = harvestfs(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        let script = String::from_utf8(output.stdout).expect("text");
        assert!(script.contains("harvestfs"), "{shell}");
    }
}
