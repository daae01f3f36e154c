//! How a session lasts: keepalives, what is forgotten when the lease is over, and how it goes on after
//! its connection was lost.

use std::time::Duration;

use harvestfs_protocol::limits::KEEPALIVE_INTERVAL;

/// How often the lease is looked at between two keepalives: timers stop while the machine is
/// suspended, and the lease does not.
const LEASE_LOOKS: u32 = 5;
const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(20);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Keepalives on one connection.
#[derive(Default)]
pub(crate) struct KeepAlive {
    looks: u32,
}

/// What is due at a look at the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    KeepAlive,
    /// At once, in case the machine was suspended: the kernel's times to live stopped then. Then a
    /// keepalive.
    Forget,
}

impl KeepAlive {
    /// Time between two looks.
    pub(crate) const LOOK_INTERVAL: Duration = KEEPALIVE_INTERVAL.checked_div(LEASE_LOOKS).unwrap();

    /// A look at what remains of the lease.
    pub(crate) fn look(&mut self, lease_remaining: Duration) -> Due {
        assert!(
            self.looks < LEASE_LOOKS,
            "a keepalive is overdue: {} looks at the lease, with {lease_remaining:?} left",
            self.looks
        );
        self.looks += 1;
        if lease_remaining.is_zero() {
            self.looks = 0;
            return Due::Forget;
        }
        if self.looks < LEASE_LOOKS {
            return Due::Nothing;
        }
        self.looks = 0;
        Due::KeepAlive
    }
}

/// Attempts to connect.
#[derive(Default)]
pub(crate) struct Reconnect {
    failures: u32,
    forgotten: bool,
}

/// What follows from an attempt to connect that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    /// Nothing that is cached is valid any more, since a moment ago.
    pub(crate) forget: bool,
    /// Before the next attempt.
    pub(crate) pause: Duration,
}

impl Reconnect {
    /// An attempt failed, with so much left of the lease.
    pub(crate) fn failed(&mut self, lease_remaining: Duration) -> Retry {
        assert!(
            self.failures > 0 || !self.forgotten,
            "the cache was forgotten before an attempt failed"
        );
        let is_over = lease_remaining.is_zero();
        let forget = is_over && !std::mem::replace(&mut self.forgotten, is_over);
        let doublings = self.failures.min(16);
        self.failures += 1;
        Retry {
            forget,
            pause: (RECONNECT_PAUSE_MIN * 2_u32.pow(doublings)).min(RECONNECT_PAUSE_MAX),
        }
    }
}

/// Which sessions the namenode has ended.
#[derive(Default)]
pub(crate) struct Ended {
    /// The generation of the last one.
    through: u64,
}

impl Ended {
    pub(crate) fn session(&mut self, generation: u64) {
        self.through = self.through.max(generation);
    }

    /// Whether a session may be resumed.
    pub(crate) fn may_resume(&self, generation: u64) -> bool {
        generation > self.through
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::limits::LEASE;
    use proptest::prelude::*;

    use super::*;
    use crate::engine::session::lease::Lease;

    proptest! {
        /// In virtual time, on a machine that is suspended now and then: whenever it is awake, a
        /// lease that is over is noticed within one look of running time, and on a good connection
        /// the lease never ends without a suspension.
        #[test]
        fn a_lease_that_is_over_is_noticed(
            steps in prop::collection::vec((0u64..100_000, 0u8..10, 0u64..4_000), 1..200),
        ) {
            let lease = Lease::default();
            let mut keep_alive = KeepAlive::default();
            let mut now = Duration::from_secs(1_000);
            lease.renew(now);
            let mut was_suspended = false;
            for (suspended_ms, awake, round_trip_ms) in steps {
                if awake == 0 {
                    was_suspended = true;
                    now += Duration::from_millis(suspended_ms);
                }
                now += KeepAlive::LOOK_INTERVAL;
                let due = keep_alive.look(lease.remaining(now));
                let is_over = lease.remaining(now).is_zero();
                prop_assert_eq!(due == Due::Forget, is_over);
                prop_assert!(!is_over || was_suspended, "it ended while the machine was awake");
                if due != Due::Nothing {
                    let sent = now;
                    now += Duration::from_millis(round_trip_ms);
                    lease.renew(sent);
                    was_suspended = false;
                    prop_assert!(lease.remaining(sent) <= LEASE);
                }
            }
        }

        #[test]
        fn what_is_cached_is_forgotten_once_and_attempts_go_on(
            lease_ms in 0u64..30_000,
            attempt_ms in prop::collection::vec(0u64..3_000, 1..100),
        ) {
            let mut reconnect = Reconnect::default();
            let (mut now, lease) = (Duration::ZERO, Duration::from_millis(lease_ms));
            let mut forgotten = 0;
            let mut last = Duration::ZERO;
            for attempt_ms in attempt_ms {
                now += Duration::from_millis(attempt_ms);
                let retry = reconnect.failed(lease.saturating_sub(now));
                forgotten += u32::from(retry.forget);
                prop_assert_eq!(forgotten, u32::from(now >= lease));
                prop_assert!(retry.pause >= last && retry.pause <= RECONNECT_PAUSE_MAX);
                last = retry.pause;
                now += retry.pause;
            }
        }
    }

    #[test]
    fn an_ended_session_is_not_resumed() {
        let mut ended = Ended::default();
        assert!(ended.may_resume(1));
        ended.session(2);
        ended.session(1);
        assert!(!ended.may_resume(1) && !ended.may_resume(2) && ended.may_resume(3));
    }
}
