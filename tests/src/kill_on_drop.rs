//! Processes that end with the test.

use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

/// A process that is killed when this is dropped.
#[derive(Debug)]
pub struct KillOnDrop(pub Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        // A process that is blocked on a mount may end only when the cluster is dropped, which happens later.
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
    }
}
