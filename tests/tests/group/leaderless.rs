//! The leader fails while an operator changes the members: the command continues with the next leader.

use std::process::Output;
use std::thread;
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions};

use super::{address, begin, hand_over, stderr, voters};

const NAMENODES: usize = 3;
/// Delays in milliseconds from the start of the command.
const KILLED_AFTER_MS: [u64; 4] = [30, 90, 200, 400];

/// Runs `harvestfs admin namenode COMMAND ADDRESS`, and kills the leader during the command.
fn change(cluster: &mut Cluster, command: &str, which: usize, killed_after: Duration) -> Output {
    let leader = cluster.leader();
    let to = address(cluster, which);
    let changing = begin(cluster, &["admin", "namenode", command, &to]);
    thread::sleep(killed_after);
    cluster.kill(&Cluster::namenode_name(leader));
    let output = changing.wait_with_output().expect("it ends");
    println!("{command} {which} without {leader}: {}", stderr(&output));
    cluster.start_namenode_number(leader);
    output
}

#[test]
fn a_change_of_the_members_is_made_though_its_leader_is_killed() {
    let mut cluster = Cluster::start(&ClusterOptions {
        namenodes: NAMENODES,
        datanodes: 1,
        ..ClusterOptions::default()
    });
    for after_ms in KILLED_AFTER_MS {
        let new = cluster.make_namenode();
        let after = Duration::from_millis(after_ms);
        let added = change(&mut cluster, "add", new, after);
        assert!(added.status.success(), "{added:?}");
        assert_eq!(voters(&cluster).len(), NAMENODES + 1);

        if cluster.leader() == new {
            hand_over(&cluster, 1);
        }
        let removed = change(&mut cluster, "remove", new, after);
        if !removed.status.success() {
            // It has become the next leader.
            let said = stderr(&removed);
            assert!(said.contains("the namenode that leads cannot"), "{said}");
            super::remove(&cluster, new, 1);
        }
        assert_eq!(voters(&cluster).len(), NAMENODES);
        cluster.stop(&Cluster::namenode_name(new));
    }
}
