//! Why a namenode does not start, or stops.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::transport::TransportError;
use harvestfs_protocol::version::Unfit;

use super::token_keys::TokenKeyError;
use crate::consensus::{ConsensusError, EntryError};
use crate::engine::namespace::{DecodeError, SnapshotError};
use crate::journal::{JournalError, Lsn};

/// Why a namenode does not start, or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamenodeError {
    /// The data directory already holds a cluster.
    #[error("{} holds a cluster already: use another directory, or start the namenode on it", path.display())]
    AlreadyFormatted {
        /// The data directory.
        path: PathBuf,
    },
    /// The data directory holds no cluster.
    #[error(
        "{} holds no cluster: run `harvestfs init` for a new one; if there was one, its disk may \
         have been reformatted: restore the directory from a copy",
        path.display()
    )]
    NotFormatted {
        /// The data directory.
        path: PathBuf,
    },
    /// The file with the cluster's id is damaged.
    #[error("{} does not hold the id of a cluster (32 hexadecimal digits)", path.display())]
    BadClusterId {
        /// The file.
        path: PathBuf,
    },
    /// The journal belongs to another cluster than the data directory.
    #[error("the journal is of cluster {found}, but the data directory is of cluster {expected}")]
    WrongCluster {
        /// Cluster of the data directory.
        expected: ClusterId,
        /// Cluster of the journal.
        found: ClusterId,
    },
    /// The data directory cannot be used.
    #[error("cannot use {}: {source}", path.display())]
    DataDir {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// An option has an invalid value.
    #[error("{option} is {value}, but must be {accepted}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The value given.
        value: String,
        /// The values accepted.
        accepted: String,
    },
    /// The journal cannot be opened, or failed.
    #[error(transparent)]
    Journal(Arc<JournalError>),
    /// Another namenode was elected.
    #[error("another namenode leads from here on")]
    Deposed,
    /// The namenodes' consensus stopped.
    #[error("the namenodes' consensus stopped: {0}")]
    Consensus(String),
    /// A record of the journal is not an entry of the log.
    #[error("record {lsn} of the journal cannot be read: {source}")]
    Entry {
        /// The record.
        lsn: Lsn,
        /// Why.
        source: EntryError,
    },
    /// The keys of block tokens cannot be used.
    #[error(transparent)]
    TokenKeys(#[from] TokenKeyError),
    /// The snapshot cannot be read.
    #[error("the snapshot of record {lsn} cannot be used: {source}")]
    Snapshot {
        /// The last record that it covers.
        lsn: Lsn,
        /// Why.
        source: SnapshotError,
    },
    /// A record of the journal is not a command.
    #[error("record {lsn} of the journal cannot be read: {source}")]
    Record {
        /// The record.
        lsn: Lsn,
        /// Why.
        source: DecodeError,
    },
    /// A command in the journal that was once accepted is now refused.
    #[error(
        "record {lsn} of the journal is refused now, although it was accepted once: {source}; the \
         release that wrote it behaves otherwise: start that one"
    )]
    Replay {
        /// The record.
        lsn: Lsn,
        /// Why.
        source: FsError,
    },
    /// The cluster has a version that this program does not support.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The engine refused to make a cluster.
    #[error("cannot make a cluster: {0}")]
    Engine(FsError),
    /// This namenode was elected, but cannot do what a leader must do first.
    #[error("this namenode cannot lead: {0}")]
    TakeOver(FsError),
    /// The network cannot be used.
    #[error("cannot listen on {addr}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: TransportError,
    },
    /// The operating system refused a thread or a resource of the runtime.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The thread of the namenode panicked.
    #[error("the namenode failed: its thread panicked; the log says where")]
    Panicked,
}

impl NamenodeError {
    /// The error for a snapshot that cannot be read.
    pub(crate) fn of_snapshot(lsn: Lsn, source: SnapshotError) -> Self {
        match source {
            SnapshotError::Unfit(unfit) => Self::Unfit(unfit),
            source => Self::Snapshot { lsn, source },
        }
    }

    /// The error for a command of the journal that is refused.
    pub(crate) fn of_replay(lsn: Lsn, source: FsError) -> Self {
        match source {
            FsError::Unfit(unfit) => Self::Unfit(unfit),
            source => Self::Replay { lsn, source },
        }
    }
}

impl From<ConsensusError> for NamenodeError {
    fn from(error: ConsensusError) -> Self {
        match error {
            ConsensusError::Journal(error) => error.into(),
            ConsensusError::Deposed => Self::Deposed,
            ConsensusError::Stopped(why) => Self::Consensus(why),
        }
    }
}

impl From<JournalError> for NamenodeError {
    fn from(error: JournalError) -> Self {
        Self::Journal(Arc::new(error))
    }
}
