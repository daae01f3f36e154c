//! Pipelines of real datanodes.

use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::data::{Packet, WriteAck};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::token::Right;
use rustix::io::Errno;

use crate::testing::cluster::{TestCluster, data};
use crate::testing::disks::{Fault, FaultyDisk};

#[tokio::test]
async fn three_replicas_of_what_was_written() {
    let cluster = TestCluster::start(3).await;
    let data = data(1, 5_000_123);
    cluster.write_block(&cluster.nodes, 1, &data).await;
    for node in 0..3 {
        let all = cluster.read(node, 1, (0, 5_000_123)).await;
        assert_eq!(all.unwrap(), data);
    }
    // The namenode learns of every sealed replica.
    cluster
        .namenode
        .wait_for(|state| {
            let sealed = state
                .replicas
                .values()
                .filter_map(|of_node| of_node.get(&BlockId(1)))
                .filter(|(_, replica)| replica.sealed && replica.length_bytes == 5_001_216);
            (sealed.count() == 3).then_some(())
        })
        .await;
}

/// Otherwise the writer would take a sealed replica for one that failed.
#[tokio::test]
async fn what_is_done_when_the_datanode_stops_is_acknowledged() {
    // A slow disk takes longer than a short pause.
    for pause_ms in [200, 1_000, 5_000] {
        if is_acknowledged_at_a_stop_after(Duration::from_millis(pause_ms)).await {
            return;
        }
    }
    panic!("the disk never sealed it in time");
}

/// Stops a datanode when its disk has had this time to seal a replica. Returns whether that was acknowledged, or false
/// if the disk took longer.
async fn is_acknowledged_at_a_stop_after(pause: Duration) -> bool {
    let disk = FaultyDisk::new();
    let mut cluster = TestCluster::start_on(vec![disk.clone()]).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    assert_eq!(stream.ack().await, Some(WriteAck::Ready));
    let data = data(1, 4096);
    stream.send(Bytes::from(data), false).await.unwrap();
    stream.wait_for_all().await.unwrap();
    disk.hang();
    stream.seal(4096).await;
    disk.wait_for_hanging(1).await;
    disk.heal();
    // The disk's thread seals the replica, while no task of this thread goes on before the datanode stops.
    std::thread::sleep(pause);
    let datanode = cluster.datanodes[0].take().unwrap();
    let (acknowledged, ()) = tokio::join!(stream.wait_for_all(), datanode.shutdown());
    match acknowledged {
        Ok(()) => true,
        Err(WriteAck::Failed {
            error: DataError::Stopping,
            ..
        }) => false,
        Err(other) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn acknowledged_data_is_readable_everywhere_before_the_seal() {
    let cluster = TestCluster::start(3).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    assert_eq!(stream.ack().await, Some(WriteAck::Ready));
    for (index, (bytes, sync)) in [(10, true), (70_000, false), (1 << 20, true)]
        .into_iter()
        .enumerate()
    {
        let data = data(index as u64, bytes);
        let offset = stream.offset;
        stream.send(Bytes::from(data.clone()), sync).await.unwrap();
        if !sync {
            stream.sync().await;
        }
        stream.wait_for_all().await.unwrap();
        for node in 0..3 {
            let read = cluster.read(node, 1, (offset, bytes as u64)).await;
            assert_eq!(read.unwrap(), data);
        }
    }
    // The writer disappears silently; the client seals.
    drop(stream);
    for node in &cluster.nodes {
        let reply = cluster
            .client
            .seal(node, BlockId(1), token, 4096 + 70_000)
            .await;
        assert_eq!(reply, Ok(()));
    }
    let end = 4096 + 73_728;
    for node in 0..3 {
        let beyond = cluster.read(node, 1, (end, 1)).await;
        assert_eq!(beyond, Err(DataError::ShortReplica { have_bytes: end }));
    }
}

#[tokio::test]
async fn a_dead_node_in_the_middle_is_named_and_what_was_acknowledged_stays() {
    let mut cluster = TestCluster::start(3).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    assert_eq!(stream.ack().await, Some(WriteAck::Ready));
    let data = data(1, 300_000);
    stream.send(Bytes::from(data.clone()), true).await.unwrap();
    stream.wait_for_all().await.unwrap();
    cluster.kill(1).await;
    let failed = loop {
        // Whether sending still works depends on how fast the news arrives.
        let _ = stream.send(Bytes::from_static(&[1; 4096]), false).await;
        match stream.ack().await {
            Some(WriteAck::Acked { .. }) => {}
            Some(WriteAck::Failed { node, error }) => break (node, error),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(failed.0, cluster.nodes[1].node);
    // Its final message, if it was sent.
    let expected = matches!(failed.1, DataError::Downstream(_) | DataError::Stopping);
    assert!(expected, "{failed:?}");
    for node in [0, 2] {
        let reply = cluster
            .client
            .seal(&cluster.nodes[node], BlockId(1), token, 300_000)
            .await;
        assert_eq!(reply, Ok(()));
        assert_eq!(cluster.read(node, 1, (0, 300_000)).await.unwrap(), data);
    }
    // The dead datanode returns with its unsealed replica.
    let options = cluster.options(1);
    cluster.restart(options, 1).await;
    assert_eq!(cluster.read(1, 1, (0, 300_000)).await.unwrap(), data);
}

#[tokio::test]
async fn a_failing_disk_further_down_is_named() {
    let disks = vec![FaultyDisk::new(), FaultyDisk::new(), FaultyDisk::new()];
    let last = disks[2].clone();
    let cluster = TestCluster::start_on(disks).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    assert_eq!(stream.ack().await, Some(WriteAck::Ready));
    last.fail(Fault::Sync, &cluster.volume(2), Errno::IO);
    stream
        .send(Bytes::from_static(b"not acknowledged"), true)
        .await
        .unwrap();
    let Err(WriteAck::Failed { node, error }) = stream.wait_for_all().await else {
        panic!("it cannot be on stable storage");
    };
    assert_eq!(node, cluster.nodes[2].node);
    assert!(matches!(error, DataError::Disk(_)), "{error}");
}

#[tokio::test]
async fn a_pipeline_that_does_not_stand_leaves_nothing_behind() {
    let mut cluster = TestCluster::start(3).await;
    cluster.kill(2).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    let Some(WriteAck::Failed { node, error }) = stream.ack().await else {
        panic!("one is dead");
    };
    assert_eq!(node, cluster.nodes[2].node);
    assert!(matches!(error, DataError::Downstream(_)), "{error}");
    // The same block on the others.
    let data = data(1, 10_000);
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.write_block(&cluster.nodes[..2], 1, &data).await;
    assert_eq!(cluster.read(1, 1, (0, 10_000)).await.unwrap(), data);
    // And again: the replica already exists.
    let mut stream = cluster
        .client
        .write(&cluster.nodes[..2], BlockId(1), token)
        .await;
    let Some(WriteAck::Failed { error, .. }) = stream.ack().await else {
        panic!("it is there already");
    };
    assert_eq!(error, DataError::ReplicaExists);
}

#[tokio::test]
async fn what_does_not_fit_ends_the_stream_with_a_reason() {
    let cluster = TestCluster::start(2).await;
    let data = |block_offset, checksums| Packet::Data {
        block_offset,
        checksums,
        sync: false,
        request: RequestId::NONE,
    };
    let good = harvestfs_protocol::data::chunk_checksums(b"x");
    let protocol = |error: &DataError| matches!(error, DataError::Protocol(_));
    let order = |error: &DataError| matches!(error, DataError::OutOfOrder(_));
    let corrupt = |error: &DataError| *error == DataError::Corrupt { offset: 0 };
    type Check<'a> = &'a dyn Fn(&DataError) -> bool;
    let cases: [(Packet, usize, Check); 7] = [
        (data(4096, good.clone()), 1, &order),
        (data(1, good.clone()), 1, &order),
        (data(0, vec![1]), 1, &corrupt),
        (data(0, vec![]), 1, &protocol),
        (data(0, good.clone()), 0, &protocol),
        (data(0, vec![0; 257]), (1 << 20) + 1, &protocol),
        (Packet::Seal { length_bytes: 1 }, 0, &order),
    ];
    for (block, (packet, data_len, is_expected)) in cases.into_iter().enumerate() {
        let block = BlockId(block as u64 + 1);
        let token = cluster.namenode.token(block, Right::Write);
        let mut stream = cluster.client.write(&cluster.nodes, block, token).await;
        assert_eq!(stream.ack().await, Some(WriteAck::Ready));
        let bytes = Bytes::from(vec![b'x'; data_len]);
        // Fails if the answer is faster.
        let _ = stream.sender.send_with_data(&packet, bytes).await;
        match stream.ack().await {
            Some(WriteAck::Failed { error, .. }) => {
                assert!(is_expected(&error), "{packet:?}: {error}")
            }
            other => panic!("{packet:?}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_full_datanode_says_so() {
    let mut cluster = TestCluster::start(2).await;
    cluster.kill(1).await;
    let mut options = cluster.options(1);
    options.volumes[0].quota_bytes = 0;
    cluster.restart(options, 1).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    let expected = WriteAck::Failed {
        node: cluster.nodes[1].node,
        error: DataError::NoSpace,
    };
    assert_eq!(stream.ack().await, Some(expected));
}

#[tokio::test]
async fn a_stopping_datanode_ends_its_streams_with_a_reason() {
    let mut cluster = TestCluster::start(2).await;
    let token = cluster.namenode.token(BlockId(1), Right::Write);
    let mut stream = cluster
        .client
        .write(&cluster.nodes, BlockId(1), token)
        .await;
    assert_eq!(stream.ack().await, Some(WriteAck::Ready));
    stream
        .send(Bytes::from_static(b"kept"), false)
        .await
        .unwrap();
    stream.wait_for_all().await.unwrap();
    let datanode = cluster.datanodes[1].take().unwrap();
    let stopping = tokio::spawn(datanode.shutdown());
    let expected = WriteAck::Failed {
        node: cluster.nodes[1].node,
        error: DataError::Stopping,
    };
    assert_eq!(stream.ack().await, Some(expected));
    let started = std::time::Instant::now();
    stopping.await.unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "streams end at once"
    );
    let options = cluster.options(1);
    cluster.restart(options, 1).await;
    assert_eq!(cluster.read(1, 1, (0, 4)).await.unwrap(), b"kept");
}
