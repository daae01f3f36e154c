//! Namenodes that must not become members of the group.

use std::fs;
use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, copy_directory, harvestfs, wait_until};

use super::{address, fails, hand_over, stderr, voters};

const NAMENODES: usize = 3;
/// Maximum time until an operator learns that nobody answers.
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_secs(60);

fn options(namenodes: usize) -> ClusterOptions {
    ClusterOptions {
        namenodes,
        datanodes: 3,
        ..ClusterOptions::default()
    }
}

#[test]
fn what_cannot_be_a_member_is_refused_with_the_reason_and_the_group_goes_on() {
    let mut cluster = Cluster::start(&options(NAMENODES));
    let members = voters(&cluster);
    assert_eq!(members.len(), NAMENODES);
    let add = |cluster: &Cluster, addr: &str| fails(cluster, &["admin", "namenode", "add", addr]);

    // The same one twice, whether it leads or follows.
    for number in 1..=NAMENODES {
        let said = add(&cluster, &address(&cluster, number));
        assert!(said.contains("is a member already"), "{said}");
    }

    // An address that does not answer, one on which nothing listens, and a part that is not a namenode.
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("an address").to_string();
    let datanode = cluster.node_status(1)["server"]["data_addr"].clone();
    let datanode = datanode.as_str().expect("an address").to_owned();
    for addr in [silent.as_str(), "127.0.0.1:9", &datanode] {
        let began = Instant::now();
        let said = add(&cluster, addr);
        assert!(said.contains(&format!("{addr} cannot be added")), "{said}");
        assert!(began.elapsed() < ANSWERED_WITHIN, "{:?}", began.elapsed());
    }
    let said = fails(&cluster, &["admin", "namenode", "remove", &silent]);
    assert!(
        said.contains("no namenode of the group listens on"),
        "{said}"
    );
    let said = fails(&cluster, &["admin", "namenode", "transfer", &silent]);
    assert!(
        said.contains("no namenode of the group listens on"),
        "{said}"
    );
    let of_leader = address(&cluster, cluster.leader());
    let said = fails(&cluster, &["admin", "namenode", "remove", &of_leader]);
    assert!(said.contains("transfer"), "{said}");

    // A namenode of another cluster, which has its own authority.
    let other = Cluster::start(&ClusterOptions {
        datanodes: 0,
        ..options(1)
    });
    let said = add(&cluster, &address(&other, 1));
    assert!(said.contains("certificate"), "{said}");
    drop(other);

    // A namenode of this authority that was created for another cluster.
    let number = cluster.make_namenode_of("00000000000000000000000000000bad");
    let said = add(&cluster, &address(&cluster, number));
    assert!(said.contains("bad"), "{said}");
    cluster.stop(&Cluster::namenode_name(number));

    // A copy of a member, alongside it: its identity is that of the member, and it does not take part.
    let follower = cluster.leader() % NAMENODES + 1;
    let name = Cluster::namenode_name(follower);
    cluster.stop(&name);
    let copied = cluster.path("copied");
    copy_directory(&cluster.path(&name), &copied);
    cluster.start_namenode_number(follower);
    let of_copy = cluster.start_copied_namenode(&copied);
    wait_until("the copy says what it is", DEADLINE, || {
        cluster.log("copy").contains("admin namenode add")
    });
    assert_eq!(voters(&cluster), members);
    let said = fails(
        &cluster,
        &["admin", "namenode", "transfer", &of_copy.to_string()],
    );
    assert!(
        said.contains("no namenode of the group listens on"),
        "{said}"
    );

    // After all that, any member may fail.
    cluster.output_of(&["fs", "mkdir", "/before"]);
    let leader = cluster.leader();
    cluster.kill(&Cluster::namenode_name(leader));
    let _next = cluster.leader();
    cluster.output_of(&["fs", "mkdir", "/after"]);
    let listed = cluster.output_of(&["fs", "ls", "/"]);
    assert!(
        listed.contains("before") && listed.contains("after"),
        "{listed}"
    );
    cluster.start_namenode_number(leader);
    assert_eq!(voters(&cluster), members);
}

#[test]
fn a_namenode_whose_vote_is_damaged_does_not_start_and_says_what_to_do() {
    let mut cluster = Cluster::start(&options(NAMENODES));
    let damaged = cluster.leader() % NAMENODES + 1;
    let name = Cluster::namenode_name(damaged);
    cluster.kill(&name);
    let directory = cluster.path(&name);
    let path = directory.join("data/journal/member");
    let mut bytes = fs::read(&path).expect("it is there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("it is ours");
    let config = directory.join("namenode.toml");
    let start = [
        "namenode",
        "--config",
        &config.to_string_lossy(),
        "--policy=stock",
    ];
    let said = fails(&cluster, &start);
    for told in [
        "member",
        "is damaged",
        "harvestfs init namenode",
        "harvestfs admin namenode add",
    ] {
        assert!(said.contains(told), "{told}: {said}");
    }
    cluster.output_of(&["fs", "mkdir", "/without"]);

    // And that is the remedy, at the same address.
    fs::rename(&directory, cluster.path("aside")).expect("it is ours");
    let at = address(&cluster, damaged);
    let out = directory.to_string_lossy();
    cluster.output_of(&["init", "namenode", "--out", &out, "--listen", &at]);
    cluster.start_namenode_number(damaged);
    cluster.output_of(&["admin", "namenode", "add", &at]);
    assert_eq!(voters(&cluster).len(), NAMENODES);
    hand_over(&cluster, damaged);
    let listed = cluster.output_of(&["fs", "ls", "/"]);
    assert!(listed.contains("without"), "{listed}");
}

#[test]
fn a_group_that_cannot_work_is_not_made() {
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let init = |arguments: &[&str]| {
        let output = Command::new(harvestfs())
            .args(["init", "cluster", "--data"])
            .arg(&data)
            .args(arguments)
            .output()
            .expect("the binary runs");
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        assert!(!data.exists(), "{arguments:?} left something");
        stderr(&output)
    };
    let [one, two, three, four] = [9310, 9311, 9312, 9313].map(|port| format!("10.0.0.1:{port}"));
    let said = init(&["--listen", &format!("{one},{two},{one}")]);
    assert!(said.contains("the same address"), "{said}");
    for even in [
        format!("{one},{two}"),
        format!("{one},{two},{three},{four}"),
    ] {
        let said = init(&["--listen", &even]);
        assert!(said.contains("one, three or five"), "{said}");
    }
    let said = init(&["--namenodes", "3", "--listen", &format!("{one},{two}")]);
    assert!(said.contains('3'), "{said}");
    for number in ["0", "2", "4", "6"] {
        let said = init(&["--namenodes", number, "--listen", &one]);
        assert!(said.contains(number), "{said}");
        let up = Command::new(harvestfs())
            .args(["up", "--detach", "--namenodes", number, "--data"])
            .arg(&data)
            .output()
            .expect("the binary runs");
        assert!(!up.status.success(), "{up:?}");
        assert!(!data.exists(), "{up:?}");
    }
}

#[test]
fn parts_that_are_told_wrong_addresses_too_find_the_namenodes() {
    let mut cluster = Cluster::start(&options(NAMENODES));
    let stranger = Cluster::start(&ClusterOptions {
        datanodes: 0,
        ..options(1)
    });
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("an address");
    // One of the three is sufficient, whatever else is configured.
    let named = [silent, stranger.namenode(), cluster.namenodes()[2]];
    for config in ["admin/client.toml", "client/client.toml"] {
        super::name_namenodes(&cluster.path(config), &named);
    }
    let name = Cluster::datanode(1);
    cluster.stop(&name);
    super::name_namenodes(&cluster.path(&name).join("datanode.toml"), &named);
    cluster.start_datanode(1);
    // Which may be the same one.
    for (round, number) in [3, cluster.leader()].into_iter().enumerate() {
        if cluster.leader() == number {
            hand_over(&cluster, if number == 1 { 2 } else { 1 });
        }
        cluster.wait_alive(3, DEADLINE);
        let directory = format!("/d-{round}");
        cluster.output_of(&["fs", "mkdir", &directory]);
        let source = cluster.path("source");
        fs::write(&source, vec![7; 300_000]).expect("a file");
        let target = format!("{directory}/file");
        cluster.output_of(&["fs", "put", &source.to_string_lossy(), &target]);
    }
    cluster.wait_healthy();
}
