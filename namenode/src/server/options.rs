//! The options of a namenode.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_protocol::identity::Identity;
use harvestfs_protocol::limits::{
    BLOCKS_PER_SESSION_MAX, CONNECTIONS_PER_ADDRESS_MAX, LEASE, SESSION_TIMEOUT,
    SESSIONS_PER_CLIENT_MAX, TOKEN_LIFETIME,
};
use harvestfs_protocol::transport::TransportOptions;

use super::NamenodeError;
use crate::engine::cluster::ClusterOptions;
use crate::journal::{JournalOptions, JournalWriterOptions};

/// Smallest segment of the journal in bytes: everything that is handed over together must fit, and one request
/// can be as large as a frame.
pub(crate) const SEGMENT_BYTES_MIN: u64 = 4 << 20;

/// The options of a namenode.
#[derive(Clone, Debug)]
pub struct NamenodeOptions {
    /// Data directory, made by [`super::format`].
    pub data_dir: PathBuf,
    /// Address to listen on; port 0 for any.
    pub listen: SocketAddr,
    /// Certificate and key, with the role of a namenode.
    pub identity: Identity,
    /// Liveness, repair and placement.
    pub cluster: ClusterOptions,
    /// Policy that places replicas; can be changed while the namenode runs.
    pub policy: PolicyKind,
    /// Parameters of the policy.
    pub placement: PolicyOptions,
    /// The network.
    pub transport: TransportOptions,
    /// Group commit.
    pub journal: JournalWriterOptions,
    /// Size of one segment of the journal in bytes, at least 4 MiB.
    pub segment_bytes: u64,
    /// When snapshots are written.
    pub snapshots: SnapshotTrigger,
    /// A session that was silent for this long has lost its leases. Clients rely on the value: it differs from
    /// [`LEASE`] only in tests.
    pub lease: Duration,
    /// A session that was silent for this long is ended. Not shorter than `lease`.
    pub session_timeout: Duration,
    /// How long a block token is valid.
    pub token_lifetime: Duration,
    /// How often timeouts are checked and repair is scheduled.
    pub tick: Duration,
    /// Maximum number of remembered lease grants, about 50 bytes each. When it is exceeded, the table is
    /// emptied and sessions get more notices than they need.
    pub grants_max: usize,
    /// Maximum number of connections from one address.
    pub connections_per_address_max: u32,
    /// Maximum number of sessions of one client.
    pub sessions_per_client_max: usize,
    /// Maximum number of blocks that one session may write at a time.
    pub blocks_per_session_max: usize,
    /// Maximum number of files that one session may hold open.
    pub holds_per_session_max: usize,
    /// Number of inodes and blocks up to which `fsck` checks the running namespace, which blocks all requests
    /// meanwhile: about 70 ms for the default. A larger namespace is checked beside the running engine, from
    /// the journal, which takes longer and needs twice the memory.
    pub fsck_in_place_max: u64,
    /// How often the history of the primary tenants is analysed without a request from an operator.
    pub analysis_interval: Duration,
    /// Seed of random choices, so that a run can be repeated; random if absent. Keys of block tokens are never
    /// derived from it.
    pub rng_seed: Option<u64>,
}

/// When a snapshot is written: as soon as the journal since the last snapshot reaches one of the limits.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotTrigger {
    /// Records. A million are replayed in a few seconds.
    pub records: u64,
    /// Bytes of records; at least as many as the last snapshot had, so that writing snapshots never
    /// costs more than writing the journal did.
    pub bytes: u64,
}

impl Default for SnapshotTrigger {
    fn default() -> Self {
        Self {
            records: 1_000_000,
            bytes: 256 << 20,
        }
    }
}

impl NamenodeOptions {
    /// The usual options.
    #[must_use]
    pub fn new(data_dir: PathBuf, listen: SocketAddr, identity: Identity) -> Self {
        let journal = JournalOptions::new(PathBuf::new(), 0);
        Self {
            data_dir,
            listen,
            identity,
            cluster: ClusterOptions::default(),
            policy: PolicyKind::default(),
            placement: PolicyOptions::default(),
            transport: TransportOptions::default(),
            journal: JournalWriterOptions::default(),
            segment_bytes: journal.segment_bytes,
            snapshots: SnapshotTrigger::default(),
            lease: LEASE,
            session_timeout: SESSION_TIMEOUT,
            token_lifetime: TOKEN_LIFETIME,
            tick: Duration::from_millis(100),
            grants_max: 1 << 18,
            connections_per_address_max: CONNECTIONS_PER_ADDRESS_MAX,
            sessions_per_client_max: SESSIONS_PER_CLIENT_MAX,
            blocks_per_session_max: BLOCKS_PER_SESSION_MAX,
            holds_per_session_max: 1 << 18,
            fsck_in_place_max: 200_000,
            analysis_interval: Duration::from_secs(24 * 3600),
            rng_seed: None,
        }
    }

    pub(crate) fn check(&self) -> Result<(), NamenodeError> {
        let bad = |option, value: String, accepted: String| {
            Err(NamenodeError::Option {
                option,
                value,
                accepted,
            })
        };
        check_segment_bytes(self.segment_bytes)?;
        let ms = |duration: Duration| format!("{} ms", duration.as_millis());
        if self.session_timeout < self.lease {
            let accepted = format!("at least the lease of {}", ms(self.lease));
            return bad("session_timeout", ms(self.session_timeout), accepted);
        }
        // An expired lease must be noticed well before a client gives up waiting.
        if self.tick.is_zero() || self.tick > self.lease / 2 {
            let accepted = format!("above 0 and at most half the lease of {}", ms(self.lease));
            return bad("tick", ms(self.tick), accepted);
        }
        Ok(())
    }
}

pub(crate) fn check_segment_bytes(segment_bytes: u64) -> Result<(), NamenodeError> {
    if segment_bytes >= SEGMENT_BYTES_MIN {
        return Ok(());
    }
    Err(NamenodeError::Option {
        option: "segment_bytes",
        value: segment_bytes.to_string(),
        accepted: format!("at least {SEGMENT_BYTES_MIN}"),
    })
}
