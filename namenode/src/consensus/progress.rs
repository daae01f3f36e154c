//! How far the log is committed, and how far the engine has executed it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use harvestfs_protocol::planted::{self, Bug};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{LogId, Term};
use crate::journal::Lsn;

/// The last entry that is committed.
#[derive(Debug, Default)]
struct Newest {
    lsn: Lsn,
    term: Term,
    /// The term in which this member leads, and has executed entries that are not committed.
    led: Option<Term>,
}

impl Newest {
    /// Whether another leader committed it: what is committed in place of this member's entries says nothing about
    /// these.
    fn is_of_successor(&self, term: Term) -> bool {
        self.led.is_some_and(|led| term > led)
    }
}

/// How far the log is committed.
#[derive(Debug, Default)]
pub struct Commits {
    committed: Mutex<Newest>,
    durable: AtomicU64,
    /// This member is the only voter: what is durable is committed.
    is_sole_voter: AtomicBool,
    /// Entries in the log that name other voters, in order: those that may still be removed, and the last one that
    /// may not.
    others_named: Mutex<Vec<Lsn>>,
    changed: Notify,
    ended: AtomicBool,
    /// The newest commit that the leader has reported. It may be beyond what this member has.
    of_leader: AtomicU64,
    /// When this member last heard from the leader.
    leader_heard: Mutex<Option<Instant>>,
}

impl Commits {
    /// The last record that is committed. For a member that leads, what its successor commits does not count.
    pub fn last(&self) -> Lsn {
        if self.is_alone() || planted::is(Bug::AnswersWhatIsDurableHere) {
            self.durable.load(Ordering::Acquire)
        } else {
            self.committed.lock().lsn
        }
    }

    /// Notes that this member leads in a term from here on, and executes what follows the entry `after` before it is
    /// committed.
    pub fn lead(&self, term: Term, after: Lsn) {
        let mut newest = self.committed.lock();
        newest.led = Some(term);
        if newest.is_of_successor(newest.term) {
            newest.lsn = newest.lsn.min(after);
        }
    }

    /// The last record that the leader is known to have committed.
    pub fn of_leader(&self) -> Lsn {
        self.of_leader.load(Ordering::Acquire).max(self.last())
    }

    /// Notes how far the leader reports to have committed.
    pub(super) fn leader_has(&self, lsn: Lsn) {
        self.of_leader.fetch_max(lsn, Ordering::AcqRel);
    }

    /// Whether anything of the leader of a term is committed.
    pub(super) fn is_led_in(&self, term: Term) -> bool {
        self.committed.lock().term == term
    }

    /// Notes when this member heard from the leader that it follows.
    pub(super) fn leader_heard(&self, at: Instant) {
        *self.leader_heard.lock() = Some(at);
    }

    /// How long ago the leader was last heard. A member believes in a failed leader until there is another one.
    pub fn leader_silent_for(&self) -> Duration {
        let heard = *self.leader_heard.lock();
        heard.map_or(Duration::MAX, |at| at.elapsed())
    }

    /// Waits until more is committed, or the consensus has ended. Supports one waiter at a time.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Sets whether this member is the only voter, as of a committed entry. If a later entry names other voters,
    /// these have to agree already.
    pub(super) fn set_alone(&self, is_sole_voter: bool, as_of: Lsn) {
        {
            let mut others_named = self.others_named.lock();
            let committed = others_named.partition_point(|&lsn| lsn <= as_of);
            others_named.drain(..committed.saturating_sub(1));
            let is_last = others_named.last().is_none_or(|&last| as_of >= last);
            self.is_sole_voter
                .store(is_sole_voter && is_last, Ordering::Release);
        }
        self.changed.notify_one();
    }

    /// Notes an entry in the log that names other voters: from here on they have to agree, before it is committed or
    /// durable.
    pub(super) fn others_named(&self, lsn: Lsn) {
        {
            let mut others_named = self.others_named.lock();
            others_named.push(lsn);
            self.is_sole_voter.store(false, Ordering::Release);
        }
        self.changed.notify_one();
    }

    /// Whether this member is the only voter.
    pub fn is_alone(&self) -> bool {
        self.is_sole_voter.load(Ordering::Acquire)
    }

    /// Whether nothing more will be committed.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Notes that the journal is durable up to there, or failed.
    pub(super) fn progress(&self, durable: Option<Lsn>) {
        match durable {
            Some(durable) => self.durable.store(durable, Ordering::Release),
            None => self.ended.store(true, Ordering::Release),
        }
        self.changed.notify_one();
    }

    /// Notes that all entries after `lsn` were removed.
    pub(super) fn removed_after(&self, lsn: Lsn) {
        let committed = self.committed.lock().lsn;
        assert!(
            committed <= lsn,
            "record {committed} is committed, and all after {lsn} are removed"
        );
        self.durable.fetch_min(lsn, Ordering::AcqRel);
        // An entry that remains still has to be taken into account.
        self.others_named.lock().retain(|&named| named <= lsn);
    }

    pub(super) fn committed(&self, entry: LogId) {
        {
            let mut newest = self.committed.lock();
            let term = entry.committed_leader_id().term;
            if newest.is_of_successor(term) {
                return;
            }
            newest.lsn = newest.lsn.max(entry.index());
            newest.term = newest.term.max(term);
        }
        if !self.is_alone() {
            self.changed.notify_one();
        }
    }
}

/// Which part of the log the engine has. A standby has what is committed, and what was in its journal when it
/// started; a leader also has what is not committed yet.
#[derive(Debug)]
pub(super) struct Executed {
    last: AtomicU64,
    /// The last committed entry that openraft has read back, after it removed those in whose place others are
    /// committed.
    applied: AtomicU64,
    /// Another leader replaced part of it: the engine differs from the log.
    is_replaced: AtomicBool,
}

impl Executed {
    /// The engine has everything up to `last`, and everything up to `applied` is committed.
    pub(super) fn new(last: Lsn, applied: Lsn) -> Self {
        Self {
            last: AtomicU64::new(last),
            applied: AtomicU64::new(applied),
            is_replaced: AtomicBool::new(false),
        }
    }

    pub(super) fn last(&self) -> Lsn {
        self.last.load(Ordering::Acquire)
    }

    pub(super) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Acquire)
    }

    /// Notes that the engine has to be rebuilt.
    pub(super) fn replaced(&self) {
        self.is_replaced.store(true, Ordering::Release);
    }

    pub(super) fn up_to(&self, lsn: Lsn) {
        self.last.fetch_max(lsn, Ordering::AcqRel);
    }

    pub(super) fn applied(&self, lsn: Lsn) {
        self.applied.store(lsn, Ordering::Release);
    }

    /// Whether what the engine has up to an entry is certainly what is committed: other entries may be committed in
    /// its place before it is removed.
    pub(super) fn is_committed(&self, lsn: Lsn) -> bool {
        self.applied.load(Ordering::Acquire) >= lsn && !self.is_replaced()
    }

    /// Notes that the entries after this one were removed.
    pub(super) fn removed_after(&self, lsn: Lsn) {
        if lsn < self.last() && !planted::is(Bug::KeepsWhatWasReplaced) {
            self.replaced();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::entry::log_id;

    /// As on a standby that started with entries which only it has.
    #[test]
    fn what_the_engine_has_is_committed_when_it_was_applied_and_not_replaced() {
        let executed = Executed::new(7, 5);
        assert!(executed.is_committed(5), "a snapshot");
        assert!(!executed.is_committed(6));
        executed.applied(6);
        assert!(executed.is_committed(6));
        assert!(!executed.is_committed(7));
        executed.removed_after(6);
        executed.applied(9);
        assert!(!executed.is_committed(7));
    }

    /// After a start entries are applied again, and the one that names others may not be committed yet.
    #[test]
    fn a_member_is_not_alone_again_as_of_an_entry_before_the_one_that_names_others() {
        let commits = Commits::default();
        commits.set_alone(true, 3);
        assert!(commits.is_alone());
        commits.others_named(7);
        assert!(!commits.is_alone());
        commits.set_alone(true, 5);
        assert!(!commits.is_alone());
        // A later one names this member alone, or that one never counted.
        commits.set_alone(true, 9);
        assert!(commits.is_alone());
        commits.others_named(12);
        commits.removed_after(11);
        assert!(!commits.is_alone());
        commits.set_alone(true, 9);
        assert!(commits.is_alone());
    }

    #[test]
    fn of_the_entries_that_name_others_those_that_are_left_count_when_later_ones_are_removed() {
        let commits = Commits::default();
        commits.set_alone(true, 3);
        for lsn in [7, 12, 14] {
            commits.others_named(lsn);
        }
        commits.removed_after(13);
        commits.removed_after(11);
        commits.set_alone(true, 5);
        assert!(!commits.is_alone(), "the one before is there");
        commits.set_alone(true, 9);
        assert!(commits.is_alone());
        // Entries are applied again after a start.
        commits.others_named(15);
        commits.set_alone(false, 15);
        commits.set_alone(true, 9);
        assert!(!commits.is_alone(), "it is committed");
        commits.set_alone(true, 16);
        assert!(commits.is_alone());
    }

    /// A leader that was cut off learns of its successor: other records with the same numbers are committed.
    #[test]
    fn what_a_successor_commits_says_nothing_of_what_was_executed_before() {
        let commits = Commits::default();
        commits.committed(log_id(2, 5));
        commits.lead(2, 5);
        commits.committed(log_id(2, 7));
        assert_eq!(commits.last(), 7);
        commits.committed(log_id(3, 9));
        assert_eq!(commits.last(), 7);
    }

    #[test]
    fn a_successor_may_commit_before_this_member_knows_that_it_led() {
        let commits = Commits::default();
        commits.committed(log_id(2, 5));
        commits.committed(log_id(3, 9));
        assert_eq!(commits.last(), 9, "a standby follows");
        commits.lead(2, 5);
        assert_eq!(commits.last(), 5);
        commits.committed(log_id(3, 10));
        assert_eq!(commits.last(), 5);
    }

    #[test]
    fn a_leader_counts_what_those_before_it_left() {
        let commits = Commits::default();
        commits.lead(4, 5);
        commits.committed(log_id(2, 4));
        assert_eq!(commits.last(), 4);
        commits.committed(log_id(4, 6));
        assert_eq!(commits.last(), 6);
    }
}
