//! Reads whose extents another client has made stale, before this client is notified.

use bytes::Bytes;
use harvestfs_protocol::types::Attr;

use super::{create, pattern, root};
use crate::testing::Cluster;
use crate::{ClientError, File, OpenFlags};

const MIB: usize = 1 << 20;

/// A file of several blocks that `a` has written, and that `b` has open and knows the extents of.
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
    // All of the first block, half of the second, and no fourth.
    let change = Bytes::from(pattern(3 * MIB / 2, 2));
    written.write(0, change.clone()).await.unwrap();
    written.flush().await.unwrap();
    written.truncate(3 << 20).await.unwrap();
    let mut expected = pattern(4 * MIB, 1);
    expected[..change.len()].copy_from_slice(&change);
    expected.truncate(3 * MIB);
    assert!(read.read(0, 8 * MIB).await.unwrap() == expected);
    // What was asked for again is known now.
    let asked = cluster.namenode.calls("get_extents");
    assert!(read.read(MIB as u64, MIB).await.unwrap() == expected[MIB..2 * MIB]);
    assert_eq!(cluster.namenode.calls("get_extents"), asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_is_never_where_the_extents_say_ends_the_read() {
    let cluster = Cluster::start(3, 3).await;
    let (attr, _written, read) = written(&cluster).await;
    for block in cluster.namenode.used_blocks() {
        cluster.namenode.forget_block(block);
    }
    let refused = read.read(0, MIB).await;
    assert_eq!(refused, Err(ClientError::ChangesTooFast { ino: attr.ino }));
}
