//! The options of a client.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use harvestfs_protocol::identity::Identity;

/// How to reach a cluster, and how much memory and patience a client has.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Where namenodes listen. Of several, one leads at a time. These need not be all: the ones that
    /// answer say which others there are.
    pub namenodes: Vec<SocketAddr>,
    /// The name in the namenodes' certificate.
    pub namenode_name: String,
    /// The identity of this client.
    pub identity: Identity,
    /// The local address to send from; by default any address and port of the family of the first
    /// namenode.
    pub bind: Option<SocketAddr>,
    /// Most bytes of written data that wait in memory for their commit, of all files together.
    /// Writers wait beyond it.
    pub dirty_bytes_max: u64,
    /// How old written data may become before it is flushed without being asked for.
    pub dirty_age_max: Duration,
    /// Most bytes that are read ahead of a sequential reader, for each open file.
    pub read_ahead_bytes: u64,
    /// Most bytes that are read ahead, of all files together.
    pub read_ahead_total_bytes: u64,
    /// Replicas of new blocks; overrides the directory's.
    pub replication: Option<u8>,
    /// How long an operation waits for datanodes that are all busy.
    pub busy_timeout: Duration,
    /// How long an operation waits for a namenode or for datanodes that do not answer;
    /// [`Duration::MAX`]: until they do.
    pub unreachable_timeout: Duration,
    /// Most inodes and directory entries that the metadata cache keeps.
    pub cache_entries_max: usize,
    /// Most closed files that the session goes on holding open at the namenode, so that opening
    /// them again needs no round trip.
    pub idle_holds_max: usize,
}

impl ClientOptions {
    /// Options with their defaults.
    #[must_use]
    pub fn new(
        namenodes: Vec<SocketAddr>,
        namenode_name: impl Into<String>,
        identity: Identity,
    ) -> Self {
        Self {
            namenodes,
            namenode_name: namenode_name.into(),
            identity,
            bind: None,
            dirty_bytes_max: 256 << 20,
            dirty_age_max: Duration::from_secs(5),
            read_ahead_bytes: 8 << 20,
            read_ahead_total_bytes: 128 << 20,
            replication: None,
            busy_timeout: Duration::from_secs(30),
            unreachable_timeout: Duration::from_secs(60),
            cache_entries_max: 500_000,
            idle_holds_max: 4_096,
        }
    }

    /// The address to bind to.
    pub(crate) fn bind_addr(&self) -> SocketAddr {
        let any: IpAddr = match self.namenodes.first() {
            Some(SocketAddr::V6(_)) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        self.bind.unwrap_or(SocketAddr::new(any, 0))
    }
}
