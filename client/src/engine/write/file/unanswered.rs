//! Commits of appends that are unanswered for longer than operations wait for a namenode.
//!
//! They are sent again under their numbers. Until the outcome of one is known, or its session has ended,
//! none of its data may go into another commit, because it must not be in the file twice; and no later
//! append may overtake it. Flushes do not wait for that any longer than for everything else.

use std::time::Instant;

use super::{Commit, DirtyFile};
use crate::engine::write::writeback::Order;
use crate::error::ClientError;

impl DirtyFile {
    /// Whether the answer to a commit matters: its data was not given up meanwhile.
    pub(crate) fn awaits(&self, commit: &Commit) -> bool {
        let lane = match commit.order {
            Order::File => &self.written,
            Order::Append => &self.appended,
        };
        lane.data.committing() == Some(commit.first)
    }

    /// Notes that a commit of appends was not answered in time. The flushes that wait for it fail, even one
    /// that has just begun. Returns whether to continue with the commit: yes, unless its data was given up.
    pub(crate) fn commit_unanswered(
        &mut self,
        commit: &Commit,
        error: &ClientError,
        now: Instant,
    ) -> bool {
        if !self.awaits(commit) {
            return false;
        }
        self.unanswered = Some(commit.first);
        // Otherwise nothing was tried since the last failure.
        if self.is_wanted() {
            self.failed(error, now);
        }
        if self.awaits(commit) {
            // This is also for the case that something else has failed too often meanwhile.
            self.give_up_unseen(error);
        }
        self.awaits(commit)
    }

    /// Whether a commit that was not answered in time is still unanswered.
    pub(super) fn is_unanswered(&self) -> bool {
        self.unanswered.is_some() && self.unanswered == self.appended.data.committing()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use harvestfs_protocol::error::FsError;
    use harvestfs_protocol::request_id::RequestId;
    use harvestfs_protocol::types::Credentials;

    use super::*;
    use crate::engine::session::call::Unanswered;
    use crate::engine::write::file::FAILURES_UNSEEN_MAX;
    use crate::engine::write::file::tests::{moment, opened, write_sent};
    use crate::testing::some_time;

    fn away() -> ClientError {
        ClientError::Unreachable {
            waited: Duration::from_secs(60),
            reason: "away".into(),
        }
    }

    fn append(file: &mut DirtyFile, bytes: usize) {
        file.append(vec![1; bytes].into(), &Credentials::root(), moment());
    }

    /// Sends what a flush waits for to datanodes, and begins the commit that is then possible.
    fn send(file: &mut DirtyFile) -> Option<Commit> {
        let begun = file.advance(false, RequestId::NONE);
        write_sent(file, begun.sends);
        let written = file.advance(false, RequestId::NONE);
        begun.commits.into_iter().chain(written.commits).next()
    }

    fn length_bytes(commit: &Commit) -> u64 {
        let extents = commit.commit.extents.iter();
        extents.map(|extent| extent.length_bytes).sum()
    }

    #[test]
    fn flushes_fail_while_an_append_is_not_answered_and_learn_of_it_later() {
        for is_executed in [true, false] {
            let mut file = opened();
            append(&mut file, 10);
            let first = file.begin_flush(false, RequestId::NONE);
            let commit = send(&mut file).expect("it is written");
            append(&mut file, 20);
            file.commit_unanswered(&commit, &away(), some_time());
            assert_eq!(file.flushed(&first), Some(Err(away())));
            assert_eq!((file.losses().0, file.held_bytes()), (0, 30));

            let second = file.begin_flush(false, RequestId::NONE);
            assert!(send(&mut file).is_none(), "one would overtake the other");
            assert_eq!(file.flushed(&second), None);
            file.commit_unanswered(&commit, &away(), some_time());
            assert_eq!(file.flushed(&second), Some(Err(away())));
            assert_eq!(file.may_be_cut(0), Some(false), "it may be in the file");

            let third = file.begin_flush(false, RequestId::NONE);
            assert!(file.awaits(&commit));
            let expected = if is_executed {
                file.commit_done(Order::Append);
                20
            } else {
                let refused = Unanswered::refused(away());
                file.commit_failed(Order::Append, &refused, RequestId::NONE, some_time());
                file.begin_flush(false, RequestId::NONE);
                30
            };
            let rest = send(&mut file).expect("it is written");
            assert_eq!(length_bytes(&rest), expected);
            file.commit_done(Order::Append);
            assert_eq!(file.flushed(&third), Some(Ok(())));
            assert_eq!(file.may_be_cut(0), Some(true));
        }
    }

    #[test]
    fn an_answer_says_nothing_of_what_was_appended_after_its_commit_was_given_up() {
        let mut file = opened();
        append(&mut file, 10);
        file.begin_flush(false, RequestId::NONE);
        let given_up = send(&mut file).expect("it is written");
        assert!(file.handle_closed());
        for failure in 1..=FAILURES_UNSEEN_MAX {
            file.want_all(RequestId::NONE);
            let goes_on = file.commit_unanswered(&given_up, &away(), some_time());
            assert_eq!(goes_on, failure < FAILURES_UNSEEN_MAX);
            assert_eq!(goes_on, file.awaits(&given_up));
        }
        assert_eq!((file.losses().0 > 0, file.held_bytes()), (true, 0));
        file.handle_opened();
        append(&mut file, 20);
        file.begin_flush(false, RequestId::NONE);
        let next = send(&mut file).expect("it is written");
        assert!(file.awaits(&next) && !file.awaits(&given_up));
    }

    #[test]
    fn a_closed_file_keeps_what_no_flush_has_tried_again() {
        let mut file = opened();
        append(&mut file, 10);
        file.begin_flush(false, RequestId::NONE);
        let commit = send(&mut file).expect("it is written");
        assert!(file.handle_closed());
        for _ in 0..2 * FAILURES_UNSEEN_MAX {
            assert!(file.commit_unanswered(&commit, &away(), some_time()));
        }
        assert_eq!((file.losses().0, file.held_bytes()), (0, 10));
        let now = some_time();
        assert!(file.is_dirty_for(Duration::ZERO, now), "nobody will try");
    }

    /// Otherwise it would be executed after its program had received the loss.
    #[test]
    fn what_a_commit_has_is_given_up_only_when_that_can_leave_it_out() {
        let mut file = opened();
        append(&mut file, 10);
        file.begin_flush(false, RequestId::NONE);
        let commit = send(&mut file).expect("it is written");
        append(&mut file, 20);
        assert!(file.handle_closed());
        for _ in 0..FAILURES_UNSEEN_MAX {
            file.want_all(RequestId::NONE);
            let sends = file.advance(false, RequestId::NONE).sends;
            let pieces: Vec<_> = sends
                .iter()
                .flat_map(|send| send.pieces.iter().map(|piece| (send.order, piece.id)))
                .collect();
            file.pieces_failed(&pieces, &away(), some_time());
        }
        assert!(file.awaits(&commit));
        assert_eq!((file.losses().0, file.held_bytes()), (0, 30));
        assert!(!file.commit_unanswered(&commit, &away(), some_time()));
        assert_eq!((file.losses().0 > 0, file.held_bytes()), (true, 0));
    }

    #[test]
    fn a_closed_file_keeps_what_a_namenode_in_recovery_refuses() {
        let mut file = opened();
        append(&mut file, 10);
        assert!(file.handle_closed());
        let refused = Unanswered::refused(FsError::Recovery("put back".into()));
        for _ in 0..2 * FAILURES_UNSEEN_MAX {
            file.want_all(RequestId::NONE);
            assert!(send(&mut file).is_some());
            file.commit_failed(Order::Append, &refused, RequestId::NONE, some_time());
        }
        assert_eq!((file.losses().0, file.held_bytes()), (0, 10));
    }

    #[test]
    fn an_append_is_given_up_when_its_session_ends_without_an_answer() {
        let mut file = opened();
        append(&mut file, 10);
        file.begin_flush(false, RequestId::NONE);
        let commit = send(&mut file).expect("it is written");
        file.commit_unanswered(&commit, &away(), some_time());
        let expired = Unanswered::unknown(FsError::SessionExpired.into());
        file.commit_failed(Order::Append, &expired, RequestId::NONE, some_time());
        let (losses, loss) = file.losses();
        assert!(losses == 1 && matches!(loss, Some(ClientError::DataLost { .. })));
        assert_eq!(file.held_bytes(), 0);
    }
}
