//! A namenode whose directory was restored from a copy, or that runs twice.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{AttrChanges, Mutation, OpenSession, mutation};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::timeline::{Epoch, Position};

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Replaces the namenode's directory with the copy.
fn put_back(cluster: &Cluster, copied: &Path) {
    fs::remove_dir_all(cluster.data_dir()).unwrap();
    copy(copied, &cluster.data_dir());
}

async fn allocate(client: &mut Client) -> Result<u64, FsError> {
    Ok(client.allocate(1).await?.blocks[0].block.0)
}

/// The current address of a datanode's namenode.
async fn position(node: &Datanode) -> Position {
    let authority = node.heartbeat().await.authority;
    assert!(!authority.recovering);
    authority.position
}

#[tokio::test]
async fn an_older_copy_changes_nothing_until_the_loss_is_accepted() {
    let mut cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    let copied = tempfile::tempdir().unwrap();
    let mut alice = cluster.client("alice").await;
    alice.create(ROOT, "old").await;
    let session = alice.session;
    cluster.shutdown().await;
    copy(&cluster.data_dir(), copied.path());
    cluster.start().await;

    let node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.open("alice", Some(session), vec![]).await.unwrap();
    alice.set_sequence(1);
    let given = (
        allocate(&mut alice).await.unwrap(),
        alice.create(ROOT, "newer").await.ino,
        cluster.client("carol").await.session,
    );
    let obeyed = position(&node).await;
    let newer = tempfile::tempdir().unwrap();
    cluster.shutdown().await;
    copy(&cluster.data_dir(), newer.path());

    put_back(&cluster, copied.path());
    cluster.start().await;
    let node = Datanode::register_after(&cluster, "dn-1", Some(obeyed))
        .await
        .unwrap();
    assert!(node.registered.authority.recovering);
    assert!(node.heartbeat().await.authority.recovering);
    // Reading continues to work, changing does not.
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "old").await.unwrap();
    let refused = bob.call(create(ROOT, "new")).await;
    assert!(matches!(refused, Err(FsError::Recovery(_))), "{refused:?}");
    let refused = allocate(&mut bob).await;
    assert!(matches!(refused, Err(FsError::Recovery(_))), "{refused:?}");
    let status = cluster.status().await;
    let recovery = status.recovery.unwrap();
    assert_eq!(recovery.ahead[0].name, "dn-1");
    assert_eq!(recovery.ahead[0].obeyed, obeyed);
    assert!(recovery.missing_records() > 0);
    let AdminReply::Fsck(report) = cluster.admin(AdminRequest::Fsck).await.unwrap() else {
        panic!("a report was expected");
    };
    assert!(!report.healthy);

    // A client that saw more is not treated as one that knows what this namenode knows.
    let (link, _notices) = cluster.rpc(Role::Client, "alice").await;
    let resume = Request::OpenSession(OpenSession {
        resume: Some(session),
        holds: vec![],
        delegations: None,
        seen: Some(obeyed),
    });
    assert_eq!(link.ask(resume).await, Err(FsError::SessionExpired));

    // The earlier session comes back, and ends when the loss is accepted.
    let mut alice = cluster.open("alice", Some(session), vec![]).await.unwrap();
    assert_eq!(
        cluster.admin(AdminRequest::AcceptLoss).await,
        Ok(AdminReply::Done)
    );
    let lookup = alice.lookup(ROOT, "old").await;
    assert_eq!(lookup, Err(FsError::SessionExpired));
    let accepted = position(&node).await;
    assert!(accepted.epoch.number > obeyed.epoch.number);
    assert_eq!(cluster.status().await.recovery, None);
    let nothing_to_accept = cluster.admin(AdminRequest::AcceptLoss).await;
    assert!(nothing_to_accept.is_err());
    // No ID is assigned twice.
    bob.set_sequence(10);
    assert_ne!(allocate(&mut bob).await.unwrap(), given.0);
    assert_ne!(bob.create(ROOT, "newer").await.ino, given.1);
    assert_ne!(cluster.client("dave").await.session, given.2);

    // Then the newer directory is found. It lacks what its datanodes have obeyed since.
    cluster.shutdown().await;
    put_back(&cluster, newer.path());
    cluster.start().await;
    let node = Datanode::register_after(&cluster, "dn-1", Some(accepted))
        .await
        .unwrap();
    assert!(node.registered.authority.recovering);
    assert_eq!(
        cluster.admin(AdminRequest::AcceptLoss).await,
        Ok(AdminReply::Done)
    );
    assert!(position(&node).await.epoch.number > accepted.epoch.number);
    let mut bob = cluster.client("bob").await;
    assert_eq!(bob.lookup(ROOT, "newer").await.unwrap().ino, given.1);
}

/// They may trust what they have cached until then.
#[tokio::test]
async fn after_a_restart_others_wait_for_the_lease_of_a_session_that_ended_with_the_loss() {
    const LEASE: Duration = Duration::from_secs(2);
    let mut cluster = Cluster::with(|options| {
        options.cluster.safe_mode_max_ms = 0;
        options.lease = LEASE;
    })
    .await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let session = alice.session;
    let copied = tempfile::tempdir().unwrap();
    copy(&cluster.data_dir(), copied.path());
    alice.create(ROOT, "newer").await;
    let obeyed = position(&node).await;
    cluster.kill().await;

    put_back(&cluster, copied.path());
    cluster.start().await;
    let node = Datanode::register_after(&cluster, "dn-1", Some(obeyed));
    assert!(node.await.unwrap().registered.authority.recovering);
    let alice = cluster.open("alice", Some(session), vec![]).await.unwrap();
    assert_eq!(
        cluster.admin(AdminRequest::AcceptLoss).await,
        Ok(AdminReply::Done)
    );
    let kept_alive = alice.link.ask(Request::KeepAlive).await;
    assert_eq!(kept_alive, Err(FsError::SessionExpired));
    cluster.restart().await;
    let mut bob = cluster.client("bob").await;
    let started = Instant::now();
    let changes = AttrChanges {
        mode: Some(0o600),
        ..AttrChanges::default()
    };
    let change = mutation::SetAttr { ino: file, changes };
    bob.call(Mutation::SetAttr(change)).await.unwrap();
    let waited = started.elapsed();
    assert!(waited >= LEASE / 2, "only {waited:?}");
}

#[tokio::test]
async fn a_copy_that_lacks_but_a_record_is_found_out() {
    // The first records that a copy writes may have the same numbers as those that it lacks.
    for missing in 1..=3 {
        let mut cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
        let node = Datanode::register(&cluster, "dn-1").await;
        let mut alice = cluster.client("alice").await;
        let copied = tempfile::tempdir().unwrap();
        copy(&cluster.data_dir(), copied.path());
        let before = position(&node).await;
        for number in 0..missing {
            alice.create(ROOT, &format!("file-{number}")).await;
        }
        let obeyed = position(&node).await;
        assert_eq!(obeyed.record, before.record + missing);
        cluster.kill().await;

        put_back(&cluster, copied.path());
        cluster.start().await;
        let node = Datanode::register_after(&cluster, "dn-1", Some(obeyed))
            .await
            .unwrap();
        assert!(
            node.registered.authority.recovering,
            "{missing} records are missing"
        );
        assert_eq!(
            cluster.admin(AdminRequest::AcceptLoss).await,
            Ok(AdminReply::Done)
        );
        position(&node).await;
    }
}

#[tokio::test]
async fn what_a_copy_wrote_itself_in_recovery_is_not_counted_as_what_it_had() {
    let mut cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    alice.create(ROOT, "old").await;
    let copied = tempfile::tempdir().unwrap();
    let had = position(&node).await.record;
    copy(&cluster.data_dir(), copied.path());
    for number in 0..20 {
        alice.create(ROOT, &format!("newer-{number}")).await;
    }
    let obeyed = position(&node).await;
    cluster.kill().await;
    put_back(&cluster, copied.path());
    cluster.start().await;
    for start in 1..=4 {
        let node = Datanode::register_after(&cluster, "dn-1", Some(obeyed)).await;
        assert!(node.unwrap().registered.authority.recovering);
        let recovery = cluster.status().await.recovery.unwrap();
        let found = (recovery.restored_record, recovery.missing_records());
        assert_eq!(found, (had, obeyed.record - had), "start {start}");
        // Sessions are records, too.
        cluster.client("bob").await;
        cluster.kill_and_start().await;
    }
}

#[tokio::test]
async fn the_right_copy_goes_on_at_once() {
    let mut cluster = Cluster::new().await;
    let mut node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    for i in 0..10 {
        alice.create(ROOT, &format!("file-{i}")).await;
        let obeyed = position(&node).await;
        if i % 3 == 0 {
            let sequence = alice.last_sequence();
            cluster.kill_and_start().await;
            // A session that does not come back is waited for.
            let resumed = cluster.open("alice", Some(alice.session), vec![]).await;
            alice = resumed.unwrap();
            alice.set_sequence(sequence);
        }
        node = Datanode::register_after(&cluster, "dn-1", Some(obeyed))
            .await
            .unwrap();
    }
    position(&node).await;
    assert_eq!(cluster.status().await.recovery, None);
}

#[tokio::test]
async fn a_datanode_of_a_second_namenode_is_refused_and_the_first_one_serves_on() {
    let cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let mine = position(&node).await;
    let other = Position {
        epoch: Epoch {
            number: mine.epoch.number + 5,
            id: 1,
        },
        record: 3,
    };
    let refused = Datanode::register_after(&cluster, "dn-2", Some(other)).await;
    assert!(matches!(refused, Err(FsError::Recovery(_))));
    let status = cluster.status().await;
    assert_eq!(status.recovery, None);
    assert_eq!(status.refused_nodes[0].name, "dn-2");
    let mut alice = cluster.client("alice").await;
    allocate(&mut alice).await.unwrap();
    // It comes back when it has obeyed no other namenode.
    Datanode::register_after(&cluster, "dn-2", Some(mine))
        .await
        .unwrap();
    assert_eq!(cluster.status().await.refused_nodes, []);

    // Or when an operator decides for this namenode, whose clients continue.
    let refused = Datanode::register_after(&cluster, "dn-2", Some(other)).await;
    assert!(refused.is_err());
    assert_eq!(
        cluster.admin(AdminRequest::AcceptLoss).await,
        Ok(AdminReply::Done)
    );
    for obeyed in [other, mine] {
        Datanode::register_after(&cluster, "dn-2", Some(obeyed))
            .await
            .unwrap();
    }
    alice.create(ROOT, "after").await;
    let status = cluster.status().await;
    assert!(status.recovery.is_none() && status.refused_nodes.is_empty());
}
