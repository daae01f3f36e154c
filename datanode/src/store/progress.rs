//! Progress of opening a volume, for tasks that wait for it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use harvestfs_protocol::ids::StorageId;

/// Counts the disk's answers, and holds what is known about the volume so far.
#[derive(Debug, Default)]
pub struct Progress {
    answers: AtomicU64,
    storage: OnceLock<StorageId>,
    quota_bytes: OnceLock<u64>,
}

impl Progress {
    /// Records an answer of the disk.
    pub fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of answers so far.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// Records which volume is being opened.
    pub fn found(&self, storage: StorageId) {
        // Called before the volume is locked, and again when it is.
        let _ = self.storage.set(storage);
    }

    /// Records the volume's quota.
    pub fn limited(&self, quota_bytes: u64) {
        // A volume is opened once.
        let _ = self.quota_bytes.set(quota_bytes);
    }

    /// The volume's quota, once it is known, which is long before the volume is open.
    pub fn quota_bytes(&self) -> Option<u64> {
        self.quota_bytes.get().copied()
    }

    /// The volume's id, once it is known, which is long before the volume is open.
    pub fn storage(&self) -> Option<StorageId> {
        self.storage.get().copied()
    }
}
