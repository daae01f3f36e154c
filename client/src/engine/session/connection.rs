//! How a session lasts: keepalives, what is forgotten when the lease is over, and how it goes on after
//! its connection was lost.

use std::time::Duration;

use harvestfs_protocol::limits::KEEPALIVE_INTERVAL;

/// How often the lease is looked at between two keepalives: timers stop while the machine is
/// suspended, and the lease does not.
const LEASE_LOOKS: u32 = 5;
/// Where there are several namenodes: after a request had no answer for so long, the one that leads
/// is asked for a sign of life. With the next one less than an election takes: the others are connected and asked by the
/// time that one of them leads.
pub(crate) const DOUBT_AFTER: Duration = Duration::from_millis(150);
/// Without one for so long, the others are asked whether one of them leads.
pub(crate) const SIGN_OF_LIFE_WITHIN: Duration = Duration::from_millis(100);
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

/// The way back to a session whose connection was lost.
#[derive(Default)]
pub(crate) struct Reconnect {
    failures: u32,
    forgotten: bool,
}

impl Reconnect {
    /// A look at what remains of the lease, every [`KeepAlive::LOOK_INTERVAL`]: whether nothing that is
    /// cached is valid any more, since a moment ago.
    pub(crate) fn look(&mut self, lease_remaining: Duration) -> bool {
        let is_over = lease_remaining.is_zero();
        is_over && !std::mem::replace(&mut self.forgotten, is_over)
    }

    /// A session that was resumed was lost again: after how long the next attempt begins.
    pub(crate) fn failed(&mut self) -> Duration {
        let doublings = self.failures.min(16);
        self.failures += 1;
        (RECONNECT_PAUSE_MIN * 2_u32.pow(doublings)).min(RECONNECT_PAUSE_MAX)
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
            look_ms in prop::collection::vec(0u64..3_000, 1..100),
        ) {
            let mut reconnect = Reconnect::default();
            let (mut now, lease) = (Duration::ZERO, Duration::from_millis(lease_ms));
            let mut forgotten = 0;
            let mut last = Duration::ZERO;
            for look_ms in look_ms {
                now += Duration::from_millis(look_ms);
                forgotten += u32::from(reconnect.look(lease.saturating_sub(now)));
                prop_assert_eq!(forgotten, u32::from(now >= lease));
                let pause = reconnect.failed();
                prop_assert!(pause >= last && pause <= RECONNECT_PAUSE_MAX);
                last = pause;
                now += pause;
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
