//! Reads of real datanodes.

use std::os::unix::fs::FileExt;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::ReplicaChange;

use crate::testing::cluster::{TestCluster, data};

#[tokio::test]
async fn any_range_is_read() {
    let cluster = TestCluster::start(1).await;
    let data = data(2, 9 << 20);
    cluster.write_block(&cluster.nodes, 1, &data).await;
    for (offset, length) in [
        (0, 1),
        (0, 4096),
        (4095, 2),
        (123_456, 3 << 20),
        (0, 9 << 20),
    ] {
        let read = cluster.read(0, 1, (offset, length)).await.unwrap();
        let (start, end) = (offset as usize, (offset + length) as usize);
        assert!(read == data[start..end], "{offset} + {length}");
    }
    let beyond = cluster.read(0, 1, ((9 << 20) - 1, 2)).await;
    assert_eq!(
        beyond,
        Err(DataError::ShortReplica {
            have_bytes: 9 << 20
        })
    );
    let nothing = cluster.read(0, 1, (5, 0)).await;
    assert!(matches!(nothing, Err(DataError::Protocol(_))));
    assert_eq!(
        cluster.read(0, 7, (0, 1)).await,
        Err(DataError::NoSuchReplica)
    );
}

#[tokio::test]
async fn corruption_is_reported_to_the_reader_and_the_namenode() {
    let cluster = TestCluster::start(1).await;
    let data = data(2, 3 << 20);
    cluster.write_block(&cluster.nodes, 1, &data).await;
    let path = cluster.volume(0).join("sealed/01/0000000000000001");
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let chunk = 600;
    file.write_all_at(&[data[chunk * 4096] ^ 1], 8192 + chunk as u64 * 4096)
        .unwrap();
    file.sync_all().unwrap();
    let expected = DataError::Corrupt {
        offset: chunk as u64 * 4096,
    };
    assert_eq!(cluster.read(0, 1, (0, 3 << 20)).await, Err(expected));
    cluster
        .namenode
        .wait_for(|state| {
            let corrupt = ReplicaChange::Corrupt(BlockId(1));
            state
                .changes
                .iter()
                .any(|(_, change)| *change == corrupt)
                .then_some(())
        })
        .await;
}

#[tokio::test]
async fn many_readers_at_once_share_the_buffers() {
    let cluster = TestCluster::start(1).await;
    let data = data(2, 8 << 20);
    cluster.write_block(&cluster.nodes, 1, &data).await;
    let token = cluster
        .namenode
        .token(BlockId(1), harvestfs_protocol::token::Right::Read);
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let (client, node) = (cluster.client.clone(), cluster.nodes[0].clone());
        readers.spawn(async move { client.read(&node, BlockId(1), token, (0, 8 << 20)).await });
    }
    while let Some(read) = readers.join_next().await {
        assert!(read.unwrap().unwrap() == data);
    }
}
