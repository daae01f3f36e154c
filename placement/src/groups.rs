//! A set of members in groups, for example servers in racks, from which a member is drawn uniformly in O(log groups).

use rand::{Rng, RngExt};

const ABSENT: u32 = u32::MAX;

/// A set of grouped members. Members and groups are identified by small numbers.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// The members of each group.
    groups: Vec<Vec<u32>>,
    /// The index of a member in its group's list, or [`ABSENT`].
    positions: Vec<u32>,
    /// Fenwick tree over the lengths of `groups`; `tree[i]` belongs to node `i + 1`.
    tree: Vec<u32>,
    len: u32,
}

impl Groups {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, member: u32) -> bool {
        self.positions
            .get(member as usize)
            .is_some_and(|&position| position != ABSENT)
    }

    pub(crate) fn in_group(&self, group: u32) -> &[u32] {
        self.groups.get(group as usize).map_or(&[], Vec::as_slice)
    }

    /// `member` must not be in any group.
    pub(crate) fn insert(&mut self, member: u32, group: u32) {
        assert!(
            !self.contains(member),
            "{member} joins group {group} and is in one already"
        );
        while self.groups.len() <= group as usize {
            self.groups.push(Vec::new());
            self.push_tree();
        }
        if self.positions.len() <= member as usize {
            self.positions.resize(member as usize + 1, ABSENT);
        }
        let members = &mut self.groups[group as usize];
        self.positions[member as usize] = members.len() as u32;
        members.push(member);
        self.len += 1;
        self.add(group, 1);
    }

    /// `group` must be the one that `member` was inserted with.
    pub(crate) fn remove(&mut self, member: u32, group: u32) {
        let position = std::mem::replace(&mut self.positions[member as usize], ABSENT);
        let members = &mut self.groups[group as usize];
        assert_eq!(
            members.get(position as usize),
            Some(&member),
            "{member} leaves group {group}, in which it is not"
        );
        members.swap_remove(position as usize);
        if let Some(&moved) = members.get(position as usize) {
            self.positions[moved as usize] = position;
        }
        self.len -= 1;
        self.add(group, -1);
    }

    /// Draws one member outside the given groups, each with the same probability. `outside` must be sorted and free
    /// of duplicates.
    pub(crate) fn draw(&self, rng: &mut dyn Rng, outside: &[u32]) -> Option<u32> {
        let left_out: u32 = outside
            .iter()
            .map(|&group| self.in_group(group).len() as u32)
            .sum();
        let Some(count) = self.len.checked_sub(left_out) else {
            panic!("groups {outside:?} have {left_out} of {} members", self.len);
        };
        if count == 0 {
            return None;
        }
        let mut rank = rng.random_range(0..count);
        for &group in outside {
            let members = self.in_group(group).len() as u32;
            if members > 0 && rank >= self.before(group) {
                rank += members;
            }
        }
        Some(self.at(rank))
    }

    /// Iterates over all members outside the given groups.
    pub(crate) fn iter<'a>(&'a self, outside: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        self.groups
            .iter()
            .enumerate()
            .filter(|(group, _)| !outside.contains(&(*group as u32)))
            .flat_map(|(_, members)| members.iter().copied())
    }

    /// Returns the member of the given rank, counted group by group; `rank` is below `len`.
    fn at(&self, mut rank: u32) -> u32 {
        let mut group = 0;
        let mut step = self.tree.len().next_power_of_two();
        while step > 0 {
            let next = group + step;
            if next <= self.tree.len() && self.tree[next - 1] <= rank {
                group = next;
                rank -= self.tree[next - 1];
            }
            step /= 2;
        }
        self.groups[group][rank as usize]
    }

    /// Returns the number of members of all groups below `group`.
    fn before(&self, group: u32) -> u32 {
        let mut node = group as usize;
        let mut sum = 0;
        while node > 0 {
            sum += self.tree[node - 1];
            node &= node - 1;
        }
        sum
    }

    fn add(&mut self, group: u32, difference: i32) {
        let mut node = group as usize + 1;
        while node <= self.tree.len() {
            self.tree[node - 1] = self.tree[node - 1].wrapping_add_signed(difference);
            node += node & node.wrapping_neg();
        }
    }

    /// Adds a tree node for a further, empty group: the sum of the nodes that it covers.
    fn push_tree(&mut self) {
        let group = self.tree.len() as u32;
        let node = group + 1;
        let covered_from = node & (node - 1);
        self.tree
            .push(self.before(group) - self.before(covered_from));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;

    #[test]
    fn draws_every_member_outside_the_given_racks_and_no_other() {
        let mut index = Groups::default();
        for member in 0..40 {
            index.insert(member, member % 8);
        }
        for member in (0..40).step_by(3) {
            index.remove(member, member % 8);
        }
        let mut rng = SmallRng::seed_from_u64(1);
        let mut seen = BTreeMap::new();
        for _ in 0..4_000 {
            let member = index.draw(&mut rng, &[2, 5]).expect("members are left");
            *seen.entry(member).or_insert(0) += 1;
        }
        let mut expected: Vec<u32> = (0..40)
            .filter(|member| member % 3 != 0 && ![2, 5].contains(&(member % 8)))
            .collect();
        expected.sort_unstable();
        assert_eq!(seen.keys().copied().collect::<Vec<_>>(), expected);
        let mut scanned: Vec<u32> = index.iter(&[2, 5]).collect();
        scanned.sort_unstable();
        assert_eq!(scanned, expected);
    }

    proptest! {
        /// Against an obvious model: a list of (group, member).
        #[test]
        fn counts_as_the_model_does(
            steps in prop::collection::vec((0u32..60, 0u32..9, any::<bool>()), 0..300),
        ) {
            let mut index = Groups::default();
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            for (member, group, insert) in steps {
                if insert {
                    prop_assert_eq!(index.contains(member), model.contains_key(&member));
                    model.entry(member).or_insert_with(|| {
                        index.insert(member, group);
                        group
                    });
                } else if let Some(group) = model.remove(&member) {
                    index.remove(member, group);
                }
                prop_assert_eq!(index.len() as usize, model.len());
                for group in 0..9 {
                    let below = model.values().filter(|&&of| of < group).count();
                    if (group as usize) < index.groups.len() {
                        prop_assert_eq!(index.before(group) as usize, below);
                    }
                }
            }
            let mut drawn: Vec<u32> = (0..index.len()).map(|rank| index.at(rank)).collect();
            drawn.sort_unstable();
            prop_assert_eq!(drawn, model.into_keys().collect::<Vec<_>>());
        }
    }
}
