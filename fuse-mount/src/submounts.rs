//! Other mounts inside the mount.
//!
//! When the kernel finds that a directory entry is no longer valid, it detaches whatever is mounted there or below. So
//! while there is such a mount, entries are not declared stale: they are given a time to live of zero instead, and the
//! kernel looks each up again, which it does in place.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::mount_table::{mounted_below, mounts};

/// Checks whether something is mounted in a mount. The kernel does not show mounts that exist in other mount
/// namespaces only.
#[derive(Debug)]
pub struct Submounts {
    /// Signals changes of the table; see proc_pid_mountinfo(5).
    table: File,
    /// The mount's device.
    device: String,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    None,
    Since(Instant),
}

impl Submounts {
    /// `device` is the mount's, as shown in the kernel's table of mounts. Nothing is mounted in it yet.
    ///
    /// # Errors
    /// If `/proc` is not available.
    pub fn new(device: String) -> io::Result<Self> {
        Ok(Self {
            table: File::open("/proc/self/mountinfo")?,
            device,
            state: Mutex::new(State::None),
        })
    }

    /// How long something has been seen mounted in the mount; `None` if nothing is.
    pub fn seen_for(&self) -> Option<Duration> {
        // Held while the table is read: otherwise another thread would find it unchanged.
        let mut state = self.state.lock();
        if self.table_changed() {
            let is_any = match mounts() {
                Ok(mounts) => !mounted_below(&mounts, &self.device).is_empty(),
                Err(error) => {
                    tracing::warn!(%error, "cannot see what is mounted in the mount");
                    true
                }
            };
            *state = match (is_any, *state) {
                (false, _) => State::None,
                (true, State::None) => State::Since(Instant::now()),
                (true, since) => since,
            };
        }
        match *state {
            State::None => None,
            State::Since(since) => Some(since.elapsed()),
        }
    }

    fn table_changed(&self) -> bool {
        let mut polled = [PollFd::new(&self.table, PollFlags::PRI)];
        match poll(&mut polled, Some(&Timespec::default())) {
            Ok(ready) => ready != 0,
            // When in doubt, look.
            Err(_) => true,
        }
    }
}
