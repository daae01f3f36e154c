//! Real QUIC over loopback.

mod handshake;
mod pool;
mod rpc;
mod stream;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;
use std::time::Duration;

use super::{Connection, Endpoint, TransportOptions};
use crate::identity::{CertificateAuthority, Identity, Peer, Role};

/// Longer than anything here takes; a test that waits for it has failed.
const LONG: Duration = Duration::from_secs(20);
/// For what must not happen: long enough that it would.
const SHORT: Duration = Duration::from_millis(100);

fn authority() -> &'static CertificateAuthority {
    static AUTHORITY: OnceLock<CertificateAuthority> = OnceLock::new();
    AUTHORITY.get_or_init(|| CertificateAuthority::in_memory().unwrap())
}

fn identity(role: Role, name: &str) -> Identity {
    authority().issue(role, name, LONG * 100).unwrap()
}

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn endpoint(role: Role, name: &str) -> Endpoint {
    endpoint_with(&identity(role, name), TransportOptions::default())
}

fn endpoint_with(identity: &Identity, options: TransportOptions) -> Endpoint {
    Endpoint::bind(loopback(), identity, options).unwrap()
}

fn namenode() -> Peer {
    Peer::new(Role::Namenode, "nn").unwrap()
}

/// A connection from a client to a namenode, seen from both ends.
struct Pair {
    client: Connection,
    server: Connection,
    _endpoints: [Endpoint; 2],
}

async fn pair() -> Pair {
    pair_with(TransportOptions::default()).await
}

async fn pair_with(options: TransportOptions) -> Pair {
    let server_identity = identity(Role::Namenode, "nn");
    let server_endpoint = endpoint_with(&server_identity, options.clone());
    let client_endpoint = endpoint_with(&identity(Role::Client, "c-1"), options);
    let addr = server_endpoint.local_addr().unwrap();
    let expected = namenode();
    let (client, server) = tokio::join!(client_endpoint.connect(addr, &expected, LONG), async {
        server_endpoint.accept().await.unwrap().establish().await
    });
    Pair {
        client: client.unwrap(),
        server: server.unwrap(),
        _endpoints: [client_endpoint, server_endpoint],
    }
}
