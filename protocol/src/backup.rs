//! What an operator asks a namenode for when taking a backup of the namespace.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::ClusterId;
use crate::timeline::Epoch;

/// A request about a backup. Any member of the group of namenodes answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackupRequest {
    /// Take a snapshot of everything that is committed now, and keep it open for this connection, in the
    /// place of the one before. Reply: [`BackupReply::Begun`].
    Begin {
        /// Also if this namenode does not lead, and may lack what the leader has committed.
        of_any: bool,
    },
    /// Bytes of that snapshot, from there on; as many as there are, at most
    /// [`crate::limits::SNAPSHOT_PART_BYTES_MAX`]. Reply: [`BackupReply::Part`].
    Read {
        /// Where they begin.
        offset: u64,
    },
}

/// The reply to a [`BackupRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackupReply {
    /// The snapshot is there.
    Begun(Box<BackupContent>),
    /// Some of it.
    Part(Vec<u8>),
}

/// What a backup is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupContent {
    /// The cluster.
    pub cluster: ClusterId,
    /// The last record that it has.
    pub record: u64,
    /// The term of that record.
    pub term: u64,
    /// The epoch in which it was written.
    pub epoch: Epoch,
    /// The clock of the namenode then, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Version of the namenode's software.
    pub version: String,
    /// The edition of the namespace.
    pub edition: u8,
    /// The name in the certificate of the namenode that gave it.
    pub name: String,
    /// Where that one listens.
    pub addr: SocketAddr,
    /// It led then, and had all that was committed.
    pub led: bool,
    /// How many records it lacked that the leader had committed, as far as it knew.
    pub behind_records: u64,
    /// Where the namenodes of its group listen.
    pub namenodes: Vec<SocketAddr>,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Blocks.
    pub blocks: u64,
    /// Size of the snapshot in bytes.
    pub length_bytes: u64,
}
