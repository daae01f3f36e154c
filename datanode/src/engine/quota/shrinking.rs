//! Getting below a lowered quota.
//!
//! Until the deadline the namenode chooses which replicas go: it knows how many copies exist elsewhere, and has time
//! to make more. After the deadline, replicas are given up in this order until the rest fits:
//!
//! 1. replicas of which nothing can be read, or that were to be removed: they are of no use;
//! 2. sealed replicas, the largest first, so that as few blocks as possible lose a replica;
//! 3. corrupt replicas, the largest first: the namenode has a corrupt replica removed once it knows of a good one, so
//!    one that is still here may be all that is left of its block.
//!
//! Replicas that are not sealed stay; they may not grow, are sealed soon, and can be chosen then. Those that have to
//! be rewritten before they are sealed are rewritten while the volume is above its quota even when the primary tenant
//! needs the server: the space is the tenant's.

use std::time::{Duration, Instant};

use harvestfs_protocol::ids::BlockId;

/// How soon the data on a volume must fit into a quota lowered by the configuration.
pub const SHRINK_DEADLINE: Duration = Duration::from_secs(3600);
/// The latest possible deadline, whatever is requested.
const DEADLINE_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// A quota that was set while the datanode ran, as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetQuota {
    /// The configured quota at that time, in bytes.
    pub configured_bytes: u64,
    /// The quota in force instead, in bytes.
    pub quota_bytes: u64,
    /// When the usage must be below it.
    pub deadline_unix_ms: u64,
}

impl SetQuota {
    /// A quota that is set at `now_unix_ms`, and that the usage must meet within `time`.
    pub fn new(configured_bytes: u64, quota_bytes: u64, time: Duration, now_unix_ms: u64) -> Self {
        Self {
            configured_bytes,
            quota_bytes,
            // Saturation affects only the deadline after a restart.
            deadline_unix_ms: now_unix_ms.saturating_add(milliseconds(time)),
        }
    }
}

/// The origin of a volume's quota, and its deadline.
#[derive(Clone, Copy, Debug)]
pub struct Shrinking {
    configured_bytes: u64,
    deadline: Instant,
}

impl Shrinking {
    /// The state at startup, given the stored quota. Also returns the quota in force, in bytes. A quota that was set
    /// at run time holds until the configured quota differs from what it was then.
    pub fn at_start(
        configured_bytes: u64,
        set: Option<SetQuota>,
        now: Instant,
        now_unix_ms: u64,
    ) -> (u64, Self) {
        let set = set.filter(|set| set.configured_bytes == configured_bytes);
        let quota_bytes = set.map_or(configured_bytes, |set| set.quota_bytes);
        let time = set.map_or(SHRINK_DEADLINE, |set| {
            Duration::from_millis(set.deadline_unix_ms.saturating_sub(now_unix_ms))
        });
        (quota_bytes, Self::within(configured_bytes, time, now))
    }

    /// A quota that is set `now`, and that the usage must meet within `time`.
    pub fn within(configured_bytes: u64, time: Duration, now: Instant) -> Self {
        Self {
            configured_bytes,
            deadline: now + time.min(DEADLINE_MAX),
        }
    }

    /// The configured quota in bytes, even while another quota holds.
    pub fn configured_bytes(&self) -> u64 {
        self.configured_bytes
    }

    /// While the usage exceeds the quota by so much: milliseconds until it must no longer do so.
    pub fn left_ms(&self, excess_bytes: u64, now: Instant) -> Option<u64> {
        let left = self.deadline.saturating_duration_since(now);
        (excess_bytes > 0).then_some(milliseconds(left))
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The value of a replica to its block: the least valuable goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worth {
    /// The replica is of no use.
    Useless,
    /// The replica is good, and most likely not the only one.
    Sealed,
    /// A part of the replica is bad, or its contents are unknown, and it may be the only one.
    Corrupt,
}

/// A replica that may be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its block.
    pub block: BlockId,
    /// Its value.
    pub worth: Worth,
    /// The space that it takes, in bytes.
    pub bytes: u64,
}

/// Selects replicas that together take at least `excess_bytes`, in the order in which they are given up.
pub fn victims(mut candidates: Vec<Candidate>, excess_bytes: u64) -> Vec<BlockId> {
    candidates.sort_unstable_by_key(|it| (it.worth, u64::MAX - it.bytes, it.block));
    let mut left_bytes = excess_bytes;
    let enough = candidates.into_iter().take_while(|it| {
        let is_needed = left_bytes > 0;
        // The last replica may be larger than the remaining excess.
        left_bytes = left_bytes.saturating_sub(it.bytes);
        is_needed
    });
    enough.map(|it| it.block).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    fn worth() -> impl Strategy<Value = Worth> {
        prop_oneof![
            Just(Worth::Useless),
            Just(Worth::Sealed),
            Just(Worth::Corrupt)
        ]
    }

    proptest! {
        /// Enough replicas are given up, and without the last one it would not be enough; none is given up while one
        /// stays that is worth less, or a larger one that is worth the same.
        #[test]
        fn as_little_goes_as_must(
            replicas in prop::collection::vec((worth(), 1u64..50), 0..20),
            excess_bytes in 0u64..500,
        ) {
            let candidates: Vec<Candidate> = (0..)
                .map(BlockId)
                .zip(replicas)
                .map(|(block, (worth, bytes))| Candidate { block, worth, bytes })
                .collect();
            let given_up = victims(candidates.clone(), excess_bytes);
            let found = |block: &BlockId| candidates[block.0 as usize];
            let sum_of = |blocks: &[BlockId]| blocks.iter().map(|it| found(it).bytes).sum::<u64>();
            match given_up.split_last() {
                Some((_, before)) => prop_assert!(sum_of(before) < excess_bytes),
                None => prop_assert!(excess_bytes == 0 || candidates.is_empty()),
            }
            prop_assert!(sum_of(&given_up) >= excess_bytes || given_up.len() == candidates.len());
            for stays in candidates.iter().filter(|it| !given_up.contains(&it.block)) {
                for goes in given_up.iter().map(found) {
                    prop_assert!(
                        goes.worth < stays.worth
                            || goes.worth == stays.worth && goes.bytes >= stays.bytes
                    );
                }
            }
        }

        /// A deadline is unchanged by a restart of the datanode, and a configuration that was changed since takes
        /// precedence over a quota set at run time.
        #[test]
        fn a_deadline_survives_restarts(
            time_s in 0u64..100_000,
            restarts_s in prop::collection::vec(1u64..50_000, 0..10),
        ) {
            let (mut now, mut unix_ms) = (some_time(), 1_700_000_000_000);
            let set = SetQuota::new(1_000, 500, Duration::from_secs(time_s), unix_ms);
            let mut left_s = time_s;
            for after_s in restarts_s {
                now += Duration::from_secs(after_s);
                unix_ms += after_s * 1_000;
                left_s = left_s.saturating_sub(after_s);
                let (quota_bytes, shrinking) = Shrinking::at_start(1_000, Some(set), now, unix_ms);
                prop_assert_eq!(quota_bytes, 500);
                prop_assert_eq!(shrinking.left_ms(1, now), Some(left_s * 1_000));
                prop_assert_eq!(shrinking.left_ms(0, now), None);
            }
            let (quota_bytes, shrinking) = Shrinking::at_start(700, Some(set), now, unix_ms);
            prop_assert_eq!((quota_bytes, shrinking.configured_bytes()), (700, 700));
            let hour_ms = milliseconds(SHRINK_DEADLINE);
            prop_assert_eq!(shrinking.left_ms(1, now), Some(hour_ms));
        }
    }

    #[test]
    fn times_without_end_are_cut() {
        let set = SetQuota::new(1, 1, Duration::MAX, 5);
        assert_eq!(set.deadline_unix_ms, u64::MAX);
        let now = some_time();
        let shrinking = Shrinking::within(1, Duration::MAX, now);
        assert_eq!(shrinking.left_ms(1, now), Some(milliseconds(DEADLINE_MAX)));
    }
}
