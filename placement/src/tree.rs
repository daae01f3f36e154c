//! A list of weights from which a position is drawn with probability proportional to its weight.

use rand::{Rng, RngExt};

/// A Fenwick tree: drawing and changing a weight cost O(log n).
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    /// `sums[i]` belongs to the node `i + 1`.
    sums: Vec<u64>,
    total: u64,
}

impl Tree {
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of positions.
    pub(crate) fn len(&self) -> usize {
        self.sums.len()
    }

    /// Adds a position of weight 0 at the end.
    pub(crate) fn push(&mut self) {
        let node = self.sums.len() + 1;
        let covered_from = node & (node - 1);
        let sum = self.before(self.sums.len()) - self.before(covered_from);
        self.sums.push(sum);
    }

    /// Changes the weight of a position from `old`, which it must have, to `new`. All weights
    /// together must stay below 2^64.
    #[inline]
    pub(crate) fn change(&mut self, position: u32, old: u64, new: u64) {
        let total = self.total.wrapping_sub(old).wrapping_add(new);
        if position as usize >= self.sums.len() || self.total < old || total < new {
            self.stop(position, old, new);
        }
        self.total = total;
        let difference = new.wrapping_sub(old);
        let mut node = position as usize + 1;
        while node <= self.sums.len() {
            self.sums[node - 1] = self.sums[node - 1].wrapping_add(difference);
            node += node & node.wrapping_neg();
        }
    }

    #[cold]
    fn stop(&self, position: u32, old: u64, new: u64) -> ! {
        panic!(
            "position {position} of {} changes its weight from {old} to {new}, of {} in all",
            self.sums.len(),
            self.total
        )
    }

    /// Draws a position with probability proportional to its weight; `None` when all weights are 0.
    #[inline]
    pub(crate) fn draw(&self, rng: &mut dyn Rng) -> Option<u32> {
        if self.total() == 0 {
            return None;
        }
        Some(self.at(rng.random_range(0..self.total())))
    }

    /// Returns the position that covers `rank` when the weights are laid out side by side; `rank` is below the total.
    fn at(&self, mut rank: u64) -> u32 {
        let mut position = 0;
        let mut step = (self.sums.len() + 1).next_power_of_two() / 2;
        while step > 0 {
            let next = position + step;
            if next <= self.sums.len() && self.sums[next - 1] <= rank {
                position = next;
                rank -= self.sums[next - 1];
            }
            step /= 2;
        }
        assert!(
            position < self.sums.len(),
            "{rank} beyond the weights, which are {} in all",
            self.total
        );
        position as u32
    }

    /// Returns the sum of the weights of all positions below `position`.
    fn before(&self, position: usize) -> u64 {
        let mut node = position;
        let mut sum: u64 = 0;
        while node > 0 {
            sum = sum.wrapping_add(self.sums[node - 1]);
            node &= node - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain list of weights.
        #[test]
        fn covers_each_position_by_its_weight(
            steps in prop::collection::vec((any::<bool>(), 0usize..40, 0u64..7), 0..150),
        ) {
            let mut tree = Tree::default();
            let mut model: Vec<u64> = Vec::new();
            for (push, position, weight) in steps {
                if push || model.is_empty() {
                    model.push(0);
                    tree.push();
                } else {
                    let position = position % model.len();
                    tree.change(position as u32, model[position], weight);
                    model[position] = weight;
                }
                prop_assert_eq!(tree.total(), model.iter().sum::<u64>());
            }
            let mut rank = 0;
            for (position, &weight) in model.iter().enumerate() {
                for _ in 0..weight {
                    prop_assert_eq!(tree.at(rank) as usize, position);
                    rank += 1;
                }
            }
        }
    }
}
