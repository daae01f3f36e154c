//! The end of what goes on beside a test.

use std::sync::atomic::{AtomicBool, Ordering};

/// Tells threads that it is over, also when the test fails: the scope that they are in waits for them.
pub struct StoreOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StoreOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
