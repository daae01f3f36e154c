//! The order in which sealed replicas are verified, and when.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use harvestfs_protocol::ids::BlockId;

/// Rounds through all volumes, one after the other, forever.
#[derive(Debug)]
pub struct Rounds {
    /// Where the round begins in each volume's list of replicas.
    start: u64,
    interval: Duration,
    next_at: Option<Instant>,
}

impl Rounds {
    /// Rounds that begin at least `interval` apart. `chance` determines where the first one begins, so that a datanode
    /// that is often restarted still reaches all replicas.
    pub fn new(interval: Duration, chance: u64) -> Self {
        Self {
            start: chance,
            interval,
            next_at: None,
        }
    }

    /// Records that a round begins.
    pub fn begin(&mut self, now: Instant) {
        assert!(
            self.next_at.is_none(),
            "a round begins before the last one is over: {self:?}"
        );
        self.next_at = Some(now + self.interval);
    }

    /// Returns the sealed replicas of a volume in the order in which this round verifies them.
    pub fn order(&self, mut blocks: Vec<BlockId>) -> Vec<BlockId> {
        blocks.sort_unstable();
        // Ids count up from the start of the cluster, so `start` selects an index, not an id.
        if let Some(places) = NonZeroU64::new(blocks.len() as u64) {
            blocks.rotate_left((self.start % places) as usize);
        }
        blocks
    }

    /// Records that the round is over. Returns when the next one begins.
    pub fn end(&mut self, now: Instant) -> Instant {
        self.start = 0;
        let Some(next_at) = self.next_at.take() else {
            panic!("a round is over that did not begin: {self:?}");
        };
        next_at.max(now)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    proptest! {
        /// Each round contains every replica once, and rounds are not closer than allowed.
        #[test]
        fn every_round_has_all(
            chance: u64,
            rounds in prop::collection::vec(
                (prop::collection::btree_set(0u64..1_000, 0..20), 0u64..200),
                1..10,
            ),
        ) {
            let interval = Duration::from_secs(100);
            let mut scrub = Rounds::new(interval, chance);
            let mut now = some_time();
            for (blocks, took_s) in rounds {
                let began = now;
                scrub.begin(now);
                let listed: Vec<BlockId> = blocks.iter().rev().copied().map(BlockId).collect();
                let order = scrub.order(listed);
                prop_assert_eq!(order.len(), blocks.len());
                let seen: BTreeSet<u64> = order.iter().map(|block| block.0).collect();
                prop_assert_eq!(seen, blocks);
                now += Duration::from_secs(took_s);
                let next = scrub.end(now).max(now);
                prop_assert_eq!(next, now.max(began + interval));
                now = next;
            }
        }
    }

    /// A datanode that is restarted after the first replicas of each round still verifies all of them in time.
    #[test]
    fn restarts_do_not_keep_it_from_getting_everywhere() {
        let blocks: Vec<BlockId> = (0..100).map(|block| BlockId(7_000 + block)).collect();
        let mut seen = BTreeSet::new();
        let mut chance: u64 = 1;
        for _ in 0..1_000 {
            chance = chance
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let rounds = Rounds::new(Duration::ZERO, chance >> 7);
            seen.extend(rounds.order(blocks.clone()).into_iter().take(3));
        }
        assert_eq!(seen.len(), blocks.len());
    }

    #[test]
    fn later_rounds_begin_with_the_first() {
        let mut rounds = Rounds::new(Duration::ZERO, 4);
        let blocks: Vec<BlockId> = (0..3).map(BlockId).collect();
        assert_eq!(rounds.order(blocks.clone())[0], BlockId(1));
        rounds.begin(some_time());
        rounds.end(some_time());
        assert_eq!(rounds.order(blocks.clone()), blocks);
    }
}
