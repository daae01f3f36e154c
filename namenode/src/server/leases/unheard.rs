//! What sessions changed, and may not know yet: their own answers are under way.
//!
//! Others see a change of names as soon as it is made, and may go on from there. What they do with the file must not
//! return while the session that made the change still believes in the names of before: when a change has returned,
//! every mount shows it (`docs/SEMANTICS.md`).

use std::collections::BTreeMap;

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::name::Name;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// A change of names by a session.
type Number = (SessionId, u64);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Unheard {
    changes: BTreeMap<Number, Change>,
    /// By the inodes that have the names, or had them.
    by_inode: FxHashMap<InodeId, SmallVec<[Number; 1]>>,
}

#[derive(Debug)]
struct Change {
    inodes: SmallVec<[InodeId; 2]>,
    entries: Vec<(InodeId, Name)>,
}

impl Unheard {
    /// A session has changed these names, those of `inodes` that are no directories of theirs, with its mutation `sequence`.
    pub(super) fn add(
        &mut self,
        (session, sequence): Number,
        inodes: &[InodeId],
        entries: &[(InodeId, Name)],
    ) {
        if entries.is_empty() {
            return;
        }
        let is_above = |ino: &InodeId| entries.iter().any(|(dir, _)| dir == ino);
        let inodes: SmallVec<[InodeId; 2]> =
            inodes.iter().copied().filter(|it| !is_above(it)).collect();
        let number = (session, sequence);
        for ino in &inodes {
            self.by_inode.entry(*ino).or_default().push(number);
        }
        let change = Change {
            inodes,
            entries: entries.to_vec(),
        };
        self.changes.insert(number, change);
    }

    /// The session has heard of its mutations before this one.
    pub(super) fn heard_below(&mut self, session: SessionId, sequence: u64) {
        while let Some((&number, _)) = self.changes.range((session, 0)..(session, sequence)).next()
        {
            self.remove(number);
        }
    }

    /// The names that sessions other than `author` gave to an inode, or took from it. They have to forget what they know
    /// of them, and are not asked again.
    pub(super) fn take(
        &mut self,
        ino: InodeId,
        author: SessionId,
    ) -> Vec<(SessionId, Vec<(InodeId, Name)>)> {
        let Some(numbers) = self.by_inode.get(&ino) else {
            return Vec::new();
        };
        let of_others = numbers.iter().filter(|number| number.0 != author);
        let of_others: SmallVec<[Number; 1]> = of_others.copied().collect();
        let removed = of_others.into_iter().filter_map(|number| {
            let change = self.remove(number)?;
            Some((number.0, change.entries))
        });
        removed.collect()
    }

    fn remove(&mut self, number: Number) -> Option<Change> {
        let change = self.changes.remove(&number)?;
        for ino in &change.inodes {
            if let Some(numbers) = self.by_inode.get_mut(ino) {
                numbers.retain(|it| *it != number);
                if numbers.is_empty() {
                    self.by_inode.remove(ino);
                }
            }
        }
        Some(change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: InodeId = InodeId(1);
    const FILE: InodeId = InodeId(2);
    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);

    fn entry(name: &[u8]) -> (InodeId, Name) {
        (DIR, Name::new(name).unwrap())
    }

    #[test]
    fn a_session_is_asked_once_for_what_it_has_not_heard_of() {
        let mut unheard = Unheard::default();
        unheard.add((A, 1), &[DIR, FILE], &[entry(b"a")]);
        unheard.add((A, 2), &[DIR, FILE], &[entry(b"b")]);
        unheard.add((A, 3), &[FILE], &[]);
        // What goes on in the directory does not depend on it.
        assert_eq!(unheard.take(DIR, B), []);
        assert_eq!(unheard.take(FILE, A), []);
        unheard.heard_below(A, 2);
        assert_eq!(unheard.take(FILE, B), [(A, vec![entry(b"b")])]);
        assert_eq!(unheard.take(FILE, B), []);
        assert!(unheard.changes.is_empty() && unheard.by_inode.is_empty());
    }

    #[test]
    fn a_session_that_ends_has_heard_of_everything() {
        let mut unheard = Unheard::default();
        unheard.add((A, 1), &[FILE], &[entry(b"a")]);
        unheard.add((B, 1), &[FILE], &[entry(b"b")]);
        unheard.heard_below(A, u64::MAX);
        assert_eq!(unheard.take(FILE, A), [(B, vec![entry(b"b")])]);
    }
}
