//! Whether a volume's disk can be trusted.

use std::io;
use std::path::Path;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::clock::now;
use super::reading::is_medium_error;
use crate::engine;

/// What is known about a disk. Once bad, it stays bad until the datanode is restarted.
#[derive(Debug, Default)]
pub struct Health(Mutex<engine::disk::health::Health>);

impl Health {
    /// Whether the volume can be used.
    pub fn is_good(&self) -> bool {
        self.0.lock().failure().is_none()
    }

    /// Why the volume cannot be used, if so.
    pub fn failure(&self) -> Option<String> {
        self.0.lock().failure().map(str::to_owned)
    }

    /// Gives the volume up.
    pub fn fail(&self, reason: &str, volume: &Path) {
        let is_first = self.0.lock().fail(reason);
        if is_first {
            tracing::error!(volume = %volume.display(), reason, "the volume is down");
        }
    }

    /// Records an error of the disk, and gives the volume up if the error is serious or there have been too many.
    pub fn note_error(&self, error: &io::Error, volume: &Path) {
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::ROFS | Errno::NODEV | Errno::NXIO | Errno::STALE | Errno::UCLEAN) => {
                self.fail(&error.to_string(), volume);
            }
            _ if is_medium_error(error) => {
                tracing::warn!(volume = %volume.display(), %error, "the disk reports an error");
                let is_last = self.0.lock().has_error(now());
                if is_last {
                    self.fail("the disk reports too many errors", volume);
                }
            }
            // Not the disk's fault: too many open files, a missing file, no space.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.raw_os_error())
    }

    #[test]
    fn a_disk_that_went_away_is_given_up_at_once() {
        let health = Health::default();
        for _ in 0..10 {
            health.note_error(&error(Errno::MFILE), Path::new("v"));
        }
        assert!(health.is_good());
        health.note_error(&error(Errno::ROFS), Path::new("v"));
        assert!(!health.is_good());
    }

    #[test]
    fn a_disk_with_many_bad_sectors_is_given_up() {
        let medium_errors = [
            Errno::IO,
            Errno::NODATA,
            Errno::ILSEQ,
            Errno::REMOTEIO,
            Errno::TIMEDOUT,
            Errno::BADMSG,
        ];
        for errno in medium_errors {
            let health = Health::default();
            health.note_error(&error(errno), Path::new("v"));
            assert!(health.is_good());
            for _ in 0..10 {
                health.note_error(&error(errno), Path::new("v"));
            }
            assert!(!health.is_good(), "{errno}");
        }
    }
}
