//! Bytes that do not follow the protocol, and peers that do not belong to the cluster.

use std::net::UdpSocket;
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_protocol::codec::{MAX_DATA_BYTES, MAX_HEADER_BYTES, WireError};
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{MetaCall, MetaOp, Query, query};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::transport::{CloseCode, RequestFrame, TransportError, TransportOptions};
use harvestfs_protocol::types::Credentials;
use harvestfs_protocol::version::{Version, Versions};
use harvestfs_tests::{Cluster, ClusterOptions};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::assert_serves;
use crate::wire::{self, Target, block_on};

/// First byte of a stream of requests, and of one of block data.
const RPC: u8 = 1;
const DATA: u8 = 2;

/// A cluster of three processes and a mount.
fn cluster() -> Option<(Cluster, PathBuf)> {
    Cluster::mounted(&ClusterOptions {
        datanodes: 2,
        replication: 2,
        ..ClusterOptions::default()
    })
}

#[test]
fn random_datagrams() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    let seed = 1;
    let mut rng = StdRng::seed_from_u64(seed);
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    for target in [wire::namenode(&cluster), wire::datanode(&cluster, 1)] {
        for round in 0..3_000_usize {
            let length = match round % 3 {
                0 => rng.random_range(0..64),
                1 => rng.random_range(64..1_500),
                _ => rng.random_range(1_200..32_000),
            };
            let mut datagram = vec![0; length];
            rng.fill_bytes(&mut datagram);
            if round % 2 == 0 && length > 5 {
                // Looks like the first packet of a QUIC version 1 connection.
                datagram[0] |= 0xc0;
                datagram[1..5].copy_from_slice(&1_u32.to_be_bytes());
            }
            // A full socket queue drops datagrams, as networks do.
            let _ = socket.send_to(&datagram, target.addr);
        }
    }
    assert_serves(&mut cluster, &mount, 4);
}

/// Invalid streams, each with a description.
fn broken_streams(kind: u8) -> Vec<(&'static str, Vec<u8>)> {
    let prefix = |header_len: usize, data_len: usize| {
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&u32::try_from(header_len).expect("it fits").to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(data_len).expect("it fits").to_le_bytes());
        bytes
    };
    let mut truncated = prefix(100, 0);
    truncated.extend_from_slice(&[7; 10]);
    let mut random = vec![kind];
    let mut rng = StdRng::seed_from_u64(u64::from(kind));
    random.resize(20_000, 0);
    rng.fill_bytes(&mut random[1..]);
    let mut random_header = prefix(500, 0);
    random_header.extend((0..500).map(|_| rng.random::<u8>()));
    vec![
        ("a truncated prefix", vec![kind, 1, 0]),
        ("a truncated header", truncated),
        ("an oversized header", prefix(MAX_HEADER_BYTES + 1, 0)),
        ("the largest header", prefix(u32::MAX as usize, 0)),
        ("oversized data", prefix(4, MAX_DATA_BYTES + 1)),
        ("random bytes", random),
        ("a random header", random_header),
        ("an unknown kind of stream", vec![0x7f, 0, 0, 0]),
    ]
}

/// Sends bytes on a new stream of a new connection. Returns the connection and the stream's other
/// direction.
async fn send(
    cluster: &Cluster,
    target: &Target,
    bytes: &[u8],
) -> (quinn::Connection, quinn::RecvStream) {
    let connection = wire::raw_after_hello(cluster, target, &wire::good_hello()).await;
    let (mut sender, receiver) = connection.open_bi().await.expect("a stream");
    // The peer may have closed the connection before it read everything.
    let _ = sender.write_all(bytes).await;
    let _ = sender.finish();
    (connection, receiver)
}

fn assert_violation(what: &str, error: &TransportError) {
    assert!(
        matches!(
            error,
            TransportError::ClosedByPeer {
                code: CloseCode::PROTOCOL_VIOLATION,
                reason,
            } if !reason.is_empty()
        ),
        "{what}: {error:?}"
    );
}

#[test]
fn broken_frames_to_the_namenode_end_the_connection_with_a_reason() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    block_on(async {
        let target = wire::namenode(&cluster);
        let mut streams = broken_streams(RPC);
        streams.push(("a stream of block data", vec![DATA, 0, 0, 0, 0, 0, 0, 0, 0]));
        streams.push(("a name of 256 bytes", request_with_too_long_a_name()));
        for (what, bytes) in streams {
            let (connection, _receiver) = send(&cluster, &target, &bytes).await;
            let error = wire::end_of(&connection).await;
            eprintln!("{what}: {error}");
            assert_violation(what, &error);
        }
    });
    assert_serves(&mut cluster, &mount, 4);
}

/// A request that only a peer without our `Name` type can create.
fn request_with_too_long_a_name() -> Vec<u8> {
    let request = RequestFrame {
        id: 1,
        body: Request::Meta(MetaCall {
            credentials: Credentials::root(),
            op: MetaOp::Query(Query::Lookup(query::Lookup {
                parent: InodeId::ROOT,
                name: Name::new(&[b'n'; 255]).expect("not too long"),
            })),
        }),
        request: RequestId::NONE,
    };
    let mut header = postcard::to_stdvec(&request).expect("it can be encoded");
    let length = header
        .windows(3)
        .position(|bytes| bytes == [0xff, 0x01, b'n'])
        .expect("255 as a varint, and the name");
    header[length..length + 2].copy_from_slice(&[0x80, 0x02]);
    header.push(b'n');
    let mut bytes = vec![RPC];
    bytes.extend_from_slice(&u32::try_from(header.len()).expect("it fits").to_le_bytes());
    bytes.extend_from_slice(&0_u32.to_le_bytes());
    bytes.extend_from_slice(&header);
    bytes
}

#[test]
fn broken_frames_to_a_datanode_end_the_stream() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    block_on(async {
        let target = wire::datanode(&cluster, 1);
        for (what, bytes) in broken_streams(DATA) {
            let (connection, mut receiver) = send(&cluster, &target, &bytes).await;
            let answer = tokio::time::timeout(wire::DEADLINE, receiver.read_to_end(1 << 20)).await;
            let answer = answer.unwrap_or_else(|_| panic!("{what}: the stream does not end"));
            eprintln!("{what}: {answer:?}");
            assert!(
                answer.as_ref().map_or(true, Vec::is_empty),
                "{what}: {answer:?}"
            );
            connection.close(0_u32.into(), b"");
        }
        let (connection, _receiver) = send(&cluster, &target, &[RPC, 0, 0]).await;
        wire::assert_not_allowed(&wire::end_of(&connection).await);
    });
    assert_serves(&mut cluster, &mount, 4);
}

#[test]
fn another_version_or_none_is_refused() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    block_on(async {
        for target in [wire::namenode(&cluster), wire::datanode(&cluster, 1)] {
            let theirs = Versions::OURS;
            let ours = Versions::only(Version(theirs.newest.0 + 1));
            let options = TransportOptions {
                versions: ours,
                ..TransportOptions::default()
            };
            let error = wire::endpoint(&cluster, "client/identity", options)
                .connect(target.addr, &target.peer, wire::DEADLINE)
                .await
                .expect_err("another version");
            let expected = WireError::VersionMismatch { ours, theirs };
            assert_eq!(error, TransportError::Wire(expected));

            let good = wire::good_hello();
            for hello in [&b"GET / HTTP/1.1\r\n"[..], &[0; 8], &good[..5], &[]] {
                let connection = wire::raw_after_hello(&cluster, &target, hello).await;
                let error = wire::end_of(&connection).await;
                assert_violation("a wrong hello", &error);
            }
        }
    });
    assert_serves(&mut cluster, &mount, 4);
}

#[test]
fn without_a_certificate_of_the_cluster_nobody_gets_in() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    let foreign = cluster.path("foreign");
    CertificateAuthority::in_memory()
        .and_then(|other| other.issue(Role::Client, "client", Duration::from_secs(3_600)))
        .and_then(|identity| identity.save(&foreign))
        .expect("another cluster's client");
    block_on(async {
        for target in [wire::namenode(&cluster), wire::datanode(&cluster, 1)] {
            for (identity, reason) in [
                (None, "it got no certificate"),
                (Some(foreign.as_path()), "from another authority"),
            ] {
                let refused = match wire::raw(&cluster, identity, &target).await {
                    // In TLS 1.3 a client's handshake ends before the server has seen its
                    // certificate.
                    Ok(connection) => wire::end_of(&connection).await,
                    Err(error) => error,
                };
                let TransportError::RefusedByPeer { reason: said } = &refused else {
                    panic!("{identity:?} to {target:?}: {refused:?}");
                };
                assert!(said.contains(reason), "{said}");
            }
            // Conversely, a client of another cluster notices that this is not its own.
            let error = wire::endpoint(&cluster, "foreign", TransportOptions::default())
                .connect(target.addr, &target.peer, wire::DEADLINE)
                .await
                .expect_err("another authority");
            assert!(
                matches!(error, TransportError::PeerNotTrusted { .. }),
                "{error:?}"
            );
        }
    });
    assert_serves(&mut cluster, &mount, 4);
}
