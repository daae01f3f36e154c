//! What fails, and whether the rest is done.

use std::fmt;

use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;

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
fn is_of_its_path(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::Fs(
            FsError::NotFound
                | FsError::Stale
                | FsError::Exists
                | FsError::NotADirectory
                | FsError::IsADirectory
                | FsError::NotEmpty
                | FsError::PermissionDenied
                | FsError::NotPermitted
                | FsError::ReadOnly
        ))
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_fails_for_its_path_is_told_from_what_fails_for_all() {
        let of_its_path = |error: ClientError| {
            let error = anyhow::Error::new(error).context("/f");
            is_of_its_path(&error)
        };
        assert!(of_its_path(FsError::NotFound.into()));
        assert!(of_its_path(FsError::PermissionDenied.into()));
        assert!(!of_its_path(FsError::NoSpace.into()));
        assert!(!of_its_path(ClientError::Closed));
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
