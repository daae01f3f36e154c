//! Counts the jobs of a disk.

use std::sync::Arc;

use parking_lot::Mutex;

use super::clock::now;
use crate::engine;

/// The jobs of a disk.
#[derive(Debug, Default)]
pub struct Pulse(Mutex<engine::disk::silence::Pulse>);

/// A job that has not ended or been withdrawn yet.
#[derive(Debug)]
pub struct Beat(Arc<Pulse>);

impl Pulse {
    /// Records that a job is handed to the disk.
    pub fn begin(self: &Arc<Self>) -> Beat {
        self.0.lock().begun(now());
        Beat(self.clone())
    }

    /// Whether the disk has owed an answer for so long that it is to be left alone.
    pub fn is_silent(&self) -> bool {
        self.0.lock().is_silent(now())
    }

    /// Whether the disk is to be given up.
    pub fn is_over(&self) -> bool {
        self.0.lock().is_over(now())
    }
}

impl Beat {
    /// Records that the disk has done the job. If this is dropped without that, the job never ran.
    pub fn end(self) {
        self.0.0.lock().answered(now());
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.0.0.lock().ended();
    }
}
