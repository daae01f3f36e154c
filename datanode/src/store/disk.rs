//! The disk interface that the block store needs, and its real implementation. Tests replace it with disks that fail
//! or forget.
//!
//! Bulk data bypasses the page cache (O_DIRECT), so that harvesting does not evict the primary tenant's pages. Table
//! pages and small appends go through it: a sync then writes them together, and all that remains cached is one page
//! for each 4 MiB.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, FallocateFlags, OFlags};

/// A disk with a directory tree.
pub trait Disk: Send + Sync + 'static {
    /// Creates a file, which must not exist, for reading and writing.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file with direct I/O, for another process to read.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if there is no file that could be handed over, or no way to bypass the page
    /// cache.
    fn open_to_lend(&self, path: &Path) -> io::Result<OwnedFd> {
        let _ = path;
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Size of a file in bytes, without opening it; for a symbolic link, the size of the link.
    fn file_bytes(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::symlink_metadata(path)?.len())
    }
    /// Renames a file, replacing an existing one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Puts the entries of a directory on stable storage.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// An open file. Positions, lengths and buffers are whole pages, except in the cached operations,
/// which are for files that [`Disk::create`] returned.
pub trait DiskFile: Send + Sync {
    /// Size in bytes.
    fn len_bytes(&self) -> io::Result<u64>;
    /// Fills the buffer, bypassing the page cache if possible.
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()>;
    /// Writes all data, bypassing the page cache if possible.
    fn write_at(&self, data: &[u8], position: u64) -> io::Result<()>;
    /// Fills the buffer through the page cache.
    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()>;
    /// Writes all data through the page cache.
    fn write_cached_at(&self, data: &[u8], position: u64) -> io::Result<()>;
    /// Lets the page cache drop a range that is on stable storage; only a hint.
    fn forget_cached(&self, position: u64, length: u64);
    /// Allocates a range, growing the file to its end.
    fn allocate(&self, position: u64, length: u64) -> io::Result<()>;
    /// Truncates or grows the file.
    fn set_len(&self, length: u64) -> io::Result<()>;
    /// Puts the data on stable storage, with the metadata needed to read it.
    fn sync_data(&self) -> io::Result<()>;
    /// Puts data and all metadata on stable storage.
    fn sync_all(&self) -> io::Result<()>;
}

/// The file systems of this machine.
#[derive(Debug)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        // Not readable by other users of the machine.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let cached = options.open(path)?;
        // A table page is surrounded by bulk data, which should not enter the page cache by read-ahead. A hint:
        // without it, some memory is wasted.
        let _ = rustix::fs::fadvise(&cached, 0, None, Advice::Random);
        let direct = open_direct(path).inspect_err(|_| {
            // Otherwise it would block the next file of this name.
            let _ = fs::remove_file(path);
        })?;
        Ok(Box::new(match direct {
            Some(direct) => RealFile::Both { direct, cached },
            None => RealFile::Cached(cached),
        }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(match open_direct(path)? {
            Some(direct) => RealFile::Direct(direct),
            None => RealFile::Cached(OpenOptions::new().read(true).write(true).open(path)?),
        }))
    }

    fn open_to_lend(&self, path: &Path) -> io::Result<OwnedFd> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(DIRECT_FLAG);
        match options.open(path) {
            Ok(file) => Ok(file.into()),
            Err(error) if error.raw_os_error() == Some(INVALID_ARGUMENT) => {
                Err(io::ErrorKind::Unsupported.into())
            }
            Err(error) => Err(error),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

enum RealFile {
    /// A file that is written.
    Both { direct: File, cached: File },
    /// A file that is only read, truncated or synced.
    Direct(File),
    /// The file system does not support direct I/O; pages are dropped after use.
    Cached(File),
}

impl RealFile {
    /// The descriptor for bulk data.
    fn bulk(&self) -> &File {
        match self {
            Self::Both { direct, .. } | Self::Direct(direct) => direct,
            Self::Cached(cached) => cached,
        }
    }

    /// The descriptor for small data.
    fn cached(&self) -> &File {
        match self {
            Self::Both { cached, .. } | Self::Cached(cached) => cached,
            Self::Direct(direct) => direct,
        }
    }

    fn is_cached_only(&self) -> bool {
        matches!(self, Self::Cached(_))
    }
}

/// Opens a file with direct I/O; `None` if the file system does not support that.
fn open_direct(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(DIRECT_FLAG);
    match options.open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.raw_os_error() == Some(INVALID_ARGUMENT) => Ok(None),
        Err(error) => Err(error),
    }
}

const DIRECT_FLAG: i32 = OFlags::DIRECT.bits() as i32;
const INVALID_ARGUMENT: i32 = rustix::io::Errno::INVAL.raw_os_error();
const NOT_SUPPORTED: rustix::io::Errno = rustix::io::Errno::OPNOTSUPP;

impl DiskFile for RealFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.cached().metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.bulk().read_exact_at(buffer, position)?;
        if self.is_cached_only() {
            self.forget_cached(position, buffer.len() as u64);
        }
        Ok(())
    }

    fn write_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.bulk().write_all_at(data, position)
    }

    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.cached().read_exact_at(buffer, position)
    }

    fn write_cached_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.cached().write_all_at(data, position)
    }

    fn forget_cached(&self, position: u64, length: u64) {
        let length = std::num::NonZeroU64::new(length);
        // Only a hint: pages that remain merely cost memory.
        let _ = rustix::fs::fadvise(self.cached(), position, length, Advice::DontNeed);
    }

    fn allocate(&self, position: u64, length: u64) -> io::Result<()> {
        match rustix::fs::fallocate(self.cached(), FallocateFlags::empty(), position, length) {
            Err(NOT_SUPPORTED) => self.cached().set_len(position + length),
            result => Ok(result?),
        }
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.cached().set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.cached().sync_data()?;
        if self.is_cached_only() {
            self.forget_cached(0, 0);
        }
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        self.cached().sync_all()
    }
}
