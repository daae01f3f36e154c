//! Reads whose extents another client has made stale, before this client is notified or while the
//! mount is still busy with an earlier notice; and answers that are overtaken in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::query::{GetXattr, Lookup};
use harvestfs_protocol::meta::{AttrChanges, SetXattrMode};
use harvestfs_protocol::types::{Attr, FileKind};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::faults::DEADLINE;
use super::{create, name, pattern, root};
use crate::testing::Cluster;
use crate::{CacheListener, Client, ClientError, File, Invalidated, Invalidation, OpenFlags};

const MIB: usize = 1 << 20;

/// A file of several blocks that `a` has written; `b` has it open and knows its extents.
async fn written(cluster: &Cluster) -> (Attr, File, File) {
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    let (attr, written) = create(&a, "file").await;
    written.write(0, pattern(4 * MIB, 1).into()).await.unwrap();
    written.flush().await.unwrap();
    let read = b.open(&root(), attr.ino, OpenFlags::READ).await.unwrap();
    assert_eq!(read.seek_hole(0).await.unwrap(), Some(4 << 20));
    (attr, written, read)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_whose_blocks_left_the_file_asks_for_its_extents_again() {
    let cluster = Cluster::with_block_bytes(3, 3, MIB as u64).await;
    let (_, written, read) = written(&cluster).await;
    cluster.namenode.hold_notices(true);
    // This covers all of the first block and half of the second, but no fourth.
    let change = Bytes::from(pattern(3 * MIB / 2, 2));
    written.write(0, change.clone()).await.unwrap();
    written.flush().await.unwrap();
    written.truncate(3 << 20).await.unwrap();
    let mut expected = pattern(4 * MIB, 1);
    expected[..change.len()].copy_from_slice(&change);
    expected.truncate(3 * MIB);
    assert!(read.read(0, 8 * MIB).await.unwrap() == expected);
    // The second answer is cached now.
    let asked = cluster.namenode.calls("get_extents");
    assert!(read.read(MIB as u64, MIB).await.unwrap() == expected[MIB..2 * MIB]);
    assert_eq!(cluster.namenode.calls("get_extents"), asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_is_never_where_the_extents_say_ends_the_read() {
    let cluster = Cluster::start(3, 3).await;
    let (attr, _written, read) = written(&cluster).await;
    for block in cluster.namenode.used_blocks() {
        cluster.namenode.place(block, None);
    }
    let refused = read.read(0, MIB).await;
    assert_eq!(refused, Err(ClientError::ChangesTooFast { ino: attr.ino }));
}

/// A mount whose kernel is slow.
struct Slow(Arc<Semaphore>);

impl CacheListener for Slow {
    fn invalidate(&self, _: Vec<Invalidation>) -> Invalidated {
        let may = self.0.clone();
        Box::pin(async move {
            let permit = may.acquire().await;
            permit.expect("it is not closed").forget();
        })
    }
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < DEADLINE, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Waits until the namenode has done an operation `count` times.
async fn wait_for(cluster: &Cluster, op: &str, count: u64) {
    let is_done = || cluster.namenode.calls(op) >= count;
    until(&format!("no {op} came"), is_done).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_behind_that_of_another_is_read_with_it_before_the_mount_has_invalidated() {
    let cluster = Cluster::start(3, 3).await;
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    let (other, _) = create(&a, "other").await;
    let (log, _) = create(&a, "log").await;
    let append = OpenFlags {
        read: true,
        append: true,
        ..OpenFlags::WRITE
    };
    let by_a = a.open(&root(), log.ino, append).await.unwrap();
    let by_b = b.open(&root(), log.ino, append).await.unwrap();
    by_b.append(Bytes::from_static(b"one")).await.unwrap();
    by_b.flush().await.unwrap();
    assert_eq!(by_b.read(0, 100).await.unwrap(), "one");
    b.getattr(&root(), other.ino).await.unwrap();

    // The mount of `b` is busy with this when it is notified of the append.
    let may = Arc::new(Semaphore::new(0));
    b.set_cache_listener(Arc::new(Slow(may.clone())));
    let changed = cluster.namenode.calls("setattr");
    let changes = tokio::spawn({
        let a = a.clone();
        async move {
            let mode = AttrChanges {
                mode: Some(0o600),
                ..AttrChanges::default()
            };
            a.setattr(&root(), other.ino, mode).await.unwrap();
        }
    });
    wait_for(&cluster, "setattr", changed + 1).await;
    let appends = tokio::spawn(async move {
        by_a.append(Bytes::from_static(b"two")).await.unwrap();
        by_a.flush().await.unwrap();
    });
    let is_committed = || cluster.namenode.size_bytes(log.ino) >= 6;
    until("it was not committed", is_committed).await;
    by_b.append(Bytes::from_static(b"three")).await.unwrap();
    by_b.flush().await.unwrap();
    assert_eq!(by_b.read(0, 100).await.unwrap(), "onetwothree");
    assert!(!appends.is_finished(), "b has not acknowledged it");
    may.add_permits(100);
    changes.await.unwrap();
    appends.await.unwrap();
}

/// A mount that records whether it was notified.
struct Noted(Arc<AtomicBool>);

impl CacheListener for Noted {
    fn invalidate(&self, _: Vec<Invalidation>) -> Invalidated {
        self.0.store(true, Ordering::SeqCst);
        Box::pin(async {})
    }
}

/// A file that no client has open any more.
async fn made(cluster: &Cluster, client: &Client, text: &str) -> Attr {
    let releases = cluster.namenode.calls("release");
    let (root, name, kind) = (root(), name(text), FileKind::Regular);
    let made = client.mknod(&root, InodeId::ROOT, &name, kind, 0o644, 0);
    let made = made.await.unwrap();
    wait_for(cluster, "release", releases + 1).await;
    made
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_removed_while_it_is_looked_up_is_not_there() {
    let cluster = Cluster::start(3, 3).await;
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    made(&cluster, &a, "file").await;
    let lookups = cluster.namenode.calls("lookup");
    cluster.namenode.hold(Some(Lookup::NAME));
    let looks = tokio::spawn(async move {
        let found = b.lookup(&root(), InodeId::ROOT, &name("file")).await;
        found.map(|attr| attr.ino)
    });
    wait_for(&cluster, "lookup", lookups + 1).await;
    let removed = a.unlink(&root(), InodeId::ROOT, &name("file")).await;
    removed.unwrap();
    cluster.namenode.hold(None);
    assert_eq!(looks.await.unwrap(), Err(FsError::NotFound.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_was_done_does_not_fail_when_its_file_is_removed_before_it_is_answered() {
    let cluster = Cluster::start(3, 3).await;
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    let c = cluster.client("c").await;
    let ino = made(&cluster, &a, "file").await.ino;
    for client in [&b, &c] {
        client.getattr(&root(), ino).await.unwrap();
    }
    // The mount of `c` is busy when it is notified, so `b` waits for its answer.
    let may = Arc::new(Semaphore::new(0));
    c.set_cache_listener(Arc::new(Slow(may.clone())));
    let is_noted = Arc::new(AtomicBool::new(false));
    b.set_cache_listener(Arc::new(Noted(is_noted.clone())));
    let [changes, removals] = ["setattr", "unlink"].map(|op| cluster.namenode.calls(op));
    let changing = tokio::spawn(async move {
        let mode = AttrChanges {
            mode: Some(0o600),
            ..AttrChanges::default()
        };
        b.setattr(&root(), ino, mode).await
    });
    wait_for(&cluster, "setattr", changes + 1).await;
    let removing = tokio::spawn(async move {
        let removed = a.unlink(&root(), InodeId::ROOT, &name("file")).await;
        removed.unwrap();
    });
    wait_for(&cluster, "unlink", removals + 1).await;
    until("b was not notified", || is_noted.load(Ordering::SeqCst)).await;
    may.add_permits(100);
    let changed = changing.await.unwrap().unwrap();
    assert_eq!(changed.permission_bits(), 0o600);
    removing.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_from_before_an_attribute_was_set_does_not_say_how_blocks_are_placed() {
    let cluster = Cluster::start(3, 3).await;
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    let ino = made(&cluster, &a, "file").await.ino;
    let file = b.open(&root(), ino, OpenFlags::WRITE).await.unwrap();
    file.write(0, Bytes::from_static(b"data")).await.unwrap();
    let asked = cluster.namenode.calls(GetXattr::NAME);
    cluster.namenode.hold(Some(GetXattr::NAME));
    let syncing = tokio::spawn({
        let file = file.clone();
        async move { file.sync().await }
    });
    // One query for each of the settings.
    wait_for(&cluster, GetXattr::NAME, asked + 3).await;
    let (me, replication) = (root(), b"user.harvestfs.replication");
    let set = b.setxattr(&me, ino, replication, b"2", SetXattrMode::Any);
    set.await.unwrap();
    cluster.namenode.hold(None);
    syncing.await.unwrap().unwrap();
    let known = file.state().rules().map(|rules| rules.replication);
    assert_eq!(known, Some(2));
}

/// The source is truncated elsewhere, and this client has not been notified yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_file_that_ends_earlier_by_now_returns_what_is_copied() {
    let cluster = Cluster::start(3, 3).await;
    let (client, other) = (cluster.client("a").await, cluster.client("b").await);
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    file.sync().await.unwrap();
    let (_, copy) = create(&client, "copy").await;
    let theirs = other.open(&root(), attr.ino, OpenFlags::WRITE).await;
    cluster.namenode.hold_notices(true);
    theirs.unwrap().truncate(3).await.unwrap();
    let known = client.try_getattr(attr.ino).map(|attr| attr.size_bytes);
    assert_eq!(known, Some(7));
    assert_eq!(file.copy_range(0, &copy, 0, 7).await, Ok(3));
    assert_eq!(&copy.read(0, 100).await.unwrap()[..], b"con");
}
