//! Whether the server is to be left to its primary tenant.

pub mod admission;

use std::time::{Duration, Instant};

use harvestfs_protocol::node::{PrimaryLoad, ServerSize};
use harvestfs_telemetry::gate::{Load, Verdict};

/// When to retry a request to a datanode whose disks do not respond.
const SILENT_RETRY: Duration = Duration::from_secs(2);

/// Adds up how long the server is left alone.
#[derive(Debug, Default)]
pub struct Looks {
    last: Option<Instant>,
    was_denied: bool,
}

impl Looks {
    /// Records a check by which the server is denied or not. Returns how long it was denied since the previous check.
    pub fn look(&mut self, is_denied: bool, now: Instant) -> Duration {
        assert!(
            self.last.is_some() || !self.was_denied,
            "the server is left alone since no time"
        );
        let last = self.last.replace(now);
        let was_denied = std::mem::replace(&mut self.was_denied, is_denied);
        match last {
            Some(last) if was_denied => now.saturating_duration_since(last),
            _ => Duration::ZERO,
        }
    }
}

/// How long a denied peer should wait; `None` if there is no denial. `verdict` is that on the primary tenant, if it is
/// monitored; `is_silent` means that the tenant keeps all disks so busy that they do not respond at all.
pub fn denied(verdict: Option<Verdict>, is_silent: bool) -> Option<Duration> {
    match verdict {
        Some(Verdict::Busy { retry_after, .. }) => Some(retry_after),
        Some(Verdict::Free) | None => is_silent.then_some(SILENT_RETRY),
    }
}

/// The primary tenant's usage of a server of this size, for heartbeats; `None` if it is not known.
pub fn primary(load: &Load, size: Option<ServerSize>) -> Option<PrimaryLoad> {
    // Shares are from 0 to 1.
    let permille = |share: f64| (share * 1000.0).round() as u16;
    Some(PrimaryLoad {
        cpu_permille: permille(load.cpu_share?),
        memory_permille: load.memory_share.map(permille),
        stalled_permille: load.stalled_share.map(permille),
        size,
    })
}

#[cfg(test)]
mod tests {
    use harvestfs_telemetry::gate::Reason;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    #[test]
    fn the_owner_counts_before_the_disks() {
        let retry_after = Duration::from_secs(7);
        let busy = Verdict::Busy {
            reason: Reason::Silence,
            retry_after,
        };
        assert_eq!(denied(None, false), None);
        assert_eq!(denied(Some(Verdict::Free), false), None);
        assert_eq!(denied(Some(Verdict::Free), true), Some(SILENT_RETRY));
        assert_eq!(denied(Some(busy), true), Some(retry_after));
        assert_eq!(denied(Some(busy), false), Some(retry_after));
    }

    proptest! {
        /// The time counted is exactly that from each check that denies to the next check.
        #[test]
        fn the_time_it_is_left_alone_is_counted(
            looks in prop::collection::vec((any::<bool>(), 0u64..1_000), 1..100),
        ) {
            let mut counted = Looks::default();
            let mut now = some_time();
            let (mut sum, mut expected) = (Duration::ZERO, Duration::ZERO);
            let mut before = false;
            for (is_denied, pause_ms) in looks {
                let pause = Duration::from_millis(pause_ms);
                now += pause;
                if before {
                    expected += pause;
                }
                sum += counted.look(is_denied, now);
                before = is_denied;
            }
            prop_assert_eq!(sum, expected);
        }
    }
}
