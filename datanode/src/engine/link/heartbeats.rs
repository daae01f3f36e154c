//! When a heartbeat goes out.

use std::time::{Duration, Instant};

use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;

/// Between two looks whether space became short.
pub const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// An owner's use that differs by so much from what was said last is said soon, in thousandths of all cores: jobs
/// on the server follow it within seconds.
pub const CPU_CHANGE_PERMILLE: u16 = 50;

/// The heartbeats on one connection. They come at a steady rate, and sooner when space becomes short:
/// writers may be refused until the namenode has more deleted than the rate allows. Also sooner when the owner uses
/// much more or less.
#[derive(Debug)]
pub struct Heartbeats {
    next_at: Instant,
    look_at: Instant,
    /// What was to be deleted beyond the rate at the last look, in bytes.
    pressure_bytes: u64,
    /// What the last heartbeat said that the owner uses.
    cpu_permille: Option<u16>,
}

impl Heartbeats {
    /// The first one is due at once.
    pub fn new(now: Instant) -> Self {
        Self {
            next_at: now,
            look_at: now + PRESSURE_INTERVAL,
            pressure_bytes: 0,
            cpu_permille: None,
        }
    }

    /// When to [look](Heartbeats::look) next.
    pub fn look_at(&self) -> Instant {
        self.next_at.min(self.look_at)
    }

    /// Whether a heartbeat is due, where so much should be deleted beyond the rate and the owner uses so much. It is due
    /// when the former is more than the last heartbeat said, or than the least since, or the latter differs much from that.
    pub fn look(&mut self, now: Instant, pressure_bytes: u64, cpu_permille: Option<u16>) -> bool {
        if now >= self.next_at {
            return true;
        }
        if now < self.look_at {
            return false;
        }
        self.look_at = now + PRESSURE_INTERVAL;
        let before_bytes = std::mem::replace(&mut self.pressure_bytes, pressure_bytes);
        let is_news = match (self.cpu_permille, cpu_permille) {
            (Some(said), Some(now)) => said.abs_diff(now) >= CPU_CHANGE_PERMILLE,
            (said, now) => said.is_some() != now.is_some(),
        };
        pressure_bytes > before_bytes || is_news
    }

    /// One is sent, which says that so much should be deleted beyond the rate, and what the owner uses.
    pub fn sent(&mut self, now: Instant, pressure_bytes: u64, cpu_permille: Option<u16>) {
        self.next_at = now + HEARTBEAT_INTERVAL;
        self.pressure_bytes = pressure_bytes;
        self.cpu_permille = cpu_permille;
    }

    /// It is answered. One that is sent at each answer because space is short is sent at most
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
        /// never further apart than they may be, more pressure and another use are known soon, and these alone do not
        /// make more of them than one in its time.
        #[test]
        fn heartbeats_come_in_time(
            steps in prop::collection::vec(
                // What should be deleted from then on, what the owner uses, whether it is busy or not any more, round trip.
                (0u64..4, prop::option::weighted(0.8, 0u16..200), prop::bool::weighted(0.1), 0u64..400),
                1..200,
            ),
        ) {
            let start = some_time();
            let mut now = start;
            let mut heartbeats = Heartbeats::new(now);
            let mut last = None::<Instant>;
            let mut said_bytes = 0;
            let mut risen_at = None::<Instant>;
            let mut said_cpu = None;
            for (pressure_bytes, cpu_permille, busy_changes, round_trip_ms) in steps {
                if !busy_changes {
                    now = now.max(heartbeats.look_at());
                }
                let is_due = busy_changes || heartbeats.look(now, pressure_bytes, cpu_permille);
                prop_assert!(is_due || last.is_some(), "the first one is not sent at once");
                if pressure_bytes <= said_bytes {
                    said_bytes = pressure_bytes;
                    risen_at = None;
                } else {
                    risen_at.get_or_insert(now);
                }
                let is_far = match (said_cpu, cpu_permille) {
                    (Some(said), Some(now)) => u16::abs_diff(said, now) >= CPU_CHANGE_PERMILLE,
                    (said, now) => said.is_some() != now.is_some(),
                };
                prop_assert!(is_due || !is_far, "another use is not said when it is seen");
                if is_due {
                    if let Some(last) = last {
                        let apart = now - last;
                        prop_assert!(apart <= HEARTBEAT_INTERVAL, "{apart:?}");
                        prop_assert!(busy_changes || apart >= PRESSURE_INTERVAL, "{apart:?}");
                    }
                    last = Some(now);
                    heartbeats.sent(now, pressure_bytes, cpu_permille);
                    (said_bytes, risen_at) = (pressure_bytes, None);
                    said_cpu = cpu_permille;
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
    fn one_that_is_answered_late_is_followed_by_the_next_at_once() {
        let start = some_time();
        let mut heartbeats = Heartbeats::new(start);
        assert!(heartbeats.look(start, 0, None));
        heartbeats.sent(start, 0, None);
        let late = start + HEARTBEAT_INTERVAL;
        heartbeats.answered(late);
        assert_eq!(heartbeats.look_at(), late);
        assert!(heartbeats.look(late, 0, None));
    }
}
