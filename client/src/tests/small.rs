//! Clusters of fewer datanodes than replicas wanted.

use super::{create, pattern};
use crate::testing::Cluster;

/// Blocks have all the replicas that are possible: each is used, and none is sealed before it is full.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_with_a_replica_on_every_datanode_are_kept_in_stock() {
    let cluster = Cluster::with_block_bytes(2, 3, 1 << 20).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let content = pattern(12 << 20, 1);
    file.write(0, content.clone().into()).await.unwrap();
    file.sync().await.unwrap();
    assert!(file.read(0, 13 << 20).await.unwrap() == content);
    let used = cluster.namenode.used_blocks().len() as u64;
    assert_eq!(used, 12);
    assert_eq!(cluster.namenode.calls("allocate_blocks"), used / 2);
    let given_back = |length: &u64| *length == 0;
    assert!(!cluster.namenode.sealed().values().any(given_back));
}
