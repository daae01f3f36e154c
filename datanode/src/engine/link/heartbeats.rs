//! When a heartbeat goes out.

use std::time::{Duration, Instant};

use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;

/// Between two looks whether space became short.
pub const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// The heartbeats on one connection. They come at a steady rate, and sooner when space becomes short:
/// writers may be refused until the namenode has more deleted than the rate allows.
#[derive(Debug)]
pub struct Heartbeats {
    next_at: Instant,
    look_at: Instant,
    /// What was to be deleted beyond the rate at the last look, in bytes.
    pressure_bytes: u64,
}

impl Heartbeats {
    /// The first one is due at once.
    pub fn new(now: Instant) -> Self {
        Self {
            next_at: now,
            look_at: now + PRESSURE_INTERVAL,
            pressure_bytes: 0,
        }
    }

    /// When to [look](Heartbeats::look) next.
    pub fn look_at(&self) -> Instant {
        self.next_at.min(self.look_at)
    }

    /// Whether a heartbeat is due, where so much should be deleted beyond the rate. It is due when that is
    /// more than the last heartbeat said, or than the least since.
    pub fn look(&mut self, now: Instant, pressure_bytes: u64) -> bool {
        if now >= self.next_at {
            return true;
        }
        if now < self.look_at {
            return false;
        }
        self.look_at = now + PRESSURE_INTERVAL;
        let before_bytes = std::mem::replace(&mut self.pressure_bytes, pressure_bytes);
        pressure_bytes > before_bytes
    }

    /// One is sent, which says that so much should be deleted beyond the rate.
    pub fn sent(&mut self, now: Instant, pressure_bytes: u64) {
        self.next_at = now + HEARTBEAT_INTERVAL;
        self.pressure_bytes = pressure_bytes;
    }

    /// It is answered, or given up. One that is sent at each answer because space is short is sent at most
    /// once in a time.
    pub fn answered(&mut self, now: Instant) {
        self.look_at = now + PRESSURE_INTERVAL;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    proptest! {
        /// In virtual time, with changes of the owner's use and of what should be deleted: heartbeats are
        /// never further apart than they may be, more pressure is known soon, and pressure alone does not
        /// make more of them than one in its time.
        #[test]
        fn heartbeats_come_in_time(
            steps in prop::collection::vec(
                // What should be deleted from then on, whether it is busy or not any more, round trip.
                (0u64..4, prop::bool::weighted(0.1), 0u64..400),
                1..200,
            ),
        ) {
            let start = some_time();
            let mut now = start;
            let mut heartbeats = Heartbeats::new(now);
            let mut last = None::<Instant>;
            let mut said_bytes = 0;
            let mut risen_at = None::<Instant>;
            for (pressure_bytes, busy_changes, round_trip_ms) in steps {
                if !busy_changes {
                    now = now.max(heartbeats.look_at());
                }
                let is_due = busy_changes || heartbeats.look(now, pressure_bytes);
                prop_assert!(is_due || last.is_some(), "the first one is not sent at once");
                if pressure_bytes <= said_bytes {
                    said_bytes = pressure_bytes;
                    risen_at = None;
                } else {
                    risen_at.get_or_insert(now);
                }
                if is_due {
                    if let Some(last) = last {
                        let apart = now - last;
                        prop_assert!(apart <= HEARTBEAT_INTERVAL, "{apart:?}");
                        prop_assert!(busy_changes || apart >= PRESSURE_INTERVAL, "{apart:?}");
                    }
                    last = Some(now);
                    heartbeats.sent(now, pressure_bytes);
                    (said_bytes, risen_at) = (pressure_bytes, None);
                    now += Duration::from_millis(round_trip_ms);
                    heartbeats.answered(now);
                }
                if let Some(risen_at) = risen_at {
                    prop_assert!(now - risen_at <= PRESSURE_INTERVAL, "it is not said");
                }
                prop_assert!(heartbeats.look_at() <= now + PRESSURE_INTERVAL);
            }
        }
    }

    #[test]
    fn one_that_is_not_answered_is_followed_by_the_next_at_once() {
        let start = some_time();
        let mut heartbeats = Heartbeats::new(start);
        assert!(heartbeats.look(start, 0));
        heartbeats.sent(start, 0);
        let given_up = start + HEARTBEAT_INTERVAL;
        heartbeats.answered(given_up);
        assert_eq!(heartbeats.look_at(), given_up);
        assert!(heartbeats.look(given_up, 0));
    }
}
