//! Samples of what the primary tenant uses of its server.
//!
//! - [`Machine`]: the whole machine less HarvestFS's own processes;
//! - [`Cgroup`]: a control group, version 1 or 2; while it does not exist, the machine;
//! - [`TraceReplay`]: a recorded series, acted out in real or scaled time.
//!
//! A [`Monitor`] takes samples on a thread of its own and has a [`crate::gate::BusyGate`] judge them.

mod cgroup;
mod kernel;
mod machine;
mod monitor;
mod replay;

use std::time::{Duration, Instant};

pub use cgroup::{CGROUP_ROOT, Cgroup};
pub use kernel::{cores, memory_mib};
pub use machine::{Machine, Own};
pub use monitor::{DEFAULT_INTERVAL, Monitor, Status};
pub use replay::{ReplayError, TraceReplay};

use crate::gate::Load;

/// Something that tells what the primary tenant uses.
pub trait Sampler: Send {
    /// The use since the sample before, or what is known of it; a load of which nothing is known
    /// when it cannot be read now. May block as long as the kernel pleases.
    ///
    /// # Errors
    /// Why the source tells nothing; it may do so again with the next sample.
    fn sample(&mut self, now: Instant) -> Result<Load, SampleError>;
}

/// Why a source tells nothing.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// A file of the kernel cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A control group that must be there is not.
    #[error("there is no cgroup {}", .0.display())]
    NoCgroup(std::path::PathBuf),
    /// A file of the kernel holds something unexpected.
    #[error("{path}: {what} is not there")]
    Format {
        /// Which.
        path: String,
        /// What was looked for.
        what: &'static str,
    },
}

/// A counter that grows, of which the difference to its last value counts.
#[derive(Debug, Default)]
struct Counter {
    last: Option<u64>,
}

impl Counter {
    /// How much it grew; `None` the first time, and when it went back because what it counts was
    /// made anew.
    fn growth(&mut self, value: u64) -> Option<u64> {
        let last = self.last.replace(value)?;
        value.checked_sub(last)
    }
}

/// After a pause this long between two samples (the machine slept, or the process was stopped), the
/// average over it says nothing about now.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The time between samples.
#[derive(Debug, Default)]
struct Pace {
    last: Option<Instant>,
}

impl Pace {
    /// Microseconds since the sample before; `None` the first time, after a pause, and when the
    /// clock did not move on.
    fn elapsed_us(&mut self, now: Instant) -> Option<u64> {
        let last = self.last.replace(now)?;
        let elapsed = now.checked_duration_since(last)?;
        let usable = !elapsed.is_zero() && elapsed <= PAUSE_MAX;
        usable
            .then_some(elapsed.as_micros() as u64)
            .filter(|&us| us > 0)
    }
}
