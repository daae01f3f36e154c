//! Blocks that wait for repair, ranked by their surviving replicas.

use rustc_hash::FxHashMap;

use super::table::{NodeIx, Slot};

/// Ranks: one per number of survivors; blocks with more than this many rank with it.
pub(super) const RANKS: usize = 10;

/// One block that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) slot: Slot,
    /// Not to be tried before.
    pub(super) not_before_ms: u64,
    /// Attempts that failed so far.
    pub(super) attempts: u8,
    /// The target of the last attempt that failed.
    pub(super) avoid: Option<NodeIx>,
}

/// A set of entries, each in one rank. Adding, moving and removing one costs O(1); a rank is gone
/// through in turns, from where the last turn stopped.
#[derive(Debug, Default)]
pub(super) struct RepairQueue {
    ranks: [Rank; RANKS],
    /// Rank and position of each entry.
    places: FxHashMap<Slot, (u8, u32)>,
}

#[derive(Debug, Default)]
struct Rank {
    entries: Vec<Entry>,
    cursor: usize,
}

/// The rank of a block with this many survivors; 0 comes first.
fn rank_of(survivors: usize) -> usize {
    survivors.clamp(1, RANKS) - 1
}

impl RepairQueue {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn rank_len(&self, rank: usize) -> usize {
        self.ranks[rank].entries.len()
    }

    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.places.contains_key(&slot)
    }

    /// Adds an entry.
    pub(super) fn add(&mut self, survivors: usize, entry: Entry) {
        self.remove(entry.slot);
        let rank = rank_of(survivors);
        let entries = &mut self.ranks[rank].entries;
        self.places
            .insert(entry.slot, (rank as u8, entries.len() as u32));
        entries.push(entry);
    }

    /// Moves an entry to the rank for another number of survivors.
    pub(super) fn rank(&mut self, slot: Slot, survivors: usize) {
        if self
            .places
            .get(&slot)
            .is_some_and(|&(rank, _)| usize::from(rank) != rank_of(survivors))
            && let Some(entry) = self.remove(slot)
        {
            self.add(survivors, entry);
        }
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Entry> {
        let (rank, position) = self.places.remove(&slot)?;
        let entries = &mut self.ranks[usize::from(rank)].entries;
        let entry = entries.swap_remove(position as usize);
        if let Some(moved) = entries.get(position as usize) {
            self.places.insert(moved.slot, (rank, position));
        }
        Some(entry)
    }

    /// The next entry of a rank in turn; it stays where it is.
    pub(super) fn next(&mut self, rank: usize) -> Option<Entry> {
        let rank = &mut self.ranks[rank];
        if rank.cursor >= rank.entries.len() {
            rank.cursor = 0;
        }
        let entry = rank.entries.get(rank.cursor).copied();
        rank.cursor += 1;
        entry
    }

    /// The entry of a block, to change when and how it is tried next.
    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Entry> {
        let (rank, position) = *self.places.get(&slot)?;
        self.ranks[usize::from(rank)]
            .entries
            .get_mut(position as usize)
    }

    /// Memory of the tables in bytes.
    pub(super) fn bytes(&self) -> usize {
        let entries: usize = self.ranks.iter().map(|rank| rank.entries.capacity()).sum();
        entries * size_of::<Entry>() + self.places.capacity() * 16
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn entry(slot: Slot) -> Entry {
        Entry {
            slot,
            not_before_ms: 0,
            attempts: 0,
            avoid: None,
        }
    }

    proptest! {
        /// Against a map from slot to rank; and a turn sees every entry of a rank once.
        #[test]
        fn behaves_as_a_map(
            steps in prop::collection::vec((0u8..3, 0u32..40, 0usize..14), 0..300),
        ) {
            let mut queue = RepairQueue::default();
            let mut model = BTreeMap::new();
            for (step, slot, survivors) in steps {
                match step {
                    0 => {
                        queue.add(survivors, entry(slot));
                        model.insert(slot, rank_of(survivors));
                    }
                    1 => {
                        queue.rank(slot, survivors);
                        model.entry(slot).and_modify(|rank| *rank = rank_of(survivors));
                    }
                    _ => prop_assert_eq!(queue.remove(slot).is_some(), model.remove(&slot).is_some()),
                }
                prop_assert_eq!(queue.len(), model.len());
            }
            for rank in 0..RANKS {
                let mut seen: Vec<Slot> = (0..queue.rank_len(rank))
                    .filter_map(|_| queue.next(rank))
                    .map(|entry| entry.slot)
                    .collect();
                seen.sort_unstable();
                let expected: Vec<Slot> =
                    model.iter().filter(|(_, r)| **r == rank).map(|(slot, _)| *slot).collect();
                prop_assert_eq!(seen, expected);
            }
        }
    }
}
