//! Truncating a file while data in memory cannot be stored first.
//!
//! The namenode truncates first: it may refuse, and then nothing must be lost. Until it has, no
//! commit begins, because a commit could bring back data that was cut off.

use harvestfs_protocol::types::Timestamp;

use super::DirtyFile;
use crate::error::ClientError;

impl DirtyFile {
    /// Sets whether commits have to wait until the file is truncated.
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

    /// Whether it is known which data in memory a truncation leaves. It is not for appends: their
    /// offset is unknown unless the new size is 0, and while their commit is unanswered, so is
    /// whether they are in the file. `None`: a commit in flight will decide.
    pub(crate) fn may_be_cut(&self, size_bytes: u64) -> Option<bool> {
        if self.is_unanswered() {
            return Some(false);
        }
        (!self.is_committing()).then(|| size_bytes == 0 || !self.has_appends())
    }

    /// Notes that the namenode has truncated the file, and gave it this modification time. Data in
    /// memory beyond the new end is no longer part of it.
    pub(crate) fn cut(&mut self, size_bytes: u64, mtime: Timestamp) {
        self.cut_off(size_bytes);
        if self.held_bytes() > 0 {
            // The commit of the remaining data must not set it back.
            self.mtime = Some(mtime);
        }
    }

    /// Notes that the namenode may have truncated the file, or may yet: data that would be cut off is given up.
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
