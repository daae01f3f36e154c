//! Classifies failures, and decides whether a command continues with its other paths.

use std::{fmt, io};

use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use rustix::io::Errno;

use super::Files;
use crate::output;

/// Something could not be done or shown, which has already been reported: exit status 1, without a message.
#[derive(Debug)]
pub(crate) struct Incomplete;

impl fmt::Display for Incomplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("something could not be done")
    }
}

impl std::error::Error for Incomplete {}

/// The message for a path that fails for a reason that may not apply to other paths.
#[derive(Debug)]
pub(super) struct OfItsPath(pub String);

impl fmt::Display for OfItsPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OfItsPath {}

impl Files {
    /// Reports what could not be done. The command continues, and fails at its end.
    pub(super) fn could_not(&self, error: &anyhow::Error) {
        output::complain(error);
        self.is_incomplete.set(true);
    }

    /// Reports a failure that concerns only one path, so that the command continues with the next.
    pub(super) fn or_next(&self, done: anyhow::Result<()>) -> anyhow::Result<()> {
        match done {
            Err(error) if is_of_its_path(&error) => {
                self.could_not(&error);
                Ok(())
            }
            done => done,
        }
    }

    /// Fails, at the end of a command, if it could not do everything.
    pub(super) fn all_is_done(&self) -> anyhow::Result<()> {
        if self.is_incomplete.get() {
            return Err(Incomplete.into());
        }
        Ok(())
    }
}

/// Whether an operation failed because its file does not exist, or no longer exists.
pub(super) fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(ClientError::is_gone)
}

/// Whether an operation failed because no namenode answers, so that the next request would not be answered soon either.
/// A refusal by datanodes does not imply that.
pub(super) fn is_unanswered(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::Unreachable { .. } | ClientError::Connect(_) | ClientError::Closed)
    )
}

/// Whether an operation failed for a reason that may not apply to other paths.
pub(super) fn is_of_its_path(error: &anyhow::Error) -> bool {
    if error.is::<OfItsPath>() {
        return true;
    }
    if let Some(reason) = refusal(error) {
        return matches!(
            reason,
            FsError::NotFound
                | FsError::Stale
                | FsError::Exists
                | FsError::NotADirectory
                | FsError::IsADirectory
                | FsError::NotEmpty
                | FsError::PermissionDenied
                | FsError::NotPermitted
                | FsError::NameTooLong
                | FsError::TooDeep
                | FsError::InvalidArgument(_)
                | FsError::TooManyLinks
                | FsError::QuotaExceeded
                | FsError::ReadOnly
        );
    }
    matches!(
        local_reason(error),
        Some(
            Errno::EXIST
                | Errno::ACCESS
                | Errno::PERM
                | Errno::ISDIR
                | Errno::NOTDIR
                | Errno::NAMETOOLONG
        )
    )
}

/// The reason for which the cluster refused an operation, or would have refused it.
fn refusal(error: &anyhow::Error) -> Option<&FsError> {
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Fs(reason)) => Some(reason),
        Some(_) => None,
        // An invalid name is refused before it is sent.
        None => error.downcast_ref::<FsError>(),
    }
}

/// The reason for which this machine refused an operation.
fn local_reason(error: &anyhow::Error) -> Option<Errno> {
    if let Some(errno) = error.downcast_ref::<Errno>() {
        return Some(*errno);
    }
    Errno::from_io_error(error.downcast_ref::<io::Error>()?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_fails_for_its_path_is_told_from_what_fails_for_all() {
        fn of_its_path(error: impl Into<anyhow::Error>) -> bool {
            let error: anyhow::Error = error.into();
            is_of_its_path(&error.context("d/f").context("cannot copy d"))
        }
        let refused = |reason: FsError| of_its_path(ClientError::Fs(reason));
        assert!(refused(FsError::NotFound));
        assert!(refused(FsError::PermissionDenied));
        assert!(refused(FsError::NameTooLong));
        assert!(refused(FsError::QuotaExceeded));
        assert!(!refused(FsError::NoSpace));
        assert!(!of_its_path(ClientError::Closed));
        // An invalid name is refused before it is sent.
        assert!(of_its_path(FsError::InvalidArgument("..".into())));
        assert!(of_its_path(OfItsPath("it exists".into())));
        assert!(of_its_path(Errno::ACCESS));
        assert!(of_its_path(io::Error::from(Errno::ISDIR)));
        assert!(!of_its_path(io::Error::from(Errno::NOSPC)));
        assert!(!of_its_path(anyhow::anyhow!("the time is over")));
    }

    #[test]
    fn a_namenode_that_refuses_answers_and_so_does_the_one_of_datanodes_that_do_not() {
        let unanswered = |error: ClientError| {
            let error = anyhow::Error::new(error).context("cannot make /f");
            is_unanswered(&error)
        };
        let waited = Duration::from_secs(60);
        let reason = "no route".into();
        assert!(unanswered(ClientError::Unreachable { waited, reason }));
        assert!(!unanswered(FsError::NoSpace.into()));
        assert!(!unanswered(ClientError::AllServersBusy { waited }));
    }
}
