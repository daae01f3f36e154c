//! Errors as they travel on the wire. Each part converts its own errors into these once, at its
//! edge; the mount converts them into errno once, at its edge.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::outlook::Shortage;
use crate::version::{Unfit, Version};

/// Why a metadata operation was refused. The comment names the errno it becomes at the mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FsError {
    /// `ENOENT`
    #[error("no such file or directory")]
    NotFound,
    /// `EEXIST`
    #[error("the file exists")]
    Exists,
    /// `ENOTDIR`
    #[error("not a directory")]
    NotADirectory,
    /// `EISDIR`
    #[error("is a directory")]
    IsADirectory,
    /// `ENOTEMPTY`
    #[error("the directory is not empty")]
    NotEmpty,
    /// `EACCES`: the mode bits deny it.
    #[error("permission denied")]
    PermissionDenied,
    /// `EPERM`: only the owner or root may do it.
    #[error("operation not permitted")]
    NotPermitted,
    /// `ENAMETOOLONG`
    #[error("the name is longer than 255 bytes")]
    NameTooLong,
    /// `ENAMETOOLONG`
    #[error("the directory would be too deep")]
    TooDeep,
    /// `EINVAL`
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// `EMLINK`
    #[error("too many links")]
    TooManyLinks,
    /// `EFBIG`
    #[error("the file would be too large")]
    FileTooLarge,
    /// `ENODATA`
    #[error("no such extended attribute")]
    NoAttribute,
    /// `E2BIG`
    #[error("the extended attribute is too large")]
    AttributeTooLarge,
    /// `EOPNOTSUPP`
    #[error("not supported: {0}")]
    NotSupported(String),
    /// `ESTALE`: the inode no longer exists, or the name now refers to another one; look it up again.
    #[error("stale file handle")]
    Stale,
    /// `ENOSPC`: no datanode has space left.
    #[error("no space is left on the datanodes")]
    NoSpace,
    /// `EIO`: the servers that have space left cannot keep the replicas as far apart as the file demands.
    #[error(
        "the servers that have room cannot keep replicas apart: {wanted} wanted, {placeable} can be \
         placed"
    )]
    InsufficientDiversity {
        /// Replicas wanted.
        wanted: u8,
        /// Replicas for which a server was found.
        placeable: u8,
    },
    /// `EAGAIN` from the API, `EIO` at the mount once its busy timeout is over.
    #[error("busy: try again in {retry_after_ms} ms")]
    Busy {
        /// When to try again.
        retry_after_ms: u32,
    },
    /// `EIO`: the session is unknown or was ended; its uncommitted data is lost.
    #[error("the session has expired")]
    SessionExpired,
    /// `EACCES`: this peer's certificate does not allow the request.
    #[error("this certificate does not allow the request: {0}")]
    RoleDenied(String),
    /// `EIO`: the peer sent something that this version does not accept.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// `EIO`: the namenode failed; the message is meant for the reader of the log.
    #[error("namenode error: {0}")]
    Internal(String),
    /// `EDQUOT`: a directory's quota of bytes or of files would be exceeded.
    #[error("the quota of a directory is used up")]
    QuotaExceeded,
    /// `EROFS`
    #[error("it is a part of a snapshot, which nothing changes")]
    ReadOnly,
    /// `EROFS`: the namenode lacks records that others know, and so it is in recovery and changes nothing, or
    /// it refuses a datanode. The message describes what it lacks.
    #[error("{0}")]
    Recovery(String),
    /// `EIO`: this peer has reached its limit of some resource. Other peers are not affected.
    #[error("one peer has at most {max} {what}")]
    PeerLimit {
        /// The resource.
        what: String,
        /// The limit.
        max: u32,
    },
    /// `EIO`: datanodes that a new block needs are temporarily unavailable; a write waits for them before it
    /// fails.
    #[error("{0}")]
    TooFewDatanodes(Shortage),
    /// `EIO`: another namenode leads, or currently none does. Clients ask that one, or all in turn, until their
    /// deadline.
    #[error("this namenode does not lead{}", leader.map(|it| format!("; ask the one at {it}")).unwrap_or_default())]
    NotLeader {
        /// The address of the namenode that leads, or that may know the leader, if known.
        leader: Option<SocketAddr>,
    },
    /// `EOPNOTSUPP`: the operation exists since a version that the cluster does not have yet.
    #[error(
        "it exists since version {since}, and the cluster has version {cluster}: upgrade all parts, then \
         run `harvestfs admin upgrade finish`"
    )]
    ClusterVersion {
        /// Since when.
        since: Version,
        /// The cluster's.
        cluster: Version,
    },
    /// `EIO`: the program cannot be a part of the cluster.
    #[error(transparent)]
    Unfit(Unfit),
}

/// Why a datanode refused or ended a block stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum DataError {
    /// The primary tenant needs the server.
    #[error("busy: try again in {retry_after_ms} ms")]
    Busy {
        /// When to try again.
        retry_after_ms: u32,
    },
    /// No replica of the block is here.
    #[error("no replica of the block is here")]
    NoSuchReplica,
    /// The replica is shorter than the range asked for.
    #[error("the replica holds {have_bytes} bytes only")]
    ShortReplica {
        /// Bytes that the replica holds.
        have_bytes: u64,
    },
    /// A replica of the block exists already.
    #[error("a replica of the block is here already")]
    ReplicaExists,
    /// A chunk's checksum does not match its data.
    #[error("the checksum of the chunk at {offset} does not match")]
    Corrupt {
        /// Where in the block.
        offset: u64,
    },
    /// The token is forged, or for another block or right.
    #[error("the block token is not valid: {0}")]
    BadToken(String),
    /// The token was valid once.
    #[error("the block token has expired")]
    TokenExpired,
    /// No volume has room below its quota.
    #[error("no volume has room below its quota")]
    NoSpace,
    /// The request does not fit the state of the replica.
    #[error("out of order: {0}")]
    OutOfOrder(String),
    /// The disk failed.
    #[error("disk error: {0}")]
    Disk(String),
    /// A datanode further down the pipeline failed.
    #[error("the next datanode of the pipeline failed: {0}")]
    Downstream(String),
    /// The datanode is stopping.
    #[error("the datanode is stopping")]
    Stopping,
    /// The peer sent something that this version does not accept.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// This peer has as many streams at this datanode as one may have.
    #[error("one peer has at most {max} block streams")]
    TooManyStreams {
        /// The most.
        max: u32,
    },
}
