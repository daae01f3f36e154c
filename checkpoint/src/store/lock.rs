//! The lock on a job: a file in its directory, which `rm` removes with the rest.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use rustix::fs::{FlockOperation, OFlags};

use super::{Job, StoreError, io_error};

pub(super) const LOCK_FILE: &str = ".lock";
/// How often the lock is sought again when its file was removed in the meantime.
const ATTEMPTS_MAX: u32 = 10;

impl Job {
    /// Locks the job against other commands on this mount until the lock is dropped.
    ///
    /// # Errors
    /// [`StoreError::Locked`] when another command holds the lock, [`StoreError::Link`] when the job's directory is a
    /// link.
    pub fn lock(&self) -> Result<JobLock, StoreError> {
        for _ in 0..ATTEMPTS_MAX {
            if let Some(file) = self.open_lock()?
                && let Some(lock) = self.lock_opened(file)?
            {
                return Ok(lock);
            }
        }
        // Other commands keep removing it.
        Err(StoreError::Locked(self.name.clone()))
    }

    /// Opens the file of the lock, and creates it with the job's directory if they are missing. `None` when another
    /// command has just removed the directory.
    pub(super) fn open_lock(&self) -> Result<Option<File>, StoreError> {
        match fs::create_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.is_there()?;
            }
            made => made.map_err(io_error("make", &self.directory))?,
        }
        let path = self.directory.join(LOCK_FILE);
        let opened = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            // Opening a named pipe in its place must not block.
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
            .open(&path);
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(io_error("open", &path)),
        }
    }

    /// Locks the file if it still is that of the job: `rm` may have removed it since it was opened, and another command
    /// may have locked a new one of that name.
    pub(super) fn lock_opened(&self, file: File) -> Result<Option<JobLock>, StoreError> {
        let path = self.directory.join(LOCK_FILE);
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(StoreError::Locked(self.name.clone()));
            }
            Err(error) => return Err(io_error("lock", &path)(error.into())),
        }
        let lock = JobLock { file };
        let named = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            named => named.map_err(io_error("look at", &path))?,
        };
        let locked = match lock.file.metadata() {
            // It was removed on another machine.
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => return Ok(None),
            locked => locked.map_err(io_error("look at", &path))?,
        };
        let is_same = (locked.dev(), locked.ino()) == (named.dev(), named.ino());
        Ok(is_same.then_some(lock))
    }
}

/// Lock on a job: while it is held, no other command on this mount works on the job.
#[derive(Debug)]
pub struct JobLock {
    pub(super) file: File,
}

impl Drop for JobLock {
    fn drop(&mut self) {
        // Closing the file is not enough: a child process has it open, too, between fork and exec.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}
