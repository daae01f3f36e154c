//! A primary tenant whose resource usage a test controls, or whose kernel files hang.

use std::sync::Arc;
use std::time::Instant;

use harvestfs_telemetry::gate::Load;
use harvestfs_telemetry::primary::{SampleError, Sampler};
use parking_lot::{Condvar, Mutex};

/// A primary tenant. Cheap to clone; all clones are the same tenant.
#[derive(Clone, Default)]
pub struct TestPrimary {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The usage, or that reading it hangs.
    cpu_share: Mutex<Option<f64>>,
    changed: Condvar,
}

impl TestPrimary {
    pub fn idle() -> Self {
        let primary = Self::default();
        primary.uses(0.0);
        primary
    }

    pub fn uses(&self, cpu_share: f64) {
        *self.inner.cpu_share.lock() = Some(cpu_share);
        self.inner.changed.notify_all();
    }

    /// Makes reading its usage hang from now on.
    pub fn hang(&self) {
        *self.inner.cpu_share.lock() = None;
    }
}

impl Sampler for TestPrimary {
    fn sample(&mut self, _: Instant) -> Result<Load, SampleError> {
        let mut cpu_share = self.inner.cpu_share.lock();
        while cpu_share.is_none() {
            self.inner.changed.wait(&mut cpu_share);
        }
        Ok(Load {
            cpu_share: *cpu_share,
            memory_share: Some(0.25),
            ..Load::default()
        })
    }
}
