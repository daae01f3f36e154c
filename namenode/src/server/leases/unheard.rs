//! Changes that their own sessions may not know of yet, since the replies are still in flight.
//!
//! Others see a change of names as soon as it is made, and may build on it. What they do with the file must not
//! return while the session that made the change still believes in the old names: when a change has returned, every
//! mount shows it (`docs/SEMANTICS.md`).

use std::collections::BTreeMap;

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::name::Name;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Identifies a change of names by its session and sequence number.
type Number = (SessionId, u64);

/// The changes whose sessions may not have received the replies yet.
#[derive(Debug, Default)]
pub(super) struct Unheard {
    changes: BTreeMap<Number, Change>,
    /// By the inodes that have or had the names.
    by_inode: FxHashMap<InodeId, SmallVec<[Number; 1]>>,
}

#[derive(Debug)]
struct Change {
    inodes: SmallVec<[InodeId; 2]>,
    entries: Vec<(InodeId, Name)>,
}

impl Unheard {
    /// Adds the names `entries` that a session has changed with its mutation `sequence`. Of `inodes`, those that are
    /// not the directories of these names count as the inodes that have or had them.
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

    /// Notes that the session has received the replies to its mutations before this one.
    pub(super) fn heard_below(&mut self, session: SessionId, sequence: u64) {
        while let Some((&number, _)) = self.changes.range((session, 0)..(session, sequence)).next()
        {
            self.remove(number);
        }
    }

    /// Takes out the names that sessions other than `author` gave to an inode, or removed from it. These sessions
    /// have to forget what they know of the names, and need not be notified again.
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
