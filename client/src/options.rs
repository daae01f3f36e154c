//! The options of a client.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use harvestfs_protocol::identity::Identity;

/// How to reach a cluster, and how much memory and patience a client has.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Addresses of namenodes, at least one, of which one leads at a time. The list need not be
    /// complete: a namenode that answers names the others.
    pub namenodes: Vec<SocketAddr>,
    /// The name in the namenodes' certificate.
    pub namenode_name: String,
    /// The identity of this client.
    pub identity: Identity,
    /// The local address to send from. The default is any address and port, in the address family
    /// of the first namenode.
    pub bind: Option<SocketAddr>,
    /// Maximum number of bytes of written data, over all files, that may wait in memory for their
    /// commit. Writers block beyond it.
    pub dirty_bytes_max: u64,
    /// How old written data may become before it is flushed unasked.
    pub dirty_age_max: Duration,
    /// Maximum number of bytes that are read ahead of a sequential reader, per open file.
    pub read_ahead_bytes: u64,
    /// Maximum number of bytes that are read ahead, over all files.
    pub read_ahead_total_bytes: u64,
    /// Number of replicas of new blocks; overrides the directory's setting.
    pub replication: Option<u8>,
    /// How long an operation waits for datanodes that are all busy.
    pub busy_timeout: Duration,
    /// How long an operation waits for namenodes or datanodes that do not answer; [`Duration::MAX`]
    /// means indefinitely.
    pub unreachable_timeout: Duration,
    /// Maximum number of inodes and directory entries in the metadata cache.
    pub cache_entries_max: usize,
    /// Maximum number of closed files that the session keeps open at the namenode, so that
    /// reopening them needs no round trip.
    pub idle_holds_max: usize,
}

impl ClientOptions {
    /// Options with default values.
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
