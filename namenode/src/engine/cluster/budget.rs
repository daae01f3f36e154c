//! How many repairs a node or a volume took part in recently.

/// Slots of the window. The current slot comes on top, so that the count covers at least a whole window
/// at any time.
const SLOTS: u64 = 60;
/// The slots of the window and the current one.
const SLOTS_KEPT: u64 = SLOTS + 1;

/// Bits in which the events of a slot are counted in place; those beyond are counted elsewhere.
const COUNT_BITS: u64 = 4;
const IN_PLACE_MAX: u64 = (1 << COUNT_BITS) - 1;
const SLOTS_PER_WORD: u64 = u64::BITS as u64 / COUNT_BITS;
const WORDS: usize = SLOTS_KEPT.div_ceil(SLOTS_PER_WORD) as usize;

/// Counts events in a sliding window. An event stays counted for at least the length of the window and
/// at most a sixtieth longer, so no interval of that length ever has more events than the limit that
/// callers enforce. Time must not run backwards.
///
/// In one cache line: repair reads budgets all over memory.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Budget {
    /// When the oldest events leave the window; `u64::MAX` when there are none. Until then `sum` is
    /// right, and nothing else need be read.
    falls_ms: u64,
    /// A bit for each slot that has events, by its number modulo the slots kept.
    taken: u64,
    /// Events of each slot, up to [`IN_PLACE_MAX`].
    counts: [u64; WORDS],
    /// Events of each slot beyond those.
    beyond: Option<Box<[u32; SLOTS_KEPT as usize]>>,
    sum: u32,
    slot_ms: u32,
}

impl Budget {
    pub(super) fn new(window_ms: u64) -> Self {
        let slot_ms = window_ms.div_ceil(SLOTS).max(1);
        Self {
            falls_ms: u64::MAX,
            taken: 0,
            counts: [0; WORDS],
            beyond: None,
            sum: 0,
            // Operators choose the window: slots of more than 49 days are as good as longer ones.
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

    /// Drops the oldest events, which leave the window.
    fn forget_oldest(&mut self) {
        let oldest = self.falls_ms / u64::from(self.slot_ms) - SLOTS_KEPT;
        let position = oldest % SLOTS_KEPT;
        assert!(
            self.taken & 1 << position != 0,
            "no events leave at {}: {self:?}",
            self.falls_ms
        );
        let gone = self.take(position);
        assert!(gone <= self.sum, "{gone} events leave, of fewer: {self:?}");
        self.sum -= gone;
        self.taken &= !(1 << position);
        self.falls_ms = if self.taken == 0 {
            u64::MAX
        } else {
            // The next slot with events; the last position is followed by the first.
            let later = self.taken >> position;
            let ahead = if later == 0 {
                SLOTS_KEPT - position + u64::from(self.taken.trailing_zeros())
            } else {
                u64::from(later.trailing_zeros())
            };
            self.falls_ms + ahead * u64::from(self.slot_ms)
        };
    }

    /// Takes all events out of a slot.
    fn take(&mut self, position: u64) -> u32 {
        let (word, shift) = word_and_shift(position);
        let in_place = self.counts[word] >> shift & IN_PLACE_MAX;
        self.counts[word] &= !(IN_PLACE_MAX << shift);
        let beyond = self.beyond.as_mut();
        let beyond = beyond.map_or(0, |it| std::mem::take(&mut it[position as usize]));
        in_place as u32 + beyond
    }

    /// Adds an event to a slot.
    fn add(&mut self, position: u64) {
        let (word, shift) = word_and_shift(position);
        if self.counts[word] >> shift & IN_PLACE_MAX < IN_PLACE_MAX {
            self.counts[word] += 1 << shift;
        } else {
            let beyond = self
                .beyond
                .get_or_insert_with(|| Box::new([0; SLOTS_KEPT as usize]));
            beyond[position as usize] += 1;
        }
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
        self.add(position);
        self.sum += 1;
        self.taken |= 1 << position;
        let falls_ms = (slot + SLOTS_KEPT) * u64::from(self.slot_ms);
        self.falls_ms = self.falls_ms.min(falls_ms);
    }

    /// Memory that it takes besides itself, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.beyond.as_deref().map_or(0, size_of_val)
    }
}

/// Where a slot counts: the word, and by how much it is shifted there.
fn word_and_shift(position: u64) -> (usize, u64) {
    let word = position / SLOTS_PER_WORD;
    (word as usize, position % SLOTS_PER_WORD * COUNT_BITS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_one_cache_line() {
        assert_eq!(size_of::<Budget>(), 64);
    }

    proptest! {
        /// Against the list of all events.
        #[test]
        fn counts_a_window_and_at_most_a_slot_more(
            window_ms in 1u64..10_000,
            steps in prop::collection::vec((0u64..3_000, 1usize..40), 1..200),
        ) {
            let mut budget = Budget::new(window_ms);
            let mut events = Vec::new();
            let mut now = 0;
            for (step, charges) in steps {
                now += step;
                let used = budget.used(now) as usize;
                let within = |length: u64| events.iter().filter(|&&at| at + length > now).count();
                prop_assert!(used >= within(window_ms));
                prop_assert!(used <= within(61 * window_ms.div_ceil(60) + 1));
                let slot_of = |at: u64| at / window_ms.div_ceil(60);
                let kept = events.iter().filter(|&&at| slot_of(now) - slot_of(at) < 61).count();
                prop_assert_eq!(used, kept);
                if let Some(falls_ms) = budget.falls_at_ms() {
                    prop_assert_eq!(budget.clone().used(falls_ms - 1) as usize, used);
                    prop_assert!((budget.clone().used(falls_ms) as usize) < used);
                } else {
                    prop_assert_eq!(used, 0);
                }
                for _ in 0..charges {
                    budget.charge(now);
                    events.push(now);
                }
            }
        }
    }
}
