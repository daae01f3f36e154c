//! Real QUIC over loopback, and streams past it.

/// Runs tests that take a pair over the network, and with streams past it.
macro_rules! both_ways {
    ($($test:ident),* $(,)?) => {
        mod network {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::network_pair().await).await;
            })*
        }
        mod local {
            $(#[tokio::test]
            async fn $test() {
                let pair = super::pair().await;
                assert!(pair.client.opens_local_streams());
                super::$test(pair).await;
            })*
        }
    };
}

mod handshake;
mod local;
mod pool;
mod rpc;
mod stream;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;
use std::time::Duration;

use super::{Connection, Endpoint, TransportOptions};
use crate::identity::{CertificateAuthority, Identity, Peer, Role};

/// Longer than anything here takes; a test that waits for it has failed.
pub(super) const LONG: Duration = Duration::from_secs(20);
/// A wait for events that must not happen, long enough for them to happen.
pub(super) const SHORT: Duration = Duration::from_millis(100);

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
pub(super) struct Pair {
    pub(super) client: Connection,
    server: Connection,
    _endpoints: [Endpoint; 2],
}

async fn pair() -> Pair {
    pair_with(TransportOptions::default()).await
}

/// A pair whose streams go over QUIC.
pub(super) async fn network_pair() -> Pair {
    pair_with(TransportOptions {
        local_streams: false,
        ..TransportOptions::default()
    })
    .await
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
