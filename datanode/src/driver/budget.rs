//! A budget of bytes per second for background work.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// What may be spent at once after a pause.
const BURST: Duration = Duration::from_millis(100);

/// Lets work proceed at a steady rate.
#[derive(Debug)]
pub struct Budget {
    bytes_per_second: u64,
    /// When everything granted so far is paid for.
    paid_at: Mutex<Option<Instant>>,
}

impl Budget {
    /// A budget of so many bytes in a second; 0 means no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second,
            paid_at: Mutex::new(None),
        }
    }

    /// Waits until `bytes` may be spent. Callers are served in the order in which they come.
    pub async fn spend(&self, bytes: u64) {
        if self.bytes_per_second > 0 {
            tokio::time::sleep_until(self.reserve(bytes, Instant::now())).await;
        }
    }

    /// Bytes that could be spent within `time`, if no other caller spends any; [`u64::MAX`] without a limit.
    pub fn left_within(&self, time: Duration) -> u64 {
        if self.bytes_per_second == 0 {
            return u64::MAX;
        }
        let paid_at = *self.paid_at.lock();
        let debt = paid_at.map_or(Duration::ZERO, |it| {
            it.saturating_duration_since(Instant::now())
        });
        (time.saturating_sub(debt).as_secs_f64() * self.bytes_per_second as f64) as u64
    }

    /// When `bytes` may be spent by a caller that asks at `now`.
    fn reserve(&self, bytes: u64, now: Instant) -> Instant {
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let mut paid_at = self.paid_at.lock();
        // Soon after the machine has booted there is no instant before.
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let start = paid_at.map_or(earliest, |paid_at| paid_at.max(earliest));
        *paid_at = Some(start + cost);
        start + cost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_second_buys_what_it_should() {
        let budget = Budget::new(1000);
        let start = Instant::now();
        for _ in 0..20 {
            budget.spend(100).await;
        }
        let elapsed = start.elapsed();
        assert!(elapsed >= Duration::from_millis(1850), "{elapsed:?}");
        assert!(elapsed <= Duration::from_millis(2050), "{elapsed:?}");
        Budget::new(0).spend(u64::MAX).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_is_less_by_what_is_not_paid_yet() {
        let two_seconds = Duration::from_secs(2);
        let budget = Budget::new(1000);
        assert_eq!(budget.left_within(two_seconds), 2000);
        // A tenth of a second is free after a pause.
        let spending = tokio::spawn(async move {
            budget.spend(1600).await;
            budget
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!spending.is_finished());
        let budget = spending.await.unwrap();
        assert_eq!(budget.left_within(two_seconds), 2000);
        budget.reserve(1100, Instant::now());
        assert_eq!(budget.left_within(two_seconds), 900);
        budget.reserve(5000, Instant::now());
        assert_eq!(budget.left_within(two_seconds), 0);
        assert_eq!(Budget::new(0).left_within(two_seconds), u64::MAX);
    }
}
