//! The promise to the primary tenant: a datanode leaves its server alone when the tenant needs it.

use std::time::Duration;

use harvestfs_protocol::data::{
    DataRequest, Opening, ReadPacket, ReadRequest, WriteAck, first_mismatch,
};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::{CHUNK_BYTES, HEARTBEAT_INTERVAL};
use harvestfs_protocol::node::{NodeCommand, ReplicaChange};
use harvestfs_protocol::token::Right;
use tokio::time::Instant;

use crate::testing::cluster::{TestCluster, data};
use crate::testing::disks::FaultyDisk;
use crate::testing::fake_namenode::State;

const DEADLINE: Duration = Duration::from_secs(20);

/// Makes a primary tenant busy or idle and waits until its datanode has reported that.
pub(super) async fn set_busy(cluster: &TestCluster, index: usize, busy: bool) {
    cluster.primaries[index].uses(if busy { 0.95 } else { 0.1 });
    let node = cluster.nodes[index].node;
    let is_reported = |state: &mut crate::testing::fake_namenode::State| {
        let mut of_node = state.heartbeats.iter().rev().filter(|(id, ..)| *id == node);
        of_node
            .next()
            .filter(|(_, _, last)| last.busy == busy)
            .map(|_| ())
    };
    cluster.namenode.wait_for(is_reported).await;
}

#[tokio::test]
async fn heartbeats_tell_at_once_what_the_primary_does() {
    let cluster = TestCluster::start(1).await;
    set_busy(&cluster, 0, false).await;
    let began = Instant::now();
    set_busy(&cluster, 0, true).await;
    // On an otherwise idle machine it takes milliseconds.
    assert!(
        began.elapsed() < HEARTBEAT_INTERVAL,
        "{:?}",
        began.elapsed()
    );
    let load = cluster
        .namenode
        .lock()
        .heartbeats
        .last()
        .unwrap()
        .2
        .primary
        .unwrap();
    assert_eq!(load.cpu_permille, 950);
    assert_eq!(load.memory_permille, Some(250));
    assert_eq!(load.stalled_permille, None);
    set_busy(&cluster, 0, false).await;
}

#[tokio::test]
async fn reads_and_writes_are_denied_while_the_primary_needs_the_server() {
    let cluster = TestCluster::start(1).await;
    let content = data(1, 100_000);
    cluster.write_block(&cluster.nodes, 1, &content).await;
    set_busy(&cluster, 0, true).await;
    let denied = cluster.read(0, 1, (0, 5000)).await;
    let Err(DataError::Busy { retry_after_ms }) = denied else {
        panic!("{denied:?}");
    };
    assert!((1..=2_000).contains(&retry_after_ms), "{retry_after_ms}");
    let token = cluster.namenode.token(BlockId(2), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(2), token)
        .await;
    let answer = stream.ack().await;
    let node = cluster.nodes[0].node;
    assert!(
        matches!(&answer, Some(WriteAck::Failed { node: of, error: DataError::Busy { .. } }) if *of == node),
        "{answer:?}"
    );
    set_busy(&cluster, 0, false).await;
    assert_eq!(cluster.read(0, 1, (0, 100_000)).await.unwrap(), content);
    cluster.write_block(&cluster.nodes, 2, &content).await;
}

#[tokio::test]
async fn a_read_under_way_is_cut_at_a_chunk_border() {
    let cluster = TestCluster::start(2).await;
    let content = data(1, 24 << 20);
    cluster.write_block(&cluster.nodes, 1, &content).await;
    let (mut sender, mut receiver) = cluster.client.open_stream(&cluster.nodes[0]).await;
    let request = ReadRequest {
        block: BlockId(1),
        token: cluster.namenode.token(BlockId(1), Right::Read),
        block_offset: 0,
        length_bytes: 24 << 20,
    };
    sender
        .send(&Opening::from(DataRequest::Read(request)))
        .await
        .unwrap();
    let mut got = Vec::new();
    let denial = loop {
        let (packet, length) = receiver.recv(DEADLINE).await.unwrap().expect("not the end");
        match packet {
            ReadPacket::Data { checksums, .. } => {
                let mut piece = vec![0; length];
                receiver.read_data_into(&mut piece, DEADLINE).await.unwrap();
                assert_eq!(first_mismatch(&piece, &checksums), None);
                if got.is_empty() {
                    set_busy(&cluster, 0, true).await;
                }
                got.extend_from_slice(&piece);
            }
            ReadPacket::Failed(denial) => break denial,
        }
    };
    assert!(matches!(denial, DataError::Busy { .. }), "{denial:?}");
    assert!(got.len() < content.len() && got.len().is_multiple_of(CHUNK_BYTES));
    assert!(got == content[..got.len()]);
    // The rest comes from elsewhere.
    let rest = (got.len() as u64, (content.len() - got.len()) as u64);
    assert!(cluster.read(1, 1, rest).await.unwrap() == content[got.len()..]);
}

#[tokio::test]
async fn a_write_under_way_is_cut_and_what_was_acknowledged_can_be_sealed() {
    let cluster = TestCluster::start(3).await;
    let content = data(1, 300_000);
    for busy in 0..3 {
        let block = 10 + busy as u64;
        let token = cluster.namenode.token(BlockId(block), Right::Write);
        let mut stream = cluster
            .client
            .write(&cluster.nodes, BlockId(block), token)
            .await;
        assert_eq!(stream.ack().await, Some(WriteAck::Ready));
        stream.send(content.clone().into(), true).await.unwrap();
        stream.wait_for_all().await.unwrap();
        set_busy(&cluster, busy, true).await;
        // The writer learns of it without sending anything more.
        let answer = stream.ack().await;
        let node = cluster.nodes[busy].node;
        assert!(
            matches!(&answer, Some(WriteAck::Failed { node: of, error: DataError::Busy { .. } }) if *of == node),
            "{answer:?}"
        );
        drop(stream);
        for node in &cluster.nodes {
            let began = Instant::now();
            let sealed = loop {
                let reply = cluster
                    .client
                    .seal(node, BlockId(block), token, 300_000)
                    .await;
                match reply {
                    Err(DataError::OutOfOrder(_)) if began.elapsed() < DEADLINE => {}
                    reply => break reply,
                }
            };
            assert_eq!(sealed, Ok(()));
        }
        set_busy(&cluster, busy, false).await;
        for index in 0..3 {
            assert!(cluster.read(index, block, (0, 300_000)).await.unwrap() == content);
        }
    }
}

#[tokio::test]
async fn a_busy_datanode_is_neither_source_nor_target_of_repairs() {
    let cluster = TestCluster::start(3).await;
    let content = data(1, 2_000_000);
    for block in [1, 2] {
        cluster
            .write_block(&cluster.nodes[..2], block, &content)
            .await;
    }
    let target = cluster.nodes[2].node;
    let replicate = |block: u64, sources: &[usize]| NodeCommand::Replicate {
        block: BlockId(block),
        length_bytes: 2_000_000,
        sources: sources
            .iter()
            .map(|&index| cluster.nodes[index].clone())
            .collect(),
        token: cluster.namenode.token(BlockId(block), Right::Read),
    };
    let failed = |block: u64| (target, ReplicaChange::RepairFailed(BlockId(block)));
    // A busy source: the next source has the replica; without another source, the repair fails, which is reported.
    set_busy(&cluster, 0, true).await;
    cluster.namenode.command_now(target, replicate(1, &[0]));
    let wait = |state: &mut crate::testing::fake_namenode::State| {
        state.changes.contains(&failed(1)).then_some(())
    };
    cluster.namenode.wait_for(wait).await;
    cluster.namenode.command_now(target, replicate(1, &[0, 1]));
    let has = |state: &mut crate::testing::fake_namenode::State, block| {
        let (_, replica) = state.replicas.get(&target)?.get(&BlockId(block))?;
        replica.sealed.then_some(())
    };
    cluster.namenode.wait_for(|state| has(state, 1)).await;
    // A busy target.
    set_busy(&cluster, 2, true).await;
    cluster.namenode.command_now(target, replicate(2, &[1]));
    cluster
        .namenode
        .wait_for(|state| state.changes.contains(&failed(2)).then_some(()))
        .await;
    let left = std::fs::read_dir(cluster.volume(2).join("repair")).unwrap();
    assert_eq!(left.count(), 0);
    set_busy(&cluster, 2, false).await;
    cluster.namenode.command_now(target, replicate(2, &[1]));
    cluster.namenode.wait_for(|state| has(state, 2)).await;
}

#[tokio::test]
async fn the_scrubber_pauses_while_the_primary_needs_the_server() {
    let mut cluster = TestCluster::start(1).await;
    cluster
        .write_block(&cluster.nodes, 1, &data(1, 3 << 20))
        .await;
    let path = cluster.volume(0).join("sealed/01/0000000000000001");
    cluster.kill(0).await;
    // Damage in the last chunk, which the scrubber would find within a second, and not before the first sample.
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", (3 << 20) + 4096).unwrap();
    cluster.primaries[0].uses(0.95);
    let mut options = cluster.options(0);
    options.scrub_bytes_per_second = 4 << 20;
    cluster.restart(options, 0).await;
    set_busy(&cluster, 0, true).await;
    cluster.namenode.lock().changes.clear();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let found = (cluster.nodes[0].node, ReplicaChange::Corrupt(BlockId(1)));
    let was_found = cluster.namenode.lock().changes.contains(&found);
    set_busy(&cluster, 0, false).await;
    if !was_found {
        cluster
            .namenode
            .wait_for(|state| state.changes.contains(&found).then_some(()))
            .await;
    }
    assert!(!was_found, "it was read while the server was busy");
}

/// The paper's replication storm: heartbeats that wait for disks or for the kernel's accounting make
/// healthy servers look dead. Here everything hangs for five minutes of virtual time.
#[tokio::test]
async fn nothing_that_hangs_delays_a_heartbeat() {
    let disk = FaultyDisk::new();
    let cluster = TestCluster::start_on(vec![disk.clone()]).await;
    cluster
        .write_block(&cluster.nodes, 1, &data(1, 100_000))
        .await;
    set_busy(&cluster, 0, false).await;
    let storage = cluster.namenode.lock().heartbeats.last().unwrap().2.volumes[0].storage;

    disk.hang();
    cluster.primaries[0].hang();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (client, node) = (cluster.client.clone(), cluster.nodes[0].clone());
        let token = cluster.namenode.token(BlockId(1), Right::Read);
        waiting.spawn(async move {
            let (mut sender, mut receiver) = client.open_stream(&node).await;
            let request = ReadRequest {
                block: BlockId(1),
                token,
                block_offset: 0,
                length_bytes: 1,
            };
            sender
                .send(&Opening::from(DataRequest::Read(request)))
                .await
                .unwrap();
            let _ = receiver.recv::<ReadPacket>(Duration::from_secs(3600)).await;
        });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    tokio::time::pause();
    let began = Instant::now();
    let before = cluster.namenode.lock().heartbeats.len();
    while began.elapsed() < Duration::from_secs(300) {
        tokio::time::advance(Duration::from_millis(50)).await;
        // The network is real: packets need real turns of the runtime to come and go, and while
        // a task is ready to run, the clock does not move by itself.
        for _ in 0..300 {
            tokio::task::yield_now().await;
        }
    }
    {
        let state = cluster.namenode.lock();
        let beats = &state.heartbeats[before - 1..];
        assert!(beats.len() > 90, "{} heartbeats in 300 s", beats.len());
        for pair in beats.windows(2) {
            let gap = pair[1].1 - pair[0].1;
            assert!(
                gap < HEARTBEAT_INTERVAL + Duration::from_millis(500),
                "{gap:?}"
            );
        }
        for (_, at, beat) in beats {
            // The namenode repairs what is on servers that are dead and on volumes that are not
            // healthy or no longer there; a busy server it leaves alone.
            assert_eq!(beat.volumes.len(), 1);
            assert_eq!(beat.volumes[0].storage, storage);
            assert!(beat.volumes[0].healthy);
            assert!(beat.busy || *at < began + Duration::from_secs(10));
        }
        assert_eq!(state.registered.len(), 1, "it never had to register again");
        let is_loss = |change: &ReplicaChange| {
            matches!(
                change,
                ReplicaChange::Deleted(_) | ReplicaChange::Corrupt(_)
            )
        };
        assert!(!state.changes.iter().any(|(_, change)| is_loss(change)));
    }
    tokio::time::resume();
    disk.heal();
    cluster.primaries[0].uses(0.1);
    set_busy(&cluster, 0, false).await;
    assert_eq!(
        cluster.read(0, 1, (0, 100_000)).await.unwrap(),
        data(1, 100_000)
    );
    waiting.abort_all();
}

/// A datanode that has found a replica of block 2 that is not sealed, and what the namenode has it do.
async fn found_unsealed() -> (TestCluster, NodeCommand) {
    let mut cluster = TestCluster::start(1).await;
    let token = cluster.namenode.token(BlockId(2), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(2), token)
        .await;
    stream.ack().await;
    stream.send(data(1, 50_000).into(), false).await.unwrap();
    stream.wait_for_all().await.unwrap();
    drop(stream);
    cluster.kill(0).await;
    let options = cluster.options(0);
    cluster.restart(options, 0).await;
    let seal = NodeCommand::Seal {
        block: BlockId(2),
        length_bytes: 50_000,
    };
    (cluster, seal)
}

/// Whether the only datanode has said that it has sealed that.
fn is_sealed(cluster: &TestCluster, state: &State) -> bool {
    let replica = state.replicas[&cluster.nodes[0].node].get(&BlockId(2));
    replica.is_some_and(|(_, replica)| replica.sealed)
}

/// The whole replica has to be read and rewritten first.
#[tokio::test]
async fn what_a_start_found_is_sealed_when_the_owner_lets_it() {
    let (cluster, seal) = found_unsealed().await;
    let node = cluster.nodes[0].node;
    set_busy(&cluster, 0, true).await;
    cluster.namenode.command_now(node, seal.clone());
    cluster.namenode.wait_for_heartbeats().await;
    assert!(!is_sealed(&cluster, &cluster.namenode.lock()));
    set_busy(&cluster, 0, false).await;
    // The command was dropped, and the namenode repeats it.
    cluster.namenode.command_now(node, seal);
    cluster
        .namenode
        .wait_for(|state| is_sealed(&cluster, state).then_some(()))
        .await;
}

/// Otherwise the primary tenant would not get the space back before the server is idle.
#[tokio::test]
async fn what_a_start_found_is_sealed_at_once_where_the_quota_is_exceeded() {
    const QUOTA_BYTES: u64 = 4_096;
    let (cluster, seal) = found_unsealed().await;
    let node = cluster.nodes[0].node;
    set_busy(&cluster, 0, true).await;
    let storage = cluster.namenode.lock().heartbeats.last().unwrap().2.volumes[0].storage;
    let shrink = NodeCommand::SetQuota {
        storage,
        quota_bytes: QUOTA_BYTES,
        deadline_ms: 3_600_000,
    };
    cluster.namenode.command_now(node, shrink);
    let is_shrinking = |state: &mut State| {
        let (_, _, last) = state.heartbeats.last()?;
        (last.busy && last.volumes[0].quota_bytes == QUOTA_BYTES).then_some(())
    };
    cluster.namenode.wait_for(is_shrinking).await;
    cluster.namenode.command_now(node, seal);
    cluster
        .namenode
        .wait_for(|state| is_sealed(&cluster, state).then_some(()))
        .await;
    assert!(cluster.namenode.lock().heartbeats.last().unwrap().2.busy);
}
