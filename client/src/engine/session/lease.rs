//! The time until which the cache is valid, by a clock that does not stop while this machine is
//! suspended: other machines continue to run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use harvestfs_protocol::limits::{LEASE, LEASE_BELIEVED};
use harvestfs_protocol::planted::{self, Bug};

/// The lease of a session.
#[derive(Default)]
pub(crate) struct Lease {
    /// Time since the machine started; 0 if there is no lease.
    until_us: AtomicU64,
}

impl Lease {
    pub(crate) fn remaining(&self, now: Duration) -> Duration {
        let until_us = self.until_us.load(Ordering::Acquire);
        Duration::from_micros(until_us).saturating_sub(now)
    }

    /// Renews the lease: the namenode answered a request that was sent at `sent`.
    pub(crate) fn renew(&self, sent: Duration) {
        let lease = if planted::is(Bug::IgnoresClockDrift) {
            LEASE
        } else {
            LEASE_BELIEVED
        };
        let until_us = u64::try_from((sent + lease).as_micros()).unwrap_or(u64::MAX);
        self.until_us.fetch_max(until_us, Ordering::AcqRel);
    }

    pub(crate) fn end(&self) {
        self.until_us.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_over_before_a_clock_that_goes_faster_says_so() {
        let lease = Lease::default();
        let sent = Duration::from_secs(1_000);
        lease.renew(sent);
        // By the namenode's clock, and by one that is slower by almost one percent.
        let over = LEASE.mul_f64(0.9901);
        assert_eq!(lease.remaining(sent + over), Duration::ZERO);
    }

    #[test]
    fn a_lease_counts_from_when_it_was_asked_for() {
        let lease = Lease::default();
        let sent = Duration::from_secs(1_000);
        assert_eq!(lease.remaining(sent), Duration::ZERO);
        lease.renew(sent);
        assert_eq!(lease.remaining(sent), LEASE_BELIEVED);
        let quarter = LEASE_BELIEVED / 4;
        assert_eq!(lease.remaining(sent + quarter), quarter * 3);
        // As after a night's sleep.
        assert_eq!(lease.remaining(sent + LEASE * 2_000), Duration::ZERO);
        lease.renew(sent - Duration::from_secs(1));
        let remaining = lease.remaining(sent);
        assert_eq!(remaining, LEASE_BELIEVED, "an answer to something older");
        lease.end();
        assert_eq!(lease.remaining(sent), Duration::ZERO);
    }
}
