//! Tests what operators learn about a group with problems, and that the given advice works.

use std::fs;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, copy_directory, wait_until};

use super::{address, hand_over, remove, voters};

const NAMENODES: usize = 3;
const DEADLINE: Duration = Duration::from_secs(60);
/// Maximum time until an operator learns what is wrong.
const TOLD_WITHIN: Duration = Duration::from_secs(30);

fn options(namenodes: usize) -> ClusterOptions {
    ClusterOptions {
        namenodes,
        datanodes: 0,
        ..ClusterOptions::default()
    }
}

/// The output of a command, whether or not it fails.
fn heard(cluster: &Cluster, arguments: &[&str]) -> String {
    let began = Instant::now();
    let output = cluster.command(arguments);
    assert!(began.elapsed() < TOLD_WITHIN, "{:?}", began.elapsed());
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).into_owned()
}

fn listed(cluster: &Cluster) -> String {
    heard(cluster, &["admin", "namenode", "list"])
}

#[test]
fn an_even_number_of_namenodes_is_said_to_survive_as_many_failures_as_it_does() {
    let mut cluster = Cluster::start(&options(1));
    for (count, survived) in [(2, "no failure"), (3, ""), (4, "1 failure")] {
        let number = cluster.make_namenode();
        let to = address(&cluster, number);
        let said = cluster.output_of(&["admin", "namenode", "add", &to]);
        let doctor = heard(&cluster, &["admin", "doctor"]);
        for said in [said, listed(&cluster), doctor] {
            let is_said = said.contains("survive");
            assert_eq!(is_said, !survived.is_empty(), "{count}: {said}");
            assert!(said.contains(survived), "{count}: {said}");
        }
    }
}

/// Starts all namenodes with copies of their directories, of different ages. Returns the number of the one with the
/// most complete journal.
fn put_all_back(cluster: &mut Cluster) -> usize {
    let data = |cluster: &Cluster, number| {
        let name = Cluster::namenode_name(number);
        (
            cluster.path(&name).join("data"),
            cluster.path(&format!("{name}-aside")),
        )
    };
    // The first copy lacks changes that the others have.
    for (at, number) in [2, 1, 3].into_iter().enumerate() {
        cluster.output_of(&["fs", "mkdir", &format!("/before-{at}")]);
        cluster.stop(&Cluster::namenode_name(number));
        let (data, aside) = data(cluster, number);
        copy_directory(&data, &aside);
        cluster.start_namenode_number(number);
        wait_until("all follow", DEADLINE, || cluster.all_follow());
    }
    cluster.output_of(&["fs", "mkdir", "/lost"]);
    for number in 1..=NAMENODES {
        cluster.kill(&Cluster::namenode_name(number));
    }
    for number in 1..=NAMENODES {
        let (data, aside) = data(cluster, number);
        fs::remove_dir_all(&data).expect("it is ours");
        copy_directory(&aside, &data);
        cluster.start_namenode_number(number);
    }
    3
}

#[test]
fn a_group_of_copies_is_told_what_it_is_and_goes_on_with_the_newest_of_them() {
    let mut cluster = Cluster::start(&options(NAMENODES));
    let newest = put_all_back(&mut cluster);
    let of_newest = address(&cluster, newest);
    for said in [listed(&cluster), heard(&cluster, &["admin", "doctor"])] {
        let told = [
            "copies",
            "harvestfs admin namenode recover --accept-loss",
            &format!("{of_newest} has the newest"),
        ];
        for told in told {
            assert!(said.contains(told), "{told}: {said}");
        }
        assert!(!said.contains("start the others"), "{said}");
    }

    // And that is the remedy.
    for number in 1..=NAMENODES {
        cluster.stop(&Cluster::namenode_name(number));
    }
    let data = cluster.path(&Cluster::namenode_name(newest)).join("data");
    let data = data.to_string_lossy();
    cluster.output_of(&["admin", "namenode", "recover", "--accept-loss", &data]);
    for number in 1..=NAMENODES {
        cluster.start_namenode_number(number);
    }
    assert_eq!(cluster.leader(), newest);
    for number in (1..=NAMENODES).filter(|it| *it != newest) {
        let to = address(&cluster, number);
        cluster.output_of(&["admin", "namenode", "add", &to]);
    }
    assert_eq!(voters(&cluster).len(), NAMENODES);
    let names = cluster.output_of(&["fs", "ls", "/"]);
    assert!(
        names.contains("before-2") && !names.contains("lost"),
        "{names}"
    );
}

#[test]
fn one_that_was_removed_is_added_again_with_its_directory() {
    let mut cluster = Cluster::start(&options(NAMENODES));
    let leader = cluster.leader();
    let removed = leader % NAMENODES + 1;
    let (name, at) = (Cluster::namenode_name(removed), address(&cluster, removed));
    // At once, and after it was away.
    for is_restarted in [false, true] {
        cluster.output_of(&["fs", "mkdir", &format!("/before-{is_restarted}")]);
        remove(&cluster, removed, leader);
        if is_restarted {
            wait_until("it says that it has left", DEADLINE, || {
                cluster.log(&name).matches("in the group no more").count() > 1
            });
            cluster.stop(&name);
            cluster.start_namenode_number(removed);
        }
        let began = Instant::now();
        cluster.output_of(&["admin", "namenode", "add", &at]);
        assert!(began.elapsed() < TOLD_WITHIN, "{:?}", began.elapsed());
        assert_eq!(voters(&cluster).len(), NAMENODES);
        // It counts as a member: without one of the others, changes are committed with it.
        let other = (1..=NAMENODES).find(|it| *it != removed && *it != cluster.leader());
        let other = other.expect("one of three");
        cluster.kill(&Cluster::namenode_name(other));
        cluster.output_of(&["fs", "mkdir", &format!("/with-it-{is_restarted}")]);
        cluster.start_namenode_number(other);
    }
    hand_over(&cluster, removed);
    let names = cluster.output_of(&["fs", "ls", "/"]);
    for is_restarted in [false, true] {
        assert!(
            names.contains(&format!("with-it-{is_restarted}")),
            "{names}"
        );
    }
}
