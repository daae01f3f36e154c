//! How much written data is in memory.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// What part of the memory, one of so many, is left to data that was refused, once others need it.
const REFUSED_PART: u64 = 4;

/// Written data in memory, of all files.
pub(crate) struct DirtyBudget {
    used: AtomicU64,
    max: u64,
    /// Some of it has left, or was refused and will not leave by itself.
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

    /// Whether there is room for more. One write always fits, however large it is.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let used = self.used();
        used == 0 || used + bytes as u64 <= self.max
    }

    /// So much is in memory that it is written without waiting for a flush.
    pub(crate) fn is_tight(&self) -> bool {
        self.used() > self.max / 2
    }

    /// How much of it may be data that was refused while others wait for room.
    pub(super) fn refused_max(&self) -> u64 {
        self.max / REFUSED_PART
    }

    /// A file holds `after` bytes now instead of `before`.
    pub(super) fn changed(&self, before: u64, after: u64) {
        if after >= before {
            self.used.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.used.fetch_sub(before - after, Ordering::Relaxed);
            self.freed.notify_waiters();
        }
    }
}
