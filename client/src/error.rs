//! What can go wrong for a user of the client.

use std::time::Duration;

use harvestfs_protocol::error::{DataError, FsError};
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::transport::TransportError;

/// Why an operation failed. Clone, because every caller that waited for a shared flush gets it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The namenode refused it.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// No namenode answered in time. Whether a mutation was executed is unknown.
    #[error("no namenode answered within {} s: {reason}", waited.as_secs())]
    Unreachable {
        /// How long it was tried.
        waited: Duration,
        /// What happened last.
        reason: String,
    },
    /// This client's endpoint or certificate cannot be used, or the cluster refuses it.
    #[error("cannot connect: {0}")]
    Connect(#[from] TransportError),
    /// Every replica is on a busy server. `EAGAIN` from the API.
    #[error("all replicas of block {block} are busy; waited {} s", waited.as_secs())]
    AllReplicasBusy {
        /// The block.
        block: BlockId,
        /// How long it was tried.
        waited: Duration,
    },
    /// All servers that new data could go to are busy. `EAGAIN` from the API.
    #[error("all servers that new data could go to are busy; waited {} s", waited.as_secs())]
    AllServersBusy {
        /// How long it was tried.
        waited: Duration,
    },
    /// No replica of a block could be read.
    #[error("no replica of block {block} can be read: {reason}")]
    NoReplica {
        /// The block.
        block: BlockId,
        /// What the last replica said.
        reason: String,
    },
    /// No pipeline to datanodes could be set up or kept.
    #[error("cannot write to datanodes: {0}")]
    Write(DataError),
    /// Data that an earlier write acknowledged was lost before it was made stable.
    #[error("written data was lost before it was stable: {reason}")]
    DataLost {
        /// How.
        reason: String,
    },
    /// Fewer datanodes have written data on stable storage than are needed, and repair made no further replica in time.
    #[error("fewer datanodes than are needed have block {block} on stable storage; waited {} s", waited.as_secs())]
    TooFewReplicas {
        /// The block.
        block: BlockId,
        /// How long it was tried.
        waited: Duration,
    },
    /// Too much written data waits for its commit, and nothing of it could be committed in time.
    #[error("{waiting_bytes} bytes of written data could not be committed for {} s", waited.as_secs())]
    TooMuchDirtyData {
        /// Bytes that wait.
        waiting_bytes: u64,
        /// How long it was tried.
        waited: Duration,
    },
    /// The file was not opened for this.
    #[error("the file is not open for {0}")]
    NotOpenFor(&'static str),
    /// The namenode answered an operation, called as in metrics, with something else than its answer.
    #[error("unexpected answer to {0}")]
    UnexpectedReply(&'static str),
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
    /// The caller has stopped waiting. Whether a mutation is executed is unknown.
    #[error("interrupted: the caller no longer waits")]
    Interrupted,
    /// A block is not in a file any more where its extents said.
    #[error("block {block} is not in inode {ino} any more where it was")]
    LeftFile {
        /// The block.
        block: BlockId,
        /// The file.
        ino: InodeId,
    },
    /// Others change the content of a file faster than this client can find out what it is.
    #[error("inode {ino} changes faster than it can be read")]
    ChangesTooFast {
        /// The file.
        ino: InodeId,
    },
}

impl ClientError {
    /// Whether what it was about is not there: it was removed, or never was.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Fs(FsError::NotFound | FsError::Stale))
    }

    /// Whether there is no room for data that met it: it is stored only once somebody makes some.
    pub(crate) fn refuses_data(&self) -> bool {
        matches!(
            self,
            Self::Fs(
                FsError::QuotaExceeded | FsError::NoSpace | FsError::InsufficientDiversity { .. }
            )
        )
    }

    /// Whether trying the same again later may succeed without anything being changed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::AllReplicasBusy { .. }
                | Self::AllServersBusy { .. }
                | Self::NoReplica { .. }
                | Self::Write(_)
                | Self::TooFewReplicas { .. }
                | Self::TooMuchDirtyData { .. }
                | Self::LeftFile { .. }
                | Self::ChangesTooFast { .. }
                | Self::Fs(
                    FsError::Busy { .. }
                        | FsError::NoSpace
                        | FsError::PeerLimit { .. }
                        | FsError::InsufficientDiversity { .. }
                        | FsError::TooFewDatanodes(_)
                        | FsError::SessionExpired
                )
        )
    }
}
