//! A set of servers, grouped by rack, from which one is drawn uniformly in O(log racks).

use rand::{Rng, RngExt};

const ABSENT: u32 = u32::MAX;

/// Servers are given by their slot in the view, racks by their number.
#[derive(Debug, Default)]
pub(crate) struct RackIndex {
    /// The members of each rack.
    racks: Vec<Vec<u32>>,
    /// Where a slot stands in its rack's list, or [`ABSENT`].
    positions: Vec<u32>,
    /// Fenwick tree over the lengths of `racks`; `tree[i]` belongs to the node `i + 1`.
    tree: Vec<u32>,
    len: u32,
}

impl RackIndex {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.positions
            .get(slot as usize)
            .is_some_and(|&position| position != ABSENT)
    }

    pub(crate) fn in_rack(&self, rack: u32) -> &[u32] {
        self.racks.get(rack as usize).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn insert(&mut self, slot: u32, rack: u32) {
        if self.contains(slot) {
            return;
        }
        while self.racks.len() <= rack as usize {
            self.racks.push(Vec::new());
            self.push_tree();
        }
        if self.positions.len() <= slot as usize {
            self.positions.resize(slot as usize + 1, ABSENT);
        }
        let members = &mut self.racks[rack as usize];
        self.positions[slot as usize] = members.len() as u32;
        members.push(slot);
        self.len += 1;
        self.add(rack, 1);
    }

    /// `rack` must be the one that `slot` was inserted with.
    pub(crate) fn remove(&mut self, slot: u32, rack: u32) {
        if !self.contains(slot) {
            return;
        }
        let position = std::mem::replace(&mut self.positions[slot as usize], ABSENT);
        let members = &mut self.racks[rack as usize];
        members.swap_remove(position as usize);
        if let Some(&moved) = members.get(position as usize) {
            self.positions[moved as usize] = position;
        }
        self.len -= 1;
        self.add(rack, -1);
    }

    /// One member outside the given racks, each with the same probability. `outside` must be
    /// sorted and free of duplicates.
    pub(crate) fn draw(&self, rng: &mut dyn Rng, outside: &[u32]) -> Option<u32> {
        let left_out: u32 = outside
            .iter()
            .map(|&rack| self.in_rack(rack).len() as u32)
            .sum();
        let count = self.len - left_out;
        if count == 0 {
            return None;
        }
        let mut rank = rng.random_range(0..count);
        for &rack in outside {
            let members = self.in_rack(rack).len() as u32;
            if members > 0 && rank >= self.before(rack) {
                rank += members;
            }
        }
        Some(self.at(rank))
    }

    /// All members outside the given racks.
    pub(crate) fn iter<'a>(&'a self, outside: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        self.racks
            .iter()
            .enumerate()
            .filter(|(rack, _)| !outside.contains(&(*rack as u32)))
            .flat_map(|(_, members)| members.iter().copied())
    }

    /// The member of the given rank, counted rack by rack; `rank` is below `len`.
    fn at(&self, mut rank: u32) -> u32 {
        let mut rack = 0;
        let mut step = self.tree.len().next_power_of_two();
        while step > 0 {
            let next = rack + step;
            if next <= self.tree.len() && self.tree[next - 1] <= rank {
                rack = next;
                rank -= self.tree[next - 1];
            }
            step /= 2;
        }
        self.racks[rack][rank as usize]
    }

    /// Members of all racks below `rack`.
    fn before(&self, rack: u32) -> u32 {
        let mut node = rack as usize;
        let mut sum = 0;
        while node > 0 {
            sum += self.tree[node - 1];
            node &= node - 1;
        }
        sum
    }

    fn add(&mut self, rack: u32, difference: i32) {
        let mut node = rack as usize + 1;
        while node <= self.tree.len() {
            self.tree[node - 1] = self.tree[node - 1].wrapping_add_signed(difference);
            node += node & node.wrapping_neg();
        }
    }

    /// Adds a tree node for a further, empty rack: the sum of those it covers.
    fn push_tree(&mut self) {
        let rack = self.tree.len() as u32;
        let node = rack + 1;
        let covered_from = node & (node - 1);
        self.tree
            .push(self.before(rack) - self.before(covered_from));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};

    use super::*;

    #[test]
    fn draws_every_member_outside_the_given_racks_and_no_other() {
        let mut index = RackIndex::default();
        for slot in 0..40 {
            index.insert(slot, slot % 8);
        }
        for slot in (0..40).step_by(3) {
            index.remove(slot, slot % 8);
        }
        let mut rng = SmallRng::seed_from_u64(1);
        let mut seen = BTreeMap::new();
        for _ in 0..4_000 {
            let slot = index.draw(&mut rng, &[2, 5]).expect("members are left");
            *seen.entry(slot).or_insert(0) += 1;
        }
        let mut expected: Vec<u32> = (0..40)
            .filter(|slot| slot % 3 != 0 && ![2, 5].contains(&(slot % 8)))
            .collect();
        expected.sort_unstable();
        assert_eq!(seen.keys().copied().collect::<Vec<_>>(), expected);
        let mut scanned: Vec<u32> = index.iter(&[2, 5]).collect();
        scanned.sort_unstable();
        assert_eq!(scanned, expected);
    }

    proptest! {
        /// Against an obvious model: a list of (rack, slot).
        #[test]
        fn counts_as_the_model_does(
            steps in prop::collection::vec((0u32..60, 0u32..9, any::<bool>()), 0..300),
        ) {
            let mut index = RackIndex::default();
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            for (slot, rack, insert) in steps {
                if insert {
                    model.entry(slot).or_insert(rack);
                    index.insert(slot, rack);
                } else if let Some(rack) = model.remove(&slot) {
                    index.remove(slot, rack);
                }
                prop_assert_eq!(index.len() as usize, model.len());
                for rack in 0..9 {
                    let below = model.values().filter(|&&of| of < rack).count();
                    if (rack as usize) < index.racks.len() {
                        prop_assert_eq!(index.before(rack) as usize, below);
                    }
                }
            }
            let mut drawn: Vec<u32> = (0..index.len()).map(|rank| index.at(rank)).collect();
            drawn.sort_unstable();
            prop_assert_eq!(drawn, model.into_keys().collect::<Vec<_>>());
        }
    }
}
