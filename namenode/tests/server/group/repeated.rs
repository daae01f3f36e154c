//! Requests sent before a failover and repeated after it, word for word.

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::meta::{FileCommit, Mutation, mutation};
use harvestfs_protocol::node::{BlockReport, NodeRequest};

use super::*;
use crate::harness::unlink;

#[tokio::test]
async fn what_is_said_again_to_the_next_leader_is_not_done_again() {
    let mut group = Group::new(3).await;
    let (mut alice, first) = group.client("alice", None).await;
    let creates = alice.number(create(ROOT, "a"));
    let created = meta(&alice.link, creates.clone()).await.unwrap();
    alice.create(ROOT, "b").await;
    let removes = alice.number(unlink(ROOT, "a"));
    meta(&alice.link, removes.clone()).await.unwrap();
    let (session, sequence) = (alice.session, alice.last_sequence());
    let remove_member = GroupRequest::Remove(group.addrs[(first + 1) % 3]);

    group.kill(first).await;
    // On a connection that has no session.
    let next = group.leader().await;
    let (link, _notices) = group.link(next, Role::Client, "alice").await.unwrap();
    let again = link.ask(Request::Meta(removes.clone())).await;
    assert!(again.is_err(), "{again:?}");
    let (mut alice, leader) = group.client("alice", Some(session)).await;
    alice.set_sequence(sequence);
    assert_eq!(alice.session, session);
    // The last one is answered as before, those before it are not executed.
    let again = meta(&alice.link, removes).await;
    assert!(again.is_ok(), "{again:?}");
    let again = meta(&alice.link, creates).await;
    assert!(
        again.is_err() || again.as_ref() == Ok(&created),
        "{again:?}"
    );
    assert_eq!(alice.lookup(ROOT, "a").await, Err(FsError::NotFound));
    alice.create(ROOT, "c").await;

    // An operator's request to a namenode that no longer leads, a datanode's to one that it did not register with.
    group.start(first).await;
    let standby = (0..3).find(|at| *at != leader).unwrap();
    let (link, _notices) = group.link(standby, Role::Admin, "operator").await.unwrap();
    for request in [
        AdminRequest::Group(remove_member),
        AdminRequest::AcceptLoss,
        AdminRequest::Snapshot,
    ] {
        let again = link.ask(Request::Admin(request)).await;
        assert!(matches!(again, Err(FsError::NotLeader { .. })), "{again:?}");
    }
    let (link, _notices) = group.link(leader, Role::Datanode, "dn-1").await.unwrap();
    let report = NodeRequest::BlockReport(BlockReport {
        storage: StorageId(1),
        replicas: vec![],
        part: 0,
        last: true,
    });
    let again = link.ask(Request::Node(report)).await;
    assert!(matches!(again, Err(FsError::Protocol(_))), "{again:?}");
    assert_eq!(voters_of(&group.list().await), 3);
}

/// Otherwise another client could build on the state without it, before this one has replayed it.
#[tokio::test]
async fn a_commit_is_answered_when_it_outlives_the_leader() {
    let mut group = Group::new(3).await;
    let (mut alice, leader) = group.client("alice", None).await;
    let ino = alice.create(ROOT, "file").await.ino;
    let others: Vec<usize> = (0..3).filter(|at| *at != leader).collect();
    let killed: Vec<Namenode> = (others.iter())
        .map(|at| group.namenodes[*at].take().unwrap())
        .collect();
    for killed in futures::future::join_all(killed.into_iter().map(Namenode::kill)).await {
        killed.unwrap();
    }
    // It has its lease for a moment yet.
    let commit = mutation::Commit {
        files: vec![FileCommit {
            ino,
            extents: vec![],
            append: false,
            mtime: Some(Timestamp(1)),
        }],
        durable: false,
    };
    let call = alice.number(Mutation::Commit(commit));
    let answer = tokio::time::timeout(Duration::from_secs(1), meta(&alice.link, call)).await;
    assert!(!matches!(answer, Ok(Ok(_))), "nobody agreed: {answer:?}");
}

fn voters_of(status: &GroupStatus) -> usize {
    status.members.iter().filter(|it| it.is_voter).count()
}
