//! Detects that a volume's directory is gone. Operators clear disks or mount others without notice, and open files can
//! be written and synced as if nothing had happened.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::error::VolumeError;

/// Name of the file that is locked.
pub const LOCK_FILE: &str = "LOCK";

/// Why a volume whose directory is gone is given up.
const GONE: &str = "its directory was removed, or another disk is mounted there; the datanode makes a volume of what is \
                    there now when it is restarted";

/// A volume's directory, locked by this process.
#[derive(Debug)]
pub struct Place {
    lock_path: PathBuf,
    /// Holds the lock.
    lock: File,
}

impl Place {
    /// Locks a directory.
    ///
    /// # Errors
    /// [`VolumeError::Locked`], or the disk's error.
    pub fn take(dir: &Path) -> Result<Self, VolumeError> {
        let lock_path = dir.join(LOCK_FILE);
        let lock = File::create(&lock_path).map_err(VolumeError::io(&lock_path))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { lock_path, lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(VolumeError::Locked {
                path: dir.to_owned(),
            }),
            Err(error) => Err(VolumeError::io(&lock_path)(error.into())),
        }
    }

    /// Returns why the directory can no longer be relied upon, if so: the locked file is not the one that is there.
    /// Blocks on the disk.
    ///
    /// # Errors
    /// The disk's error, if it cannot tell.
    pub fn loss(&self) -> io::Result<Option<&'static str>> {
        let locked = self.lock.metadata()?;
        match fs::symlink_metadata(&self.lock_path) {
            Ok(there) => {
                let is_same = (there.dev(), there.ino()) == (locked.dev(), locked.ino());
                Ok((!is_same).then_some(GONE))
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                Ok(Some(GONE))
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_removed_or_replaced_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("volume");
        fs::create_dir(&volume).unwrap();
        let place = Place::take(&volume).unwrap();
        assert_eq!(place.loss().unwrap(), None);
        assert!(matches!(
            Place::take(&volume),
            Err(VolumeError::Locked { .. })
        ));
        fs::rename(&volume, dir.path().join("aside")).unwrap();
        assert_eq!(place.loss().unwrap(), Some(GONE));
        fs::create_dir(&volume).unwrap();
        let other = Place::take(&volume).unwrap();
        assert_eq!(place.loss().unwrap(), Some(GONE));
        assert_eq!(other.loss().unwrap(), None);
        fs::remove_dir_all(&volume).unwrap();
        fs::write(&volume, "").unwrap();
        assert_eq!(other.loss().unwrap(), Some(GONE));
    }
}
