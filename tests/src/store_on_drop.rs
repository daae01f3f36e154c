//! Ends the background threads of a test.

use std::sync::atomic::{AtomicBool, Ordering};

/// Signals threads to end, even if the test fails, since their scope waits for them.
pub struct StoreOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StoreOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
