//! Who may do what, and what happens to those who send nonsense.

use std::net::UdpSocket;

use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::GROUPS_MAX;
use harvestfs_protocol::meta::{MetaCall, MetaOp, OpenSession};
use harvestfs_protocol::node::{IncrementalReport, NodeRequest};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::transport::{CloseCode, Endpoint, TransportError, TransportOptions};
use harvestfs_protocol::types::Credentials;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::*;

fn requests() -> Vec<(&'static str, Request)> {
    let open = OpenSession {
        resume: None,
        holds: vec![],
        delegations: None,
        seen: None,
    };
    let call = MetaCall {
        credentials: Credentials::root(),
        sequence: 0,
        answered_below: 0,
        relaxed: false,
        op: MetaOp::StatFs { ino: InodeId::ROOT },
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
        ("operator", Request::Admin(AdminRequest::Status)),
        ("operator", Request::Admin(AdminRequest::Fsck)),
    ]
}

#[tokio::test]
async fn each_role_may_make_its_own_requests_and_no_others() {
    let cluster = Cluster::new().await;
    let allowed = [
        (Role::Client, vec!["client"]),
        (Role::Admin, vec!["client", "operator"]),
        (Role::Datanode, vec!["node"]),
        (Role::Namenode, vec![]),
    ];
    for (role, kinds) in allowed {
        let (link, _notices) = cluster.rpc(role, "somebody").await;
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
    call.sequence = 0;
    let refused = meta(&alice.link, call).await;
    assert!(matches!(refused, Err(FsError::Protocol(_))), "{refused:?}");
    let mut call = alice.number(MetaOp::StatFs { ino: InodeId::ROOT });
    call.credentials.groups = vec![0; GROUPS_MAX + 1];
    let refused = meta(&alice.link, call).await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
    let blocks = vec![harvestfs_protocol::ids::BlockId(1); 1_025];
    let refused = alice.call(MetaOp::Locate { blocks }).await;
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
        // Postcard writes an array of bytes as it is; an id, then no request that there is.
        let mut bytes = [0_u8; 32];
        rng.fill_bytes(&mut bytes);
        (bytes[0], bytes[1]) = (round, 0xff);
        sender.send(&bytes).await.unwrap();
        let ended = connection.closed().await;
        let violation = matches!(
            &ended,
            TransportError::ClosedByPeer { code, .. } if *code == CloseCode::PROTOCOL_VIOLATION
        );
        assert!(violation, "round {round}: {ended}");
    }
    let (_endpoint, connection) = cluster.connect(Role::Client, "mallory").await;
    let (mut sender, _receiver) = connection.open_stream(StreamKind::Data).await.unwrap();
    // The kind of the stream is enough, and may be known before this is sent.
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
            .call(MetaOp::StatFs { ino: InodeId::ROOT })
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
    assert!(status.engine_bytes > 0 && status.journal_lsn == 5);
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
