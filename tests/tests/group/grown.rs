//! One namenode becomes three, while operators' configurations contain only the first one.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, wait_until};

use super::{address, begin, hand_over, name_namenodes, remove};

const DEADLINE: Duration = Duration::from_secs(60);
/// Maximum time for an operator to wait for a diagnosis.
const TOLD_WITHIN: Duration = Duration::from_secs(30);

/// The first namenode leads a group of three; operators know only that one.
fn grown() -> Cluster {
    let mut cluster = Cluster::start(&ClusterOptions {
        namenodes: 1,
        datanodes: 3,
        ..ClusterOptions::default()
    });
    for _ in 0..2 {
        let number = cluster.make_namenode();
        let to = address(&cluster, number);
        cluster.output_of(&["admin", "namenode", "add", &to]);
    }
    name_namenodes(
        &cluster.path("admin/client.toml"),
        &cluster.namenodes()[..1],
    );
    cluster
}

#[test]
fn operators_who_know_one_namenode_hand_leadership_over_and_back() {
    let cluster = grown();
    let mut reported = 0;
    for to in [2, 3, 1, 3, 2, 1] {
        let said = hand_over(&cluster, to);
        let to = address(&cluster, to);
        if let Some(said) = said {
            assert!(said.contains(&format!("{to} leads")), "{said}");
            reported += 1;
        }
        cluster.output_of(&["admin", "status"]);
    }
    // Elections on a busy machine may get in the way of some.
    assert!(reported >= 4, "{reported} of 6 succeeded");
}

/// A long command continues with the next leader.
#[test]
fn a_command_outlives_the_one_namenode_that_it_knows() {
    let mut cluster = grown();
    let source = cluster.path("source");
    fs::write(&source, vec![7; 3 << 20]).expect("a file");
    cluster.output_of(&["fs", "put", &source.to_string_lossy(), "/file"]);
    cluster.wait_healthy();
    // It waits until the server's blocks are elsewhere, which they cannot be: there are three servers.
    let datanode = Cluster::datanode(1);
    let arguments = ["admin", "decommission", "start", &datanode, "--wait"];
    let mut waiting = begin(&cluster, &arguments);
    thread::sleep(Duration::from_secs(2));
    assert!(waiting.try_wait().expect("it is a child").is_none());
    cluster.kill(&Cluster::namenode_name(1));
    thread::sleep(Duration::from_secs(8));
    let ended = waiting.try_wait().expect("it is a child");
    let _ = waiting.kill();
    let output = waiting.wait_with_output().expect("it ends");
    assert!(ended.is_none(), "{output:?}");
    cluster.start_namenode_number(1);
}

#[test]
fn one_that_is_left_alone_tells_what_it_knows() {
    let mut cluster = grown();
    hand_over(&cluster, 2);
    for number in [2, 3] {
        cluster.kill(&Cluster::namenode_name(number));
    }
    let began = Instant::now();
    let listed = cluster.command(&["admin", "namenode", "list"]);
    assert!(!listed.status.success(), "{listed:?}");
    assert!(began.elapsed() < TOLD_WITHIN, "{:?}", began.elapsed());
    let said = String::from_utf8_lossy(&listed.stdout).into_owned();
    for number in 1..=3 {
        assert!(said.contains(&address(&cluster, number)), "{said}");
    }
    assert!(
        said.contains("NO NAMENODE LEADS") && !said.contains("leader"),
        "{said}"
    );
    let this = format!("at {} knows", address(&cluster, 1));
    assert!(said.contains(&this), "{said}");
    let listed = cluster.command(&["admin", "namenode", "list", "--json"]);
    assert!(!listed.status.success(), "{listed:?}");
    let group: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    assert!(group["leader"].is_null(), "{group}");
    assert_eq!(group["members"].as_array().expect("members").len(), 3);
}

#[test]
fn one_that_left_is_enough_to_find_the_others() {
    let cluster = grown();
    hand_over(&cluster, 2);
    remove(&cluster, 1, 2);
    let name = Cluster::namenode_name(1);
    wait_until("it knows that it has left", DEADLINE, || {
        cluster.log(&name).contains("in the group no more")
    });
    for config in ["admin/client.toml", "client/client.toml"] {
        name_namenodes(&cluster.path(config), &cluster.namenodes()[..1]);
    }
    let source = cluster.path("source");
    fs::write(&source, "found").expect("a file");
    cluster.output_of(&["fs", "put", &source.to_string_lossy(), "/file"]);
    assert_eq!(cluster.output_of(&["fs", "cat", "/file"]), "found");
    cluster.output_of(&["admin", "status"]);
}

#[test]
fn one_that_left_says_so_once_and_what_to_do() {
    let cluster = grown();
    remove(&cluster, 3, 1);
    let name = Cluster::namenode_name(3);
    let said = || cluster.log(&name).matches("in the group no more").count();
    wait_until("it says that it has left", DEADLINE, || said() > 0);
    thread::sleep(Duration::from_secs(5));
    assert_eq!(said(), 1, "{}", cluster.log(&name));
    assert!(cluster.log(&name).contains("harvestfs admin namenode add"));
    assert_eq!(super::voters(&cluster).len(), 2);
}
