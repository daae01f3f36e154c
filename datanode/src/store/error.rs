//! Errors of the block store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::ClusterId;

use super::layout;
use crate::engine::removal::sealing::Short;

/// When to retry a request for data on a silent disk.
const BUSY_RETRY_MS: u32 = 2_000;

/// Why a volume cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// It does not exist.
    #[error("{} is not there: is the disk mounted?", path.display())]
    Missing {
        /// The volume.
        path: PathBuf,
    },
    /// It holds something else.
    #[error("{} is not empty and not a volume of HarvestFS", path.display())]
    NotAVolume {
        /// The volume.
        path: PathBuf,
    },
    /// Its version file cannot be trusted.
    #[error("{} is corrupt: {reason}", path.display())]
    CorruptVersionFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// It was formatted by another release.
    #[error("{} has format version {found}, this release knows {known}", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        found: u32,
        /// The version that this release can read.
        known: u32,
    },
    /// It belongs to another server.
    #[error("{} belongs to server {found}, this is {expected}", path.display())]
    OtherServer {
        /// The volume.
        path: PathBuf,
        /// The one that it belongs to.
        found: String,
        /// The name of this server.
        expected: String,
    },
    /// It belongs to another cluster.
    #[error("{} belongs to cluster {found}, the namenode's is {expected}", path.display())]
    OtherCluster {
        /// The volume.
        path: PathBuf,
        /// The one that it belongs to.
        found: ClusterId,
        /// Which one this datanode is part of.
        expected: ClusterId,
    },
    /// It is a copy of another volume of this server, or the other one is a copy of it.
    #[error("{} and {} are the same volume: one directory is a copy of the other", path.display(), other.display())]
    Copy {
        /// The volume.
        path: PathBuf,
        /// The other one.
        other: PathBuf,
    },
    /// Its disk does not respond.
    #[error("the disk of {} does not answer", path.display())]
    Silent {
        /// The volume.
        path: PathBuf,
    },
    /// Opening it takes longer than the other volumes wait.
    #[error("{} is still being opened", path.display())]
    Opening {
        /// The volume.
        path: PathBuf,
    },
    /// Another process uses it.
    #[error("{} is in use by another process", path.display())]
    Locked {
        /// The volume.
        path: PathBuf,
    },
    /// The disk failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was accessed.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl VolumeError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| Self::Io {
            path: path.to_owned(),
            source,
        }
    }
}

/// Why an operation on a replica failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// No replica of the block is here.
    #[error("no replica of the block is here")]
    NoSuchReplica,
    /// The replica is shorter than the requested range.
    #[error("the replica holds {have_bytes} bytes only")]
    ShortReplica {
        /// Its length in bytes.
        have_bytes: u64,
    },
    /// The block already has a replica here.
    #[error("a replica of the block is here already")]
    ReplicaExists,
    /// Data and checksum differ.
    #[error("the checksum of the chunk at {offset} does not match")]
    Corrupt {
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// No room below the quota, or on the disk.
    #[error("no volume has room below its quota")]
    NoSpace,
    /// The operation does not fit the state of the replica.
    #[error("out of order: {0}")]
    OutOfOrder(String),
    /// A repair found no source that could be used.
    #[error("no source of the replica can be used")]
    NoSource,
    /// The disk failed.
    #[error("{what} {}: {source}", path.display())]
    Disk {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The volume's disk does not respond now. A job that was handed to it may still run.
    #[error("the disk of the volume {} does not answer", path.display())]
    Silent {
        /// The volume.
        path: PathBuf,
    },
    /// The primary tenant needs the server.
    #[error("the primary tenant needs this server")]
    Busy,
    /// The volume cannot be used.
    #[error("the volume {} is down: {reason}", path.display())]
    VolumeDown {
        /// The volume.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl StoreError {
    /// Wraps an error of the system; a full disk becomes [`StoreError::NoSpace`].
    pub(crate) fn disk(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace,
            _ => Self::Disk {
                what,
                path,
                source: Arc::new(source),
            },
        }
    }
}

impl StoreError {
    /// Whether the volume cannot be used now, with everything on it.
    pub(crate) fn is_of_volume(&self) -> bool {
        matches!(self, Self::Silent { .. } | Self::VolumeDown { .. })
    }

    /// Whether a file, or the directory in which it was to be created, does not exist.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Disk { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<Short> for StoreError {
    fn from(short: Short) -> Self {
        Self::ShortReplica {
            have_bytes: layout::chunk_bytes(short.have_chunks),
        }
    }
}

impl From<StoreError> for DataError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NoSuchReplica => Self::NoSuchReplica,
            StoreError::ShortReplica { have_bytes } => Self::ShortReplica { have_bytes },
            StoreError::ReplicaExists => Self::ReplicaExists,
            StoreError::Corrupt { offset } => Self::Corrupt { offset },
            StoreError::NoSpace => Self::NoSpace,
            StoreError::OutOfOrder(reason) => Self::OutOfOrder(reason),
            StoreError::NoSource => Self::NoSuchReplica,
            StoreError::Silent { .. } | StoreError::Busy => Self::Busy {
                retry_after_ms: BUSY_RETRY_MS,
            },
            StoreError::Disk { .. } | StoreError::VolumeDown { .. } => {
                Self::Disk(error.to_string())
            }
        }
    }
}
