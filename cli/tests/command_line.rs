//! Tests the command line from a user's point of view.

use std::fs::File;
use std::path::Path;
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

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[test]
fn a_datanode_that_cannot_be_is_refused_and_nothing_is_made() {
    let directory = tempfile::tempdir().expect("a directory");
    let data = text_of(&directory.path().join("data"));
    let out = directory.path().join("out");
    let made = harvestfs(&["init", "cluster", "--data", &data]);
    assert!(made.status.success(), "{made:?}");
    let init = |name: &str, data: &str, listen: &str| {
        let out = text_of(&out);
        let mut arguments = vec!["init", "datanode", name, "--data", data, "--out", &out];
        arguments.extend(["--namenode", "127.0.0.1:9310", "--listen", listen]);
        arguments.extend(["--rack", "r", "--environment", "e"]);
        arguments.extend(["--machine-function", "f", "--volume", "/nowhere=1GiB"]);
        harvestfs(&arguments)
    };
    for listen in ["0.0.0.0:9311", "[::]:9311"] {
        let refused = init("dn-1", &data, listen);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("do not reach a datanode"), "{said}");
        assert!(!out.exists());
    }
    let elsewhere = text_of(&directory.path().join("elsewhere"));
    for (name, data) in [("dn_1", &data), ("dn-1", &elsewhere)] {
        let refused = init(name, data, "127.0.0.1:9311");
        assert!(!refused.status.success(), "{name}: {refused:?}");
        assert!(!out.exists(), "{name}");
    }
    let made = init("dn-1", &data, "127.0.0.1:9311");
    assert!(made.status.success(), "{made:?}");
}

#[test]
fn a_detail_of_the_log_that_is_not_understood_is_told() {
    let said = |detail: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_harvestfs"))
            .args(["completions", "bash"])
            .env("HARVESTFS_LOG", detail)
            .output()
            .expect("the binary runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert_eq!(said("info,harvestfs_client=debug"), "");
    let told = said("harvestfs_client=loud");
    assert!(told.contains("HARVESTFS_LOG is not understood"), "{told}");
}

#[test]
fn what_is_typed_names_the_cluster_whatever_variables_say() {
    let directory = tempfile::tempdir().expect("a directory");
    let data = text_of(&directory.path().join("data"));
    let file = text_of(&directory.path().join("client.toml"));
    let other = text_of(&directory.path().join("other"));
    let fs = |arguments: &[&str], data: &str, config: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_harvestfs"))
            .arg("fs")
            .args(arguments)
            .env("HARVESTFS_DATA", data)
            .env("HARVESTFS_CLIENT_CONFIG", config)
            .output()
            .expect("the binary runs");
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let of_data = format!("no cluster was made on this machine in {data} ");
    for (arguments, variables, told) in [
        (&["ls", "--data", &data][..], [&other[..], &other], &of_data),
        (&["ls", "--config", &file], [&other, &other], &file),
        (&["ls"], [&other, &file], &file),
        // An empty variable has no effect.
        (&["ls"], [&data, ""], &of_data),
    ] {
        let said = fs(arguments, variables[0], variables[1]);
        assert!(said.contains(told), "{arguments:?}, {variables:?}: {said}");
    }
    for both in [
        ["ls", "--data", &data, "--config", &file],
        ["--data", &data, "ls", "--config", &file],
    ] {
        let said = fs(&both, "", "");
        assert!(said.contains("cannot be used with"), "{said}");
    }
}

#[test]
fn what_cannot_be_told_ends_no_command() {
    let full = File::options().write(true).open("/dev/full");
    let status = Command::new(env!("CARGO_BIN_EXE_harvestfs"))
        .args(["simulate", "cluster", "--seed", "1", "--minutes", "0.05"])
        .stderr(full.expect("a disk that is full"))
        .status()
        .expect("the binary runs");
    assert!(status.success(), "{status}");
}

#[test]
fn an_empty_variable_names_no_directory() {
    let ls = |data_home: &str, home: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_harvestfs"))
            .args(["fs", "ls"])
            .env_remove("HARVESTFS_DATA")
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .env("XDG_DATA_HOME", data_home)
            .env("HOME", home)
            .output()
            .expect("the binary runs");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = ls("", "/nowhere");
    assert!(said.contains("/nowhere/.local/share/harvestfs "), "{said}");
    let said = ls("", "");
    assert!(said.contains("HOME is not set"), "{said}");
}

#[test]
fn down_calls_only_what_is_missing_missing() {
    let directory = tempfile::tempdir().expect("a directory");
    let [gone, file] = ["gone", "file"].map(|name| directory.path().join(name));
    File::create(&file).expect("a file");
    for (data, told) in [
        (&gone, "no cluster was ever started"),
        // A different error, for root, too.
        (&file, "cannot open"),
    ] {
        let output = harvestfs(&["down", "--data", &text_of(data)]);
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(told), "{said}");
    }
}
