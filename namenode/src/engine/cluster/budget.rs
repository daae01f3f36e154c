//! How many repairs a node took part in lately.

/// Slots of the window. The slot under way comes on top, so that what is counted covers at least
/// a whole window at any time.
const SLOTS: u64 = 60;
/// The slots of the window and the one under way.
const SLOTS_KEPT: u64 = SLOTS + 1;

/// Counts events in a sliding window. What was charged stays counted for at least the window's
/// length and at most a sixtieth longer, so no interval of that length ever has more than the
/// limit that callers hold to. Time must not run backwards.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    /// When the oldest events leave the window; never when there are none. Until then `sum` is
    /// right, and nothing else need be looked at.
    falls_ms: u64,
    /// A bit for each slot that has events, by its number modulo the slots kept.
    taken: u64,
    /// Events of each slot. Apart, because repair looks at budgets far more often than it charges
    /// them, and such looks are all over the memory.
    counts: Box<Counts>,
    sum: u32,
    slot_ms: u32,
}

/// They saturate far above any limit of a slot.
type Counts = [u16; SLOTS_KEPT as usize];

impl Budget {
    /// Memory that it takes beside itself, in bytes.
    pub(super) const BYTES: usize = size_of::<Counts>();

    pub(super) fn new(window_ms: u64) -> Self {
        let slot_ms = window_ms.div_ceil(SLOTS).max(1);
        Self {
            falls_ms: u64::MAX,
            taken: 0,
            counts: Box::new([0; SLOTS_KEPT as usize]),
            sum: 0,
            slot_ms: u32::try_from(slot_ms).unwrap_or(u32::MAX),
        }
    }

    /// Events within the window up to now.
    pub(super) fn used(&mut self, now_ms: u64) -> u32 {
        while self.falls_ms <= now_ms {
            self.forget_oldest();
        }
        self.sum
    }

    /// The oldest events leave the window.
    fn forget_oldest(&mut self) {
        let oldest = self.falls_ms / u64::from(self.slot_ms) - SLOTS_KEPT;
        let position = oldest % SLOTS_KEPT;
        self.sum -= u32::from(std::mem::take(&mut self.counts[position as usize]));
        self.taken &= !(1 << position);
        self.falls_ms = if self.taken == 0 {
            u64::MAX
        } else {
            // The next one in turn; behind the last position comes the first.
            let later = self.taken >> position;
            let ahead = if later == 0 {
                SLOTS_KEPT - position + u64::from(self.taken.trailing_zeros())
            } else {
                u64::from(later.trailing_zeros())
            };
            self.falls_ms + ahead * u64::from(self.slot_ms)
        };
    }

    /// Events within the window up to the last [`Budget::used`].
    pub(super) fn counted(&self) -> u32 {
        self.sum
    }

    /// When the count falls next by time alone; `None` when nothing is counted. Exact right after
    /// [`Budget::used`].
    pub(super) fn falls_at_ms(&self) -> Option<u64> {
        (self.sum > 0).then_some(self.falls_ms)
    }

    pub(super) fn charge(&mut self, now_ms: u64) {
        self.used(now_ms);
        let slot = now_ms / u64::from(self.slot_ms);
        let position = slot % SLOTS_KEPT;
        let count = &mut self.counts[position as usize];
        if *count < u16::MAX {
            *count += 1;
            self.sum += 1;
            self.taken |= 1 << position;
            let falls_ms = (slot + SLOTS_KEPT) * u64::from(self.slot_ms);
            self.falls_ms = self.falls_ms.min(falls_ms);
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
