//! How far the opening of a volume is, for those who wait for it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use harvestfs_protocol::ids::StorageId;

/// Counts what the disk has answered.
#[derive(Debug, Default)]
pub struct Progress {
    answers: AtomicU64,
    storage: OnceLock<StorageId>,
    quota_bytes: OnceLock<u64>,
}

impl Progress {
    /// The disk has answered.
    pub fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it has.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// It is this volume that is being opened.
    pub fn found(&self, storage: StorageId) {
        // It is seen before the volume is locked, and said again when it is.
        let _ = self.storage.set(storage);
    }

    /// So much it may use.
    pub fn limited(&self, quota_bytes: u64) {
        // It is opened once.
        let _ = self.quota_bytes.set(quota_bytes);
    }

    /// What it may use, once that is known, which is long before it is open.
    pub fn quota_bytes(&self) -> Option<u64> {
        self.quota_bytes.get().copied()
    }

    /// Which volume it is, once that is known, which is long before it is open.
    pub fn storage(&self) -> Option<StorageId> {
        self.storage.get().copied()
    }
}
