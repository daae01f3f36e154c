//! Requests of an operator to a namenode when taking a backup of the namespace.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::ClusterId;
use crate::timeline::Epoch;

/// A request about a backup. Any member of the group of namenodes answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackupRequest {
    /// Take a snapshot of everything that is committed now, and keep it open for this connection, replacing the
    /// previous one. Reply: [`BackupReply::Begun`].
    Begin {
        /// Allow it even if this namenode does not lead and may lack what the leader has committed.
        of_any: bool,
    },
    /// Reads bytes of that snapshot from an offset: as many as there are, but at most
    /// [`crate::limits::SNAPSHOT_PART_BYTES_MAX`]. Reply: [`BackupReply::Part`].
    Read {
        /// Offset of the first byte.
        offset: u64,
    },
}

/// The reply to a [`BackupRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackupReply {
    /// The snapshot is open.
    Begun(Box<BackupContent>),
    /// Bytes of the snapshot.
    Part(Vec<u8>),
}

/// Describes the content of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupContent {
    /// The cluster.
    pub cluster: ClusterId,
    /// The last record in the backup.
    pub record: u64,
    /// The term of that record.
    pub term: u64,
    /// The epoch in which it was written.
    pub epoch: Epoch,
    /// The clock of the namenode at that time, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Version of the namenode's software.
    pub version: String,
    /// The edition of the namespace.
    pub edition: u8,
    /// The name in the certificate of the namenode that took it.
    pub name: String,
    /// The address at which that namenode listens.
    pub addr: SocketAddr,
    /// Whether it led at that time, and so had everything that was committed.
    pub led: bool,
    /// How many records it lacked that the leader had committed, as far as it knew.
    pub behind_records: u64,
    /// The addresses at which the namenodes of its group listen.
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
