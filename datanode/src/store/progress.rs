//! How far the opening of a volume is, for those who wait for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what the disk has answered.
#[derive(Debug, Default)]
pub struct Progress(AtomicU64);

impl Progress {
    /// The disk has answered.
    pub fn answered(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it has.
    pub fn answers(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
