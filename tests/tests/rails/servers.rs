//! Servers that are taken out of service and back in good order.

use std::fs;

use harvestfs_tests::{Cluster, ClusterOptions, can_mount, wait_until};

use crate::{DEADLINE, put};

/// A healthy cluster without a mount. Skips the test and returns `None` if FUSE cannot be used.
fn with_blocks_of_two_replicas() -> Option<Cluster> {
    let (mut cluster, mount) = Cluster::mounted(&ClusterOptions {
        replication: 2,
        ..ClusterOptions::default()
    })?;
    for number in 0..8 {
        put(&mount.join(number.to_string()), 1 << 20).expect("write");
    }
    cluster.stop("mnt");
    cluster.wait_healthy();
    Some(cluster)
}

#[test]
fn a_server_is_decommissioned_by_its_rack_and_used_again() {
    let Some(mut cluster) = with_blocks_of_two_replicas() else {
        return;
    };
    let admin = |arguments: &[&str]| {
        let all = [&["admin", "decommission"], arguments].concat();
        cluster.command(&all)
    };
    let unknown = admin(&["start", "--rack", "nowhere"]);
    assert!(!unknown.status.success());
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(said.contains("nowhere"), "{said}");

    // The files may share a block, of which not every server has a replica.
    let mut found = None;
    wait_until("a server has a sealed replica", DEADLINE, || {
        found = (1..=4).find(|number| !cluster.sealed_replicas(*number).is_empty());
        found.is_some()
    });
    let number = found.expect("it was waited for");
    let (server, rack) = (Cluster::datanode(number), format!("rack-{number}"));
    let names = cluster.sealed_replicas(number);
    wait_until("nothing needs the server", DEADLINE, || {
        admin(&["start", "--rack", &rack]).status.success()
    });
    let others = (1..=4).filter(|other| *other != number);
    let others: Vec<_> = others.map(|it| cluster.sealed_replicas(it)).collect();
    for name in &names {
        let copies = others.iter().filter(|it| it.contains(name)).count();
        assert!(copies >= 2, "{copies} of {name:?} elsewhere");
    }
    cluster.kill(&server);
    let fsck = cluster.fsck();
    assert_eq!(fsck["lost_blocks"], 0, "{fsck:#}");
    cluster.start_datanode(number);
    cluster.wait_alive(4, DEADLINE);
    let stopped = cluster.command(&["admin", "decommission", "stop", &server]);
    assert!(stopped.status.success(), "{stopped:?}");
    let before = cluster.sealed_replicas(number);
    let mount = cluster.mount("mount");
    let mut files = 0;
    wait_until("it gets new replicas", 2 * DEADLINE, || {
        put(&mount.join(format!("new-{files}")), 1 << 20).expect("write");
        files += 1;
        !cluster.sealed_replicas(number).is_subset(&before)
    });
}

#[test]
fn a_server_in_maintenance_is_away_without_repair_until_the_time_is_over() {
    let Some(mut cluster) = with_blocks_of_two_replicas() else {
        return;
    };
    let has_replicas = |number: &usize| {
        let replicas = &cluster.node_status(*number)["replicas"];
        replicas.as_u64() > Some(0)
    };
    let away = (1..=4).find(has_replicas).expect("a server with replicas");
    let (server, rack) = (Cluster::datanode(away), format!("rack-{away}"));
    let admin = |cluster: &Cluster, arguments: &[&str]| {
        let all = [&["admin", "maintenance"], arguments].concat();
        cluster.command(&all)
    };
    // A block with two replicas has one of them in another rack, but not if all four racks are named.
    let racks = ["1", "2", "3", "4"].map(|number| format!("--rack=rack-{number}"));
    let all = [&["start"], &racks.each_ref().map(String::as_str)[..]].concat();
    let refused = admin(&cluster, &all);
    assert!(!refused.status.success(), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(said.contains("cannot be read meanwhile"), "{said}");

    let begun = admin(&cluster, &["start", "--rack", &rack, "--for", "1h"]);
    assert!(begun.status.success(), "{begun:?}");
    cluster.kill(&server);
    // It has long been silent, and the namenode has forgotten the locations of blocks.
    cluster.kill("namenode");
    cluster.start_namenode();
    let status = |cluster: &Cluster| -> serde_json::Value {
        let status = cluster.output_of(&["admin", "status", "--json"]);
        serde_json::from_str(&status).expect("JSON")
    };
    wait_until("the locations of blocks are known", DEADLINE, || {
        status(&cluster)["ready"] == true
    });
    let now = status(&cluster);
    assert_eq!(now["nodes_in_maintenance"], 1, "{now:#}");
    assert_eq!(now["nodes_alive"], 3, "{now:#}");
    let missing = now["under_replicated_blocks"].as_u64().expect("a number");
    assert!(missing > 0, "{now:#}");
    let fsck = cluster.fsck();
    let findings = fsck["findings"].as_array().expect("findings");
    let waits = |finding: &&serde_json::Value| {
        let message = finding["message"].as_str().expect("a message");
        message.contains("servers in maintenance")
    };
    assert_eq!(findings.iter().filter(waits).count() as u64, missing);

    // It comes back with everything: nothing was repaired.
    cluster.start_datanode(away);
    cluster.wait_healthy();
    assert_eq!(status(&cluster)["repairs_done"], 0);
    let mount = cluster.mount("mount");
    put(&mount.join("new"), 1 << 20).expect("the others take it");
    cluster.stop("mount");

    // The maintenance is over, but the server still away: its blocks are repaired.
    let begun = admin(&cluster, &["start", &server, "--for", "1h"]);
    assert!(begun.status.success(), "{begun:?}");
    cluster.kill(&server);
    let stopped = admin(&cluster, &["stop", &server]);
    assert!(stopped.status.success(), "{stopped:?}");
    wait_until("its blocks are repaired elsewhere", DEADLINE, || {
        let now = status(&cluster);
        now["repairs_done"].as_u64() >= Some(missing) && now["under_replicated_blocks"] == 0
    });
}

#[test]
fn what_is_left_of_removed_files_is_told_from_harm() {
    let Some(cluster) = with_blocks_of_two_replicas() else {
        return;
    };
    // With these paused, nothing removes it.
    for number in 1..=4 {
        cluster.pause(&Cluster::datanode(number));
    }
    let files = ["/0", "/1", "/2", "/3", "/4", "/5", "/6", "/7"];
    cluster.output_of(&[&["fs", "rm", "--skip-trash"], &files[..]].concat());
    wait_until("what is left is all that is found", DEADLINE, || {
        let fsck = cluster.command(&["admin", "fsck"]);
        let said = String::from_utf8_lossy(&fsck.stdout);
        !fsck.status.success() && said.contains("is still to be removed")
    });
}

#[test]
fn an_empty_server_gets_its_share() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        replication: 2,
        block_size: "4MiB",
        quota: "256MiB",
        ..ClusterOptions::default()
    });
    cluster.wait_alive(4, DEADLINE);
    let run = |cluster: &Cluster, arguments: &[&str]| {
        let output = cluster.command(&[&["admin"], arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    };
    run(&cluster, &["decommission", "start", "datanode-4"]);
    let mount = cluster.mount("mount");
    put(&mount.join("large"), 120 << 20).expect("write");
    cluster.stop("mount");
    cluster.wait_healthy();
    let used = |cluster: &Cluster, number: usize| {
        let volumes = &cluster.node_status(number)["volumes"];
        volumes[0]["used_bytes"].as_u64().expect("bytes")
    };
    assert!(used(&cluster, 4) < 16 << 20);

    run(
        &cluster,
        &["repair", "--moves-per-hour", "1000", "--at-once", "8"],
    );
    let balance = |cluster: &Cluster, arguments: &[&str]| -> serde_json::Value {
        let all = [&["admin", "balance", "--json"], arguments].concat();
        serde_json::from_str(&cluster.output_of(&all)).expect("JSON")
    };
    assert_eq!(balance(&cluster, &["off"])["pause"], "Off");
    run(&cluster, &["decommission", "stop", "datanode-4"]);
    // An operator's choice survives a restart of the namenode.
    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.wait_alive(4, DEADLINE);
    cluster.wait_healthy();
    let off = balance(&cluster, &[]);
    assert_eq!(
        (&off["pause"], &off["moves_done"]),
        (&"Off".into(), &0.into())
    );
    let disks = &off["classes"][0];
    assert_eq!(
        (&disks["class"], &disks["servers"]),
        (&"Disk".into(), &4.into())
    );
    assert!(disks["most_permille"].as_u64() > Some(250), "{off:#}");
    assert!(disks["least_permille"].as_u64() < Some(100), "{off:#}");

    let on = balance(&cluster, &["on"]);
    assert_eq!(
        (&on["spread_permille"], &on["pause"]),
        (&100.into(), &serde_json::Value::Null)
    );
    // Within a tenth of the quota, plus data in flight.
    wait_until("all are about as full", 4 * DEADLINE, || {
        let used = [1, 2, 3, 4].map(|number| used(&cluster, number));
        let spread = used.iter().max().unwrap_or(&0) - used.iter().min().unwrap_or(&0);
        spread <= 34 << 20
    });
    wait_until(
        "nothing is too full, and nothing moves",
        4 * DEADLINE,
        || {
            let now = balance(&cluster, &[]);
            now["moves_under_way"] == 0 && now["classes"][0]["volumes_too_full"] == 0
        },
    );
    assert!(balance(&cluster, &[])["moves_done"].as_u64() > Some(0));
    let said = cluster.output_of(&["admin", "balance"]);
    assert!(said.contains("more than 10.0 % fuller"), "{said}");
    assert!(said.contains("Disk: 4 servers"), "{said}");
    cluster.wait_healthy();
    let mount = cluster.mount("mount");
    assert_eq!(
        fs::read(mount.join("large")).expect("read"),
        vec![7; 120 << 20]
    );
}
