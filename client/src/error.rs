//! What can go wrong for a user of the client.

use std::time::Duration;

use harvestfs_protocol::error::{DataError, FsError};
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::transport::TransportError;

/// Why an operation failed. `Clone`, because every caller that waited for a shared flush gets a copy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The namenode refused the operation.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// No namenode answered in time. Whether a mutation was executed is unknown.
    #[error("no namenode answered within {} s: {reason}", waited.as_secs())]
    Unreachable {
        /// How long the client tried.
        waited: Duration,
        /// The last failure.
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
        /// How long the client tried.
        waited: Duration,
    },
    /// All servers that new data could go to are busy. `EAGAIN` from the API.
    #[error("all servers that new data could go to are busy; waited {} s", waited.as_secs())]
    AllServersBusy {
        /// How long the client tried.
        waited: Duration,
    },
    /// No replica of a block could be read.
    #[error("no replica of block {block} can be read: {reason}")]
    NoReplica {
        /// The block.
        block: BlockId,
        /// The failure of the last replica.
        reason: String,
    },
    /// No pipeline to datanodes could be set up or maintained.
    #[error("cannot write to datanodes: {0}")]
    Write(DataError),
    /// Data that an earlier write acknowledged was lost before it was made stable.
    #[error("written data was lost before it was stable: {reason}")]
    DataLost {
        /// How.
        reason: String,
    },
    /// Fewer datanodes than required have the data on stable storage, and repair added no replica in time.
    #[error("fewer datanodes than are needed have block {block} on stable storage; waited {} s", waited.as_secs())]
    TooFewReplicas {
        /// The block.
        block: BlockId,
        /// How long the client tried.
        waited: Duration,
    },
    /// Too much written data waits for its commit, and none of it could be committed in time.
    #[error("{waiting_bytes} bytes of written data could not be committed for {} s", waited.as_secs())]
    TooMuchDirtyData {
        /// Bytes that wait.
        waiting_bytes: u64,
        /// How long the client tried.
        waited: Duration,
    },
    /// The file was not opened for this kind of access.
    #[error("the file is not open for {0}")]
    NotOpenFor(&'static str),
    /// The namenode answered an operation, named as in metrics, with a reply of the wrong kind.
    #[error("unexpected answer to {0}")]
    UnexpectedReply(&'static str),
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
    /// The caller has stopped waiting. Whether a mutation is executed is unknown.
    #[error("interrupted: the caller no longer waits")]
    Interrupted,
    /// A block is no longer where the extents of a file placed it.
    #[error("block {block} is not in inode {ino} any more where it was")]
    LeftFile {
        /// The block.
        block: BlockId,
        /// The file.
        ino: InodeId,
    },
    /// Others change the content of a file faster than this client can determine it.
    #[error("inode {ino} changes faster than it can be read")]
    ChangesTooFast {
        /// The file.
        ino: InodeId,
    },
}

impl ClientError {
    /// Whether the object of the operation does not exist: it was removed, or never existed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Fs(FsError::NotFound | FsError::Stale))
    }

    /// Whether data was refused for lack of room: it cannot be stored until somebody makes some.
    pub(crate) fn refuses_data(&self) -> bool {
        matches!(
            self,
            Self::Fs(
                FsError::QuotaExceeded | FsError::NoSpace | FsError::InsufficientDiversity { .. }
            )
        )
    }

    /// Whether the same operation may succeed later without any intervention.
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
