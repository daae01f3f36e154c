//! Samples of the primary tenant's usage of its server.
//!
//! - [`Machine`]: the whole machine less HarvestFS's own processes;
//! - [`Cgroup`]: a control group, version 1 or 2; while it does not exist, the machine;
//! - [`TraceReplay`]: a recorded series, replayed in real or scaled time.
//!
//! A [`Monitor`] takes samples on its own thread and passes them to a [`crate::gate::BusyGate`].

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

/// A source of samples of the primary tenant's usage.
pub trait Sampler: Send {
    /// Returns the usage since the previous sample, as far as it is known; a load without any known value if it
    /// cannot be read at the moment. May block as long as the kernel does.
    ///
    /// # Errors
    /// Why the source has no value; the next sample may succeed again.
    fn sample(&mut self, now: Instant) -> Result<Load, SampleError>;
}

/// The reason why a source has no value.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// A file of the kernel cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A required control group does not exist.
    #[error("there is no cgroup {}", .0.display())]
    NoCgroup(std::path::PathBuf),
    /// A file of the kernel has unexpected content.
    #[error("{path}: {what} is not there")]
    Format {
        /// The file.
        path: String,
        /// The missing content.
        what: &'static str,
    },
}

/// A counter that increases, of which the differences between values matter.
#[derive(Debug, Default)]
struct Counter {
    last: Option<u64>,
}

impl Counter {
    /// Returns how much it grew; `None` for the first value, and when it decreased because the counted object was
    /// recreated.
    fn growth(&mut self, value: u64) -> Option<u64> {
        let last = self.last.replace(value)?;
        value.checked_sub(last)
    }
}

/// After a longer pause between two samples (the machine was suspended, or the process was stopped), the average over
/// the pause is meaningless for the present.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The time between samples.
#[derive(Debug, Default)]
struct Pace {
    last: Option<Instant>,
}

impl Pace {
    /// Returns the microseconds since the previous sample; `None` the first time, after a pause, and when the clock
    /// has not advanced.
    fn elapsed_us(&mut self, now: Instant) -> Option<u64> {
        let last = self.last.replace(now)?;
        let elapsed = now.checked_duration_since(last)?;
        let usable = !elapsed.is_zero() && elapsed <= PAUSE_MAX;
        usable
            .then_some(elapsed.as_micros() as u64)
            .filter(|&us| us > 0)
    }
}
