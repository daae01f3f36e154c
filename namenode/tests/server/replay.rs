//! Commits that were answered before a crash lost them, and that clients replay.

use std::time::{Duration, Instant};

use harvestfs_namenode::server::NamenodeOptions;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::meta::{
    AttrChanges, FileCommit, FileCommitted, Housekeeping, MetaCall, MetaReply, Mutation, Notice,
    Query, housekeeping, mutation, query,
};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::types::Extent;

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;
const LEASE: Duration = Duration::from_millis(500);

fn with_short_leases(options: &mut NamenodeOptions) {
    options.lease = LEASE;
}

fn of_file(ino: InodeId, block: BlockId, length_bytes: u64) -> FileCommit {
    let extent = Extent {
        file_offset: 0,
        length_bytes,
        block,
        block_offset: 0,
    };
    FileCommit {
        ino,
        extents: vec![extent],
        append: false,
        mtime: None,
    }
}

fn commit(files: Vec<FileCommit>, durable: bool) -> Mutation {
    Mutation::Commit(mutation::Commit { files, durable })
}

fn chmod(ino: InodeId, mode: u16) -> Mutation {
    let changes = AttrChanges {
        mode: Some(mode),
        ..AttrChanges::default()
    };
    Mutation::SetAttr(mutation::SetAttr { ino, changes })
}

fn relaxed(client: &mut Client, mutation: Mutation) -> MetaCall {
    let mut call = client.number(mutation);
    numbered(&mut call).relaxed = true;
    call
}

/// As a client replays what a namenode answered and then lost.
fn replayed(client: &mut Client, files: Vec<FileCommit>) -> MetaCall {
    relaxed(client, commit(files, false))
}

fn committed(reply: MetaReply) -> Vec<Result<FileCommitted, FsError>> {
    match reply {
        MetaReply::Committed(files) => files,
        other => panic!("unexpected {other:?}"),
    }
}

/// The blocks of a file and how many bytes each has, in order.
async fn blocks_of(client: &mut Client, ino: InodeId) -> Vec<(BlockId, u64)> {
    let op = Query::GetExtents(query::GetExtents {
        ino,
        from_offset: 0,
    });
    match client.call(op).await {
        Ok(MetaReply::Extents { extents, .. }) => {
            let block = |it: &Extent| (it.block, it.length_bytes);
            extents.iter().map(block).collect()
        }
        other => panic!("unexpected {other:?}"),
    }
}

struct Fixture {
    cluster: Cluster,
    _node: Datanode,
    alice: Client,
    bob: Client,
    files: [InodeId; 2],
    of_alice: BlockId,
    of_bob: BlockId,
}

impl Fixture {
    async fn new(adjust: fn(&mut NamenodeOptions)) -> Self {
        let cluster = Cluster::with(adjust).await;
        let _node = Datanode::register(&cluster, "dn-1").await;
        let mut alice = cluster.client("alice").await;
        let mut bob = cluster.client("bob").await;
        let files = [
            alice.create(ROOT, "one").await.ino,
            alice.create(ROOT, "two").await.ino,
        ];
        let of_alice = alice.allocate(1).await.unwrap().blocks[0].block;
        let of_bob = bob.allocate(1).await.unwrap().blocks[0].block;
        Self {
            cluster,
            _node,
            alice,
            bob,
            files,
            of_alice,
            of_bob,
        }
    }

    /// The namenode restarts, and Bob is back.
    async fn crash(&mut self) {
        self.cluster.kill_and_start().await;
        let sequence = self.bob.last_sequence();
        let bob = self.cluster.open("bob", Some(self.bob.session), vec![]);
        self.bob = bob.await.unwrap();
        self.bob.set_sequence(sequence);
        self.bob.acknowledge_all();
    }

    /// Bob is back on another connection, and declares which files he may have changed.
    async fn bob_returns(&mut self, files: Vec<InodeId>) {
        let sequence = self.bob.last_sequence();
        let session = Some(self.bob.session);
        let bob = self.cluster.open_as("bob", session, vec![], Some(files));
        self.bob = bob.await.unwrap();
        self.bob.set_sequence(sequence);
        self.bob.acknowledge_all();
    }

    /// Alice is back, and declares which files she may have changed.
    async fn alice_returns(&mut self) {
        let sequence = self.alice.last_sequence();
        let (session, files) = (Some(self.alice.session), self.files.to_vec());
        let alice = self.cluster.open_as("alice", session, vec![], Some(files));
        self.alice = alice.await.unwrap();
        self.alice.set_sequence(sequence);
        self.alice.acknowledge_all();
    }
}

/// A commit by Alice was lost in a crash: the file, and how she replays it.
async fn forgotten() -> (Fixture, InodeId, MetaCall) {
    let mut fixture = Fixture::new(with_short_leases).await;
    let [file, _] = fixture.files;
    let replay = replayed(
        &mut fixture.alice,
        vec![of_file(file, fixture.of_alice, 4_000)],
    );
    fixture.crash().await;
    (fixture, file, replay)
}

/// Alice comes back, and what she replays must not hide what Bob has changed.
async fn assert_refused(mut fixture: Fixture, file: InodeId, replay: MetaCall) {
    fixture.alice_returns().await;
    let reply = meta(&fixture.alice.link, replay).await.unwrap();
    assert!(committed(reply)[0].is_err());
    assert_eq!(
        blocks_of(&mut fixture.alice, file).await,
        [(fixture.of_bob, 1_000)]
    );
}

#[tokio::test]
async fn what_a_session_replays_comes_before_what_others_change() {
    let mut fixture = Fixture::new(|_| {}).await;
    let [file, other] = fixture.files;
    let first = replayed(
        &mut fixture.alice,
        vec![of_file(file, fixture.of_alice, 4_000)],
    );
    let second = replayed(
        &mut fixture.alice,
        vec![of_file(other, fixture.of_alice, 5_000)],
    );
    let both = vec![
        of_file(file, fixture.of_bob, 1_000),
        of_file(other, fixture.of_bob, 1_000),
    ];
    fixture.crash().await;
    let by_bob = fixture.bob.number(commit(both, true));
    let link = fixture.bob.link.clone();
    let by_bob = tokio::spawn(async move { meta(&link, by_bob).await.unwrap() });
    fixture.alice_returns().await;
    for call in [first, second] {
        let reply = meta(&fixture.alice.link, call).await.unwrap();
        assert!(committed(reply)[0].is_ok());
        assert!(!by_bob.is_finished(), "Alice has more to say");
    }
    let inodes = fixture.files.to_vec();
    let returned = housekeeping::ReturnDelegations { inodes };
    let returned = Housekeeping::ReturnDelegations(returned);
    fixture.alice.call(returned).await.unwrap();
    assert!(committed(by_bob.await.unwrap()).iter().all(Result::is_ok));
    for (ino, size_bytes) in [(file, 4_000), (other, 5_000)] {
        let expected = [
            (fixture.of_bob, 1_000),
            (fixture.of_alice, size_bytes - 1_000),
        ];
        assert_eq!(blocks_of(&mut fixture.bob, ino).await, expected);
    }
}

/// Both have changed the file, and do not know what of it is durable. Only Alice's change was lost.
#[tokio::test]
async fn what_each_of_several_sessions_replays_comes_before_what_others_change() {
    let mut fixture = Fixture::new(|_| {}).await;
    let [file, _] = fixture.files;
    let replay = replayed(
        &mut fixture.alice,
        vec![of_file(file, fixture.of_alice, 4_000)],
    );
    fixture.crash().await;
    fixture.bob_returns(vec![file]).await;
    fixture.alice_returns().await;
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    let by_bob = fixture.bob.number(by_bob);
    let link = fixture.bob.link.clone();
    let by_bob = tokio::spawn(async move { meta(&link, by_bob).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let reply = meta(&fixture.alice.link, replay).await.unwrap();
    assert!(committed(reply)[0].is_ok());
    assert!(!by_bob.is_finished(), "Alice may have more to say");
    let inodes = fixture.files.to_vec();
    let returned = housekeeping::ReturnDelegations { inodes };
    let returned = Housekeeping::ReturnDelegations(returned);
    fixture.alice.call(returned).await.unwrap();
    assert!(committed(by_bob.await.unwrap())[0].is_ok());
    let expected = [(fixture.of_bob, 1_000), (fixture.of_alice, 3_000)];
    assert_eq!(blocks_of(&mut fixture.bob, file).await, expected);
}

/// Each has changed what the other may have changed, too.
#[tokio::test]
async fn sessions_that_replay_do_not_wait_for_each_other() {
    let mut fixture = Fixture::new(|_| {}).await;
    let [file, other] = fixture.files;
    let by_alice = relaxed(&mut fixture.alice, chmod(file, 0o600));
    let by_bob = relaxed(&mut fixture.bob, chmod(other, 0o640));
    fixture.crash().await;
    fixture.bob_returns(fixture.files.to_vec()).await;
    fixture.alice_returns().await;
    let started = Instant::now();
    let answers = [
        meta(&fixture.alice.link, by_alice).await,
        meta(&fixture.bob.link, by_bob).await,
    ];
    for answer in answers {
        assert!(answer.is_ok(), "{answer:?}");
    }
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(5), "{waited:?}");
}

#[tokio::test]
async fn what_others_changed_meanwhile_is_not_hidden_by_what_is_replayed() {
    let mut fixture = Fixture::new(with_short_leases).await;
    let [file, other] = fixture.files;
    let append = FileCommit {
        append: true,
        ..of_file(file, fixture.of_alice, 100)
    };
    let files = vec![
        of_file(file, fixture.of_alice, 4_000),
        of_file(other, fixture.of_alice, 5_000),
        append,
    ];
    let replay = replayed(&mut fixture.alice, files);
    fixture.crash().await;
    // Alice is not back by the time nobody waits for her any more.
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    // Even if the answer is lost.
    for _ in 0..2 {
        fixture.alice_returns().await;
        let reply = meta(&fixture.alice.link, replay.clone()).await.unwrap();
        let results: Vec<bool> = committed(reply).iter().map(Result::is_ok).collect();
        assert_eq!(results, [false, true, true]);
    }
    let expected = [(fixture.of_bob, 1_000), (fixture.of_alice, 100)];
    assert_eq!(blocks_of(&mut fixture.alice, file).await, expected);
    assert_eq!(
        blocks_of(&mut fixture.alice, other).await,
        [(fixture.of_alice, 5_000)]
    );
    // A new change is not taken for the lost one.
    let new = commit(vec![of_file(file, fixture.of_alice, 2_000)], false);
    assert!(committed(fixture.alice.call(new).await.unwrap())[0].is_ok());
}

/// She is back, then silent for longer than others wait.
#[tokio::test]
async fn what_others_changed_before_all_was_replayed_is_not_hidden() {
    let (mut fixture, file, replay) = forgotten().await;
    fixture.alice_returns().await;
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    let reply = meta(&fixture.alice.link, replay).await;
    assert!(reply.is_err() || committed(reply.unwrap())[0].is_err());
    assert_eq!(
        blocks_of(&mut fixture.bob, file).await,
        [(fixture.of_bob, 1_000)]
    );
}

/// She is back and heard all the time, but takes longer to replay than others wait. The next leader has to know of
/// it.
#[tokio::test]
async fn what_others_changed_before_a_slow_session_had_replayed_all_is_not_hidden() {
    let (mut fixture, file, replay) = forgotten().await;
    fixture.alice_returns().await;
    let link = fixture.alice.link.clone();
    let alive = tokio::spawn(async move {
        while link.try_ask(Request::KeepAlive).await.is_ok() {
            tokio::time::sleep(LEASE / 10).await;
        }
    });
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    alive.abort();
    fixture.crash().await;
    assert_refused(fixture, file, replay).await;
}

#[tokio::test]
async fn what_others_may_have_changed_before_two_crashes_is_not_hidden_either() {
    let (mut fixture, file, replay) = forgotten().await;
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    // It is recorded that her lease has run out.
    tokio::time::sleep(LEASE).await;
    fixture.bob.create(ROOT, "later").await;
    fixture.crash().await;
    assert_refused(fixture, file, replay).await;
}

/// What he does not wait for is durable together with the record about her lease, or a crash would lose both.
#[tokio::test]
async fn what_others_change_after_a_lapse_is_durable_before_it_is_answered() {
    let (mut fixture, file, replay) = forgotten().await;
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], false);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    fixture.crash().await;
    assert_refused(fixture, file, replay).await;
}

/// A snapshot contains the record about her lease, which is not written again.
#[tokio::test]
async fn what_others_may_have_changed_before_a_snapshot_is_not_hidden_either() {
    let (mut fixture, file, replay) = forgotten().await;
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    let done = fixture.cluster.admin(AdminRequest::Snapshot).await;
    assert_eq!(done, Ok(AdminReply::Done));
    fixture.crash().await;
    assert_refused(fixture, file, replay).await;
}

/// She came back between the crashes, and had replayed nothing.
#[tokio::test]
async fn what_others_changed_before_a_return_that_came_to_nothing_is_not_hidden() {
    let (mut fixture, file, replay) = forgotten().await;
    let by_bob = commit(vec![of_file(file, fixture.of_bob, 1_000)], true);
    assert!(committed(fixture.bob.call(by_bob).await.unwrap())[0].is_ok());
    fixture.alice_returns().await;
    // The record of her return is durable with it.
    fixture.bob.create(ROOT, "later").await;
    fixture.crash().await;
    assert_refused(fixture, file, replay).await;
}

#[tokio::test]
async fn attributes_that_others_set_meanwhile_are_not_replaced_by_what_is_replayed() {
    let mut fixture = Fixture::new(with_short_leases).await;
    let [file, other] = fixture.files;
    let replays = [file, other].map(|ino| relaxed(&mut fixture.alice, chmod(ino, 0o600)));
    fixture.crash().await;
    fixture.bob.attr(chmod(file, 0o640)).await;
    fixture.alice_returns().await;
    for (replay, is_taken) in replays.into_iter().zip([false, true]) {
        let answer = meta(&fixture.alice.link, replay).await;
        assert_eq!(answer.is_ok(), is_taken, "{answer:?}");
    }
    let attr = fixture.bob.lookup(ROOT, "one").await.unwrap();
    assert_eq!(attr.permission_bits(), 0o640);
}

/// She is back, then silent for longer than others wait.
#[tokio::test]
async fn attributes_that_others_set_before_all_was_replayed_are_not_replaced() {
    let mut fixture = Fixture::new(with_short_leases).await;
    let [file, _] = fixture.files;
    let replay = relaxed(&mut fixture.alice, chmod(file, 0o600));
    fixture.crash().await;
    fixture.alice_returns().await;
    fixture.bob.attr(chmod(file, 0o640)).await;
    let answer = meta(&fixture.alice.link, replay).await;
    assert!(answer.is_err(), "{answer:?}");
    let attr = fixture.bob.lookup(ROOT, "one").await.unwrap();
    assert_eq!(attr.permission_bits(), 0o640);
    // A new change is not refused permanently, and not at all once she has reported that nothing is left to replay.
    let attr = fixture.alice.attr(chmod(file, 0o604)).await;
    assert_eq!(attr.permission_bits(), 0o604);
    fixture.files = [InodeId(0); 2];
    fixture.alice_returns().await;
    let new = relaxed(&mut fixture.alice, chmod(file, 0o606));
    let answer = meta(&fixture.alice.link, new).await;
    assert!(answer.is_ok(), "{answer:?}");
}

/// The next leader would not wait until she has forgotten it.
#[tokio::test]
async fn what_is_answered_before_the_lease_is_written_down_is_not_cached() {
    let mut fixture = Fixture::new(with_short_leases).await;
    let [file, other] = fixture.files;
    let call = relaxed(&mut fixture.alice, chmod(file, 0o600));
    fixture.crash().await;
    // It is recorded that her lease has run out.
    fixture.bob.attr(chmod(other, 0o640)).await;
    let (session, files) = (Some(fixture.alice.session), fixture.files.to_vec());
    let alice = fixture
        .cluster
        .open_as("alice", session, vec![], Some(files));
    let mut alice = alice.await.unwrap();
    let answer = meta(&alice.link, call).await;
    assert!(answer.is_ok(), "{answer:?}");
    loop {
        if let Notice::Invalidate { inodes, .. } = alice.notice().await {
            assert_eq!(inodes, [file]);
            break;
        }
    }
}

/// The next leader would take it for a replay, and refuse it.
#[tokio::test]
async fn what_is_set_before_the_lease_is_written_down_is_durable_when_it_is_answered() {
    let mut fixture = Fixture::new(with_short_leases).await;
    let [file, other] = fixture.files;
    fixture.crash().await;
    // It is recorded that her lease has run out.
    fixture.bob.attr(chmod(other, 0o640)).await;
    fixture.alice_returns().await;
    let call = relaxed(&mut fixture.alice, chmod(file, 0o600));
    let answer = meta(&fixture.alice.link, call.clone()).await;
    assert!(answer.is_ok(), "{answer:?}");
    fixture.crash().await;
    fixture.alice_returns().await;
    let again = meta(&fixture.alice.link, call).await;
    assert!(again.is_ok(), "{again:?}");
}
