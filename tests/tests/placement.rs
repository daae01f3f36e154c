//! Placement, drains and quotas on a cluster of real processes, as used by an operator.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, wait_until};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// Nine servers, each with its own owner, one per cell of the grid, and a mount.
fn nine(replication: u8) -> Option<(Cluster, PathBuf)> {
    let (cluster, mount) = Cluster::mounted(&ClusterOptions {
        datanodes: 9,
        replication,
        block_size: "1MiB",
        quota: "1GiB",
        policy: "harvest",
        ..ClusterOptions::default()
    })?;
    cluster.wait_alive(9, DEADLINE);
    Some((cluster, mount))
}

fn json(cluster: &Cluster, arguments: &[&str]) -> Value {
    serde_json::from_str(&cluster.output_of(arguments)).expect("JSON")
}

fn report(cluster: &Cluster) -> Value {
    json(cluster, &["admin", "placement", "--json"])
}

/// The number of the server with the most replicas, and how many it has.
fn fullest(cluster: &Cluster) -> (usize, u64) {
    let replicas = |number| {
        let status = cluster.node_status(number);
        (number, status["replicas"].as_u64().expect("a count"))
    };
    (1..=9).map(replicas).max_by_key(|it| it.1).expect("nine")
}

/// Quota and use of a server's only volume, in bytes.
fn space(cluster: &Cluster, number: usize) -> (u64, u64) {
    let volume = &cluster.node_status(number)["volumes"][0];
    let bytes = |name: &str| volume[name].as_u64().expect("bytes");
    (bytes("quota_bytes"), bytes("used_bytes"))
}

fn write_files(mount: &Path, count: usize) {
    write_files_from(mount, 0, count);
}

fn write_files_from(mount: &Path, first: usize, count: usize) {
    for number in first..first + count {
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
    let Some((cluster, mount)) = nine(3) else {
        return;
    };
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
    assert!(text.contains(" must stay free elsewhere, and "), "{text}");
    assert_eq!(report["losses"].as_array().map(Vec::len), Some(3));

    let unknown = cluster.command(&["admin", "placement", "--file", "/nothing"]);
    assert!(!unknown.status.success());
    let unknown = cluster.command(&["admin", "placement", "--block", "xyz"]);
    assert_eq!(unknown.status.code(), Some(2));
}

/// Two servers that have replicas of the same block.
fn two_of_a_block(cluster: &Cluster) -> (String, String) {
    let place = json(cluster, &["admin", "placement", "--file", "/f0", "--json"]);
    let replicas = &place["blocks"][0]["replicas"];
    let name = |number: usize| replicas[number]["server"].as_str().expect("a name");
    (name(0).to_owned(), name(1).to_owned())
}

#[test]
fn a_plan_of_reimages_is_judged_day_by_day() {
    let Some((cluster, mount)) = nine(3) else {
        return;
    };
    write_files(&mount, 4);
    wait_until("all blocks are sealed", DEADLINE, || {
        report(&cluster)["blocks_by_score"][5].as_u64() >= Some(4)
    });
    cluster.output_of(&["admin", "history", "analyse"]);
    // There is no history that would make a loss probable.
    let risk = &report(&cluster)["risk"];
    let (blocks, lost) = (risk["blocks"].as_u64(), risk["in_a_year"].as_f64());
    assert!(
        blocks >= Some(4) && lost < Some(1e-3) && lost > Some(0.0),
        "{risk}"
    );
    let text = cluster.output_of(&["admin", "placement", "--file", "/f0"]);
    assert!(text.contains("in a year, at most"), "{text}");
    assert!(
        text.contains("lost within a year with a probability"),
        "{text}"
    );

    let (one, other) = two_of_a_block(&cluster);
    let path = cluster.path("waves.toml");
    let plan = |days: &[&[&String]]| {
        let days = days.iter().enumerate();
        let days = days.map(|(day, servers)| {
            format!("[[days]]\nname = \"day {day}\"\nservers = {servers:?}\n")
        });
        fs::write(&path, days.collect::<String>()).expect("a plan");
        let shown = path.to_string_lossy().into_owned();
        cluster.command(&["admin", "safe-to-reimage", "--plan", &shown])
    };
    // One after the other.
    let apart = plan(&[&[&one], &[&other]]);
    let text = String::from_utf8_lossy(&apart.stdout);
    assert!(apart.status.success(), "{apart:?}");
    assert_eq!(text.matches("may go on").count(), 2, "{text}");
    // On the same day, a block would be left with one replica.
    let together = plan(&[&[&one, &other]]);
    let text = String::from_utf8_lossy(&together.stdout);
    assert_eq!(together.status.code(), Some(1));
    assert!(
        text.contains("must not go on") && text.contains("last replica"),
        "{text}"
    );
    let twice = plan(&[&[&one], &[&one]]);
    let said = String::from_utf8_lossy(&twice.stderr);
    assert!(
        !twice.status.success() && said.contains("is on day day 0"),
        "{said}"
    );
    let unknown = plan(&[&[&"nobody".to_owned()]]);
    let said = String::from_utf8_lossy(&unknown.stderr);
    assert!(
        !unknown.status.success() && said.contains("there is no server `nobody`"),
        "{said}"
    );
}

#[test]
fn a_change_of_the_policy_moves_what_the_one_before_placed() {
    let Some((cluster, mount)) = nine(3) else {
        return;
    };
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
    let Some((mut cluster, mount)) = nine(2) else {
        return;
    };
    write_files(&mount, 12);
    // What is still being written cannot be copied elsewhere.
    cluster.stop("mnt");
    let (number, _) = fullest(&cluster);
    let server = Cluster::datanode(number);

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
    cluster.wait_healthy();
}

/// Whether each of these sealed replicas is on two of the nine servers, of which `loser` is losing some.
fn are_on_two(cluster: &Cluster, names: &BTreeSet<OsString>, loser: usize) -> bool {
    let others = || (1..=9).filter(|number| *number != loser);
    let mut found = BTreeSet::new();
    // A replica that the loser no longer has was copied elsewhere before. The others are scanned twice, so that
    // a replica that is moved between them is found in its new place.
    for number in [loser].into_iter().chain(others()).chain(others()) {
        let replicas = cluster.sealed_replicas(number);
        found.extend(replicas.into_iter().map(|name| (name, number)));
    }
    names.iter().all(|name| {
        let copies = found.iter().filter(|(it, _)| it == name);
        copies.count() >= 2
    })
}

#[test]
fn an_owner_takes_space_back_and_returns_it() {
    let Some((mut cluster, mount)) = nine(2) else {
        return;
    };
    write_files(&mount, 12);
    // What is still being written cannot be copied elsewhere.
    cluster.stop("mnt");
    let (number, replicas) = fullest(&cluster);
    assert!(replicas >= 2, "{replicas}");
    let server = Cluster::datanode(number);
    let mut names = BTreeSet::new();
    wait_until("its blocks are sealed", DEADLINE, || {
        names = cluster.sealed_replicas(number);
        !names.is_empty() && are_on_two(&cluster, &names, number)
    });
    let (configured_bytes, used_bytes) = space(&cluster, number);
    let set = |bytes: u64, deadline: &str| {
        let size = bytes.to_string();
        cluster.output_of(&["admin", "quota", &server, &size, "--deadline", deadline])
    };

    // With enough time, each replica is copied elsewhere before it is removed.
    let half_bytes = used_bytes / 2;
    let said = set(half_bytes, "1h");
    assert!(said.contains("to be freed"), "{said}");
    wait_until("half of it is free", 2 * DEADLINE, || {
        let fsck = cluster.fsck();
        assert_eq!(fsck["lost_blocks"], 0, "{fsck:#}");
        assert!(are_on_two(&cluster, &names, number), "one went too early");
        let (quota_bytes, used_bytes) = space(&cluster, number);
        assert_eq!(quota_bytes, half_bytes);
        used_bytes <= half_bytes
    });
    cluster.wait_healthy();

    // Without time, replicas with a copy elsewhere are removed immediately, and copied again from there.
    // The quota survives a restart of the datanode.
    set(0, "0s");
    cluster.kill(&server);
    cluster.start_datanode(number);
    wait_until("nothing is used", 2 * DEADLINE, || {
        space(&cluster, number) == (0, 0)
    });
    cluster.wait_healthy();
    let mount = cluster.mount("mnt");
    check_files(&mount, 12);

    // With space again, it is used again.
    let size = configured_bytes.to_string();
    cluster.output_of(&["admin", "quota", &server, &size]);
    assert_eq!(space(&cluster, number).0, configured_bytes);
    let mut files = 12;
    wait_until("it has replicas again", 2 * DEADLINE, || {
        write_files_from(&mount, files, 3);
        files += 3;
        cluster.node_status(number)["replicas"].as_u64() > Some(0)
    });
    check_files(&mount, files);

    let unknown = cluster.command(&["admin", "quota", "nobody", "1GiB"]);
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(said.contains("no server `nobody`"), "{said}");
    let unknown = cluster.command(&["admin", "quota", "datanode-1", "1GiB", "--volume", "7"]);
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(said.contains("has no volume"), "{said}");
}

#[test]
fn what_an_operator_set_outlives_the_namenode() {
    let Some((mut cluster, mount)) = nine(2) else {
        return;
    };
    write_files(&mount, 12);
    cluster.stop("mnt");
    cluster.output_of(&["admin", "policy", "greedy"]);
    cluster.output_of(&["admin", "repair", "--per-hour", "77"]);
    cluster.output_of(&["admin", "balance", "20"]);
    let (number, _) = fullest(&cluster);
    let server = Cluster::datanode(number);
    let hold = [
        "admin",
        "safe-to-reimage",
        &server,
        "--hold",
        "--timeout",
        "0s",
    ];
    let held = cluster.command(&hold);
    let said = String::from_utf8_lossy(&held.stderr).into_owned();
    assert!(said.contains("not safe"), "{said}");
    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.wait_alive(9, DEADLINE);

    assert_eq!(cluster.output_of(&["admin", "policy"]).trim(), "greedy");
    let limits = json(&cluster, &["admin", "repair", "--json"]);
    assert_eq!(
        (&limits["per_node"], &limits["at_once"]),
        (&77.into(), &2.into())
    );
    let spread = |cluster: &Cluster| {
        let report = json(cluster, &["admin", "balance", "--json"]);
        report["spread_permille"].as_u64()
    };
    assert_eq!(spread(&cluster), Some(200));
    // It is emptied although the request is not repeated.
    wait_until("the server may be reimaged", 2 * DEADLINE, || {
        let asked = cluster.command(&["admin", "safe-to-reimage", &server, "--json"]);
        let impact: Value = serde_json::from_slice(&asked.stdout).expect("JSON");
        impact["waiting"] == 0 && impact["lost"] == 0 && impact["exposed"] == 0
    });

    // An edit of the configuration is deliberate, and takes effect.
    cluster.stop("namenode");
    let config = cluster.path("namenode/namenode.toml");
    let text = fs::read_to_string(&config).expect("the configuration");
    let edited = text.replace(
        "[repair]\n",
        "[repair]\nper_hour = 50\nbalance_spread_percent = 0\n",
    );
    assert_ne!(edited, text);
    fs::write(&config, edited).expect("written");
    cluster.start_namenode();
    let limits = json(&cluster, &["admin", "repair", "--json"]);
    assert_eq!(limits["per_node"], 50);
    assert_eq!(spread(&cluster), Some(0));
    let refused = cluster.command(&["admin", "balance", "on"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("has balancing off"), "{said}");
    cluster.output_of(&["admin", "balance", "15"]);
    assert_eq!(spread(&cluster), Some(150));
    assert_eq!(cluster.output_of(&["admin", "policy"]).trim(), "greedy");
}
