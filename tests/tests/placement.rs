//! Placement, drains and quotas on a cluster of processes, as an operator uses them.

use std::{fs, path::Path, time::Duration};

use harvestfs_tests::{Cluster, ClusterOptions, can_mount, wait_until};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// Nine servers, each of its own owner: one per cell of the grid.
fn nine(replication: u8) -> Cluster {
    let cluster = Cluster::start(&ClusterOptions {
        datanodes: 9,
        replication,
        block_size: "1MiB",
        quota: "1GiB",
        policy: "harvest",
    });
    cluster.wait_alive(9, DEADLINE);
    cluster
}

fn json(cluster: &Cluster, arguments: &[&str]) -> Value {
    serde_json::from_str(&cluster.output_of(arguments)).expect("JSON")
}

fn report(cluster: &Cluster) -> Value {
    json(cluster, &["admin", "placement", "--json"])
}

fn write_files(mount: &Path, count: usize) {
    for number in 0..count {
        let content = vec![number as u8; 3 << 20];
        fs::write(mount.join(format!("f{number}")), content).expect("write");
    }
}

fn check_files(mount: &Path, count: usize) {
    for number in 0..count {
        let content = fs::read(mount.join(format!("f{number}"))).expect("read");
        assert_eq!(content.len(), 3 << 20);
        assert!(content.iter().all(|&byte| byte == number as u8));
    }
}

#[test]
fn strict_files_are_spread_and_explained() {
    if !can_mount() {
        return;
    }
    let mut cluster = nine(3);
    let mount = cluster.mount("mnt");
    write_files(&mount, 10);
    wait_until("all blocks are sealed and diverse", DEADLINE, || {
        let report = report(&cluster);
        let scores = report["blocks_by_score"]
            .as_array()
            .expect("scores")
            .clone();
        let sealed: u64 = scores.iter().filter_map(Value::as_u64).sum();
        assert_eq!(report["misplaced_blocks"], 0);
        assert_eq!(scores[5].as_u64(), Some(sealed), "{scores:?}");
        sealed >= 10
    });
    let report = report(&cluster);
    assert_eq!(report["policy"], "harvest");
    assert_eq!(report["cells"].as_array().map(Vec::len), Some(10));
    for cell in &report["cells"].as_array().expect("cells")[..9] {
        assert_eq!(cell["servers"], 1);
    }
    let text = cluster.output_of(&["admin", "placement", "--file", "/f3", "--tenants"]);
    assert!(text.contains("shares nothing with the others"), "{text}");
    assert!(text.contains("tenant environment-1/function-1"), "{text}");

    let unknown = cluster.command(&["admin", "placement", "--file", "/nothing"]);
    assert!(!unknown.status.success());
    let unknown = cluster.command(&["admin", "placement", "--block", "xyz"]);
    assert_eq!(unknown.status.code(), Some(2));
}

#[test]
fn the_policy_changes_while_the_cluster_runs() {
    if !can_mount() {
        return;
    }
    let mut cluster = nine(3);
    let mount = cluster.mount("mnt");
    assert_eq!(cluster.output_of(&["admin", "policy"]).trim(), "harvest");
    cluster.output_of(&["admin", "policy", "stock"]);
    assert_eq!(cluster.output_of(&["admin", "policy"]).trim(), "stock");
    write_files(&mount, 12);
    let wrong = cluster.command(&["admin", "policy", "hdfs"]);
    assert_eq!(wrong.status.code(), Some(2));
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(said.contains("harvest"), "{said}");

    let limits = json(
        &cluster,
        &[
            "admin",
            "repair",
            "--moves-per-hour",
            "500",
            "--per-hour",
            "500",
            "--json",
        ],
    );
    assert_eq!(limits["moves_per_node"], 500);
    assert_eq!(limits["urgent_per_node"], 300);
    cluster.output_of(&["admin", "repair", "--per-volume-per-hour", "500"]);

    cluster.output_of(&["admin", "policy", "harvest"]);
    wait_until("what stock placed is moved", 2 * DEADLINE, || {
        let report = report(&cluster);
        report["misplaced_blocks"] == 0 && report["moves_waiting"] == 0
    });
    check_files(&mount, 12);
}

#[test]
fn a_server_is_reimaged_when_that_is_safe() {
    if !can_mount() {
        return;
    }
    let mut cluster = nine(2);
    let mount = cluster.mount("mnt");
    write_files(&mount, 12);
    // What is still being written cannot be copied elsewhere.
    cluster.stop("mnt");
    let server = (1..=9)
        .map(Cluster::datanode)
        .max_by_key(|name| {
            let nodes = json(&cluster, &["admin", "nodes", "--json"]);
            let nodes = nodes.as_array().expect("nodes").clone();
            let node = nodes.iter().find(|node| node["server"]["name"] == *name);
            node.and_then(|node| node["replicas"].as_u64())
        })
        .expect("there are servers");
    let number: usize = server
        .rsplit('-')
        .next()
        .and_then(|it| it.parse().ok())
        .expect("a number");

    let asked = cluster.command(&["admin", "safe-to-reimage", &server, "--json"]);
    assert_eq!(asked.status.code(), Some(1), "{asked:?}");
    let impact: Value = serde_json::from_slice(&asked.stdout).expect("JSON");
    assert!(impact["exposed"].as_u64() > Some(0), "{impact}");
    let nobody = cluster.command(&["admin", "safe-to-reimage", "nobody"]);
    let said = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(said.contains("no server `nobody`"), "{said}");

    let held = json(
        &cluster,
        &[
            "admin",
            "safe-to-reimage",
            &server,
            "--hold",
            "--timeout",
            "2m",
            "--json",
        ],
    );
    assert_eq!(
        (&held["lost"], &held["exposed"]),
        (&0.into(), &0.into()),
        "{held}"
    );
    cluster.stop(&server);
    cluster.reimage(number);
    let mount = cluster.mount("mnt");
    check_files(&mount, 12);
    cluster.start_datanode(number);
    cluster.wait_alive(9, DEADLINE);
    cluster.wait_healthy(DEADLINE);
}
