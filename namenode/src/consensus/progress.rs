//! How far the log is committed, and how far the engine has executed it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use harvestfs_protocol::planted::{self, Bug};
use tokio::sync::Notify;

use crate::journal::Lsn;

/// How far the log is committed.
#[derive(Debug, Default)]
pub struct Commits {
    committed: AtomicU64,
    durable: AtomicU64,
    /// This member is the only voter: what is durable is committed.
    is_sole_voter: AtomicBool,
    changed: Notify,
    ended: AtomicBool,
    /// What the leader said last that it has committed. It may be more than this member has.
    of_leader: AtomicU64,
}

impl Commits {
    /// The last record that is committed.
    pub fn last(&self) -> Lsn {
        let last = if self.is_alone() || planted::is(Bug::AnswersWhatIsDurableHere) {
            &self.durable
        } else {
            &self.committed
        };
        last.load(Ordering::Acquire)
    }

    /// The last record that the leader is known to have committed.
    pub fn of_leader(&self) -> Lsn {
        self.of_leader.load(Ordering::Acquire).max(self.last())
    }

    /// The leader says that it has committed so much.
    pub(super) fn leader_has(&self, lsn: Lsn) {
        self.of_leader.fetch_max(lsn, Ordering::AcqRel);
    }

    /// Waits until more is, or the consensus ended. One waits at a time.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn set_alone(&self, is_sole_voter: bool) {
        self.is_sole_voter.store(is_sole_voter, Ordering::Release);
        self.changed.notify_one();
    }

    /// This member is the only voter.
    pub fn is_alone(&self) -> bool {
        self.is_sole_voter.load(Ordering::Acquire)
    }

    /// Nothing more will be committed.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The journal is durable up to there, or failed.
    pub(super) fn progress(&self, durable: Option<Lsn>) {
        match durable {
            Some(durable) => self.durable.store(durable, Ordering::Release),
            None => self.ended.store(true, Ordering::Release),
        }
        self.changed.notify_one();
    }

    /// Entries were removed: those up to there are left.
    pub(super) fn removed_after(&self, lsn: Lsn) {
        let committed = self.committed.load(Ordering::Acquire);
        assert!(
            committed <= lsn,
            "record {committed} is committed, and all after {lsn} are removed"
        );
        self.durable.fetch_min(lsn, Ordering::AcqRel);
    }

    pub(super) fn committed(&self, lsn: Lsn) {
        self.committed.fetch_max(lsn, Ordering::AcqRel);
        if !self.is_alone() {
            self.changed.notify_one();
        }
    }
}

/// What the engine has of the log: a standby what is committed, and what was in the journal when it started; a leader
/// also what is not committed yet.
#[derive(Debug)]
pub(super) struct Executed {
    last: AtomicU64,
    /// Another leader replaced some of it: what the engine has is not what the log says.
    is_replaced: AtomicBool,
}

impl Executed {
    pub(super) fn new(last: Lsn) -> Self {
        Self {
            last: AtomicU64::new(last),
            is_replaced: AtomicBool::new(false),
        }
    }

    pub(super) fn last(&self) -> Lsn {
        self.last.load(Ordering::Acquire)
    }

    pub(super) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Acquire)
    }

    /// The engine has to be built anew.
    pub(super) fn replaced(&self) {
        self.is_replaced.store(true, Ordering::Release);
    }

    pub(super) fn up_to(&self, lsn: Lsn) {
        self.last.fetch_max(lsn, Ordering::AcqRel);
    }

    /// The entries after this one are gone.
    pub(super) fn removed_after(&self, lsn: Lsn) {
        if lsn < self.last() && !planted::is(Bug::KeepsWhatWasReplaced) {
            self.replaced();
        }
    }
}
