//! The translation of errors to errnos.

use fuser::Errno;
use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;

/// The errno for a failed operation. Errors that the user cannot have caused are logged here, once.
pub fn of(error: &ClientError) -> Errno {
    match error {
        ClientError::Fs(error) => of_fs(error),
        ClientError::NotOpenFor(_) => Errno::EBADF,
        // As for a read that the kernel must ask for again.
        ClientError::ChangesTooFast { .. }
        | ClientError::LeftFile { .. }
        | ClientError::Interrupted => Errno::EINTR,
        ClientError::Unreachable { .. } => {
            tracing::warn!(%error, "an operation failed");
            Errno::ETIMEDOUT
        }
        ClientError::AllReplicasBusy { .. }
        | ClientError::AllServersBusy { .. }
        | ClientError::Connect(_)
        | ClientError::NoReplica { .. }
        | ClientError::Write(_)
        | ClientError::DataLost { .. }
        | ClientError::TooFewReplicas { .. }
        | ClientError::TooMuchDirtyData { .. }
        | ClientError::UnexpectedReply(_)
        | ClientError::Closed => {
            tracing::warn!(%error, "an operation failed");
            Errno::EIO
        }
    }
}

/// The errno for an operation that the namenode, or a local check in its place, refused.
pub fn of_fs(error: &FsError) -> Errno {
    match error {
        FsError::NotFound => Errno::ENOENT,
        FsError::Exists => Errno::EEXIST,
        FsError::NotADirectory => Errno::ENOTDIR,
        FsError::IsADirectory => Errno::EISDIR,
        FsError::NotEmpty => Errno::ENOTEMPTY,
        FsError::PermissionDenied | FsError::RoleDenied(_) => Errno::EACCES,
        FsError::NotPermitted => Errno::EPERM,
        FsError::NameTooLong | FsError::TooDeep => Errno::ENAMETOOLONG,
        FsError::InvalidArgument(_) => Errno::EINVAL,
        FsError::TooManyLinks => Errno::EMLINK,
        FsError::FileTooLarge => Errno::EFBIG,
        FsError::NoAttribute => Errno::ENODATA,
        FsError::AttributeTooLarge => Errno::E2BIG,
        FsError::NotSupported(_) | FsError::ClusterVersion { .. } => Errno::EOPNOTSUPP,
        FsError::Stale => Errno::ESTALE,
        FsError::QuotaExceeded => Errno::EDQUOT,
        FsError::ReadOnly => Errno::EROFS,
        FsError::Recovery(_) => {
            tracing::warn!(%error, "an operation failed");
            Errno::EROFS
        }
        FsError::NoSpace => {
            tracing::warn!(%error, "an operation failed");
            Errno::ENOSPC
        }
        FsError::Busy { .. }
        | FsError::PeerLimit { .. }
        | FsError::InsufficientDiversity { .. }
        | FsError::TooFewDatanodes(_)
        | FsError::NotLeader { .. }
        | FsError::SessionExpired
        | FsError::Protocol(_)
        | FsError::Internal(_)
        | FsError::Unfit(_) => {
            tracing::warn!(%error, "an operation failed");
            Errno::EIO
        }
    }
}
