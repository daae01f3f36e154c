//! A file is cut while there is data in memory that cannot be stored before.
//!
//! The namenode does it first: it may refuse, and then nothing must be lost. Until it has, no commit begins,
//! which could bring back afterwards what was cut off.

use harvestfs_protocol::types::Timestamp;

use super::DirtyFile;
use crate::error::ClientError;

impl DirtyFile {
    /// Whether commits are to wait until the file is cut.
    pub(crate) fn hold_commits(&mut self, hold: bool) {
        self.holds_commits = hold;
    }

    pub(crate) fn holds_commits(&self) -> bool {
        self.holds_commits
    }

    /// Whether a commit is in flight.
    fn is_committing(&self) -> bool {
        self.written.data.is_committing() || self.appended.data.is_committing()
    }

    /// Whether it is known what a cut leaves of the data in memory: where appends go is not, but before the end, nor
    /// whether they are in the file while their commit is not answered. None: a commit in flight will tell.
    pub(crate) fn may_be_cut(&self, size_bytes: u64) -> Option<bool> {
        if self.is_unanswered() {
            return Some(false);
        }
        (!self.is_committing()).then(|| size_bytes == 0 || !self.has_appends())
    }

    /// The namenode has cut the file, which gave it this modification time. What is in memory beyond is not
    /// part of it any more.
    pub(crate) fn cut(&mut self, size_bytes: u64, mtime: Timestamp) {
        self.cut_off(size_bytes);
        if self.held_bytes() > 0 {
            // The commit of the rest does not set it back.
            self.mtime = Some(mtime);
        }
    }

    /// Perhaps the namenode has cut the file, or does so yet: what would be cut off is given up for this reason.
    pub(crate) fn may_have_been_cut(&mut self, size_bytes: u64, reason: ClientError) {
        let before = self.held_bytes();
        self.cut_off(size_bytes);
        let bytes = before - self.held_bytes();
        if bytes > 0 {
            self.gave_up(bytes, reason);
        }
    }

    fn cut_off(&mut self, size_bytes: u64) {
        self.written.data.cut(size_bytes);
        if size_bytes == 0 {
            self.appended.data.discard();
        }
        if self.held_bytes() == 0 {
            self.emptied();
        }
    }
}
