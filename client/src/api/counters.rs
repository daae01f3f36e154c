//! The counters of a client, for monitoring.

use crate::api::client::Client;
use crate::driver::session::LinkState;

/// What a client has counted since it was connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounters {
    /// Written data in memory that is not yet committed, in bytes.
    pub dirty_bytes: u64,
    /// Answers of datanodes that they are busy because their owner needs the server.
    pub denials: u64,
    /// Reads for which a second replica was asked because the first was slow.
    pub hedged_reads: u64,
    /// Bytes of blocks, in whole chunks, that datanodes sent.
    pub network_bytes: u64,
    /// Bytes of blocks, in whole chunks, that were read from files lent by a datanode on this host.
    pub short_circuit_bytes: u64,
    /// Whether the namenode can be reached.
    pub connected: bool,
}

impl Client {
    /// Returns the current counters, without waiting.
    #[must_use]
    pub fn counters(&self) -> ClientCounters {
        let core = self.core();
        let reads = core.reads.counters();
        ClientCounters {
            dirty_bytes: core.files.dirty.used(),
            denials: reads.denials,
            hedged_reads: reads.hedged_reads,
            network_bytes: reads.network_bytes,
            short_circuit_bytes: reads.short_circuit_bytes,
            connected: matches!(*core.session.watch_link().borrow(), LinkState::Up(_)),
        }
    }
}
