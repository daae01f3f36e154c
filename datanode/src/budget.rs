//! A budget of bytes per second for background work.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

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

    /// Waits until `bytes` may be spent. Who comes first is served first.
    pub async fn spend(&self, bytes: u64) {
        if self.bytes_per_second > 0 {
            tokio::time::sleep_until(self.reserve(bytes, Instant::now())).await;
        }
    }

    /// When `bytes` may be spent by somebody who asks at `now`.
    fn reserve(&self, bytes: u64, now: Instant) -> Instant {
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let mut paid_at = self.paid_at.lock().unwrap_or_else(PoisonError::into_inner);
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
}
