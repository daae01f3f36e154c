//! The disk as the journal sees it: one flat directory of files.
//!
//! The trait exists so that tests can put a simulated disk in its place, which records every
//! operation and builds each image that a power loss could leave behind.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use harvestfs_protocol::durable;
use harvestfs_protocol::planted::{self, Bug};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::JournalError;

/// One directory of journal files. Names are plain file names without a path.
pub trait Disk: Send + Sync {
    /// Names of all files, in any order.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Creates a file of `len_bytes` zeros with its space reserved, replacing any file of that name.
    /// Neither the file nor its name is durable before [`DiskFile::sync`] and
    /// [`Disk::sync_dir`].
    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Box<dyn DiskFile>>;

    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>>;

    /// Renames a file, replacing `to`. Durable after [`Disk::sync_dir`].
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Gives a file whose content is durable its final name, replacing any file that has it, and makes
    /// the rename durable.
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

/// The identity of a file, which a copy of it does not share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Its number in its file system.
    pub inode: u64,
    /// When it was made there, in nanoseconds since 1970; 0 if the file system does not say.
    pub born_unix_ns: u64,
}

/// An open journal file.
pub trait DiskFile: Send + Sync {
    /// Its identity; none where that is not known.
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

/// A directory of the operating system, locked for this process. All files are in the directory that is locked, even if
/// another one has taken its path meanwhile.
pub(super) struct RealDisk {
    /// For messages.
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
        let lock = open_in(&dir_handle, LOCK_FILE, OFlags::WRONLY | OFlags::CREATE)
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

/// Opens a file of a directory.
fn open_in(dir: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let mode = Mode::from_raw_mode(0o666);
    let open = || rustix::fs::openat(dir, name, flags | OFlags::CLOEXEC, mode);
    let file = rustix::io::retry_on_intr(open)?;
    Ok(File::from(file))
}

impl Disk for RealDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.dir_handle)? {
            // The journal has no names that are not UTF-8.
            match entry?.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Box<dyn DiskFile>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        let file = open_in(&self.dir_handle, name, flags)?;
        reserve(&file, len_bytes)?;
        Ok(Box::new(RealFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        let file = open_in(&self.dir_handle, name, OFlags::RDWR)?;
        Ok(Box::new(RealFile(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let dir = &self.dir_handle;
        Ok(rustix::fs::renameat(dir, from, dir, to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let removed = rustix::fs::unlinkat(&self.dir_handle, name, AtFlags::empty());
        Ok(removed?)
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
    let allocate = || fallocate(file, FallocateFlags::empty(), 0, len_bytes);
    reserve_by(allocate, file, len_bytes)
}

/// Reserves space by a system call, which a signal may interrupt.
fn reserve_by(
    allocate: impl FnMut() -> rustix::io::Result<()>,
    file: &File,
    len_bytes: u64,
) -> io::Result<()> {
    match rustix::io::retry_on_intr(allocate) {
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
        // A file without a name vanishes when this process ends.
        if self.0.metadata()?.nlink() == 0 {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "somebody removed the file while it was written to",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn space_is_reserved_also_when_signals_arrive_meanwhile() {
        let file = tempfile::tempfile().unwrap();
        let mut answers = [Err(Errno::INTR), Err(Errno::INTR), Ok(())].into_iter();
        reserve_by(|| answers.next().unwrap(), &file, 1).unwrap();
        assert_eq!(answers.len(), 0);
    }

    /// As when an operator puts a copy in the place of a directory whose namenode still runs.
    #[test]
    fn a_directory_that_took_the_place_of_the_locked_one_is_not_written() {
        let parent = tempfile::tempdir().unwrap();
        let (dir, aside) = (parent.path().join("journal"), parent.path().join("aside"));
        let disk = RealDisk::open(&dir, true).unwrap();
        disk.create("one", 0).unwrap();
        fs::rename(&dir, &aside).unwrap();
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("one"), "of another").unwrap();

        let mut file = disk.create("two", 4).unwrap();
        file.write_at(b"here", 0).unwrap();
        file.sync().unwrap();
        disk.rename("two", "three").unwrap();
        disk.install("three", "four").unwrap();
        assert_eq!(disk.open("one").unwrap().len_bytes().unwrap(), 0);
        disk.remove("one").unwrap();
        assert!(disk.open("one").is_err());
        let mut names = disk.list().unwrap();
        names.sort();
        assert_eq!(names, ["four", LOCK_FILE]);
        assert_eq!(fs::read(aside.join("four")).unwrap(), b"here");
        let others = fs::read_dir(&dir).unwrap();
        let others: Vec<_> = others.map(|it| it.unwrap().file_name()).collect();
        assert_eq!(others, ["one"]);
        // A namenode that starts there runs beside this one, and detects that its directory is a copy.
        assert!(RealDisk::open(&dir, false).is_ok());
        assert!(RealDisk::open(&aside, false).is_err());
    }
}
