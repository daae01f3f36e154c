//! Decides whether it is the leader's own disk that is slow. The code is pure.
//!
//! What a majority has is committed, even while the leader's disk is still writing it. Then no client waits, but the
//! leader's queue fills, and a standby with a faster disk should lead.

use std::collections::VecDeque;

use crate::journal::Lsn;

/// A record is late if it was committed this long ago but is not durable here yet.
const LATE_MS: u64 = 1_000;
/// The disk is slow if records have been late for this long.
const SLOW_MS: u64 = 3_000;

/// What was observed of the leader's disk.
#[derive(Debug, Default)]
pub(crate) struct SlowDisk {
    /// The last committed record at recent times, in order; about the last second.
    marks: VecDeque<(u64, Lsn)>,
    /// The time since which records have been late.
    since_ms: Option<u64>,
}

impl SlowDisk {
    /// Takes a sample; call it a few times a second. Returns whether another member should lead.
    pub(crate) fn is_slow(&mut self, now_ms: u64, committed: Lsn, durable: Lsn) -> bool {
        self.marks.push_back((now_ms, committed));
        let mut due = None;
        while let Some((at_ms, lsn)) = self.marks.front().copied()
            && at_ms + LATE_MS <= now_ms
        {
            due = Some(lsn);
            self.marks.pop_front();
        }
        match due {
            Some(due) if durable < due => {
                let since_ms = *self.since_ms.get_or_insert(now_ms);
                now_ms - since_ms >= SLOW_MS
            }
            Some(_) => {
                self.since_ms = None;
                false
            }
            // No sample was taken for a while.
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples ten times a second for ten seconds, at 2000 records a second, and returns when the disk was found to
    /// be slow.
    fn found_slow_after_ms(durable: impl Fn(u64) -> Lsn) -> Option<u64> {
        let mut disk = SlowDisk::default();
        (0..100).map(|tick| tick * 100).find(|&now_ms| {
            let committed = now_ms * 2;
            disk.is_slow(now_ms, committed, durable(now_ms))
        })
    }

    #[test]
    fn a_disk_that_keeps_up_within_a_second_is_not_slow() {
        assert_eq!(found_slow_after_ms(|now_ms| now_ms * 2), None);
        assert_eq!(
            found_slow_after_ms(|now_ms| now_ms.saturating_sub(900) * 2),
            None
        );
    }

    #[test]
    fn a_disk_that_is_late_for_seconds_is_slow() {
        assert_eq!(found_slow_after_ms(|_| 0), Some(4_100));
        let late = |now_ms: u64| now_ms.saturating_sub(1_500) * 2;
        assert!(found_slow_after_ms(late).is_some());
    }

    #[test]
    fn one_pause_does_not_make_a_disk_slow() {
        let paused = |now_ms: u64| match now_ms {
            2_000..4_500 => 4_000,
            _ => now_ms * 2,
        };
        assert_eq!(found_slow_after_ms(paused), None);
    }
}
