//! What each role may do, and what happens to peers that send nonsense.

use std::net::UdpSocket;
use std::time::Duration;

use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::backup::BackupRequest;
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::GROUPS_MAX;
use harvestfs_protocol::meta::{
    AttrChanges, FileCommit, Housekeeping, MetaCall, MetaOp, MetaReply, Mutation, OpenSession,
    Query, SetXattrMode, housekeeping, mutation, query,
};
use harvestfs_protocol::node::{IncrementalReport, NodeRequest};
use harvestfs_protocol::peer::{Memory, PeerCall, PeerRequest};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::transport::{CloseCode, Endpoint, TransportError, TransportOptions};
use harvestfs_protocol::types::{Credentials, Extent, FileBlock, FileKind};
use harvestfs_protocol::version::{Version, Versioned};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::*;

/// Bytes that are sent unchanged.
#[derive(serde::Serialize)]
struct Raw([u8; 32]);

impl Versioned for Raw {
    fn since(&self) -> Version {
        Version::default()
    }
}

fn requests() -> Vec<(&'static str, Request)> {
    let open = OpenSession {
        resume: None,
        holds: vec![],
        delegations: None,
        seen: None,
    };
    let call = MetaCall {
        credentials: Credentials::root(),
        op: MetaOp::Query(Query::StatFs(query::StatFs { ino: InodeId::ROOT })),
    };
    let report = IncrementalReport { changes: vec![] };
    vec![
        ("client", Request::OpenSession(open)),
        ("client", Request::KeepAlive),
        ("client", Request::AckInvalidation { id: 1 }),
        ("client", Request::Meta(call)),
        ("client", Request::CloseSession),
        (
            "node",
            Request::Node(NodeRequest::IncrementalReport(report)),
        ),
        ("node", Request::Node(NodeRequest::Stopping)),
        ("operator", Request::Admin(AdminRequest::Status)),
        ("operator", Request::Admin(AdminRequest::Fsck)),
        (
            "operator",
            Request::Admin(AdminRequest::Backup(BackupRequest::Begin { of_any: true })),
        ),
        (
            "namenode",
            Request::Peer(PeerCall {
                from: 7,
                to: None,
                memory: Memory {
                    run: 1,
                    writes: 0,
                    writes_at_start: 0,
                },
                known: None,
                request: PeerRequest::Identify,
            }),
        ),
    ]
}

#[tokio::test]
async fn each_role_may_make_its_own_requests_and_no_others() {
    let cluster = Cluster::new().await;
    let allowed = [
        (Role::Client, vec!["client"]),
        (Role::Admin, vec!["client", "operator"]),
        (Role::Datanode, vec!["node"]),
        (Role::Namenode, vec!["namenode"]),
    ];
    for (role, kinds) in allowed {
        let (link, _notices) = cluster.rpc(role, "stranger").await;
        for (kind, request) in requests() {
            let response = link.ask(request.clone()).await;
            let denied = matches!(response, Err(FsError::RoleDenied(_)));
            assert_eq!(
                denied,
                !kinds.contains(&kind),
                "{role}: {request:?}: {response:?}"
            );
        }
    }
}

#[tokio::test]
async fn without_a_session_nothing_is_answered() {
    let cluster = Cluster::new().await;
    let (link, _notices) = cluster.rpc(Role::Client, "alice").await;
    for (kind, request) in requests() {
        if kind == "client" && !matches!(request, Request::OpenSession(_)) {
            assert_eq!(link.ask(request).await, Err(FsError::SessionExpired));
        }
    }
}

#[tokio::test]
async fn one_session_per_connection() {
    let cluster = Cluster::new().await;
    let alice = cluster.client("alice").await;
    let open = || {
        Request::OpenSession(OpenSession {
            resume: None,
            holds: vec![],
            delegations: None,
            seen: None,
        })
    };
    let refused = alice.link.ask(open()).await;
    assert!(matches!(refused, Err(FsError::Protocol(_))), "{refused:?}");
    let link = alice.link.clone();
    alice.close().await;
    assert!(matches!(
        link.ask(open()).await,
        Ok(Reply::SessionOpened(_))
    ));
}

#[tokio::test]
async fn calls_out_of_bounds_are_refused() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let mut call = alice.number(create(InodeId::ROOT, "file"));
    numbered(&mut call).sequence = 0;
    let refused = meta(&alice.link, call).await;
    assert!(matches!(refused, Err(FsError::Protocol(_))), "{refused:?}");
    let mut call = alice.number(Query::StatFs(query::StatFs { ino: InodeId::ROOT }));
    call.credentials.groups = vec![0; GROUPS_MAX + 1];
    let refused = meta(&alice.link, call).await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
    let at = FileBlock {
        block: BlockId(1),
        file_offset: 0,
    };
    let (ino, blocks) = (InodeId::ROOT, vec![at; 1_025]);
    let refused = alice
        .call(Query::Locate(query::Locate { ino, blocks }))
        .await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn nonsense_ends_the_connection_it_came_on_and_nothing_else() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let seed: u64 = 42;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for round in 0..20 {
        let (_endpoint, connection) = cluster.connect(Role::Client, "mallory").await;
        let (mut sender, _receiver) = connection.open_stream(StreamKind::Rpc).await.unwrap();
        // Postcard writes an array of bytes as it is: an ID, then a request that does not exist.
        let mut bytes = [0_u8; 32];
        rng.fill_bytes(&mut bytes);
        (bytes[0], bytes[1]) = (round, 0xff);
        sender.send(&Raw(bytes)).await.unwrap();
        let ended = connection.closed().await;
        let violation = matches!(
            &ended,
            TransportError::ClosedByPeer { code, .. } if *code == CloseCode::PROTOCOL_VIOLATION
        );
        assert!(violation, "round {round}: {ended}");
    }
    let (_endpoint, connection) = cluster.connect(Role::Client, "mallory").await;
    let (mut sender, _receiver) = connection.open_stream(StreamKind::Data).await.unwrap();
    // The kind of the stream is enough, and may be rejected before this is sent.
    let _ = sender.send(&0_u8).await;
    assert!(matches!(
        connection.closed().await,
        TransportError::ClosedByPeer { code, .. } if code == CloseCode::PROTOCOL_VIOLATION
    ));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    for length in [0, 1, 20, 1_200, 9_000] {
        let mut bytes = vec![0; length];
        rng.fill_bytes(&mut bytes);
        socket.send_to(&bytes, cluster.addr()).unwrap();
    }
    assert!(
        alice
            .call(Query::StatFs(query::StatFs { ino: InodeId::ROOT }))
            .await
            .is_ok()
    );
    assert_eq!(cluster.status().await.sessions, 1);
}

#[tokio::test]
async fn a_stranger_is_not_let_in() {
    let cluster = Cluster::new().await;
    let elsewhere = CertificateAuthority::in_memory().unwrap();
    let identity = elsewhere.issue(Role::Admin, "operator", DEADLINE).unwrap();
    let local = "127.0.0.1:0".parse().unwrap();
    let endpoint = Endpoint::bind(local, &identity, TransportOptions::default()).unwrap();
    let namenode = Peer::new(Role::Namenode, "nn").unwrap();
    let refused = endpoint.connect(cluster.addr(), &namenode, DEADLINE).await;
    assert!(refused.is_err());
}

#[tokio::test]
async fn an_address_with_as_many_connections_as_one_may_have_gets_no_more() {
    const MAX: u32 = 3;
    let cluster = Cluster::with(|options| options.connections_per_address_max = MAX).await;
    let identity = cluster.identity(Role::Client, "mallory");
    let namenode = Peer::new(Role::Namenode, "nn").unwrap();
    let bind = |address: &str| {
        let local = format!("{address}:0").parse().unwrap();
        Endpoint::bind(local, &identity, TransportOptions::default()).unwrap()
    };
    let greedy = bind("127.0.0.2");
    let connect = async || greedy.connect(cluster.addr(), &namenode, DEADLINE).await;
    let mut open = Vec::new();
    for _ in 0..MAX {
        open.push(connect().await.unwrap());
    }
    // Established, and then refused with the reason.
    let ended = async || match connect().await {
        Ok(connection) => connection.closed().await,
        Err(error) => error,
    };
    let refused = ended().await;
    let is_typed = matches!(
        &refused,
        TransportError::ClosedByPeer { code, reason }
            if *code == CloseCode::TOO_MANY_CONNECTIONS && reason.contains("127.0.0.2")
    );
    assert!(is_typed, "{refused}");
    let mut alice = cluster.client("alice").await;
    alice
        .call(Query::StatFs(query::StatFs { ino: InodeId::ROOT }))
        .await
        .unwrap();
    let first = open.remove(0);
    first.close(CloseCode::DONE, "it makes room");
    until("there is room again", async || {
        let connection = connect().await.unwrap();
        let ended = tokio::time::timeout(Duration::from_millis(200), connection.closed()).await;
        ended.is_err()
    })
    .await;
}

#[tokio::test]
async fn an_operator_sees_a_healthy_cluster() {
    let cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    check_healthy(cluster).await;
}

#[tokio::test]
async fn a_large_namespace_is_checked_beside_the_running_one() {
    let cluster = Cluster::with(|options| {
        options.cluster.safe_mode_max_ms = 0;
        options.fsck_in_place_max = 0;
    })
    .await;
    check_healthy(cluster).await;
}

async fn check_healthy(cluster: Cluster) {
    let mut alice = cluster.client("alice").await;
    alice.create(InodeId::ROOT, "file").await;
    let status = cluster.status().await;
    assert_eq!(
        (status.files, status.directories, status.sessions),
        (1, 1, 1)
    );
    assert!(status.engine_bytes > 0 && status.journal_lsn == 6);
    until("safe mode is over", async || cluster.status().await.ready).await;
    // The second time there is nothing new in the journal since a snapshot.
    for _ in 0..2 {
        let AdminReply::Fsck(report) = cluster.admin(AdminRequest::Fsck).await.unwrap() else {
            panic!("a report was expected");
        };
        assert!(report.healthy, "{report:?}");
        assert_eq!(report.files, 1);
        let snapshot = cluster.admin(AdminRequest::Snapshot).await;
        assert_eq!(snapshot, Ok(AdminReply::Done));
    }
}

/// As a user of a session.
async fn call_as(client: &mut Client, uid: u32, op: impl Into<Op>) -> Result<MetaReply, FsError> {
    let mut call = client.number(op);
    call.credentials = Credentials {
        uid,
        gid: uid,
        groups: vec![],
    };
    meta(&client.link, call).await
}

/// A file of user 1 with one block.
async fn private_file(alice: &mut Client, mode: u16) -> (InodeId, FileBlock) {
    let chmod = AttrChanges {
        mode: Some(0o777),
        ..AttrChanges::default()
    };
    let open_root = Mutation::SetAttr(mutation::SetAttr {
        ino: InodeId::ROOT,
        changes: chmod,
    });
    alice.call(open_root).await.unwrap();
    let block = alice.allocate(1).await.unwrap().blocks[0].block;
    let create = Mutation::Create(mutation::Create {
        parent: InodeId::ROOT,
        name: name("private"),
        kind: FileKind::Regular,
        mode,
        rdev: 0,
    });
    let created = call_as(alice, 1, create).await;
    let Ok(MetaReply::Created { attr, .. } | MetaReply::Attr(attr)) = created else {
        panic!("{created:?}");
    };
    let commit = FileCommit {
        ino: attr.ino,
        extents: vec![Extent {
            file_offset: 0,
            length_bytes: 5_000,
            block,
            block_offset: 0,
        }],
        append: false,
        mtime: None,
    };
    let files = vec![commit];
    let durable = true;
    let committed = call_as(
        alice,
        1,
        Mutation::Commit(mutation::Commit { files, durable }),
    )
    .await;
    let Ok(MetaReply::Committed(files)) = committed else {
        panic!("{committed:?}");
    };
    files[0].as_ref().unwrap();
    let file_offset = 0;
    (attr.ino, FileBlock { block, file_offset })
}

fn located(reply: Result<MetaReply, FsError>) -> Result<Vec<BlockId>, FsError> {
    match reply? {
        MetaReply::Located(located) | MetaReply::Opened { located, .. } => {
            Ok(located.blocks.iter().map(|info| info.block).collect())
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_blocks_of_a_file_are_for_those_that_may_read_it() {
    let cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let (ino, at) = private_file(&mut alice, 0o622).await;
    let locate = |ino| {
        Query::Locate(query::Locate {
            ino,
            blocks: vec![at],
        })
    };
    let extents = Query::GetExtents(query::GetExtents {
        ino,
        from_offset: 0,
    });
    let open = |read, write| {
        Query::Open(query::Open {
            ino,
            read,
            write,
            execute: false,
        })
    };
    let denied = Err(FsError::PermissionDenied);

    let mut mallory = cluster.client("mallory").await;
    for op in [locate(ino), extents.clone(), open(true, false)] {
        let refused = call_as(&mut mallory, 2, op.clone()).await;
        assert_eq!(refused, denied, "{op:?}");
    }
    // Through a file of their own they learn nothing about it, nor through something that is not a file.
    let own = call_as(&mut mallory, 2, create(InodeId::ROOT, "own")).await;
    let Ok(MetaReply::Created { attr: own, .. } | MetaReply::Attr(own)) = own else {
        panic!("{own:?}");
    };
    let by_own = located(call_as(&mut mallory, 2, locate(own.ino)).await);
    assert_eq!(by_own, Ok(vec![]));
    let by_directory = call_as(&mut mallory, 2, locate(InodeId::ROOT)).await;
    assert_eq!(by_directory, Err(FsError::IsADirectory));
    let by_nothing = call_as(&mut mallory, 2, locate(InodeId(u64::MAX))).await;
    assert_eq!(by_nothing, Err(FsError::Stale));
    // A user that may only write it learns where its data is, and gets nothing to read that data with.
    let for_nothing = call_as(&mut mallory, 2, open(false, false)).await;
    assert!(matches!(for_nothing, Err(FsError::InvalidArgument(_))));
    let opened = located(call_as(&mut mallory, 2, open(false, true)).await);
    assert_eq!(opened, Ok(vec![]));
    assert_eq!(call_as(&mut mallory, 2, locate(ino)).await, denied);
    call_as(&mut mallory, 2, extents.clone()).await.unwrap();
    // What others on the same machine have open is up to the machine.
    let opened = located(call_as(&mut mallory, 1, open(true, false)).await);
    assert_eq!(opened, Ok(vec![at.block]));
    assert_eq!(
        located(call_as(&mut mallory, 2, locate(ino)).await),
        Ok(vec![at.block])
    );
}

#[tokio::test]
async fn what_is_open_stays_readable_when_the_file_changes_or_goes() {
    let mut cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    alice.acknowledge_all();
    let (ino, at) = private_file(&mut alice, 0o604).await;
    let locate = || {
        Query::Locate(query::Locate {
            ino,
            blocks: vec![at],
        })
    };
    let extents = || {
        Query::GetExtents(query::GetExtents {
            ino,
            from_offset: 0,
        })
    };
    let mut bob = cluster.client("bob").await;
    bob.acknowledge_all();
    let opened = call_as(&mut bob, 2, open_to_read(ino)).await;
    assert_eq!(located(opened), Ok(vec![at.block]));
    let changes = AttrChanges {
        mode: Some(0),
        ..AttrChanges::default()
    };
    call_as(
        &mut alice,
        1,
        Mutation::SetAttr(mutation::SetAttr { ino, changes }),
    )
    .await
    .unwrap();
    let mut carol = cluster.client("carol").await;
    for op in [locate(), extents()] {
        let refused = call_as(&mut carol, 2, op).await;
        assert_eq!(refused, Err(FsError::PermissionDenied));
    }
    for unlinked in [false, true] {
        if unlinked {
            let unlink = unlink(InodeId::ROOT, "private");
            call_as(&mut alice, 1, unlink).await.unwrap();
        }
        let found = located(call_as(&mut bob, 2, locate()).await);
        assert_eq!(found, Ok(vec![at.block]));
        call_as(&mut bob, 2, extents()).await.unwrap();
    }
    // After a restart and in a new session, too: the client declares what it has open.
    cluster.restart().await;
    let resumed = cluster.open("bob", Some(bob.session), vec![ino]).await;
    let mut bob = resumed.unwrap();
    bob.set_sequence(0);
    let found = located(call_as(&mut bob, 2, locate()).await);
    assert_eq!(found, Ok(vec![at.block]));
    // Released, it is not open any more.
    let inodes = vec![ino];
    bob.call(Housekeeping::Release(housekeeping::Release { inodes }))
        .await
        .unwrap();
    let gone = call_as(&mut bob, 2, locate()).await;
    assert!(matches!(
        gone,
        Err(FsError::PermissionDenied | FsError::Stale)
    ));
}

/// What has outlived its lifetime is removed whatever its own permissions are.
#[tokio::test]
async fn only_the_owner_of_a_directory_and_root_change_its_lifetime() {
    const LIFETIME: &str = "user.harvestfs.lifetime_s";
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let make = Mutation::MakeDir(mutation::MakeDir {
        parent: InodeId::ROOT,
        name: name("shared"),
        mode: 0o777,
    });
    let ino = alice.attr(make).await.ino;
    let changes = AttrChanges {
        uid: Some(1),
        ..AttrChanges::default()
    };
    let give = Mutation::SetAttr(mutation::SetAttr { ino, changes });
    alice.call(give).await.unwrap();
    let set = |attribute: &str, value: &str| {
        Mutation::SetXattr(mutation::SetXattr {
            ino,
            name: attribute.into(),
            value: value.into(),
            mode: SetXattrMode::Any,
        })
    };
    let remove = || {
        Mutation::RemoveXattr(mutation::RemoveXattr {
            ino,
            name: LIFETIME.into(),
        })
    };
    // User 2 may write to the directory, and so may set other attributes.
    let other = call_as(&mut alice, 2, set("user.colour", "blue")).await;
    assert_eq!(other, Ok(MetaReply::Done));
    for uid in [1, 0] {
        let refused = call_as(&mut alice, 2, set(LIFETIME, "1")).await;
        assert_eq!(refused, Err(FsError::NotPermitted));
        for seconds in ["3600", "7200"] {
            let done = call_as(&mut alice, uid, set(LIFETIME, seconds)).await;
            assert_eq!(done, Ok(MetaReply::Done), "user {uid}");
        }
        for op in [set(LIFETIME, "1"), set(LIFETIME, "100000"), remove()] {
            let refused = call_as(&mut alice, 2, op.clone()).await;
            assert_eq!(refused, Err(FsError::NotPermitted), "{op:?}");
        }
        let done = call_as(&mut alice, uid, remove()).await;
        assert_eq!(done, Ok(MetaReply::Done), "user {uid}");
    }
}
