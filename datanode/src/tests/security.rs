//! Rights of roles, and hostile input from strangers.

use std::time::{Duration, Instant};

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{
    DataRequest, Opening, ReadPacket, ReadRequest, WriteAck, WriteRequest,
};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::STREAMS_PER_PEER_MAX;
use harvestfs_protocol::token::{Right, TokenKey};
use harvestfs_protocol::transport::{CloseCode, Endpoint, TransportError, TransportOptions};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::testing::cluster::{TestCluster, data};
use crate::testing::fake_namenode::VALIDITY;

#[tokio::test]
async fn without_the_right_token_nothing_is_served() {
    let cluster = TestCluster::start(1).await;
    let block = BlockId(1);
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    let namenode = &cluster.namenode;
    let forged_key = TokenKey {
        key_id: 1,
        secret: [8; 32],
    };
    let unknown_key = TokenKey {
        key_id: 2,
        secret: [7; 32],
    };
    let own_key = TokenKey {
        key_id: 1,
        secret: [7; 32],
    };
    let bad = [
        namenode.token(BlockId(2), Right::Read),
        namenode.token_of(&forged_key, block, Right::Read, VALIDITY),
        namenode.token_of(&unknown_key, block, Right::Read, VALIDITY),
    ];
    for token in bad {
        let read = cluster
            .client
            .read(&cluster.nodes[0], block, token, (0, 1))
            .await;
        assert!(matches!(read, Err(DataError::BadToken(_))), "{read:?}");
    }
    let expired = namenode.token_of(&own_key, block, Right::Write, Duration::ZERO);
    let node = &cluster.nodes[0];
    let read = cluster.client.read(node, block, expired, (0, 1)).await;
    assert_eq!(read, Err(DataError::TokenExpired));
    let sealed = cluster.client.seal(node, block, expired, 1).await;
    assert_eq!(sealed, Err(DataError::TokenExpired));
    // The right to read is no right to write or seal.
    let reader = namenode.token(block, Right::Read);
    let sealed = cluster.client.seal(node, block, reader, 1).await;
    assert!(matches!(sealed, Err(DataError::BadToken(_))));
    let mut stream = cluster.client.write(&cluster.nodes, block, reader).await;
    let Some(WriteAck::Failed {
        error: DataError::BadToken(_),
        ..
    }) = stream.ack().await
    else {
        panic!("it is a token for reading");
    };
    // The right to write is one to read.
    let writer = namenode.token(block, Right::Write);
    let read = cluster.client.read(node, block, writer, (0, 5000)).await;
    assert_eq!(read.unwrap(), data(1, 5000));
}

#[tokio::test]
async fn keys_change_with_a_heartbeat() {
    let cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 100)).await;
    let new_key = TokenKey {
        key_id: 9,
        secret: [9; 32],
    };
    cluster.namenode.lock().new_keys = Some(vec![new_key.clone()]);
    let token = cluster
        .namenode
        .token_of(&new_key, BlockId(1), Right::Read, VALIDITY);
    let mut last = Err(DataError::NoSpace);
    for _ in 0..500 {
        last = cluster
            .client
            .read(&cluster.nodes[0], BlockId(1), token, (0, 100))
            .await;
        if last.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(last.unwrap(), data(1, 100));
    let old = cluster.read(0, 1, (0, 1)).await;
    assert!(matches!(old, Err(DataError::BadToken(_))));
}

#[tokio::test]
async fn no_namenode_and_no_stranger_is_served() {
    let cluster = TestCluster::start(1).await;
    let stranger = CertificateAuthority::in_memory().unwrap();
    let target = Peer::new(Role::Datanode, "dn1").unwrap();
    for (authority, role) in [
        (&cluster.authority, Role::Namenode),
        (&stranger, Role::Client),
    ] {
        let identity = authority.issue(role, "somebody", VALIDITY).unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let endpoint = Endpoint::bind(any, &identity, TransportOptions::default()).unwrap();
        let addr = cluster.nodes[0].data_addr;
        match endpoint
            .connect(addr, &target, Duration::from_secs(5))
            .await
        {
            Ok(connection) => {
                let error = connection.closed().await;
                let closed = matches!(
                    error,
                    TransportError::ClosedByPeer {
                        code: CloseCode::NOT_ALLOWED,
                        ..
                    }
                );
                assert!(closed && role != Role::Client, "{role:?}: {error}");
            }
            Err(error) => assert_eq!(role, Role::Client, "{error}"),
        }
    }
}

#[tokio::test]
async fn an_operator_may_only_read() {
    let cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    let identity = cluster
        .authority
        .issue(Role::Admin, "operator", VALIDITY)
        .unwrap();
    let any = "127.0.0.1:0".parse().unwrap();
    let endpoint = Endpoint::bind(any, &identity, TransportOptions::default()).unwrap();
    let node = &cluster.nodes[0];
    let target = Peer::new(Role::Datanode, node.name.clone()).unwrap();
    let deadline = Duration::from_secs(10);
    let connection = (endpoint.connect(node.data_addr, &target, deadline).await).unwrap();
    let read = DataRequest::Read(ReadRequest {
        block: BlockId(1),
        token: cluster.namenode.token(BlockId(1), Right::Read),
        block_offset: 0,
        length_bytes: 5000,
    });
    let write = DataRequest::Write(WriteRequest {
        block: BlockId(2),
        token: cluster.namenode.token(BlockId(2), Right::Write),
        class: None,
        downstream: Vec::new(),
    });
    for (request, is_served) in [(read, true), (write, false)] {
        let stream = connection.open_stream(StreamKind::Data).await;
        let (mut sender, mut receiver) = stream.unwrap();
        sender.send(&Opening::from(request)).await.unwrap();
        let answer = receiver.recv::<ReadPacket>(deadline).await;
        let served = matches!(answer, Ok(Some((ReadPacket::Data { .. }, _))));
        assert_eq!(served, is_served, "{answer:?}");
    }
}

#[tokio::test]
async fn a_peer_that_opens_streams_and_asks_nothing_keeps_no_other_out() {
    let cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    let identity = (cluster.authority)
        .issue(Role::Client, "greedy", VALIDITY)
        .unwrap();
    let node = &cluster.nodes[0];
    let target = Peer::new(Role::Datanode, node.name.clone()).unwrap();
    // Each stream needs a descriptor at both ends, which are in this process.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let any = "127.0.0.1:0".parse().unwrap();
    let endpoint = Endpoint::bind(any, &identity, TransportOptions::default()).unwrap();
    let deadline = Duration::from_secs(10);
    let first = (endpoint.connect(node.data_addr, &target, deadline).await).unwrap();
    let second = (endpoint.connect(node.data_addr, &target, deadline).await).unwrap();
    let mut idle = Vec::new();
    for _ in 0..STREAMS_PER_PEER_MAX {
        idle.push(first.open_stream(StreamKind::Data).await.unwrap());
    }
    let ask = async || {
        let (mut sender, mut receiver) = second.open_stream(StreamKind::Data).await.unwrap();
        let request = DataRequest::Read(ReadRequest {
            block: BlockId(1),
            token: cluster.namenode.token(BlockId(1), Right::Read),
            block_offset: 0,
            length_bytes: 5000,
        });
        sender.send(&Opening::from(request)).await.unwrap();
        let answer = receiver.recv::<ReadPacket>(deadline).await;
        answer.unwrap().unwrap().0
    };
    let refused = ReadPacket::Failed(DataError::TooManyStreams {
        max: STREAMS_PER_PEER_MAX,
    });
    // Streams that were opened may not have been counted yet.
    let began = Instant::now();
    while ask().await != refused {
        assert!(began.elapsed() < deadline, "it is served");
    }
    assert_eq!(cluster.read(0, 1, (0, 5000)).await.unwrap(), data(1, 5000));
    drop(idle);
    first.close(CloseCode::DONE, "it gives up");
    while ask().await == refused {
        assert!(began.elapsed() < 3 * deadline, "it is refused for ever");
    }
}

#[tokio::test]
async fn an_address_with_as_many_connections_as_one_may_have_gets_no_more() {
    const MAX: u32 = 2;
    let mut cluster = TestCluster::start(1).await;
    let mut options = cluster.options(0);
    options.connections_per_address_max = MAX;
    cluster.kill(0).await;
    cluster.restart(options, 0).await;
    let identity = (cluster.authority)
        .issue(Role::Client, "greedy", VALIDITY)
        .unwrap();
    let node = &cluster.nodes[0];
    let target = Peer::new(Role::Datanode, node.name.clone()).unwrap();
    let elsewhere = "127.0.0.2:0".parse().unwrap();
    let endpoint = Endpoint::bind(elsewhere, &identity, TransportOptions::default()).unwrap();
    let deadline = Duration::from_secs(10);
    let mut ends = Vec::new();
    for _ in 0..=MAX {
        let connected = endpoint.connect(node.data_addr, &target, deadline).await;
        ends.push(connected.unwrap());
    }
    let refused = tokio::time::timeout(deadline, ends[MAX as usize].closed()).await;
    let is_typed = matches!(
        &refused,
        Ok(TransportError::ClosedByPeer { code, .. })
            if *code == CloseCode::TOO_MANY_CONNECTIONS
    );
    assert!(is_typed, "{refused:?}");
    assert!(ends[..MAX as usize].iter().all(|it| !it.is_closed()));
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    assert_eq!(cluster.read(0, 1, (0, 5000)).await.unwrap(), data(1, 5000));
}

/// At the beginning of a stream, or (odd blocks) within a block that is being written.
async fn send_junk(cluster: &TestCluster, block: u64, junk: Vec<u8>) {
    let (mut sender, mut receiver) = if block.is_multiple_of(2) {
        cluster.client.open_stream(&cluster.nodes[0]).await
    } else {
        let block = BlockId(block);
        let token = cluster.namenode.token(block, Right::Write);
        let mut stream = cluster.client.write(&cluster.nodes, block, token).await;
        assert_eq!(stream.ack().await, Some(WriteAck::Ready));
        (stream.sender, stream.receiver)
    };
    // A tuple is encoded as its fields in a row: what follows the prefix is random.
    let sent = sender.send_with_data(&junk, junk.clone().into()).await;
    if sent.is_ok() {
        let _ = sender.finish();
    }
    // Whatever the answer, the stream ends.
    let end = async { while let Ok(Some(_)) = receiver.recv::<ReadPacket>(VALIDITY).await {} };
    tokio::time::timeout(Duration::from_secs(10), end)
        .await
        .unwrap();
}

#[tokio::test]
async fn random_bytes_do_no_harm() {
    let cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(1, 5000)).await;
    let write_token = cluster.namenode.token(BlockId(2), Right::Write);
    let seed = 42;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for round in 0..10 {
        // Concurrently: each waits for a disk.
        let attackers: [_; 20] = std::array::from_fn(|_| {
            let mut junk = vec![0; rng.random_range(0..300)];
            rng.fill_bytes(&mut junk);
            junk
        });
        let attackers = attackers.into_iter().enumerate();
        let attackers = attackers
            .map(|(index, junk)| send_junk(&cluster, 1000 + round * 20 + index as u64, junk));
        futures::future::join_all(attackers).await;
    }
    // Requests that are well-formed and impossible.
    for (block_offset, length_bytes) in [
        (u64::MAX, u64::MAX),
        (u64::MAX, 1),
        (0, u64::MAX),
        (1 << 40, 1),
    ] {
        let token = cluster.namenode.token(BlockId(1), Right::Read);
        let (mut sender, mut receiver) = cluster.client.open_stream(&cluster.nodes[0]).await;
        let request = DataRequest::Read(ReadRequest {
            block: BlockId(1),
            token,
            block_offset,
            length_bytes,
        });
        sender.send(&Opening::from(request)).await.unwrap();
        let answer = receiver.recv::<ReadPacket>(Duration::from_secs(10)).await;
        assert!(
            matches!(answer, Ok(Some((ReadPacket::Failed(_), 0)))),
            "{answer:?}"
        );
    }
    let sealed = cluster
        .client
        .seal(&cluster.nodes[0], BlockId(2), write_token, u64::MAX)
        .await;
    assert_eq!(sealed, Err(DataError::NoSuchReplica));
    // It still serves.
    assert_eq!(cluster.read(0, 1, (0, 5000)).await.unwrap(), data(1, 5000));
}

#[tokio::test]
async fn a_request_stream_is_for_the_namenode() {
    let cluster = TestCluster::start(1).await;
    let identity = cluster
        .authority
        .issue(Role::Client, "c", VALIDITY)
        .unwrap();
    let any = "127.0.0.1:0".parse().unwrap();
    let endpoint = Endpoint::bind(any, &identity, TransportOptions::default()).unwrap();
    let target = Peer::new(Role::Datanode, "dn1").unwrap();
    let addr = cluster.nodes[0].data_addr;
    let connection = endpoint
        .connect(addr, &target, Duration::from_secs(5))
        .await
        .unwrap();
    let (mut sender, _receiver) = connection.open_stream(StreamKind::Rpc).await.unwrap();
    // The stream's kind is enough for a refusal, which may arrive before this is sent.
    let _ = sender.send(&1_u8).await;
    let closed = connection.closed().await;
    assert!(matches!(
        closed,
        TransportError::ClosedByPeer {
            code: CloseCode::NOT_ALLOWED,
            ..
        }
    ));
}
