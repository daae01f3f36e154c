//! Replies that must not leave yet.
//!
//! A reply may have to wait until a record is on stable storage, until other sessions have acknowledged that they
//! forgot what it changed, or both. The gate does not look at the replies.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::planted::{self, Bug};
use rustc_hash::FxHashMap;

use super::leases::WaitId;
use crate::journal::Lsn;

/// Holds items back until they have nothing to wait for.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    held: FxHashMap<WaitId, Held<T>>,
    by_lsn: BTreeSet<(Lsn, WaitId)>,
    /// All records up to this one are durable.
    durable: Lsn,
    next: WaitId,
}

#[derive(Debug)]
struct Held<T> {
    item: T,
    waits_for_record: bool,
    waits_for_others: bool,
}

impl<T> Gate<T> {
    pub(crate) fn new() -> Self {
        Self {
            held: FxHashMap::default(),
            by_lsn: BTreeSet::new(),
            durable: 0,
            next: 0,
        }
    }

    /// Returns a number for an item that may have to be held.
    pub(crate) fn next_id(&mut self) -> WaitId {
        self.next += 1;
        self.next
    }

    /// Holds `item` until `record` is durable, if given, and until others have acknowledged, if they must. Returns
    /// the item if it has nothing to wait for.
    pub(crate) fn hold(
        &mut self,
        id: WaitId,
        item: T,
        record: Option<Lsn>,
        waits_for_others: bool,
    ) -> Option<T> {
        let record = record.filter(|lsn| *lsn > self.durable);
        let record = record.filter(|_| !planted::is(Bug::AnswersBeforeDurable));
        let waits_for_others = waits_for_others && !planted::is(Bug::DoesNotWaitForInvalidation);
        if record.is_none() && !waits_for_others {
            return Some(item);
        }
        if let Some(lsn) = record {
            self.by_lsn.insert((lsn, id));
        }
        let held = Held {
            item,
            waits_for_record: record.is_some(),
            waits_for_others,
        };
        self.held.insert(id, held);
        None
    }

    /// The item that is held under a number.
    pub(crate) fn get_mut(&mut self, id: WaitId) -> Option<&mut T> {
        self.held.get_mut(&id).map(|held| &mut held.item)
    }

    /// Notes that all records up to `lsn` are durable. Returns the items that need not wait any longer, in the order
    /// of their records.
    pub(crate) fn durable(&mut self, lsn: Lsn) -> Vec<T> {
        self.durable = self.durable.max(lsn);
        let mut free = Vec::new();
        while let Some(&(first, id)) = self.by_lsn.first()
            && first <= lsn
        {
            self.by_lsn.pop_first();
            free.extend(self.settle(id, |held| held.waits_for_record = false));
        }
        free
    }

    /// Notes that the others have acknowledged. Returns the item if it need not wait any longer.
    pub(crate) fn acknowledged(&mut self, id: WaitId) -> Option<T> {
        self.settle(id, |held| held.waits_for_others = false)
    }

    /// The number of items held.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    fn settle(&mut self, id: WaitId, change: impl FnOnce(&mut Held<T>)) -> Option<T> {
        let held = self.held.get_mut(&id)?;
        change(held);
        if held.waits_for_record || held.waits_for_others {
            return None;
        }
        self.held.remove(&id).map(|held| held.item)
    }
}

/// The last change of each inode, until it is durable.
#[derive(Debug)]
struct Changes<T> {
    changed: FxHashMap<InodeId, (Lsn, T)>,
    by_lsn: BTreeMap<Lsn, Vec<InodeId>>,
}

impl<T> Default for Changes<T> {
    fn default() -> Self {
        Self {
            changed: FxHashMap::default(),
            by_lsn: BTreeMap::new(),
        }
    }
}

impl<T: Copy> Changes<T> {
    fn note(&mut self, lsn: Lsn, of: T, inodes: impl IntoIterator<Item = InodeId>) {
        let noted = self.by_lsn.entry(lsn).or_default();
        for ino in inodes {
            self.changed.insert(ino, (lsn, of));
            noted.push(ino);
        }
    }

    /// Notes that all records up to `lsn` are durable.
    fn durable(&mut self, lsn: Lsn) {
        while let Some(entry) = self.by_lsn.first_entry()
            && *entry.key() <= lsn
        {
            let (noted_lsn, inodes) = entry.remove_entry();
            for ino in inodes {
                if self.changed.get(&ino).is_some_and(|it| it.0 == noted_lsn) {
                    self.changed.remove(&ino);
                }
            }
        }
    }

    fn of(&self, inodes: impl IntoIterator<Item = InodeId>) -> impl Iterator<Item = (Lsn, T)> {
        let changes = inodes.into_iter().map(|ino| self.changed.get(&ino));
        changes.flatten().copied()
    }
}

/// Inodes with changes that were promised to be durable and are not yet. A reply that could show such a change must
/// wait as the reply to its author does: after a crash it would have shown something that never existed.
#[derive(Debug, Default)]
pub(crate) struct Undurable {
    changes: Changes<()>,
    last: Lsn,
}

impl Undurable {
    /// Notes that the record `lsn`, for which its author waits, changed `inodes`.
    pub(crate) fn note(&mut self, lsn: Lsn, inodes: impl IntoIterator<Item = InodeId>) {
        self.changes.note(lsn, (), inodes);
        self.last = lsn;
    }

    /// Notes that all records up to `lsn` are durable.
    pub(crate) fn durable(&mut self, lsn: Lsn) {
        self.changes.durable(lsn);
    }

    /// The record that a reply about these inodes has to wait for.
    pub(crate) fn record_of(&self, inodes: impl IntoIterator<Item = InodeId>) -> Option<Lsn> {
        self.changes.of(inodes).map(|(lsn, ())| lsn).max()
    }

    /// The record that a reply which may show anything has to wait for.
    pub(crate) fn last(&self) -> Option<Lsn> {
        (!self.changes.by_lsn.is_empty()).then_some(self.last)
    }
}

/// Inodes with changes that were answered before they are durable. After a crash each session replays its changes
/// when it comes back. For one inode, the order of replays is preserved only within a session, so a change by another
/// session is answered only when all of them are durable.
#[derive(Debug, Default)]
pub(crate) struct AnsweredEarly(Changes<SessionId>);

impl AnsweredEarly {
    /// Notes that the record `lsn`, for which `session` does not wait, changed `inodes`.
    pub(crate) fn note(
        &mut self,
        session: SessionId,
        lsn: Lsn,
        inodes: impl IntoIterator<Item = InodeId>,
    ) {
        self.0.note(lsn, session, inodes);
    }

    /// Notes that all records up to `lsn` are durable.
    pub(crate) fn durable(&mut self, lsn: Lsn) {
        self.0.durable(lsn);
    }

    /// Whether one of the inodes was changed by a session other than `session`.
    pub(crate) fn has_of_others(
        &self,
        session: SessionId,
        inodes: impl IntoIterator<Item = InodeId>,
    ) -> bool {
        self.0.of(inodes).any(|(_, author)| author != session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_for_nothing_passes() {
        let mut gate = Gate::new();
        let id = gate.next_id();
        assert_eq!(gate.hold(id, "now", None, false), Some("now"));
        assert_eq!(gate.len(), 0);
    }

    #[test]
    fn what_waits_for_a_record_that_is_durable_passes() {
        let mut gate = Gate::new();
        assert_eq!(gate.durable(5), Vec::<&str>::new());
        let id = gate.next_id();
        assert_eq!(gate.hold(id, "now", Some(5), false), Some("now"));
        let id = gate.next_id();
        assert_eq!(gate.hold(id, "later", Some(6), false), None);
        let id = gate.next_id();
        assert_eq!(gate.hold(id, "after others", Some(5), true), None);
        assert_eq!(gate.acknowledged(id), Some("after others"));
    }

    #[test]
    fn both_conditions_must_be_met_in_either_order() {
        for durable_first in [true, false] {
            let mut gate = Gate::new();
            let id = gate.next_id();
            assert_eq!(gate.hold(id, "later", Some(5), true), None);
            assert_eq!(gate.durable(4), Vec::<&str>::new());
            if durable_first {
                assert_eq!(gate.durable(5), Vec::<&str>::new());
                assert_eq!(gate.acknowledged(id), Some("later"));
            } else {
                assert_eq!(gate.acknowledged(id), None);
                assert_eq!(gate.durable(9), vec!["later"]);
            }
            assert_eq!(gate.len(), 0);
        }
    }

    #[test]
    fn replies_leave_in_the_order_of_their_records() {
        let mut gate = Gate::new();
        for lsn in [3, 1, 2, 7] {
            let id = gate.next_id();
            gate.hold(id, lsn, Some(lsn), false);
        }
        assert_eq!(gate.durable(3), vec![1, 2, 3]);
        assert_eq!(gate.len(), 1);
    }

    #[test]
    fn a_reader_waits_for_the_newest_change_it_could_see() {
        let mut undurable = Undurable::default();
        let (a, b, c) = (InodeId(1), InodeId(2), InodeId(3));
        undurable.note(5, [a, b]);
        undurable.note(6, [b]);
        assert_eq!(undurable.record_of([a]), Some(5));
        assert_eq!(undurable.record_of([a, b]), Some(6));
        assert_eq!(undurable.record_of([c]), None);
        assert_eq!(undurable.last(), Some(6));
        undurable.durable(5);
        assert_eq!(undurable.record_of([a]), None);
        assert_eq!(undurable.record_of([b]), Some(6));
        undurable.durable(6);
        assert_eq!(undurable.last(), None);
        assert!(undurable.changes.changed.is_empty());
    }

    #[test]
    fn what_was_answered_early_counts_for_others_until_it_is_durable() {
        let (a, b) = (InodeId(2), InodeId(3));
        let (alice, bob) = (SessionId(1), SessionId(2));
        let mut early = AnsweredEarly::default();
        assert!(!early.has_of_others(bob, [a]));
        early.note(alice, 5, [a, b]);
        early.note(alice, 6, [b]);
        assert!(!early.has_of_others(alice, [a, b]));
        assert!(early.has_of_others(bob, [a]));
        assert!(early.has_of_others(bob, [InodeId(4), b]));
        early.durable(5);
        assert!(!early.has_of_others(bob, [a]));
        assert!(early.has_of_others(bob, [b]));
        early.durable(6);
        assert!(!early.has_of_others(bob, [a, b]));
        assert!(early.0.changed.is_empty() && early.0.by_lsn.is_empty());
    }
}
