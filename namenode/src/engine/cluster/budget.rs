//! How many repairs a node took part in lately.

/// Slots of the window. The slot under way comes on top, so that what is counted covers at least
/// a whole window at any time.
const SLOTS: u64 = 60;
/// The slots of the window and the one under way.
const SLOTS_KEPT: u64 = SLOTS + 1;

/// Counts events in a sliding window. What was charged stays counted for at least the window's
/// length and at most a sixtieth longer, so no interval of that length ever has more than the
/// limit that callers hold to.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    slot_ms: u64,
    /// Number of the slot under way, counted from time 0.
    slot: u64,
    /// The slot with whose start the oldest events leave the window; no slot when there are none.
    /// Until then `sum` is right, and `counts` need not be looked at.
    falls: u64,
    /// Events of each slot from 61 before `falls` on; the others are 0. Apart, because repair looks
    /// at budgets far more often than it charges them, and such looks are all over the memory.
    /// Saturates far above any limit of a slot.
    counts: Box<[u16; SLOTS_KEPT as usize]>,
    sum: u32,
}

impl Budget {
    /// Memory that it takes beside itself, in bytes.
    pub(super) const BYTES: usize = size_of::<[u16; SLOTS_KEPT as usize]>();

    pub(super) fn new(window_ms: u64) -> Self {
        Self {
            slot_ms: window_ms.div_ceil(SLOTS).max(1),
            slot: 0,
            falls: u64::MAX,
            counts: Box::new([0; SLOTS_KEPT as usize]),
            sum: 0,
        }
    }

    /// Events within the window up to now. Time that runs backwards counts as standing still.
    pub(super) fn used(&mut self, now_ms: u64) -> u32 {
        self.slot = self.slot.max(now_ms / self.slot_ms);
        while self.falls <= self.slot {
            self.forget_oldest();
        }
        self.sum
    }

    /// The oldest events leave the window.
    fn forget_oldest(&mut self) {
        let oldest = self.falls - SLOTS_KEPT;
        let count = &mut self.counts[(oldest % SLOTS_KEPT) as usize];
        self.sum -= u32::from(std::mem::take(count));
        self.falls = (oldest + 1..oldest + SLOTS_KEPT)
            .find(|slot| self.counts[(slot % SLOTS_KEPT) as usize] > 0)
            .map_or(u64::MAX, |slot| slot + SLOTS_KEPT);
    }

    /// Events within the window up to the last [`Budget::used`].
    pub(super) fn counted(&self) -> u32 {
        self.sum
    }

    /// When the count falls next by time alone; `None` when nothing is counted. Exact right after
    /// [`Budget::used`].
    pub(super) fn falls_at_ms(&self) -> Option<u64> {
        (self.sum > 0).then(|| self.falls * self.slot_ms)
    }

    pub(super) fn charge(&mut self, now_ms: u64) {
        self.used(now_ms);
        let count = &mut self.counts[(self.slot % SLOTS_KEPT) as usize];
        if *count < u16::MAX {
            *count += 1;
            self.sum += 1;
            self.falls = self.falls.min(self.slot + SLOTS_KEPT);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against the list of all events.
        #[test]
        fn counts_a_window_and_at_most_a_slot_more(
            window_ms in 1u64..10_000,
            steps in prop::collection::vec(0u64..3_000, 1..200),
        ) {
            let mut budget = Budget::new(window_ms);
            let mut events = Vec::new();
            let mut now = 0;
            for step in steps {
                now += step;
                let used = budget.used(now) as usize;
                let within = |length: u64| events.iter().filter(|&&at| at + length > now).count();
                prop_assert!(used >= within(window_ms));
                prop_assert!(used <= within(61 * window_ms.div_ceil(60) + 1));
                if let Some(falls_ms) = budget.falls_at_ms() {
                    prop_assert_eq!(budget.clone().used(falls_ms - 1) as usize, used);
                    prop_assert!((budget.clone().used(falls_ms) as usize) < used);
                } else {
                    prop_assert_eq!(used, 0);
                }
                budget.charge(now);
                events.push(now);
            }
        }
    }
}
