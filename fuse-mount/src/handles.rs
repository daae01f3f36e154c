//! Open files and directories, by the numbers that the kernel knows them under.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

/// Numbers for open things.
#[derive(Debug)]
pub struct Handles<T> {
    open: RwLock<HashMap<u64, Arc<T>>>,
    next: AtomicU64,
}

impl<T> Handles<T> {
    /// None is open.
    pub fn new() -> Self {
        Self {
            open: RwLock::new(HashMap::new()),
            next: AtomicU64::new(1),
        }
    }

    /// Takes a number for `value`.
    pub fn insert(&self, value: T) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(number, Arc::new(value));
        number
    }

    /// What has the number.
    pub fn get(&self, number: u64) -> Option<Arc<T>> {
        self.open.read().get(&number).cloned()
    }

    /// Gives the number back.
    pub fn remove(&self, number: u64) -> Option<Arc<T>> {
        self.open.write().remove(&number)
    }
}
