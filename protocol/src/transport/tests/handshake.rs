use rustls::pki_types::CertificateDer;

use super::*;
use crate::codec::{StreamKind, WireError};
use crate::transport::{CloseCode, RpcClient, RpcError, RpcServer, TransportError};
use crate::version::{Release, Version, Versioned, Versions};

/// What dialler and acceptor get to see.
async fn dial(
    server: &Endpoint,
    client: &Endpoint,
    expected: &Peer,
) -> (
    Result<Connection, TransportError>,
    Result<Connection, TransportError>,
) {
    let addr = server.local_addr().unwrap();
    tokio::join!(client.connect(addr, expected, LONG), async {
        server.accept().await.unwrap().establish().await
    })
}

#[tokio::test]
async fn both_ends_know_the_identity_of_the_other() {
    let pair = pair().await;
    assert_eq!(pair.client.peer(), &namenode());
    assert_eq!(pair.server.peer(), &Peer::new(Role::Client, "c-1").unwrap());
    assert!(pair.client.remote_addr().ip().is_loopback());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_on_a_multi_thread_runtime() {
    let pair = pair().await;
    assert!(!pair.client.is_closed());
}

#[tokio::test]
async fn a_client_of_another_authority_is_refused() {
    let server = endpoint(Role::Namenode, "nn");
    let stranger = CertificateAuthority::in_memory().unwrap();
    let stranger = stranger.issue(Role::Client, "c-1", LONG).unwrap();
    // It would trust the server, but the server must not trust it.
    let stranger = stranger.trusting(authority().certificate().clone());
    let client = endpoint_with(&stranger, TransportOptions::default());
    let (dialled, accepted) = dial(&server, &client, &namenode()).await;
    let error = dialled.unwrap_err();
    assert!(
        matches!(error, TransportError::RefusedByPeer { .. }),
        "{error}"
    );
    let error = accepted.unwrap_err();
    assert!(
        matches!(error, TransportError::PeerNotTrusted { .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_of_another_authority_is_refused() {
    let other = CertificateAuthority::in_memory().unwrap();
    let other = other.issue(Role::Namenode, "nn", LONG).unwrap();
    let server = endpoint_with(&other, TransportOptions::default());
    let client = endpoint(Role::Client, "c-1");
    let (dialled, accepted) = dial(&server, &client, &namenode()).await;
    let error = dialled.unwrap_err();
    assert!(
        matches!(error, TransportError::PeerNotTrusted { .. }),
        "{error}"
    );
    assert!(accepted.is_err());
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused() {
    let server = endpoint(Role::Namenode, "nn");
    let addr = server.local_addr().unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority().certificate().clone()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let mut crypto = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    crypto.alpn_protocols = vec![b"harvestfs".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(crypto).unwrap();
    let config = quinn::ClientConfig::new(std::sync::Arc::new(crypto));
    let anonymous = quinn::Endpoint::client(loopback()).unwrap();
    let (dialled, accepted) = tokio::join!(
        async {
            let connection = anonymous
                .connect_with(config, addr, &namenode().dns_name())
                .unwrap()
                .await
                .unwrap();
            TransportError::from(connection.closed().await)
        },
        async { server.accept().await.unwrap().establish().await }
    );
    assert_eq!(
        dialled,
        TransportError::RefusedByPeer {
            reason: "it got no certificate".to_owned()
        }
    );
    let error = accepted.unwrap_err();
    assert!(
        matches!(error, TransportError::PeerNotTrusted { .. }),
        "{error}"
    );
}

#[tokio::test]
async fn somebody_else_with_a_valid_certificate_is_refused() {
    let client = endpoint(Role::Client, "c-1");
    for (role, name) in [(Role::Datanode, "nn"), (Role::Namenode, "other")] {
        let server = endpoint(role, name);
        let (dialled, accepted) = dial(&server, &client, &namenode()).await;
        let error = dialled.unwrap_err();
        assert!(
            matches!(error, TransportError::PeerNotTrusted { .. }),
            "{error}"
        );
        assert!(accepted.is_err());
    }
}

#[tokio::test]
async fn a_certificate_with_a_foreign_name_is_refused() {
    let server = endpoint(Role::Namenode, "nn");
    let foreign = identity(Role::Client, "c-1").named_in_certificate("www.example.com");
    let client = endpoint_with(&foreign, TransportOptions::default());
    let (dialled, accepted) = dial(&server, &client, &namenode()).await;
    let error = dialled.unwrap_err();
    assert!(
        matches!(
            error,
            TransportError::ClosedByPeer {
                code: CloseCode::UNKNOWN_PEER,
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(
        accepted.unwrap_err(),
        TransportError::PeerNotTrusted { .. }
    ));
}

#[tokio::test]
async fn other_versions_are_refused_and_named_on_both_sides() {
    let (ours, theirs) = (versions(12, 13), versions(14, 15));
    let server = endpoint_with(&identity(Role::Namenode, "nn"), of_versions(theirs));
    let client = endpoint_with(&identity(Role::Client, "c-1"), of_versions(ours));
    for _ in 0..5 {
        let (dialled, accepted) = dial(&server, &client, &namenode()).await;
        assert_eq!(
            dialled.unwrap_err(),
            TransportError::Wire(WireError::VersionMismatch { ours, theirs })
        );
        assert_eq!(
            accepted.unwrap_err(),
            TransportError::Wire(WireError::VersionMismatch {
                ours: theirs,
                theirs: ours
            })
        );
    }
}

fn versions(oldest: u32, newest: u32) -> Versions {
    Versions {
        newest: Version(newest),
        oldest: Version(oldest),
    }
}

fn of_versions(versions: Versions) -> TransportOptions {
    TransportOptions {
        versions,
        ..TransportOptions::default()
    }
}

/// A message of which the first version has only a simpler form, or none.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Said {
    Simply,
    Newly { has_simpler: bool },
}

impl Versioned for Said {
    fn since(&self) -> Version {
        match self {
            Self::Simply => Version(12),
            Self::Newly { .. } => Version(13),
        }
    }

    fn older(&self) -> Option<Self> {
        match self {
            Self::Newly { has_simpler: true } => Some(Self::Simply),
            Self::Newly { has_simpler: false } | Self::Simply => None,
        }
    }
}

#[tokio::test]
async fn what_only_one_side_knows_is_not_sent() {
    let newest = |newest| of_versions(versions(12, newest));
    let not_spoken = WireError::NotSpoken {
        since: Version(13),
        spoken: Version(12),
    };
    for (of_server, of_client, spoken) in [(12, 13, 12), (13, 12, 12), (13, 14, 13)] {
        let server = endpoint_with(&identity(Role::Namenode, "nn"), newest(of_server));
        let client = endpoint_with(&identity(Role::Client, "c-1"), newest(of_client));
        let (dialled, accepted) = dial(&server, &client, &namenode()).await;
        let (dialled, accepted) = (dialled.unwrap(), accepted.unwrap());
        assert_eq!(dialled.version(), Version(spoken));
        assert_eq!(accepted.version(), Version(spoken));
        assert_eq!(dialled.peer_versions(), versions(12, of_server));
        assert_eq!(accepted.peer_versions(), versions(12, of_client));
        assert_eq!(accepted.peer_release(), Release::OURS);

        let (mut sender, _) = dialled.open_stream(StreamKind::Data).await.unwrap();
        let newly = |has_simpler| Said::Newly { has_simpler };
        let sent = sender.send(&newly(false)).await;
        let simply = sender.send(&newly(true)).await;
        assert_eq!(simply, Ok(()));
        let (_, _, mut receiver) = accepted.accept_stream().await.unwrap();
        if spoken == 12 {
            assert_eq!(sent, Err(TransportError::Wire(not_spoken.clone())));
            let received = receiver.recv::<Said>(LONG).await.unwrap();
            assert_eq!(received, Some((Said::Simply, 0)));
        } else {
            assert_eq!(sent, Ok(()));
            for has_simpler in [false, true] {
                let received = receiver.recv::<Said>(LONG).await.unwrap();
                assert_eq!(received, Some((newly(has_simpler), 0)));
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_the_server_does_not_know_is_refused_by_the_client() {
    let server = endpoint_with(
        &identity(Role::Namenode, "nn"),
        of_versions(versions(12, 12)),
    );
    let client = endpoint_with(
        &identity(Role::Client, "c-1"),
        of_versions(versions(12, 13)),
    );
    let (dialled, accepted) = dial(&server, &client, &namenode()).await;
    let (dialled, accepted) = (dialled.unwrap(), accepted.unwrap());
    let serving = tokio::spawn(async move {
        let (_, sender, receiver) = accepted.accept_stream().await.unwrap();
        let mut server = RpcServer::<Said, Said, ()>::start(accepted, sender, receiver);
        while let Ok(Some((request, responder))) = server.next().await {
            assert_eq!(request, Said::Simply);
            responder.send(&Said::Newly { has_simpler: true });
        }
    });
    let (notices, _) = tokio::sync::mpsc::channel(1);
    let rpc = RpcClient::<Said, Said, ()>::start(dialled, notices)
        .await
        .unwrap();
    let refused = rpc.call(&Said::Newly { has_simpler: true }, LONG).await;
    assert_eq!(
        refused,
        Err(RpcError::Encode(WireError::NotSpoken {
            since: Version(13),
            spoken: Version(12)
        }))
    );
    // The answer was put into words of the version that both have.
    assert_eq!(rpc.call(&Said::Simply, LONG).await, Ok(Said::Simply));
    drop(rpc);
    serving.await.unwrap();
}

#[tokio::test]
async fn dialling_without_a_listener_ends_at_the_deadline() {
    let silent = std::net::UdpSocket::bind(loopback()).unwrap();
    let client = endpoint(Role::Client, "c-1");
    let error = client
        .connect(silent.local_addr().unwrap(), &namenode(), SHORT)
        .await
        .unwrap_err();
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
}

#[tokio::test]
async fn a_client_does_not_listen() {
    let client = endpoint(Role::Client, "c-1");
    assert!(client.accept().await.is_none());
    let other = endpoint(Role::Admin, "a");
    let expected = Peer::new(Role::Client, "c-1").unwrap();
    let addr = client.local_addr().unwrap();
    assert!(other.connect(addr, &expected, SHORT).await.is_err());
}

#[tokio::test]
async fn closing_tells_the_peer_why() {
    let pair = pair().await;
    let code = CloseCode(77);
    pair.server.close(code, "enough");
    assert_eq!(
        pair.client.closed().await,
        TransportError::ClosedByPeer {
            code,
            reason: "enough".to_owned()
        }
    );
    assert!(pair.client.is_closed());
    assert_eq!(pair.server.closed().await, TransportError::Closed);
    assert!(pair.client.open_stream(StreamKind::Data).await.is_err());
}

#[tokio::test]
async fn a_closed_endpoint_accepts_and_dials_no_more() {
    let server = endpoint(Role::Namenode, "nn");
    server.close("stopping");
    assert!(server.accept().await.is_none());
    server.wait_idle(LONG).await.unwrap();
    let error = server
        .connect(server.local_addr().unwrap(), &namenode(), LONG)
        .await
        .unwrap_err();
    assert_eq!(error, TransportError::EndpointClosed);
}

#[test]
fn binding_without_a_runtime_or_to_a_used_port_is_an_error() {
    let identity = identity(Role::Namenode, "nn");
    let used = std::net::UdpSocket::bind(loopback()).unwrap();
    let bind = |addr| Endpoint::bind(addr, &identity, TransportOptions::default());
    assert!(matches!(bind(loopback()), Err(TransportError::Bind { .. })));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    let addr = used.local_addr().unwrap();
    let error = bind(addr).unwrap_err();
    assert!(error.to_string().contains(&addr.to_string()), "{error}");
}

impl Identity {
    /// The same with another authority to trust.
    fn trusting(self, authority: CertificateDer<'static>) -> Self {
        self.with_parts(None, Some(authority))
    }

    /// The same key with a certificate of the test authority for another DNS name.
    fn named_in_certificate(self, dns_name: &str) -> Self {
        let certificate = authority().certify_for_test(dns_name, &self);
        self.with_parts(Some(certificate), None)
    }
}

#[tokio::test]
async fn a_server_that_was_killed_and_started_again_is_noticed_at_once() {
    let server_identity = identity(Role::Namenode, "nn");
    let (addr_sent, addr) = tokio::sync::oneshot::channel();
    // A dropped runtime closes its sockets without notifying the peers, as a killed process does.
    let killed = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let first = server_identity.clone();
    killed.spawn(async move {
        let endpoint = endpoint_with(&first, TransportOptions::default());
        addr_sent.send(endpoint.local_addr().unwrap()).unwrap();
        let _connection = endpoint.accept().await.unwrap().establish().await.unwrap();
        std::future::pending::<()>().await;
    });
    let addr = addr.await.unwrap();
    let client = endpoint(Role::Client, "c-1");
    let connection = client.connect(addr, &namenode(), LONG).await.unwrap();
    killed.shutdown_background();

    let again = loop {
        match Endpoint::bind(addr, &server_identity, TransportOptions::default()) {
            Ok(endpoint) => break endpoint,
            // Until the first one's socket is closed.
            Err(_) => tokio::time::sleep(SHORT / 10).await,
        }
    };
    let started = std::time::Instant::now();
    let (mut sender, _receiver) = connection.open_stream(StreamKind::Data).await.unwrap();
    // It fails as soon as the loss is known.
    let _ = sender.send(&7_u32).await;
    tokio::time::timeout(LONG, connection.closed())
        .await
        .unwrap();
    assert!(started.elapsed() < std::time::Duration::from_secs(5));
    drop(again);
}
