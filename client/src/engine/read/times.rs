//! How long reads take, and consequently when a second replica is asked.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bounds of the delay before a second replica is asked: below the minimum, scheduling noise would
/// double the load; above the maximum, the user notices.
const HEDGE_MIN: Duration = Duration::from_millis(30);
const HEDGE_MAX: Duration = Duration::from_secs(2);
/// The delay before enough reads were measured.
const HEDGE_START: Duration = Duration::from_millis(500);
const SAMPLES_MIN: u64 = 16;
/// Reads up to this size are measured separately from larger ones.
const SMALL_BYTES: u64 = 64 << 10;

/// Maximum number of hedges that can be saved up, and how many reads earn one more. Hedging is
/// meant for the exceptional slow replica; when all are slow, asking twice makes everything slower.
const HEDGES_MAX: u32 = 20;
const READS_PER_HEDGE: u32 = 10;

/// Durations of small and of large reads, and the budget for hedging them.
#[derive(Default)]
pub(crate) struct ReadTimes {
    small: Times,
    large: Times,
    hedges: HedgeBudget,
    hedged_reads: AtomicU64,
}

/// A budget counted in reads: a hedge costs [`READS_PER_HEDGE`] of them.
struct HedgeBudget {
    earned_reads: AtomicU32,
}

impl Default for HedgeBudget {
    fn default() -> Self {
        Self {
            earned_reads: AtomicU32::new(HEDGES_MAX * READS_PER_HEDGE),
        }
    }
}

impl HedgeBudget {
    fn earn(&self) {
        let add = |reads| (reads < HEDGES_MAX * READS_PER_HEDGE).then_some(reads + 1);
        // An error means that the budget is full already.
        let _ = self
            .earned_reads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Whether one more read may be hedged; deducts its cost.
    fn spend(&self) -> bool {
        let take = |reads: u32| reads.checked_sub(READS_PER_HEDGE);
        self.earned_reads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }
}

/// Moving mean and deviation, as TCP estimates its round-trip time. Updates may get lost in a race,
/// which an estimate tolerates.
#[derive(Default)]
pub(crate) struct Times {
    samples: AtomicU64,
    mean_us: AtomicU64,
    deviation_us: AtomicU64,
}

impl ReadTimes {
    /// Notes that a range is about to be read.
    pub(crate) fn begin(&self) {
        self.hedges.earn();
    }

    /// Whether a second replica may be asked. If so, it counts as asked.
    pub(crate) fn may_hedge(&self) -> bool {
        let may = self.hedges.spend();
        if may {
            self.hedged_reads.fetch_add(1, Ordering::Relaxed);
        }
        may
    }

    /// Returns the number of reads for which a second replica was asked.
    pub(crate) fn hedged_reads(&self) -> u64 {
        self.hedged_reads.load(Ordering::Relaxed)
    }

    /// Returns the times of ranges of this size.
    pub(crate) fn of(&self, bytes: u64) -> &Times {
        if bytes <= SMALL_BYTES {
            &self.small
        } else {
            &self.large
        }
    }
}

impl Times {
    pub(crate) fn note(&self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX / 16);
        if self.samples.fetch_add(1, Ordering::Relaxed) == 0 {
            self.mean_us.store(took_us, Ordering::Relaxed);
            self.deviation_us.store(took_us / 2, Ordering::Relaxed);
            return;
        }
        let mean = self.mean_us.load(Ordering::Relaxed);
        let deviation = self.deviation_us.load(Ordering::Relaxed);
        let off = mean.abs_diff(took_us);
        self.mean_us
            .store((mean * 7 + took_us) / 8, Ordering::Relaxed);
        self.deviation_us
            .store((deviation * 3 + off) / 4, Ordering::Relaxed);
    }

    /// Returns a duration that hardly any read exceeds.
    pub(crate) fn hedge_delay(&self) -> Duration {
        if self.samples.load(Ordering::Relaxed) < SAMPLES_MIN {
            return HEDGE_START;
        }
        let mean = self.mean_us.load(Ordering::Relaxed);
        let deviation = self.deviation_us.load(Ordering::Relaxed);
        Duration::from_micros(mean + 4 * deviation).clamp(HEDGE_MIN, HEDGE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hedges_are_rationed() {
        let budget = HedgeBudget::default();
        let mut hedged = 0;
        for _ in 0..1000 {
            budget.earn();
            hedged += u32::from(budget.spend());
        }
        assert!((100..=120).contains(&hedged), "{hedged} of 1000");
    }

    #[test]
    fn the_hedge_follows_what_reads_take() {
        let times = Times::default();
        assert_eq!(times.hedge_delay(), HEDGE_START);
        for _ in 0..100 {
            times.note(Duration::from_millis(50));
        }
        let usual = times.hedge_delay();
        assert!(usual < Duration::from_millis(60), "{usual:?}");
        for _ in 0..100 {
            times.note(Duration::from_secs(10));
        }
        assert_eq!(times.hedge_delay(), HEDGE_MAX);
    }
}
