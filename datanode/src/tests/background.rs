//! Repairs and the scrubber.

use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;
use harvestfs_protocol::node::{NodeCommand, ReplicaChange};
use harvestfs_protocol::token::Right;

use crate::options::DatanodeOptions;
use crate::testing::cluster::{TestCluster, data};
use crate::testing::fake_namenode::State;
use crate::tests::busy::set_busy;

fn replicate(
    cluster: &TestCluster,
    block: u64,
    length_bytes: u64,
    sources: &[usize],
) -> NodeCommand {
    NodeCommand::Replicate {
        block: BlockId(block),
        length_bytes,
        sources: sources
            .iter()
            .map(|&index| cluster.nodes[index].clone())
            .collect(),
        token: cluster.namenode.token(BlockId(block), Right::Read),
    }
}

fn corrupt(cluster: &TestCluster, node: usize, block: u64, chunk: u64) {
    let path = cluster
        .volume(node)
        .join(format!("sealed/{block:02x}/{block:016x}"));
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 8192 + chunk * 4096).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 8192 + chunk * 4096)
        .unwrap();
    file.sync_all().unwrap();
}

#[tokio::test]
async fn a_repair_fetches_the_replica_from_a_source_that_has_it() {
    let mut cluster = TestCluster::start(4).await;
    let data = data(3, 3_000_000);
    cluster.write_block(&cluster.nodes[..3], 1, &data).await;
    // The first source is dead, the second has damage in the middle.
    cluster.kill(0).await;
    corrupt(&cluster, 1, 1, 300);
    let target = cluster.nodes[3].node;
    for _ in 0..2 {
        let command = replicate(&cluster, 1, 3_000_000, &[0, 1, 2]);
        cluster.namenode.command_now(target, command);
        cluster
            .namenode
            .wait_for(|state| {
                let (_, replica) = state.replicas.get(&target)?.get(&BlockId(1))?;
                (replica.sealed && replica.length_bytes == 3_002_368).then_some(())
            })
            .await;
    }
    assert_eq!(cluster.read(3, 1, (0, 3_000_000)).await.unwrap(), data);
    // The source reports its damage, with its next heartbeat.
    let found = (cluster.nodes[1].node, ReplicaChange::Corrupt(BlockId(1)));
    cluster
        .namenode
        .wait_for(|state| state.changes.contains(&found).then_some(()))
        .await;
}

#[tokio::test]
async fn a_repair_without_a_source_is_reported() {
    let cluster = TestCluster::start(2).await;
    cluster
        .write_block(&cluster.nodes[..1], 1, &data(3, 5000))
        .await;
    let target = cluster.nodes[1].node;
    let failed = (target, ReplicaChange::RepairFailed(BlockId(1)));
    // Longer than the source has.
    cluster
        .namenode
        .command_now(target, replicate(&cluster, 1, 9000, &[0]));
    cluster
        .namenode
        .wait_for(|state| state.changes.contains(&failed).then_some(()))
        .await;
    assert!(!cluster.namenode.lock().replicas[&target].contains_key(&BlockId(1)));
    let left = std::fs::read_dir(cluster.volume(1).join("repair")).unwrap();
    assert_eq!(left.count(), 0);
    // It works the next time.
    cluster
        .namenode
        .command_now(target, replicate(&cluster, 1, 5000, &[0]));
    cluster
        .namenode
        .wait_for(|state| state.replicas.get(&target)?.get(&BlockId(1)).map(drop))
        .await;
}

#[tokio::test]
async fn the_scrubber_finds_damage_without_a_reader() {
    let mut cluster = TestCluster::start(1).await;
    for block in 1..=3 {
        cluster
            .write_block(&cluster.nodes, block, &data(block, 400_000))
            .await;
        // So that the replica's checksums are cached.
        cluster.read(0, block, (0, 1)).await.unwrap();
    }
    corrupt(&cluster, 0, 2, 90);
    cluster.kill(0).await;
    let mut options = cluster.options(0);
    options.scrub_bytes_per_second = 50 << 20;
    cluster.restart(options, 0).await;
    let node = cluster.nodes[0].node;
    let found = (node, ReplicaChange::Corrupt(BlockId(2)));
    cluster
        .namenode
        .wait_for(|state| state.changes.contains(&found).then_some(()))
        .await;
    for block in [1, 3] {
        cluster.read(0, block, (0, 400_000)).await.unwrap();
    }
    assert!(cluster.volume(0).join("corrupt/0000000000000002").exists());
    // The namenode has the replica deleted once there are others.
    let blocks = vec![BlockId(2)];
    cluster
        .namenode
        .command_now(node, NodeCommand::Delete { blocks });
    cluster
        .namenode
        .wait_for(|state| {
            let deleted = (node, ReplicaChange::Deleted(BlockId(2)));
            state.changes.contains(&deleted).then_some(())
        })
        .await;
    assert!(!cluster.volume(0).join("corrupt/0000000000000002").exists());
}

/// A datanode verifies a replica that a client doubts, and reports the result.
#[tokio::test]
async fn doubted_replicas_are_verified() {
    let mut cluster = TestCluster::start(1).await;
    for block in 1..=2 {
        cluster
            .write_block(&cluster.nodes, block, &data(block, 400_000))
            .await;
    }
    corrupt(&cluster, 0, 2, 90);
    cluster.kill(0).await;
    let mut options = cluster.options(0);
    // A tenth of a second per replica, which shows that they are verified one after the other.
    options.scrub_bytes_per_second = 4 << 20;
    // The scrubber's rounds do not begin: it pauses while the primary tenant needs the server, and so do
    // verifications.
    cluster.primaries[0].uses(0.95);
    cluster.restart(options, 0).await;
    set_busy(&cluster, 0, true).await;
    let node = cluster.nodes[0].node;
    let storage = cluster.namenode.lock().heartbeats.last().unwrap().2.volumes[0].storage;
    cluster.namenode.lock().changes.clear();
    for block in [3, 1, 2].map(BlockId) {
        let verify = NodeCommand::Verify { storage, block };
        cluster.namenode.command_now(node, verify);
    }
    let answers = |state: &State, block: u64| {
        let of_block = state.changes.iter().filter(|(_, change)| match *change {
            ReplicaChange::Have(report) => report.block == BlockId(block),
            ReplicaChange::Deleted(it) | ReplicaChange::Corrupt(it) => it == BlockId(block),
            ReplicaChange::RepairFailed(_) => false,
        });
        of_block.map(|(_, change)| *change).collect::<Vec<_>>()
    };
    cluster
        .namenode
        .wait_for(|state| (!answers(state, 1).is_empty()).then_some(()))
        .await;
    assert_eq!(
        answers(&cluster.namenode.lock(), 3),
        [ReplicaChange::Deleted(BlockId(3))]
    );
    assert_eq!(answers(&cluster.namenode.lock(), 2), [], "one at a time");
    set_busy(&cluster, 0, false).await;
    cluster
        .namenode
        .wait_for(|state| {
            let corrupt = ReplicaChange::Corrupt(BlockId(2));
            answers(state, 2).contains(&corrupt).then_some(())
        })
        .await;
    let of_the_good_one = answers(&cluster.namenode.lock(), 1);
    assert!(
        matches!(of_the_good_one[..], [ReplicaChange::Have(_)]),
        "{of_the_good_one:?}"
    );
}

#[tokio::test]
async fn a_quota_shrinks_while_the_datanode_runs() {
    let cluster = TestCluster::start(1).await;
    let node = cluster.nodes[0].node;
    for block in 1..5 {
        cluster
            .write_block(&cluster.nodes, block, &data(block, 1_000_000))
            .await;
    }
    let storage = cluster.namenode.lock().registered[0].volumes[0].storage;
    let command = NodeCommand::SetQuota {
        storage,
        quota_bytes: 3_000_000,
        deadline_ms: 300,
    };
    cluster.namenode.command_now(node, command);
    // The namenode commands no deletion, so the datanode itself chooses replicas, and reports that.
    cluster
        .namenode
        .wait_for(|state| {
            let volume = state.heartbeats.last()?.2.volumes[0];
            let is_small = volume.quota_bytes == 3_000_000 && volume.used_bytes <= 3_000_000;
            (is_small && volume.shrinks_in_ms.is_none()).then_some(())
        })
        .await;
    let state = cluster.namenode.lock();
    let deleted = state.changes.iter();
    let deleted = deleted.filter(|(_, change)| matches!(change, ReplicaChange::Deleted(_)));
    assert_eq!(deleted.count(), 2);
}

#[tokio::test]
async fn what_the_namenode_has_deleted_goes_at_the_rate_that_is_set_until_space_is_short() {
    let (mut cluster, mut options) = removing(1_000_000, 8).await;
    let is_usual = |bytes| bytes == 3_000_000;
    removable(&cluster, is_usual).await;

    let start = Instant::now();
    delete(&cluster, 1..=6);
    deleted(&cluster, 4).await;
    // The fourth replica is deleted once the third is paid for, minus a tenth of a second.
    assert!(start.elapsed() > Duration::from_millis(2_800));
    // Bytes that still exist, and bytes that are not paid for yet, count.
    removable(&cluster, |bytes| bytes < 1_500_000).await;
    deleted(&cluster, 6).await;
    removable(&cluster, is_usual).await;

    // Deletions need not be paid for until no more than 0.5 MB is left.
    options.volumes[0].quota_bytes = 1_600_000;
    options.removal_bytes_per_second = 1;
    start_anew(&mut cluster, &options).await;
    removable(&cluster, |bytes| bytes > 1_000_000).await;
    delete(&cluster, 7..=8);
    deleted(&cluster, 8).await;
}

#[tokio::test]
async fn deletions_that_wait_are_forgotten_with_the_connection() {
    let (cluster, _) = removing(500_000, 3).await;
    delete(&cluster, 1..=2);
    deleted(&cluster, 1).await;
    // The datanode registers again because of this volume, while the second deletion waits for the first to be paid
    // for.
    delete(&cluster, 3..=3);
    deleted(&cluster, 2).await;
    // Everything is paid for: it would have been the second one's turn.
    removable(&cluster, |bytes| bytes == 1_500_000).await;
    let state = cluster.namenode.lock();
    let left: Vec<_> = state.replicas[&cluster.nodes[0].node].keys().collect();
    assert_eq!(left, [&BlockId(2)]);
}

#[tokio::test]
async fn the_namenode_hears_at_once_that_space_became_short() {
    let mut cluster = TestCluster::start(1).await;
    let mut options = cluster.options(0);
    options.volumes[0].quota_bytes = 4_000_000;
    options.removal_bytes_per_second = 1;
    start_anew(&mut cluster, &options).await;
    removable(&cluster, |bytes| bytes == 3).await;

    let (first, second) = (data(1, 1_500_000), data(2, 1_700_000));
    cluster.write_block(&cluster.nodes, 1, &first).await;
    let start = Instant::now();
    cluster.write_block(&cluster.nodes, 2, &second).await;
    removable(&cluster, |bytes| bytes > 3).await;
    assert!(start.elapsed() < HEARTBEAT_INTERVAL - Duration::from_secs(1));
}

/// A datanode with a rate for deletions, and so many blocks of 1 MB.
async fn removing(bytes_per_second: u64, blocks: u64) -> (TestCluster, DatanodeOptions) {
    let mut cluster = TestCluster::start(1).await;
    for block in 1..=blocks {
        cluster
            .write_block(&cluster.nodes, block, &data(block, 1_000_000))
            .await;
    }
    let mut options = cluster.options(0);
    options.removal_bytes_per_second = bytes_per_second;
    start_anew(&mut cluster, &options).await;
    (cluster, options)
}

async fn start_anew(cluster: &mut TestCluster, options: &DatanodeOptions) {
    cluster.kill(0).await;
    cluster.namenode.lock().heartbeats.clear();
    cluster.restart(options.clone(), 0).await;
}

fn delete(cluster: &TestCluster, blocks: RangeInclusive<u64>) {
    let blocks = blocks.map(BlockId).collect();
    let command = NodeCommand::Delete { blocks };
    cluster.namenode.command_now(cluster.nodes[0].node, command);
}

/// Waits until a heartbeat reports an accepted number of removable bytes.
async fn removable(cluster: &TestCluster, is_enough: impl Fn(u64) -> bool) {
    cluster
        .namenode
        .wait_for(|state| {
            let heartbeat = &state.heartbeats.last()?.2;
            is_enough(heartbeat.removable_bytes).then_some(())
        })
        .await;
}

/// Waits until a datanode has reported that so many replicas are deleted.
async fn deleted(cluster: &TestCluster, replicas: usize) {
    let is_deletion = |(_, change): &&_| matches!(change, ReplicaChange::Deleted(_));
    cluster
        .namenode
        .wait_for(|state| {
            let deleted = state.changes.iter().filter(is_deletion).count();
            (deleted >= replicas).then_some(())
        })
        .await;
}
