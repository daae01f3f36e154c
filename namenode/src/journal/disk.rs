//! The disk as the journal sees it: one flat directory of files.
//!
//! The trait exists so that tests can put a simulated disk in its place, which records every
//! operation and builds each image that a power loss could leave behind.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use harvestfs_protocol::durable;
use harvestfs_protocol::planted::{self, Bug};
use serde::{Deserialize, Serialize};

use super::JournalError;

/// One directory of journal files. Names are plain file names without a path.
pub trait Disk: Send + Sync {
    /// Names of all files, in any order.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Creates a file of `len_bytes` zeros with its space reserved, replacing one of that name.
    /// Neither the file nor its name is durable before [`DiskFile::sync`] and
    /// [`Disk::sync_dir`].
    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Box<dyn DiskFile>>;

    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>>;

    /// Renames a file, replacing `to`. Durable after [`Disk::sync_dir`].
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Gives a file whose content is durable its final name, replacing the file that has it, and makes
    /// that durable.
    fn install(&self, temporary: &str, name: &str) -> io::Result<()> {
        self.rename(temporary, name)?;
        if planted::is(Bug::SkipsJournalDirectorySync) {
            return Ok(());
        }
        self.sync_dir()
    }

    /// Removes a file. Durable after [`Disk::sync_dir`].
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all creations, renames and removals so far durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// Name of the directory for messages.
    fn location(&self) -> String;
}

/// What tells a file from a copy of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Its number in its file system.
    pub inode: u64,
    /// When it was made there, in nanoseconds since 1970; 0 if the file system does not say.
    pub born_unix_ns: u64,
}

/// An open journal file.
pub trait DiskFile: Send + Sync {
    /// What no copy of it has; none where that is not known.
    fn id(&self) -> io::Result<Option<FileId>> {
        Ok(None)
    }

    /// Size in bytes.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Reads at `offset` until `buffer` is full or the file ends; returns the bytes read.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `bytes` at `offset`. Not durable before [`DiskFile::sync`].
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes everything written to this file so far durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// A directory of the operating system, locked for this process.
pub(super) struct RealDisk {
    dir: PathBuf,
    dir_handle: File,
    /// Holds the lock; the kernel releases it when the process ends, however it ends.
    _lock: File,
}

const LOCK_FILE: &str = "lock";

impl RealDisk {
    /// Opens and locks `dir`, creating it when `create` is set.
    pub(super) fn open(dir: &Path, create: bool) -> Result<Self, JournalError> {
        let name = dir.display().to_string();
        if create {
            durable::create_directories(dir, 0o777)
                .map_err(|e| JournalError::io("create", &name, e))?;
        }
        let dir_handle = match File::open(dir) {
            Ok(handle) => handle,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(JournalError::Empty { location: name });
            }
            Err(e) => return Err(JournalError::io("open", &name, e)),
        };
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join(LOCK_FILE))
            .map_err(|e| JournalError::io("open", LOCK_FILE, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(JournalError::Locked {
                    dir: dir.to_owned(),
                });
            }
            Err(TryLockError::Error(e)) => return Err(JournalError::io("lock", LOCK_FILE, e)),
        }
        Ok(Self {
            dir: dir.to_owned(),
            dir_handle,
            _lock: lock,
        })
    }
}

impl Disk for RealDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(self.dir.join(name))?;
        reserve(&file, len_bytes)?;
        Ok(Box::new(RealFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.dir.join(name))?;
        Ok(Box::new(RealFile(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.dir.join(from), self.dir.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.dir.join(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.dir_handle.sync_all()
    }

    fn location(&self) -> String {
        self.dir.display().to_string()
    }
}

/// Reserves space for `len_bytes`, so that a later write cannot meet a full disk.
fn reserve(file: &File, len_bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    if len_bytes == 0 {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), 0, len_bytes) {
        Ok(()) => Ok(()),
        // Some file systems cannot reserve; there a full disk shows when data is written.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(len_bytes),
        Err(e) => Err(e.into()),
    }
}

struct RealFile(File);

impl DiskFile for RealFile {
    fn id(&self) -> io::Result<Option<FileId>> {
        let metadata = self.0.metadata()?;
        let born = metadata.created().ok();
        let born = born.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        Ok(Some(FileId {
            inode: metadata.ino(),
            born_unix_ns: born.map_or(0, |it| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX)),
        }))
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self
                .0
                .read_at(&mut buffer[filled..], offset + filled as u64)
            {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(filled)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()?;
        // Such a file goes with this process.
        if self.0.metadata()?.nlink() == 0 {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "somebody removed the file while it was written to",
            ));
        }
        Ok(())
    }
}
