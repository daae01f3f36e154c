//! Connections that send arbitrary bytes.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::codec::{HELLO_BYTES, Hello};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{CERT_FILE, Identity, KEY_FILE, Peer, Role};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{
    MetaCall, MetaOp, Mutation, MutationCall, Notice, OpenSession, Query,
};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{
    CloseCode, Connection, Endpoint, RpcClient, TransportError, TransportOptions,
};
use harvestfs_protocol::types::Credentials;
use harvestfs_protocol::version::{Release, Versions};
use harvestfs_tests::Cluster;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Longer than any answer takes on a loaded machine.
pub const DEADLINE: Duration = Duration::from_secs(15);

/// A part of the cluster to talk to.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its identity.
    pub peer: Peer,
    /// Its address.
    pub addr: SocketAddr,
}

/// The namenode.
pub fn namenode(cluster: &Cluster) -> Target {
    Target {
        peer: Peer::new(Role::Namenode, "namenode").expect("a name"),
        addr: cluster.namenode(),
    }
}

/// A datanode.
pub fn datanode(cluster: &Cluster, number: usize) -> Target {
    let status = cluster.node_status(number);
    let addr = status["server"]["data_addr"].as_str().expect("an address");
    Target {
        peer: Peer::new(Role::Datanode, Cluster::datanode(number)).expect("a name"),
        addr: addr.parse().expect("an address"),
    }
}

/// Runs a future to completion.
pub fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(future)
}

/// An endpoint with an identity of the cluster: that in `directory`.
pub fn endpoint(cluster: &Cluster, directory: &str, options: TransportOptions) -> Endpoint {
    let identity = Identity::load(&cluster.path(directory)).expect("an identity");
    Endpoint::bind(any_address(), &identity, options).expect("an endpoint")
}

/// Connects with the identity in `directory`.
pub async fn connect(cluster: &Cluster, directory: &str, target: &Target) -> Connection {
    let connection = try_connect(cluster, directory, target).await;
    connection.expect("a connection")
}

/// Same as [`connect`], where a refusal is expected.
pub async fn try_connect(
    cluster: &Cluster,
    directory: &str,
    target: &Target,
) -> Result<Connection, TransportError> {
    endpoint(cluster, directory, TransportOptions::default())
        .connect(target.addr, &target.peer, DEADLINE)
        .await
}

/// Checks that the peer closed a connection because this side did something forbidden.
pub fn assert_not_allowed(end: &TransportError) {
    let code = CloseCode::NOT_ALLOWED;
    assert!(
        matches!(end, TransportError::ClosedByPeer { code: said, .. } if *said == code),
        "{end:?}"
    );
}

/// A client of the namenode's requests.
pub struct Rpc {
    client: RpcClient<Request, Response, Notice>,
    sequence: u64,
}

impl Rpc {
    /// Connects with the identity in `directory`.
    pub async fn connect(cluster: &Cluster, directory: &str) -> Self {
        let connection = connect(cluster, directory, &namenode(cluster)).await;
        // Notices are not handled: the namenode ends this session if it ever waits for an answer.
        let (notices, _) = tokio::sync::mpsc::channel(1);
        let client = RpcClient::start(connection, notices).await;
        Self {
            client: client.expect("a request stream"),
            sequence: 0,
        }
    }

    /// Connects as the cluster's client and opens a session.
    pub async fn with_session(cluster: &Cluster) -> Self {
        let rpc = Self::connect(cluster, "client/identity").await;
        let open = OpenSession {
            resume: None,
            holds: Vec::new(),
            delegations: None,
            seen: None,
        };
        let opened = rpc.call(&Request::OpenSession(open)).await;
        assert!(matches!(opened, Ok(Reply::SessionOpened(_))), "{opened:?}");
        rpc
    }

    /// Sends a request.
    pub async fn call(&self, request: &Request) -> Response {
        let answer = self.client.call(request, DEADLINE).await;
        answer.expect("an answer, if only an error")
    }

    /// Executes a query as root.
    pub async fn query(&mut self, query: impl Into<Query>) -> Response {
        self.meta(MetaOp::Query(query.into())).await
    }

    /// Executes a mutation as root.
    pub async fn mutate(&mut self, mutation: impl Into<Mutation>) -> Response {
        self.sequence += 1;
        let call = MutationCall {
            sequence: self.sequence,
            answered_below: self.sequence,
            relaxed: false,
            file: Some(InodeId::ROOT),
            mutation: mutation.into(),
        };
        self.meta(MetaOp::Mutation(call)).await
    }

    async fn meta(&mut self, op: MetaOp) -> Response {
        let credentials = Credentials::root();
        let call = MetaCall { credentials, op };
        self.call(&Request::Meta(call)).await
    }

    /// Ends the session, so that it leaves nothing behind.
    pub async fn close(self) {
        let closed = self.call(&Request::CloseSession).await;
        assert_eq!(closed, Ok::<_, FsError>(Reply::Done));
    }
}

/// A QUIC connection without the protocol on it. `identity` is the directory of the certificate to
/// show, if any; the cluster's authority is trusted in any case.
pub async fn raw(
    cluster: &Cluster,
    identity: Option<&Path>,
    target: &Target,
) -> Result<quinn::Connection, TransportError> {
    let ours = Identity::load(&cluster.path("client/identity")).expect("an identity");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ours.authority().clone()).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots);
    let mut crypto = match identity {
        None => builder.with_no_client_auth(),
        Some(directory) => {
            let certificate = CertificateDer::from_pem_file(directory.join(CERT_FILE));
            let key = PrivateKeyDer::from_pem_file(directory.join(KEY_FILE));
            builder
                .with_client_auth_cert(
                    vec![certificate.expect("a certificate")],
                    key.expect("a key"),
                )
                .expect("a pair")
        }
    };
    crypto.alpn_protocols = vec![b"harvestfs".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(crypto).expect("TLS 1.3");
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let endpoint = quinn::Endpoint::client(any_address()).expect("an endpoint");
    let connecting = endpoint
        .connect_with(config, target.addr, &target.peer.dns_name())
        .expect("a valid configuration");
    Ok(connecting.await?)
}

/// A QUIC connection with the cluster's client certificate, on which `hello` has been sent.
pub async fn raw_after_hello(
    cluster: &Cluster,
    target: &Target,
    hello: &[u8],
) -> quinn::Connection {
    let identity = cluster.path("client/identity");
    let connection = raw(cluster, Some(&identity), target)
        .await
        .expect("the certificate is good");
    let mut stream = connection.open_uni().await.expect("a stream");
    stream.write_all(hello).await.expect("it is taken");
    stream.finish().expect("it is open");
    connection
}

/// The hello that the cluster expects.
pub fn good_hello() -> [u8; HELLO_BYTES] {
    let hello = Hello {
        versions: Versions::OURS,
        release: Release::OURS,
    };
    hello.encode()
}

/// Waits for the end of a connection.
pub async fn end_of(connection: &quinn::Connection) -> TransportError {
    tokio::time::timeout(DEADLINE, connection.closed())
        .await
        .expect("the connection is ended")
        .into()
}

fn any_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}
