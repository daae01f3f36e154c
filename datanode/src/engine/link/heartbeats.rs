//! Timing of heartbeats.

use std::time::{Duration, Instant};

use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;

/// Time between two checks for a shortage of space.
pub const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// A change of the primary tenant's CPU usage by at least this much since the last heartbeat is reported soon, in
/// thousandths of all cores: jobs on the server react to it within seconds.
pub const CPU_CHANGE_PERMILLE: u16 = 50;

/// The heartbeats on one connection. They are sent at a steady rate, and sooner when space becomes short: writers may
/// be refused until the namenode commands more deletions than the rate allows. Also sooner when the primary tenant
/// uses much more or less.
#[derive(Debug)]
pub struct Heartbeats {
    next_at: Instant,
    look_at: Instant,
    /// Bytes that should be deleted beyond the rate, as of the last check.
    pressure_bytes: u64,
    /// The primary tenant's CPU usage in the last heartbeat.
    cpu_permille: Option<u16>,
}

impl Heartbeats {
    /// The first heartbeat is due immediately.
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

    /// Whether a heartbeat is due, given the bytes that should be deleted beyond the rate and the primary tenant's CPU
    /// usage. It is due when the former exceed those in the last heartbeat, or the minimum since, or when the latter
    /// differs much from the last heartbeat.
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

    /// Records that a heartbeat with these values is sent.
    pub fn sent(&mut self, now: Instant, pressure_bytes: u64, cpu_permille: Option<u16>) {
        self.next_at = now + HEARTBEAT_INTERVAL;
        self.pressure_bytes = pressure_bytes;
        self.cpu_permille = cpu_permille;
    }

    /// Records that the last heartbeat is answered. Heartbeats sent because space is short are sent at most once per
    /// `PRESSURE_INTERVAL` after an answer.
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
        /// In virtual time, with changes of the primary tenant's usage and of the bytes that should be deleted: the
        /// interval between heartbeats never exceeds the maximum, increased pressure and changed usage are reported
        /// soon, and these alone cause at most one heartbeat per interval.
        #[test]
        fn heartbeats_come_in_time(
            steps in prop::collection::vec(
                // Bytes to delete from then on, the tenant's CPU usage, whether the server becomes busy or idle,
                // round-trip time.
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
