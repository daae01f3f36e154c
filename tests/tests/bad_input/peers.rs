//! Members of the cluster that request what they are not allowed to have.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use harvestfs_protocol::admin::AdminRequest;
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{
    DataRequest, Opening, ReadPacket, ReadRequest, SealReply, SealRequest, WriteAck, WriteRequest,
};
use harvestfs_protocol::error::{DataError, FsError};
use harvestfs_protocol::ids::{BlockId, InodeId, SessionId};
use harvestfs_protocol::meta::{MetaReply, Mutated, Mutation, OpenSession, Query, mutation, query};
use harvestfs_protocol::node::{Heartbeat, NodeRequest, RegisterNode, ServerDescription};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenSigner};
use harvestfs_protocol::transport::Connection;
use harvestfs_protocol::types::{BlockInfo, Durability, PlacementRules};
use harvestfs_tests::{Cluster, ClusterOptions, Pattern};

use crate::assert_serves;
use crate::wire::{self, DEADLINE, Rpc, block_on};

/// A cluster of three processes and a mount. Every block is on both datanodes.
fn cluster() -> Option<(Cluster, PathBuf)> {
    Cluster::mounted(&ClusterOptions {
        datanodes: 2,
        replication: 2,
        ..ClusterOptions::default()
    })
}

fn assert_denied(response: &Response) {
    let Err(FsError::RoleDenied(reason)) = response else {
        panic!("{response:?}");
    };
    assert!(!reason.is_empty());
}

#[test]
fn a_certificate_allows_its_role_only() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    let admin = [AdminRequest::Fsck, AdminRequest::Snapshot].map(Request::Admin);
    let heartbeat = Request::Node(NodeRequest::Heartbeat(Heartbeat {
        volumes: Vec::new(),
        busy: false,
        primary: None,
        active_streams: 0,
        unix_ms: 0,
        denials: 0,
        removable_bytes: u64::MAX,
    }));
    let register = |name: String| {
        Request::Node(NodeRequest::Register(Box::new(RegisterNode {
            server: ServerDescription {
                name,
                rack: "rack-9".into(),
                environment: "environment-9".into(),
                machine_function: "function-9".into(),
                data_addr: cluster.namenode(),
            },
            volumes: Vec::new(),
            cluster: None,
            version: "1.2.3".into(),
            obeyed: None,
        })))
    };
    let open = Request::OpenSession(OpenSession {
        resume: None,
        holds: Vec::new(),
        delegations: None,
        seen: None,
    });
    block_on(async {
        let client = Rpc::connect(&cluster, "client/identity").await;
        for request in [&admin[0], &admin[1], &heartbeat, &register("client".into())] {
            assert_denied(&client.call(request).await);
        }
        let datanode = Rpc::connect(&cluster, "datanode-1/identity").await;
        for request in [&admin[0], &open, &Request::KeepAlive] {
            assert_denied(&datanode.call(request).await);
        }
        // Nor may it register as another server.
        assert_denied(&datanode.call(&register(Cluster::datanode(2))).await);
        // Before it has registered, its heartbeat is refused.
        let early = datanode.call(&heartbeat).await;
        assert!(matches!(early, Err(FsError::Protocol(_))), "{early:?}");

        // A namenode never connects to a datanode.
        let target = wire::datanode(&cluster, 1);
        // It may be closed before or after the handshake is done on this side.
        let closed = match wire::try_connect(&cluster, "namenode/identity", &target).await {
            Ok(connection) => tokio::time::timeout(DEADLINE, connection.closed())
                .await
                .expect("it is closed in time"),
            Err(error) => error,
        };
        wire::assert_not_allowed(&closed);
    });
    assert_serves(&mut cluster, &mount, 4);
}

#[test]
fn a_session_that_is_unknown_or_of_another_is_refused() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    let resume = |session| {
        Request::OpenSession(OpenSession {
            resume: Some(session),
            holds: Vec::new(),
            delegations: None,
            seen: None,
        })
    };
    block_on(async {
        let mut client = Rpc::connect(&cluster, "client/identity").await;
        let expired = Err(FsError::SessionExpired);
        assert_eq!(client.call(&resume(SessionId(u64::MAX))).await, expired);
        assert_eq!(client.call(&Request::KeepAlive).await, expired);
        assert_eq!(client.call(&Request::CloseSession).await, expired);
        let op = Query::GetAttr(query::GetAttr { ino: InodeId::ROOT });
        assert_eq!(client.query(op).await, expired);

        let open = OpenSession {
            resume: None,
            holds: Vec::new(),
            delegations: None,
            seen: None,
        };
        let opened = client.call(&Request::OpenSession(open)).await;
        let Ok(Reply::SessionOpened(opened)) = opened else {
            panic!("{opened:?}");
        };
        let thief = Rpc::connect(&cluster, "admin/identity").await;
        assert_eq!(thief.call(&resume(opened.session)).await, expired);
        client.close().await;
    });
    assert_serves(&mut cluster, &mount, 4);
}

/// A new block with the right to write it.
async fn allocate(rpc: &mut Rpc) -> BlockInfo {
    let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
        count: 1,
        rules: PlacementRules {
            replication: 2,
            durability: Durability::Strict,
            class: None,
        },
        exclude: Vec::new(),
    });
    match rpc.mutate(op).await {
        Ok(Reply::Mutated(Mutated {
            reply: MetaReply::Located(mut located),
            ..
        })) => located.blocks.remove(0),
        other => panic!("{other:?}"),
    }
}

/// A block of a file that exists, with the right to read it.
async fn open(rpc: &mut Rpc, name: &str) -> BlockInfo {
    let lookup = Query::Lookup(query::Lookup {
        parent: InodeId::ROOT,
        name: harvestfs_protocol::name::Name::new(name.as_bytes()).expect("a name"),
    });
    let attr = match rpc.query(lookup).await {
        Ok(Reply::Meta(MetaReply::Attr(attr))) => attr,
        other => panic!("{other:?}"),
    };
    let open = Query::Open(query::Open {
        ino: attr.ino,
        read: true,
        write: false,
        execute: false,
    });
    match rpc.query(open).await {
        Ok(Reply::Meta(MetaReply::Opened { mut located, .. })) => located.blocks.remove(0),
        other => panic!("{other:?}"),
    }
}

async fn ask<M: serde::de::DeserializeOwned>(connection: &Connection, request: DataRequest) -> M {
    let stream = connection.open_stream(StreamKind::Data).await;
    let (mut sender, mut receiver) = stream.expect("a stream");
    let opening = Opening::from(request);
    sender.send(&opening).await.expect("it is taken");
    let answer = receiver.recv(DEADLINE).await.expect("an answer");
    answer.expect("one before the end").0
}

/// The errors of a datanode for each kind of request with a token.
async fn errors_with(
    connection: &Connection,
    block: BlockId,
    token: BlockToken,
    to_write: bool,
) -> Vec<DataError> {
    let mut errors = Vec::new();
    if !to_write {
        let request = DataRequest::Read(ReadRequest {
            block,
            token,
            block_offset: 0,
            length_bytes: 1,
        });
        match ask(connection, request).await {
            ReadPacket::Failed(error) => errors.push(error),
            other => panic!("{other:?}"),
        }
    }
    let request = DataRequest::Write(WriteRequest {
        block,
        token,
        class: None,
        downstream: Vec::new(),
    });
    match ask(connection, request).await {
        WriteAck::Failed { error, .. } => errors.push(error),
        other => panic!("{other:?}"),
    }
    let request = DataRequest::Seal(SealRequest {
        block,
        token,
        length_bytes: 0,
    });
    errors.push(
        ask::<SealReply>(connection, request)
            .await
            .expect_err("no right"),
    );
    errors
}

/// The key with which the namenode signs, read from its own file: a version byte, then keys.
fn signing_key(cluster: &Cluster) -> TokenKey {
    let bytes = fs::read(cluster.path("namenode/data/token-keys")).expect("the keys");
    let (_version, keys): (u8, Vec<(TokenKey, u64)>) =
        postcard::from_bytes(&bytes).expect("what the namenode wrote");
    keys.into_iter().next().expect("there is one").0
}

#[test]
fn a_token_that_is_forged_of_another_block_or_expired_opens_nothing() {
    let Some((mut cluster, mount)) = cluster() else {
        return;
    };
    let pattern = Pattern { seed: 5 };
    let path = mount.join("secret");
    fs::write(&path, pattern.bytes(500_000)).expect("write");
    fs::File::open(&path)
        .and_then(|file| file.sync_all())
        .expect("fsync");
    let now_unix_ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970")
        .as_millis();
    let now_unix_ms = u64::try_from(now_unix_ms).expect("it fits");
    block_on(async {
        let mut rpc = Rpc::with_session(&cluster).await;
        let (mine, other) = (allocate(&mut rpc).await, allocate(&mut rpc).await);
        let secret = open(&mut rpc, "secret").await;
        let target = wire::datanode(&cluster, 1);
        let datanode = wire::connect(&cluster, "client/identity", &target).await;

        // Every byte of a token counts.
        let good = postcard::to_stdvec(&secret.token).expect("it can be encoded");
        let mut forged = Vec::new();
        for index in 0..good.len() {
            let mut bytes = good.clone();
            bytes[index] ^= 1;
            // Some changes result in no token at all, but a message that the stream refuses.
            if let Ok(token) = postcard::from_bytes::<BlockToken>(&bytes) {
                forged.push(token);
            }
        }
        assert!(forged.len() > 16, "at least the signature can be altered");
        for token in forged {
            for error in errors_with(&datanode, secret.block, token, false).await {
                assert!(
                    matches!(error, DataError::BadToken(_) | DataError::TokenExpired),
                    "{error:?} for {token:?}"
                );
            }
        }
        // Valid rights, but to other blocks or operations.
        for (block, token, to_write) in [
            (secret.block, mine.token, false),
            (mine.block, other.token, false),
            (secret.block, secret.token, true),
        ] {
            for error in errors_with(&datanode, block, token, to_write).await {
                assert!(matches!(error, DataError::BadToken(_)), "{error:?}");
            }
        }
        // Rights that have expired.
        let signer = TokenSigner::new(&signing_key(&cluster));
        for right in [Right::Read, Right::Write] {
            let token = signer.sign(secret.block, right, now_unix_ms - 1);
            let errors = errors_with(&datanode, secret.block, token, right == Right::Write).await;
            let expired = errors.contains(&DataError::TokenExpired);
            assert!(expired, "{errors:?}");
        }

        // And the real token gives access.
        let request = DataRequest::Read(ReadRequest {
            block: secret.block,
            token: secret.token,
            block_offset: 0,
            length_bytes: 1,
        });
        let answer: ReadPacket = ask(&datanode, request).await;
        assert!(matches!(answer, ReadPacket::Data { .. }), "{answer:?}");
        rpc.close().await;
    });
    pattern.check_file(&path, 500_000);
    assert_serves(&mut cluster, &mount, 4);
}
