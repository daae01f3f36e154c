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
    /// Apart, because repair looks at nodes and volumes far more often than at their budgets.
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
            counts: Box::new([0; SLOTS_KEPT as usize]),
            sum: 0,
        }
    }

    /// Events within the window up to now. Time that runs backwards counts as standing still.
    pub(super) fn used(&mut self, now_ms: u64) -> u32 {
        let slot = (now_ms / self.slot_ms).max(self.slot);
        let passed = slot - self.slot;
        if self.sum > 0 && passed >= SLOTS_KEPT {
            self.counts.fill(0);
            self.sum = 0;
        }
        if self.sum > 0 {
            for step in 1..=passed {
                let index = ((self.slot + step) % SLOTS_KEPT) as usize;
                self.sum -= u32::from(std::mem::take(&mut self.counts[index]));
            }
        }
        self.slot = slot;
        self.sum
    }

    /// Events within the window up to the last [`Budget::used`].
    pub(super) fn counted(&self) -> u32 {
        self.sum
    }

    /// When the count falls next by time alone; `None` when nothing is counted. Exact right after
    /// [`Budget::used`].
    pub(super) fn falls_at_ms(&self) -> Option<u64> {
        let slots = SLOTS_KEPT;
        let oldest = self.slot.saturating_sub(slots - 1);
        (oldest..=self.slot)
            .find(|slot| self.counts[(slot % slots) as usize] > 0)
            .map(|slot| (slot + slots) * self.slot_ms)
    }

    pub(super) fn charge(&mut self, now_ms: u64) {
        self.used(now_ms);
        let count = &mut self.counts[(self.slot % SLOTS_KEPT) as usize];
        if *count < u16::MAX {
            *count += 1;
            self.sum += 1;
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
