//! The amount of written data in memory.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Refused data may keep one part in this many of the memory, once others need it.
const REFUSED_PART: u64 = 4;

/// The budget for written data in memory, of all files.
pub(crate) struct DirtyBudget {
    used: AtomicU64,
    max: u64,
    /// Notified when data has left, or was refused and will not leave by itself.
    pub(super) freed: Notify,
}

impl DirtyBudget {
    pub(super) fn new(max: u64) -> Self {
        Self {
            used: AtomicU64::new(0),
            max,
            freed: Notify::new(),
        }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether there is room for this much more. A write into empty memory always fits, however large it is.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let used = self.used();
        used == 0 || used + bytes as u64 <= self.max
    }

    /// Whether so much is in memory that it is written without waiting for a flush.
    pub(crate) fn is_tight(&self) -> bool {
        self.used() > self.max / 2
    }

    /// Returns how much refused data may stay while others wait for room.
    pub(super) fn refused_max(&self) -> u64 {
        self.max / REFUSED_PART
    }

    /// Notes that a file now holds `after` bytes instead of `before`.
    pub(super) fn changed(&self, before: u64, after: u64) {
        if after >= before {
            self.used.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.used.fetch_sub(before - after, Ordering::Relaxed);
            self.freed.notify_waiters();
        }
    }
}
