//! Several simultaneous `harvestfs up` with several namenodes.

use std::fs;
use std::process::{Child, Command, Output, Stdio};

use harvestfs_tests::{DownOnDrop, can_mount, harvestfs, run_on};

fn ok(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

/// Whether a program that was started in the background succeeded, and its output.
fn end(child: Child) -> (bool, String) {
    let output = child.wait_with_output().expect("it ends");
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

#[test]
fn of_several_at_once_one_makes_the_cluster_and_the_others_change_nothing() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let start = |policy: &str| {
        Command::new(harvestfs())
            .args(["up", "--detach", "--datanodes", "3", "--quota", "1GiB"])
            .args(["--namenodes", "3", "--policy", policy, "--data"])
            .arg(&data)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs")
    };
    let together = ["harvest", "stock", "greedy"].map(|policy| (policy, start(policy)));
    let ended = together.map(|(policy, child)| (policy, end(child)));
    let won: Vec<_> = ended.iter().filter(|(_, (worked, _))| *worked).collect();
    assert_eq!(won.len(), 1, "{ended:?}");
    for (_, (_, said)) in ended.iter().filter(|(_, (worked, _))| !worked) {
        assert!(said.contains("already"), "{said}");
    }
    fs::write(data.join("mnt/f"), "kept").expect("write");
    let policies = || {
        let configs = ["namenode", "namenode-2", "namenode-3"];
        configs.map(|it| fs::read_to_string(data.join(it).join("namenode.toml")).expect("there"))
    };
    let before = policies();
    let other = if won[0].0 == "stock" {
        "greedy"
    } else {
        "stock"
    };
    let refused = run_on(&data, &["up", "--detach", "--policy", other]);
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(policies(), before, "one that is refused changes nothing");
    ok(&run_on(&data, &["down"]));
    ok(&run_on(&data, &["up", "--detach"]));
    assert_eq!(fs::read(data.join("mnt/f")).expect("read"), b"kept");
    ok(&run_on(&data, &["down"]));
}
