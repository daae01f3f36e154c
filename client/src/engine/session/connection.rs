//! The lifetime of a session: keepalives, what is dropped from caches when the lease expires, and
//! how the session resumes after its connection was lost.

use std::time::Duration;

use harvestfs_protocol::limits::KEEPALIVE_INTERVAL;

/// How often the lease is checked between two keepalives: timers stop while the machine is
/// suspended, and the lease does not.
const LEASE_LOOKS: u32 = 5;
/// With several namenodes: after a request had no answer for this long, the leader is asked for a
/// sign of life. Together with `SIGN_OF_LIFE_WITHIN` this is less than an election takes: the
/// others are connected and asked by the time that one of them leads.
pub(crate) const DOUBT_AFTER: Duration = Duration::from_millis(150);
/// If the leader gives no sign of life within this, the others are asked whether one of them leads.
pub(crate) const SIGN_OF_LIFE_WITHIN: Duration = Duration::from_millis(100);
const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(20);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The keepalives on one connection.
#[derive(Default)]
pub(crate) struct KeepAlive {
    looks: u32,
}

/// What is due at a check of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    KeepAlive,
    /// Forget everything immediately, in case the machine was suspended, which also stopped the
    /// kernel's timeouts. Then send a keepalive.
    Forget,
}

impl KeepAlive {
    /// Time between two checks.
    pub(crate) const LOOK_INTERVAL: Duration = KEEPALIVE_INTERVAL.checked_div(LEASE_LOOKS).unwrap();

    /// Checks what remains of the lease.
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

/// The attempts to resume a session whose connection was lost.
#[derive(Default)]
pub(crate) struct Reconnect {
    failures: u32,
    forgotten: bool,
}

impl Reconnect {
    /// Checks what remains of the lease, every [`KeepAlive::LOOK_INTERVAL`]. Returns true once,
    /// when nothing that is cached is valid any more.
    pub(crate) fn look(&mut self, lease_remaining: Duration) -> bool {
        let is_over = lease_remaining.is_zero();
        is_over && !std::mem::replace(&mut self.forgotten, is_over)
    }

    /// Returns the pause before the next attempt, after a session that was resumed was lost again.
    pub(crate) fn failed(&mut self) -> Duration {
        let doublings = self.failures.min(16);
        self.failures += 1;
        (RECONNECT_PAUSE_MIN * 2_u32.pow(doublings)).min(RECONNECT_PAUSE_MAX)
    }
}

/// The sessions that the namenode has ended.
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
        /// In virtual time, on a machine that is suspended now and then: while it is awake, an
        /// expired lease is noticed within one check of running time, and on a good connection the
        /// lease never expires without a suspension.
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
