//! Caches of several sessions.

use std::time::{Duration, Instant};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{AttrChanges, Mutation, Notice, RenameMode, mutation};
use harvestfs_protocol::rpc::{Reply, Request};

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;

fn chmod(ino: InodeId, mode: u16) -> Mutation {
    let changes = AttrChanges {
        mode: Some(mode),
        ..AttrChanges::default()
    };
    Mutation::SetAttr(mutation::SetAttr { ino, changes })
}

/// Starts a mutation whose reply is expected to wait.
fn start(client: &mut Client, op: impl Into<Op>) -> tokio::task::JoinHandle<bool> {
    let call = client.number(op);
    let link = client.link.clone();
    tokio::spawn(async move { meta(&link, call).await.is_ok() })
}

/// Resumes the session of a client after a restart, and starts a change of a file of hers.
async fn change_after_a_restart(
    cluster: &Cluster,
    before: &Client,
    file: InodeId,
) -> tokio::task::JoinHandle<bool> {
    let resumed = cluster.open("alice", Some(before.session), vec![]).await;
    let mut resumed = resumed.unwrap();
    resumed.set_sequence(1);
    start(&mut resumed, chmod(file, 0o600))
}

#[tokio::test]
async fn a_change_is_acknowledged_when_others_have_forgotten_it() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "file").await.unwrap();

    let change = start(&mut alice, chmod(file, 0o600));
    let notice = bob.notice().await;
    assert!(matches!(&notice, Notice::Invalidate { inodes, .. } if inodes.contains(&file)));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!change.is_finished(), "Bob has not forgotten it yet");
    bob.ack(&notice).await;
    assert!(change.await.unwrap());

    // He holds none of it now, so no mutation waits.
    alice.call(chmod(file, 0o640)).await.unwrap();
    // What he learns again counts again.
    assert_eq!(bob.lookup(ROOT, "file").await.unwrap().mode, 0o640);
    let change = start(&mut alice, chmod(file, 0o644));
    let notice = bob.notice().await;
    bob.ack(&notice).await;
    assert!(change.await.unwrap());
}

#[tokio::test]
async fn a_name_that_did_not_exist_is_taken_back() {
    let cluster = Cluster::new().await;
    let mut bob = cluster.client("bob").await;
    let mut alice = cluster.client("alice").await;
    assert_eq!(bob.lookup(ROOT, "new").await, Err(FsError::NotFound));
    let change = start(&mut alice, create(ROOT, "new"));
    let notice = bob.notice().await;
    let Notice::Invalidate { entries, .. } = &notice else {
        panic!("unexpected {notice:?}");
    };
    assert!(entries.contains(&(ROOT, name("new"))));
    bob.ack(&notice).await;
    assert!(change.await.unwrap());
}

/// Found by the simulator: another session's operation on a file had returned, and the mount that had made the file's
/// name still reported that it does not exist, since its own reply was in flight.
#[tokio::test]
async fn a_change_by_others_waits_for_the_session_that_made_the_name() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let mut bob = cluster.client("bob").await;
    let file = alice.create(ROOT, "file").await.ino;
    let link = mutation::Link {
        ino: file,
        parent: ROOT,
        name: name("link"),
    };
    alice.call(Mutation::Link(link)).await.unwrap();
    // Nothing that Alice has sent since shows that she has received the reply.
    let rename = mutation::Rename {
        parent: ROOT,
        name: name("file"),
        new_parent: ROOT,
        new_name: name("link"),
        mode: RenameMode::Replace,
    };
    // Both are names of the same file: the rename changes nothing.
    let change = start(&mut bob, Mutation::Rename(rename));
    let notice = alice.notice().await;
    let Notice::Invalidate { entries, .. } = &notice else {
        panic!("unexpected {notice:?}");
    };
    assert_eq!(*entries, [(ROOT, name("link"))]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!change.is_finished(), "Alice may still believe otherwise");
    alice.ack(&notice).await;
    assert!(change.await.unwrap());
    bob.call(chmod(file, 0o600)).await.unwrap();
}

/// Found by the simulator: as above, for a mount that had looked up the name before, and was cut off.
#[tokio::test]
async fn a_change_by_others_waits_for_those_that_may_not_know_of_the_file() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let mut bob = cluster.client("bob").await;
    let mut carol = cluster.client("carol").await;
    assert_eq!(carol.lookup(ROOT, "new").await, Err(FsError::NotFound));
    let created = start(&mut alice, create(ROOT, "new"));
    let notice = carol.notice().await;
    let file = bob.lookup(ROOT, "new").await.unwrap().ino;
    let change = start(&mut bob, chmod(file, 0o600));
    let of_alice = alice.notice().await;
    alice.ack(&of_alice).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(
        !change.is_finished(),
        "Carol may still say that it is not there"
    );
    assert!(!created.is_finished());
    carol.ack(&notice).await;
    assert!(change.await.unwrap() && created.await.unwrap());
}

#[tokio::test]
async fn a_dead_session_delays_for_a_lease_at_most() {
    let cluster = Cluster::with(|options| {
        options.lease = Duration::from_millis(500);
        options.session_timeout = Duration::from_secs(60);
    })
    .await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let mut bob = cluster.client("bob").await;
    let started = Instant::now();
    bob.lookup(ROOT, "file").await.unwrap();
    bob.link.cut();
    alice.call(chmod(file, 0o600)).await.unwrap();
    // The namenode counts whole milliseconds.
    let waited = started.elapsed() + Duration::from_millis(1);
    assert!(waited >= Duration::from_millis(500), "only {waited:?}");
}

#[tokio::test]
async fn a_client_that_comes_back_learns_what_it_missed() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "file").await.unwrap();
    bob.link.cut();
    let change = start(&mut alice, chmod(file, 0o600));
    // The change has been taken when a later request of Alice is answered.
    assert_eq!(alice.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
    let mut bob = cluster
        .open("bob", Some(bob.session), vec![])
        .await
        .unwrap();
    let notice = bob.notice().await;
    assert!(matches!(notice, Notice::InvalidateAll { .. }));
    assert!(!change.is_finished());
    bob.ack(&notice).await;
    assert!(change.await.unwrap());
}

#[tokio::test]
async fn after_a_restart_every_session_may_hold_anything() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let bob = cluster.client("bob").await;
    cluster.kill_and_start().await;
    let mut bob = cluster
        .open("bob", Some(bob.session), vec![])
        .await
        .unwrap();
    let change = change_after_a_restart(&cluster, &alice, file).await;
    let notice = bob.notice().await;
    assert!(!change.is_finished());
    bob.ack(&notice).await;
    assert!(change.await.unwrap());
}

/// Alice changes a file that Bob has cached. He is not notified, and she asks for the answer again after a restart.
async fn asked_again_after_a_restart(
    cluster: &mut Cluster,
) -> (Client, tokio::task::JoinHandle<bool>) {
    let mut carol = cluster.client("carol").await;
    let hers = carol.create(ROOT, "hers").await.ino;
    carol.acknowledge_all();
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "file").await.unwrap();
    bob.link.cut();
    let first = start(&mut alice, chmod(file, 0o600));
    // It has been accepted when a later request is answered, and is durable when a later change is.
    assert_eq!(alice.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
    carol.call(chmod(hers, 0o600)).await.unwrap();
    carol.close().await;
    assert!(!first.is_finished());
    let sequence = alice.last_sequence();
    cluster.kill_and_start().await;
    let alice = cluster.open("alice", Some(alice.session), vec![]).await;
    let mut alice = alice.unwrap();
    alice.set_sequence(sequence - 1);
    (bob, start(&mut alice, chmod(file, 0o600)))
}

#[tokio::test]
async fn an_answer_that_waited_for_others_waits_for_them_again_after_a_restart() {
    let mut cluster = Cluster::new().await;
    let (bob, again) = asked_again_after_a_restart(&mut cluster).await;
    let bob = cluster.open("bob", Some(bob.session), vec![]).await;
    let mut bob = bob.unwrap();
    let notice = bob.notice().await;
    assert!(matches!(notice, Notice::InvalidateAll { .. }));
    assert!(!again.is_finished());
    bob.ack(&notice).await;
    assert!(again.await.unwrap());
}

#[tokio::test]
async fn an_answer_that_waited_for_others_waits_for_their_leases_after_a_restart() {
    const LEASE: Duration = Duration::from_millis(700);
    let mut cluster = Cluster::with(|options| options.lease = LEASE).await;
    let started = Instant::now();
    let (_, again) = asked_again_after_a_restart(&mut cluster).await;
    assert!(again.await.unwrap());
    let waited = started.elapsed();
    assert!(waited >= LEASE, "only {waited:?}");
}

/// Whether a change by Alice waits for Bob after a restart, when Bob was silent for so long before.
async fn waits_after_a_restart(silent_leases: u32, comes_back: bool) -> bool {
    const LEASE: Duration = Duration::from_millis(700);
    let mut cluster = Cluster::with(|options| options.lease = LEASE).await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "file").await.unwrap();
    bob.link.cut();
    for _ in 0..8 * silent_leases {
        tokio::time::sleep(LEASE / 7).await;
        assert_eq!(alice.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
    }
    if comes_back {
        // He has something cached again that he may trust.
        let again = cluster.open("bob", Some(bob.session), vec![]).await;
        let mut again = again.unwrap();
        again.lookup(ROOT, "file").await.unwrap();
        again.link.cut();
    }
    cluster.kill_and_start().await;
    let change = change_after_a_restart(&cluster, &alice, file).await;
    tokio::time::sleep(LEASE / 4).await;
    let waits = !change.is_finished();
    assert!(change.await.unwrap());
    waits
}

#[tokio::test]
async fn after_a_restart_nobody_waits_for_a_session_that_had_been_silent() {
    assert!(waits_after_a_restart(0, false).await);
    assert!(!waits_after_a_restart(2, false).await);
    assert!(waits_after_a_restart(2, true).await, "it came back");
}

/// Alice changes a file that Bob has cached. He keeps sending requests, and never acknowledges, until his session is
/// ended.
async fn ended_without_acknowledging(
    cluster: &Cluster,
) -> (Client, Client, InodeId, tokio::task::JoinHandle<bool>) {
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "file").await.unwrap();
    let change = start(&mut alice, chmod(file, 0o600));
    until("Bob's session is ended", async || {
        bob.link.ask(Request::KeepAlive).await == Err(FsError::SessionExpired)
    })
    .await;
    (alice, bob, file, change)
}

#[tokio::test]
async fn a_session_that_does_not_acknowledge_is_ended() {
    let cluster = Cluster::with(|options| {
        options.lease = Duration::from_millis(400);
        options.session_timeout = Duration::from_secs(60);
    })
    .await;
    let (_alice, _bob, _, change) = ended_without_acknowledging(&cluster).await;
    assert!(change.await.unwrap());
}

#[tokio::test]
async fn after_a_restart_others_wait_for_the_lease_of_a_session_that_was_ended_before() {
    const LEASE: Duration = Duration::from_millis(600);
    let mut cluster = Cluster::with(|options| {
        options.lease = LEASE;
        options.session_timeout = Duration::from_secs(60);
    })
    .await;
    let (alice, bob, file, change) = ended_without_acknowledging(&cluster).await;
    assert!(!change.is_finished(), "his lease has not run out");
    let resumed = cluster.open("bob", Some(bob.session), vec![]).await;
    assert!(matches!(resumed, Err(FsError::SessionExpired)));
    let (started, sequence) = (Instant::now(), alice.last_sequence());
    cluster.kill_and_start().await;
    let alice = cluster.open("alice", Some(alice.session), vec![]).await;
    let mut alice = alice.unwrap();
    alice.set_sequence(sequence);
    assert!(start(&mut alice, chmod(file, 0o640)).await.unwrap());
    let waited = started.elapsed();
    assert!(waited >= LEASE / 2, "only {waited:?}");
}
