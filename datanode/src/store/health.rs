//! Whether a volume's disk can be trusted.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;

/// A disk with this many errors within [`ERROR_WINDOW`] is given up. One bad sector gives one or
/// two, as the replica that has it is no longer used.
const ERRORS_MAX: u32 = 5;
const ERROR_WINDOW: Duration = Duration::from_secs(600);

/// What is known about a disk. Once bad, it stays bad until the datanode is restarted.
#[derive(Debug, Default)]
pub struct Health {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    failure: Option<String>,
    errors: u32,
    window_start: Option<Instant>,
}

impl Health {
    /// Whether the volume can be used.
    pub fn is_good(&self) -> bool {
        self.state.lock().failure.is_none()
    }

    /// Why the volume cannot be used, if so.
    pub fn failure(&self) -> Option<String> {
        self.state.lock().failure.clone()
    }

    /// Gives the volume up.
    pub fn fail(&self, reason: &str, volume: &Path) {
        let mut state = self.state.lock();
        if state.failure.is_none() {
            tracing::error!(volume = %volume.display(), reason, "the volume is down");
            state.failure = Some(reason.to_owned());
        }
    }

    /// Takes note of an error of the disk, and gives the volume up if it is serious or the last of
    /// too many.
    pub fn note_error(&self, error: &io::Error, volume: &Path) {
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::ROFS | Errno::NODEV | Errno::NXIO | Errno::STALE | Errno::UCLEAN) => {
                self.fail(&error.to_string(), volume);
            }
            Some(Errno::IO) => {
                tracing::warn!(volume = %volume.display(), %error, "the disk reports an error");
                if self.too_many(Instant::now()) {
                    self.fail("the disk reports too many errors", volume);
                }
            }
            // Not about the disk: too many open files, a file that is gone, no room.
            _ => {}
        }
    }

    fn too_many(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        match state.window_start {
            Some(start) if now.duration_since(start) < ERROR_WINDOW => state.errors += 1,
            _ => {
                state.window_start = Some(now);
                state.errors = 1;
            }
        }
        state.errors >= ERRORS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.raw_os_error())
    }

    #[test]
    fn single_errors_are_forgiven_and_repeated_ones_are_not() {
        let health = Health::default();
        for _ in 1..ERRORS_MAX {
            health.note_error(&error(Errno::IO), Path::new("v"));
            assert!(health.is_good());
        }
        health.note_error(&error(Errno::IO), Path::new("v"));
        assert!(!health.is_good());
    }

    #[test]
    fn errors_long_ago_do_not_count() {
        let health = Health::default();
        let start = Instant::now();
        for _ in 1..ERRORS_MAX {
            assert!(!health.too_many(start));
        }
        assert!(!health.too_many(start + ERROR_WINDOW));
    }

    #[test]
    fn a_disk_that_went_away_is_given_up_at_once() {
        let health = Health::default();
        health.note_error(&error(Errno::MFILE), Path::new("v"));
        assert!(health.is_good());
        health.note_error(&error(Errno::ROFS), Path::new("v"));
        assert!(!health.is_good());
    }
}
