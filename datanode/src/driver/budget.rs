//! Waiting until a budget allows work to proceed.

use std::time::Instant;

use parking_lot::Mutex;

use crate::engine;
use crate::store::now;

/// Lets work proceed at a steady rate; `None` means no limit.
#[derive(Debug)]
pub struct Budget(Option<Mutex<engine::budget::Budget>>);

impl Budget {
    /// A budget of so many bytes per second; 0 means no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        let limited = || Mutex::new(engine::budget::Budget::new(bytes_per_second));
        Self((bytes_per_second > 0).then(limited))
    }

    /// Waits until `bytes` may be spent. Callers are served in order of arrival.
    pub async fn spend(&self, bytes: u64) {
        let Some(budget) = &self.0 else {
            return;
        };
        let now = now();
        let paid_at = budget.lock().spend(bytes, now);
        sleep_until(paid_at, now).await;
    }
}

/// Waits from `now` until `then`, if that is still to come.
pub async fn sleep_until(then: Instant, now: Instant) {
    if then > now {
        tokio::time::sleep_until(then.into()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_second_buys_what_it_should() {
        let budget = Budget::new(1000);
        let start = now();
        for _ in 0..20 {
            budget.spend(100).await;
        }
        let elapsed = now() - start;
        assert!(elapsed >= Duration::from_millis(1850), "{elapsed:?}");
        assert!(elapsed <= Duration::from_millis(2050), "{elapsed:?}");
        Budget::new(0).spend(u64::MAX).await;
    }
}
