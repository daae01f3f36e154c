//! Tables of open files and directories, by the handles that the kernel uses.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

/// A table of handles for open files or directories.
#[derive(Debug)]
pub struct Handles<T> {
    open: RwLock<HashMap<u64, Arc<T>>>,
    next: AtomicU64,
}

impl<T> Handles<T> {
    /// An empty table.
    pub fn new() -> Self {
        Self {
            open: RwLock::new(HashMap::new()),
            next: AtomicU64::new(1),
        }
    }

    /// Assigns a handle to `value`.
    pub fn insert(&self, value: T) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(number, Arc::new(value));
        number
    }

    /// Returns the value with this handle.
    pub fn get(&self, number: u64) -> Option<Arc<T>> {
        self.open.read().get(&number).cloned()
    }

    /// Releases the handle.
    pub fn remove(&self, number: u64) -> Option<Arc<T>> {
        self.open.write().remove(&number)
    }
}
