//! The result of `fsync` when pipelines broke before everything was stable.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::CHUNK_BYTES;
use tokio::time::Instant;

use super::faults::{DEADLINE, lose_power, read_elsewhere};
use super::{create, name, root};
use crate::testing::{Cluster, Datanode, Mood};
use crate::{Client, ClientError, File, OpenFlags};

/// A datanode that can neither write nor seal.
const BROKEN: Mood = Mood::FailsAtPacket(1);

/// A file that is committed but not stable, and some of whose datanodes break before it is.
struct Unstable {
    file: File,
    block: BlockId,
    broken: Vec<Arc<Datanode>>,
    well: Vec<Arc<Datanode>>,
}

async fn unstable(cluster: &Cluster, client: &Client, broken: usize) -> Unstable {
    let (_, file) = create(client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    file.flush().await.unwrap();
    let blocks = cluster.namenode.used_blocks();
    let block = *blocks.iter().next().unwrap();
    let datanodes = cluster.datanodes.iter().cloned();
    let mut holders = datanodes.filter(|it| it.replicas().contains_key(&block));
    let broken: Vec<_> = holders.by_ref().take(broken).collect();
    for datanode in &broken {
        datanode.set_mood(BROKEN);
    }
    Unstable {
        file,
        block,
        broken,
        well: holders.collect(),
    }
}

async fn wait_until_sealed(cluster: &Cluster, block: BlockId) {
    let began = Instant::now();
    while !cluster.namenode.sealed().contains_key(&block) {
        assert!(began.elapsed() < DEADLINE, "the block is not sealed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Starts the `fsync` of a file, after the client has sealed whatever it could.
async fn syncing(
    cluster: &Cluster,
    unstable: &Unstable,
) -> tokio::task::JoinHandle<Result<(), ClientError>> {
    let file = unstable.file.clone();
    let syncing = tokio::spawn(async move { file.sync().await });
    wait_until_sealed(cluster, unstable.block).await;
    // This is much longer than an answer in flight needs.
    tokio::time::sleep(Duration::from_millis(200)).await;
    syncing
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_waits_for_repair_when_a_single_datanode_is_left() {
    let cluster = Cluster::start(4, 3).await;
    let client = cluster.client("a").await;
    let unstable = unstable(&cluster, &client, 2).await;
    let syncing = syncing(&cluster, &unstable).await;
    assert!(!syncing.is_finished(), "one datanode has it");
    let block = unstable.block;
    let datanodes = cluster.datanodes.iter();
    let mut others = datanodes.filter(|it| !it.replicas().contains_key(&block));
    let (left, other) = (&unstable.well[0], others.next().unwrap());
    other.copy(block, left);
    let nodes = [left, other].map(|it| it.info().node);
    cluster.namenode.place(block, Some(nodes.into()));
    let synced = tokio::time::timeout(DEADLINE, syncing).await.unwrap();
    assert_eq!(synced.unwrap(), Ok(()));
    left.stop();
    lose_power(&cluster).await;
    assert_eq!(read_elsewhere(&cluster, "/file").await, b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_fails_in_time_when_a_single_datanode_is_left_and_succeeds_when_another_is_back() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_secs(1);
    let client = Client::connect(options).await.unwrap();
    let unstable = unstable(&cluster, &client, 2).await;
    let is_refused = |synced| {
        let is_so = matches!(synced, Ok(Err(ClientError::TooFewReplicas { .. })));
        assert!(is_so, "{synced:?}");
    };
    is_refused(tokio::time::timeout(DEADLINE, unstable.file.sync()).await);
    is_refused(tokio::time::timeout(DEADLINE, unstable.file.sync()).await);
    let ino = unstable.file.ino();
    drop(unstable.file);
    let reopened = client.open(&root(), ino, OpenFlags::READ).await.unwrap();
    is_refused(tokio::time::timeout(DEADLINE, reopened.sync()).await);
    unstable.broken[0].set_mood(Mood::Well);
    assert_eq!(reopened.sync().await, Ok(()));
    unstable.well[0].stop();
    lose_power(&cluster).await;
    cluster
        .namenode
        .place(unstable.block, Some(vec![unstable.broken[0].info().node]));
    assert_eq!(read_elsewhere(&cluster, "/file").await, b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_asks_for_no_second_replica_where_there_is_to_be_one() {
    let cluster = Cluster::start(3, 1).await;
    let client = cluster.client("a").await;
    let unstable = unstable(&cluster, &client, 1).await;
    // It can no longer write, but it can seal.
    unstable.broken[0].set_mood(Mood::Full);
    let synced = tokio::time::timeout(DEADLINE, unstable.file.sync()).await;
    assert_eq!(synced, Ok(Ok(())));
    assert!(unstable.broken[0].replicas()[&unstable.block].1);
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_of_a_file_with_a_lost_block_fails_for_as_long_as_the_file_has_it() {
    let cluster = Cluster::start(6, 3).await;
    let client = cluster.client("a").await;
    let unstable = unstable(&cluster, &client, 3).await;
    let (_, clone) = create(&client, "clone").await;
    let cloned = unstable.file.clone_range(0, &clone, 0, u64::MAX).await;
    cloned.unwrap();
    let is_lost = |synced| {
        let is_so = matches!(synced, Err(ClientError::DataLost { .. }));
        assert!(is_so, "{synced:?}");
    };
    is_lost(unstable.file.sync().await);
    is_lost(unstable.file.sync().await);
    let ino = unstable.file.ino();
    drop(unstable.file);
    let flags = OpenFlags::READ_WRITE;
    let reopened = client.open(&root(), ino, flags).await.unwrap();
    is_lost(reopened.sync().await);
    is_lost(reopened.sync().await);
    is_lost(clone.sync().await);
    reopened.truncate(0).await.unwrap();
    assert_eq!(reopened.sync().await, Ok(()));
    // Its datanodes come back.
    for datanode in &unstable.broken {
        datanode.set_mood(Mood::Well);
    }
    assert_eq!(clone.sync().await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_of_what_was_committed_of_a_block_needs_no_more_of_it_than_that() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let mut files = Vec::new();
    for text in ["first", "second"] {
        let (_, file) = create(&client, text).await;
        file.write(0, Bytes::from_static(b"content")).await.unwrap();
        file.flush().await.unwrap();
        files.push(file);
    }
    let blocks = cluster.namenode.used_blocks();
    assert_eq!(blocks.len(), 1, "they share one");
    // As if the namenode had sealed the block before the second commit, because the session had ended.
    cluster.namenode.expire_sessions();
    for datanode in &cluster.datanodes {
        for block in &blocks {
            datanode.seal_at(*block, CHUNK_BYTES as u64);
        }
    }
    let noticed = name("noticed");
    let made = client.mkdir(&root(), InodeId::ROOT, &noticed, 0o755).await;
    made.unwrap();
    for _ in 0..2 {
        assert_eq!(files[0].sync().await, Ok(()));
    }
    let lost = files[1].sync().await;
    assert!(
        matches!(lost, Err(ClientError::DataLost { .. })),
        "{lost:?}"
    );
}

/// Until it is reported, the namenode does not repair the block.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_block_is_reported_also_when_the_namenode_is_away_for_long() {
    let cluster = Cluster::start(4, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_millis(200);
    let client = Client::connect(options).await.unwrap();
    let unstable = unstable(&cluster, &client, 1).await;
    let file = unstable.file.clone();
    cluster.namenode.crash().await;
    // The pipeline breaks, and this failure is not retried.
    assert!(file.sync().await.is_err());
    tokio::time::sleep(Duration::from_millis(500)).await;
    cluster.namenode.restart().await;
    wait_until_sealed(&cluster, unstable.block).await;
}

/// Returns the result of `fsync` for a file that was closed just before the session ended.
async fn synced_in_the_next_session(is_durable: bool, crashes: bool) -> Result<(), ClientError> {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    file.close().await.unwrap();
    if is_durable {
        // The namenode's journal contains everything before it, which `a` does not know.
        let other = cluster.client("b").await;
        let name = name("durable");
        let made = other.mkdir(&root(), InodeId::ROOT, &name, 0o755).await;
        made.unwrap();
    }
    assert!(client.core().session.has_unconfirmed());
    if crashes {
        cluster.namenode.crash().await;
    }
    cluster.namenode.expire_sessions();
    if crashes {
        cluster.namenode.restart().await;
    }
    let file = client.open(&root(), attr.ino, OpenFlags::READ_WRITE).await;
    let file = file.unwrap();
    let synced = file.sync().await;
    assert_eq!(file.sync().await, Ok(()), "it is reported once");
    synced
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_tells_of_what_the_namenode_forgot_before_the_session_ended() {
    let lost = synced_in_the_next_session(false, true).await;
    assert!(
        matches!(lost, Err(ClientError::DataLost { .. })),
        "{lost:?}"
    );
    assert_eq!(synced_in_the_next_session(true, true).await, Ok(()));
    assert_eq!(synced_in_the_next_session(false, false).await, Ok(()));
}
