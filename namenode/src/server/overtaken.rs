//! Files that were changed while a session was missing that may have changed them before.
//!
//! A commit that was answered before it was durable may be forgotten in a crash, and its client replays it when it
//! comes back. Others wait for that ([`super::owner`], `deferred`), but no longer than a lease. Where they went on, what
//! is replayed would hide what they wrote and synced: it is refused.
//!
//! Pure. Memory is bounded: beyond [`FILES_MAX`] every file counts as changed.

use harvestfs_protocol::ids::{InodeId, SessionId};
use rustc_hash::{FxHashMap, FxHashSet};

/// Files that are remembered, of the minute in which sessions come back.
const FILES_MAX: usize = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Overtaken {
    /// Who changed the content; none: several sessions.
    changed: FxHashMap<InodeId, Option<SessionId>>,
    /// Nobody waited for these any more before this namenode led, and what was changed then is not known.
    missed: FxHashSet<SessionId>,
}

impl Overtaken {
    /// The lease of a session had run out before this namenode led.
    pub(crate) fn was_missed(&mut self, session: SessionId) {
        self.missed.insert(session);
    }

    /// A session has changed the content of files while another one is missing.
    pub(crate) fn changed(&mut self, author: SessionId, inodes: impl IntoIterator<Item = InodeId>) {
        for ino in inodes {
            let is_full = self.changed.len() >= FILES_MAX;
            match self.changed.get_mut(&ino) {
                Some(by) => *by = by.filter(|other| *other == author),
                None if is_full => {}
                None => {
                    self.changed.insert(ino, Some(author));
                }
            }
        }
    }

    /// No session is missing any more.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether another session may have changed the content of a file.
    pub(crate) fn is_changed_by_others(&self, session: SessionId, ino: InodeId) -> bool {
        match self.changed.get(&ino) {
            Some(by) => *by != Some(session),
            None => self.missed.contains(&session) || self.changed.len() >= FILES_MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);

    #[test]
    fn what_others_changed_is_overtaken_and_what_a_session_changed_itself_is_not() {
        let mut overtaken = Overtaken::default();
        let (own, of_other, of_both, untouched) = (InodeId(1), InodeId(2), InodeId(3), InodeId(4));
        overtaken.changed(A, [own, of_both]);
        overtaken.changed(B, [of_other, of_both]);
        overtaken.changed(A, [own, of_both]);
        let by_others = |ino| overtaken.is_changed_by_others(A, ino);
        assert_eq!(
            [own, of_other, of_both, untouched].map(by_others),
            [false, true, true, false]
        );
        overtaken.was_missed(A);
        assert!(overtaken.is_changed_by_others(A, untouched));
        assert!(!overtaken.is_changed_by_others(B, untouched));
        overtaken.clear();
        assert!(!overtaken.is_changed_by_others(A, of_other));
    }

    #[test]
    fn beyond_what_is_remembered_everything_counts_as_changed() {
        let mut overtaken = Overtaken::default();
        overtaken.changed(B, (0..=FILES_MAX as u64).map(InodeId));
        assert!(overtaken.changed.len() == FILES_MAX);
        assert!(overtaken.is_changed_by_others(A, InodeId(FILES_MAX as u64 + 7)));
        assert!(!overtaken.is_changed_by_others(B, InodeId(0)));
    }
}
