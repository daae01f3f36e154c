//! A budget of bytes per second for background work.

use std::time::{Duration, Instant};

/// The work allowed in one burst after a pause.
const BURST: Duration = Duration::from_millis(100);

/// Determines when work at a steady rate may continue.
#[derive(Debug)]
pub struct Budget {
    bytes_per_second: u64,
    /// When everything granted so far is paid for.
    paid_at: Option<Instant>,
}

impl Budget {
    /// A budget of so many bytes per second; 0 means no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second,
            paid_at: None,
        }
    }

    /// Returns when `bytes` may be spent by a caller that asks at `now`. Callers are served in order of arrival.
    pub fn spend(&mut self, bytes: u64, now: Instant) -> Instant {
        if self.bytes_per_second == 0 {
            return now;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        // Shortly after boot, there may be no earlier instant.
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let start = self
            .paid_at
            .map_or(earliest, |paid_at| paid_at.max(earliest));
        let paid_at = start + cost;
        // Otherwise later callers would be served earlier.
        assert!(
            self.paid_at.is_none_or(|before| before <= paid_at),
            "{bytes} bytes are paid for at {paid_at:?}, before what was spent until {:?}",
            self.paid_at
        );
        self.paid_at = Some(paid_at);
        paid_at
    }

    /// Bytes that could be spent within `time` from `now`, if no other caller spends any; [`u64::MAX`] without a
    /// limit.
    pub fn left_within(&self, time: Duration, now: Instant) -> u64 {
        if self.bytes_per_second == 0 {
            return u64::MAX;
        }
        let debt = self
            .paid_at
            .map_or(Duration::ZERO, |it| it.saturating_duration_since(now));
        (time.saturating_sub(debt).as_secs_f64() * self.bytes_per_second as f64) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    #[test]
    fn what_is_left_is_less_by_what_is_not_paid_yet() {
        let two_seconds = Duration::from_secs(2);
        let mut budget = Budget::new(1000);
        let start = some_time() + BURST;
        assert_eq!(budget.left_within(two_seconds, start), 2000);
        // A tenth of a second is free after a pause.
        let paid_at = budget.spend(1600, start);
        assert_eq!(paid_at, start + Duration::from_millis(1500));
        assert_eq!(budget.left_within(two_seconds, paid_at), 2000);
        budget.spend(1000, paid_at);
        assert_eq!(budget.left_within(two_seconds, paid_at), 1000);
        budget.spend(5000, paid_at);
        assert_eq!(budget.left_within(two_seconds, paid_at), 0);
        let mut unlimited = Budget::new(0);
        assert_eq!(unlimited.spend(u64::MAX, start), start);
        assert_eq!(unlimited.left_within(two_seconds, start), u64::MAX);
    }

    proptest! {
        /// Whatever is requested and when: in any period, no more is granted than it pays for plus a burst; and a
        /// caller that arrives after a pause waits for its own cost only.
        #[test]
        fn the_rate_is_kept(steps in prop::collection::vec((0u64..2_000, 1u64..100_000), 1..200)) {
            const RATE: u64 = 100_000;
            let cost = |bytes: u64| Duration::from_secs_f64(bytes as f64 / RATE as f64);
            let rounding = Duration::from_micros(1);
            let mut budget = Budget::new(RATE);
            let start = some_time() + BURST;
            let mut now = start;
            let mut granted = Vec::new();
            for (pause_ms, bytes) in steps {
                now += Duration::from_millis(pause_ms);
                let debt = Duration::from_secs(1_000).saturating_sub(
                    cost(budget.left_within(Duration::from_secs(1_000), now)),
                );
                let at = budget.spend(bytes, now);
                prop_assert!(at <= now + debt + cost(bytes) + rounding);
                granted.push((at.max(now), bytes));
            }
            for (first, &(from, _)) in granted.iter().enumerate() {
                let mut sum_bytes = 0;
                for &(until, bytes) in &granted[first + 1..] {
                    sum_bytes += bytes;
                    let span = until.saturating_duration_since(from) + BURST + rounding * 200;
                    prop_assert!(cost(sum_bytes) <= span, "{sum_bytes} bytes within {span:?}");
                }
            }
        }
    }
}
