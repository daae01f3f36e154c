//! All namenodes were put back to an older copy, which none of them can detect: datanodes know more.

use harvestfs_protocol::admin::ClusterStatus;
use harvestfs_protocol::timeline::{Epoch, Position};

use super::*;
use crate::harness::{Datanode, until};

async fn status(group: &Group) -> ClusterStatus {
    match group.admin(AdminRequest::Status).await {
        Ok(AdminReply::Status(status)) => *status,
        other => panic!("unexpected {other:?}"),
    }
}

/// Registers a datanode with one of the namenodes, as soon as that knows its server.
async fn register(group: &Group, at: usize, name: &str, obeyed: Option<Position>) -> Datanode {
    let mut registered = None;
    until("the server is known", async || {
        let Some((link, _notices)) = group.link(at, Role::Datanode, name).await else {
            return false;
        };
        match Datanode::register_on(link, name, obeyed).await {
            Ok(node) => registered = Some(node),
            Err(FsError::NotLeader { .. }) => {}
            Err(error) => panic!("{at} refuses: {error}"),
        }
        registered.is_some()
    })
    .await;
    registered.expect("waited for")
}

/// Registers a new server with the leader, which on a busy machine may have changed a moment ago.
async fn register_new(group: &Group, name: &str) -> (usize, Datanode) {
    let mut registered = None;
    until("the server is known", async || {
        let leader = group.leader().await;
        let Some((link, _notices)) = group.link(leader, Role::Datanode, name).await else {
            return false;
        };
        match Datanode::register_on(link, name, None).await {
            Ok(node) => registered = Some((leader, node)),
            Err(FsError::NotLeader { .. }) => {}
            Err(error) => panic!("{leader} refuses: {error}"),
        }
        registered.is_some()
    })
    .await;
    registered.expect("waited for")
}

/// A position that no namenode of the group ever wrote.
async fn foreign(group: &Group) -> Position {
    let epoch = status(group).await.epoch;
    Position {
        epoch: Epoch {
            number: epoch.number - 1,
            id: 99,
        },
        record: 1_000,
    }
}

async fn check_recovering(group: &Group, what: &str) {
    let recovery = status(group).await.recovery;
    let ahead = recovery.unwrap_or_else(|| panic!("{what}: it is not in recovery"));
    assert_eq!(ahead.ahead[0].name, "dn-1", "{what}");
    let (mut client, _) = group.client("bob", None).await;
    let refused = client.call(create(ROOT, "in-recovery")).await;
    assert!(
        matches!(refused, Err(FsError::Recovery(_))),
        "{what}: {refused:?}"
    );
}

#[tokio::test]
async fn whoever_leads_next_is_in_recovery_too_until_the_loss_is_accepted() {
    let mut group = Group::new(3).await;
    let (first, node) = register_new(&group, "dn-1").await;
    drop(node);
    let obeyed = foreign(&group).await;
    let mut nodes = Vec::new();
    for at in 0..3 {
        nodes.push(register(&group, at, "dn-1", Some(obeyed)).await);
    }
    check_recovering(&group, "the first one").await;

    // A namenode that takes over knows it from what the datanode reported while it followed.
    group.kill(first).await;
    let second = group.leader().await;
    check_recovering(&group, "the one after a crash").await;
    assert!(nodes[second].heartbeat().await.authority.recovering);
    group.start(first).await;
    let third = (0..3).find(|at| *at != first && *at != second).unwrap();
    let to = GroupRequest::Transfer(Some(group.addrs[third]));
    group.group(to).await.unwrap();
    until("it leads", async || group.leader().await == third).await;
    check_recovering(&group, "the one that was handed over to").await;
    assert!(nodes[third].heartbeat().await.authority.recovering);

    // Then an operator accepts the loss, once for all of them.
    let accepted = group.admin(AdminRequest::AcceptLoss).await;
    assert_eq!(accepted, Ok(AdminReply::Done));
    drop(register(&group, first, "dn-1", Some(obeyed)).await);
    for _ in 0..2 {
        assert_eq!(status(&group).await.recovery, None);
        let leader = group.leader().await;
        let (mut client, _) = group.client("carol", None).await;
        client.create(ROOT, &format!("after-{leader}")).await;
        group.kill(leader).await;
        group.leader().await;
        group.start(leader).await;
    }
}

#[tokio::test]
async fn a_datanode_that_registered_before_anybody_led_is_heard() {
    let group = Group::new(3).await;
    let (first, node) = register_new(&group, "dn-1").await;
    drop(node);
    let obeyed = foreign(&group).await;
    let next = (first + 1) % 3;
    // The leader is never notified of it.
    let node = register(&group, next, "dn-1", Some(obeyed)).await;
    assert_eq!(status(&group).await.recovery, None);
    let to = GroupRequest::Transfer(Some(group.addrs[next]));
    group.group(to).await.unwrap();
    until("it leads", async || group.leader().await == next).await;
    check_recovering(&group, "the one that it registered with").await;
    assert!(node.heartbeat().await.authority.recovering);
}

#[tokio::test]
async fn who_follows_the_group_is_no_reason_for_recovery() {
    let mut group = Group::new(3).await;
    let (_, node) = register_new(&group, "dn-1").await;
    let mut obeyed = node.registered.authority.position;
    drop(node);
    for round in 0..3 {
        let (mut client, leader) = group.client("alice", None).await;
        for number in 0..10 {
            client.create(ROOT, &format!("file-{round}-{number}")).await;
        }
        let node = register(&group, leader, "dn-1", Some(obeyed)).await;
        obeyed = node.heartbeat().await.authority.position;
        for at in 0..3 {
            if at != leader {
                // It may lag behind what the datanode obeyed.
                register(&group, at, "dn-1", Some(obeyed)).await;
            }
        }
        group.kill(leader).await;
        group.leader().await;
        assert_eq!(status(&group).await.recovery, None, "round {round}");
        group.start(leader).await;
    }
}
