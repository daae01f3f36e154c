//! A small cluster in this process: a namenode with the real engine and datanodes, which keep everything
//! in memory, speak the real protocol over the real transport, and fail on demand.

mod datanode;
mod namenode;
mod serving;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use harvestfs_protocol::identity::{CertificateAuthority, Identity, Role};
use harvestfs_protocol::token::TokenKey;
use harvestfs_protocol::transport::{Endpoint, TransportOptions};
use harvestfs_protocol::unix_now_ms;

pub(crate) use datanode::{Datanode, Mood};
pub(crate) use namenode::Namenode;
pub(crate) use serving::{Member, Part};

use crate::{Client, ClientOptions};

const VALIDITY: Duration = Duration::from_secs(3600);

/// The key that the fake namenode signs tokens with.
fn token_key() -> TokenKey {
    TokenKey {
        key_id: 1,
        secret: [7; 32],
    }
}

/// The whole cluster.
pub(crate) struct Cluster {
    authority: CertificateAuthority,
    pub(crate) namenode: Namenode,
    pub(crate) datanodes: Vec<Arc<Datanode>>,
}

impl Cluster {
    /// A namenode and some datanodes; every block goes to `replication` of them.
    pub(crate) async fn start(datanodes: u32, replication: u8) -> Self {
        Self::with_block_bytes(datanodes, replication, 4 << 20).await
    }

    pub(crate) async fn with_block_bytes(
        datanodes: u32,
        replication: u8,
        block_bytes: u64,
    ) -> Self {
        let authority = CertificateAuthority::in_memory().unwrap();
        let mut nodes = Vec::new();
        for number in 1..=datanodes {
            let identity = issue(&authority, Role::Datanode, &format!("datanode-{number}"));
            nodes.push(Datanode::start(number, &identity));
        }
        let identity = issue(&authority, Role::Namenode, "namenode");
        let infos = nodes.iter().map(|node| node.info()).collect();
        let namenode = Namenode::start(identity, infos, replication, block_bytes);
        Self {
            authority,
            namenode,
            datanodes: nodes,
        }
    }

    /// Returns client options that are impatient enough for a test.
    pub(crate) fn options(&self, name: &str) -> ClientOptions {
        let identity = issue(&self.authority, Role::Client, name);
        let mut options = ClientOptions::new(vec![self.namenode.addr()], "namenode", identity);
        options.unreachable_timeout = Duration::from_secs(20);
        options.busy_timeout = Duration::from_millis(300);
        options
    }

    pub(crate) async fn client(&self, name: &str) -> Client {
        Client::connect(self.options(name)).await.unwrap()
    }

    /// Returns the datanode with this number, from 1.
    pub(crate) fn datanode(&self, number: u32) -> &Arc<Datanode> {
        &self.datanodes[number as usize - 1]
    }
}

/// Returns a moment, for tests in virtual time.
pub(crate) fn some_time() -> Instant {
    Instant::now()
}

fn issue(authority: &CertificateAuthority, role: Role, name: &str) -> Identity {
    authority.issue(role, name, VALIDITY).unwrap()
}

fn bind(addr: SocketAddr, identity: &Identity) -> Endpoint {
    Endpoint::bind(addr, identity, TransportOptions::default()).unwrap()
}

fn any_port() -> SocketAddr {
    SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0)
}

fn unix_ms_now() -> u64 {
    unix_now_ms().unwrap()
}
