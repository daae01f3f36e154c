//! A majority of namenodes has failed: tests what operators learn, and that nothing gives up too early.

use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions};

use super::{address, begin, fails, stderr};

const NAMENODES: usize = 3;
/// Time without a leader. The start of a namenode with many files may take longer.
const AWAY: Duration = Duration::from_secs(15);
/// Time for a leader to notice that the others have failed: a lease, and some reserve.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);
/// Maximum time of a diagnosis, which must not wait for unresponsive parts.
const TOLD_WITHIN: Duration = Duration::from_secs(60);
const RECOVER: &str = "harvestfs admin namenode recover --accept-loss";

fn options() -> ClusterOptions {
    ClusterOptions {
        namenodes: NAMENODES,
        datanodes: 3,
        ..ClusterOptions::default()
    }
}

/// Kills all but one.
fn leave(cluster: &mut Cluster, left: usize) {
    for number in (1..=NAMENODES).filter(|it| *it != left) {
        cluster.kill(&Cluster::namenode_name(number));
    }
}

fn start_others(cluster: &mut Cluster, left: usize) {
    for number in (1..=NAMENODES).filter(|it| *it != left) {
        cluster.start_namenode_number(number);
    }
}

/// Checks what an operator who needs help sees.
fn check_advice(cluster: &Cluster, left: usize) {
    let began = Instant::now();
    let doctor = cluster.command(&["admin", "doctor"]);
    assert!(!doctor.status.success());
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(
        said.contains("no namenode leads") && said.contains(RECOVER),
        "{said}"
    );
    assert!(began.elapsed() < TOLD_WITHIN, "{:?}", began.elapsed());
    let running = format!("{}, which runs", address(cluster, left));
    assert!(said.contains(&running), "{said}");
    assert!(said.contains("which are not reached"), "{said}");
    for contradiction in ["does not lead;", "; the one at", "; ask the one at"] {
        assert!(
            !said.contains(contradiction) || said.contains("does not any more"),
            "{said}"
        );
    }
}

#[test]
fn without_most_namenodes_an_operator_is_told_what_to_do_also_beside_a_mount_that_hangs() {
    // In the cluster's directory, as with `up`.
    let Some((mut cluster, _mount)) = Cluster::mounted(&options()) else {
        return;
    };
    let leader = cluster.leader();
    let left = leader % NAMENODES + 1;
    leave(&mut cluster, left);
    check_advice(&cluster, left);
    let listed = cluster.command(&["admin", "namenode", "list"]);
    let said = String::from_utf8_lossy(&listed.stdout).into_owned() + &stderr(&listed);
    assert!(
        said.to_lowercase().contains("no namenode leads") && said.contains(RECOVER),
        "{said}"
    );

    // The leader appears late, and the command waits for it.
    let asking = begin(&cluster, &["admin", "status"]);
    thread::sleep(AWAY);
    start_others(&mut cluster, left);
    let answered = asking.wait_with_output().expect("it ends");
    assert!(answered.status.success(), "{answered:?}");
    assert!(
        stderr(&answered).contains("No namenode leads just now"),
        "{answered:?}"
    );
}

#[test]
fn a_leader_without_the_others_keeps_no_operator_waiting() {
    let mut cluster = Cluster::start(&options());
    let leader = cluster.leader();
    leave(&mut cluster, leader);
    // Before it notices, it would complain about the address instead.
    thread::sleep(NOTICED_WITHIN);
    // It would take as long as a namenode may take to catch up.
    let began = Instant::now();
    let said = fails(&cluster, &["admin", "namenode", "add", "127.0.0.1:9"]);
    assert!(began.elapsed() < TOLD_WITHIN, "{:?}", began.elapsed());
    assert!(said.contains("harvestfs admin namenode"), "{said}");
    check_advice(&cluster, leader);
    start_others(&mut cluster, leader);
    cluster.output_of(&["admin", "status"]);
}

#[test]
fn leadership_that_goes_to_another_one_than_was_asked_for_is_told() {
    let mut cluster = Cluster::start(&options());
    let leader = cluster.leader();
    let dead = leader % NAMENODES + 1;
    cluster.kill(&Cluster::namenode_name(dead));
    // The leader may not have noticed.
    let to = address(&cluster, dead);
    let said = fails(&cluster, &["admin", "namenode", "transfer", &to]);
    assert!(
        said.contains("did not take over") || said.contains("does not answer"),
        "{said}"
    );
    assert_ne!(cluster.leader(), dead);
    cluster.start_namenode_number(dead);
}
