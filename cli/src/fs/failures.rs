//! What fails, and whether the rest is done.

use std::{fmt, io};

use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use rustix::io::Errno;

use super::Files;
use crate::output;

/// Something could not be done or shown, which was said: exit status 1, and nothing more to say.
#[derive(Debug)]
pub(crate) struct Incomplete;

impl fmt::Display for Incomplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("something could not be done")
    }
}

impl std::error::Error for Incomplete {}

/// What is said of a path that fails, for a reason that other paths need not share.
#[derive(Debug)]
pub(super) struct OfItsPath(pub String);

impl fmt::Display for OfItsPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OfItsPath {}

impl Files {
    /// Says what could not be done. The command goes on, and fails at its end.
    pub(super) fn could_not(&self, error: &anyhow::Error) {
        output::complain(error);
        self.is_incomplete.set(true);
    }

    /// Goes on behind a path that failed for a reason of its own, which is said.
    pub(super) fn or_next(&self, done: anyhow::Result<()>) -> anyhow::Result<()> {
        match done {
            Err(error) if is_of_its_path(&error) => {
                self.could_not(&error);
                Ok(())
            }
            done => done,
        }
    }

    /// At the end of a command: whether it could do everything.
    pub(super) fn all_is_done(&self) -> anyhow::Result<()> {
        if self.is_incomplete.get() {
            return Err(Incomplete.into());
        }
        Ok(())
    }
}

/// Whether it failed since what it was about is not there, or not any more.
pub(super) fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(ClientError::is_gone)
}

/// Whether it failed since no namenode answers: none will answer the next question soon. Datanodes may refuse something
/// though one does.
pub(super) fn is_unanswered(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::Unreachable { .. } | ClientError::Connect(_) | ClientError::Closed)
    )
}

/// Whether it failed for a reason that other paths need not share.
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

/// What the cluster refused it with, or would have.
fn refusal(error: &anyhow::Error) -> Option<&FsError> {
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Fs(reason)) => Some(reason),
        Some(_) => None,
        // A name may be one that nothing can have.
        None => error.downcast_ref::<FsError>(),
    }
}

/// What this machine refused it with.
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
        // What is no name is refused before it is sent.
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
