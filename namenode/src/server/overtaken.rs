//! Files that were changed while a session that may have changed them before was missing.
//!
//! A commit that was answered before it was durable may be lost in a crash, and its client replays it when it comes
//! back. Other sessions wait for that ([`super::owner`], `deferred`), but no longer than a lease. If they have
//! continued without it, a replay would hide what they wrote and synced: it is refused.
//!
//! The code is pure. Memory is bounded: beyond [`FILES_MAX`] every file counts as changed.

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::meta::Mutation;
use harvestfs_protocol::meta::mutation::{Awaits, SetAttr};
use rustc_hash::{FxHashMap, FxHashSet};

/// Maximum number of files that are remembered, for the minute in which sessions come back.
const FILES_MAX: usize = 1 << 20;

/// A part of a file that can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Content,
    Attributes,
}

impl Part {
    pub(crate) const ALL: [Self; 2] = [Self::Content, Self::Attributes];

    /// The parts that a mutation changes of files that a missing session may have changed before.
    pub(crate) fn changed_by(mutation: &Mutation) -> &'static [Self] {
        match (mutation.facts().awaits, mutation) {
            (Awaits::Files(_), Mutation::SetAttr(SetAttr { changes, .. })) => {
                match changes.size_bytes {
                    Some(_) => &Self::ALL,
                    None => &[Self::Attributes],
                }
            }
            (Awaits::Files(_), _) => &[Self::Content],
            (Awaits::Nothing | Awaits::Entry(_) | Awaits::Below(_), _) => &[],
        }
    }
}

/// The files that were changed while sessions were missing.
#[derive(Debug, Default)]
pub(crate) struct Overtaken {
    /// The session that changed each part; `None` for several sessions.
    changed: FxHashMap<(InodeId, Part), Option<SessionId>>,
    /// Sessions that nobody waited for any more before this namenode led: what was changed then is not known.
    missed: FxHashSet<SessionId>,
}

impl Overtaken {
    /// Notes that the lease of a session had run out before this namenode led.
    pub(crate) fn was_missed(&mut self, session: SessionId) {
        self.missed.insert(session);
    }

    /// Notes that a session has changed a part of files while another one is missing.
    pub(crate) fn changed(
        &mut self,
        author: SessionId,
        part: Part,
        inodes: impl IntoIterator<Item = InodeId>,
    ) {
        for ino in inodes {
            let is_full = self.changed.len() >= FILES_MAX;
            match self.changed.get_mut(&(ino, part)) {
                Some(by) => *by = by.filter(|other| *other == author),
                None if is_full => {}
                None => {
                    self.changed.insert((ino, part), Some(author));
                }
            }
        }
    }

    /// Forgets everything: no session is missing any more.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether another session may have changed a part of a file.
    pub(crate) fn is_changed_by_others(&self, session: SessionId, of: (InodeId, Part)) -> bool {
        match self.changed.get(&of) {
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
        overtaken.changed(A, Part::Content, [own, of_both]);
        overtaken.changed(B, Part::Content, [of_other, of_both]);
        overtaken.changed(A, Part::Content, [own, of_both]);
        let by_others = |ino| overtaken.is_changed_by_others(A, (ino, Part::Content));
        assert_eq!(
            [own, of_other, of_both, untouched].map(by_others),
            [false, true, true, false]
        );
        assert!(!overtaken.is_changed_by_others(A, (of_other, Part::Attributes)));
        let untouched = (untouched, Part::Content);
        overtaken.was_missed(A);
        assert!(overtaken.is_changed_by_others(A, untouched));
        assert!(!overtaken.is_changed_by_others(B, untouched));
        overtaken.clear();
        assert!(!overtaken.is_changed_by_others(A, (of_other, Part::Content)));
    }

    #[test]
    fn beyond_what_is_remembered_everything_counts_as_changed() {
        let mut overtaken = Overtaken::default();
        let part = Part::Attributes;
        overtaken.changed(B, part, (0..=FILES_MAX as u64).map(InodeId));
        assert!(overtaken.changed.len() == FILES_MAX);
        assert!(overtaken.is_changed_by_others(A, (InodeId(FILES_MAX as u64 + 7), part)));
        assert!(!overtaken.is_changed_by_others(B, (InodeId(0), part)));
    }
}
