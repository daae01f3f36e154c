//! Blocks that wait for repair, ranked by their surviving replicas.

use rustc_hash::FxHashMap;

use super::table::{NodeIx, Slot};

/// Numbers of survivors that are told apart; blocks with more than this many rank with it.
const SURVIVORS: usize = 10;
/// Classes of risk within a number of survivors; 0 is the highest.
pub(super) const RISKS: usize = 4;
/// Ranks of blocks whose last replica is left.
pub(super) const URGENT_RANKS: usize = RISKS;
/// The rank of blocks that have enough replicas, but one has to leave its server.
pub(super) const LEAVING: usize = SURVIVORS * RISKS;
/// The rank of blocks that have enough replicas, but in the wrong places.
pub(super) const MISPLACED: usize = LEAVING + 1;
/// All ranks.
pub(super) const RANKS: usize = MISPLACED + 1;

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
    /// Since when no server is found that keeps all constraints.
    pub(super) unplaced_since_ms: Option<u64>,
}

/// A set of entries, each in one rank. Adding, moving and removing one costs O(1); a rank is gone
/// through in turns, from where the last turn stopped.
#[derive(Debug)]
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

/// The rank of a block with this many survivors and this class of risk; 0 comes first.
pub(super) fn rank_of(survivors: usize, risk: usize) -> usize {
    (survivors.clamp(1, SURVIVORS) - 1) * RISKS + risk.min(RISKS - 1)
}

impl Default for RepairQueue {
    fn default() -> Self {
        Self {
            ranks: std::array::from_fn(|_| Rank::default()),
            places: FxHashMap::default(),
        }
    }
}

impl RepairQueue {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Entries of blocks that have too few replicas.
    pub(super) fn repairs(&self) -> usize {
        self.ranks[..LEAVING]
            .iter()
            .map(|rank| rank.entries.len())
            .sum()
    }

    pub(super) fn rank_len(&self, rank: usize) -> usize {
        self.ranks[rank].entries.len()
    }

    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.places.contains_key(&slot)
    }

    /// Adds an entry.
    pub(super) fn add(&mut self, rank: usize, entry: Entry) {
        self.remove(entry.slot);
        let entries = &mut self.ranks[rank].entries;
        self.places
            .insert(entry.slot, (rank as u8, entries.len() as u32));
        entries.push(entry);
    }

    /// Moves an entry to another rank. It is due at once when its last replica is left, or when it
    /// is repair where it was none before.
    pub(super) fn rank(&mut self, now_ms: u64, slot: Slot, rank: usize) {
        if let Some(&(before, _)) = self.places.get(&slot)
            && usize::from(before) != rank
            && let Some(mut entry) = self.remove(slot)
        {
            if rank < URGENT_RANKS || (rank < LEAVING && usize::from(before) >= LEAVING) {
                // The wait may have been for the normal budget.
                entry.not_before_ms = entry.not_before_ms.min(now_ms);
            }
            self.add(rank, entry);
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

    /// No entry has to wait longer.
    pub(super) fn all_due(&mut self, now_ms: u64) {
        let entries = self.ranks.iter_mut().flat_map(|rank| &mut rank.entries);
        for entry in entries {
            entry.not_before_ms = entry.not_before_ms.min(now_ms);
        }
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
            unplaced_since_ms: None,
        }
    }

    proptest! {
        /// Against a map from slot to rank; and a turn sees every entry of a rank once.
        #[test]
        fn behaves_as_a_map(
            steps in prop::collection::vec((0u8..3, 0u32..40, 0usize..RANKS), 0..300),
        ) {
            let mut queue = RepairQueue::default();
            let mut model = BTreeMap::new();
            for (step, slot, rank) in steps {
                match step {
                    0 => {
                        queue.add(rank, entry(slot));
                        model.insert(slot, rank);
                    }
                    1 => {
                        queue.rank(0, slot, rank);
                        model.entry(slot).and_modify(|it| *it = rank);
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
