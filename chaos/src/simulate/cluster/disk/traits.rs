//! A simulated disk as the journal of a namenode and the volumes of a datanode see it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use harvestfs_datanode::disk as volumes;
use harvestfs_namenode::journal::disk as journal;

use super::{Shared, SimulatedDisk};

/// One directory of a disk, with files only.
pub struct Directory {
    disk: SimulatedDisk,
    path: PathBuf,
}

impl Directory {
    /// `path` must exist.
    pub fn new(disk: SimulatedDisk, path: PathBuf) -> Self {
        Self { disk, path }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl journal::Disk for Directory {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Box<dyn journal::DiskFile>> {
        let path = self.at(name);
        if path.exists() {
            self.disk.0.lock().remove(&path)?;
        }
        let file = self.disk.0.lock().create(&path)?;
        file.lock().set_len(len_bytes)?;
        Ok(Box::new(self.disk.opened(file)))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn journal::DiskFile>> {
        let file = self.disk.0.lock().open(&self.at(name))?;
        Ok(Box::new(self.disk.opened(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.0.lock().rename(&self.at(from), &self.at(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.0.lock().remove(&self.at(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.disk.0.lock().sync_directory(&self.path)
    }

    fn location(&self) -> String {
        self.path.display().to_string()
    }
}

/// An open file.
struct Opened {
    disk: SimulatedDisk,
    file: Shared,
}

impl SimulatedDisk {
    fn opened(&self, file: Shared) -> Opened {
        Opened {
            disk: self.clone(),
            file,
        }
    }
}

impl Opened {
    fn read(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.disk.0.lock().begin()?;
        self.file.lock().read(buffer, position)
    }

    fn read_exact(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        if self.read(buffer, position)? < buffer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        let end = position + bytes.len() as u64;
        let grows = end > self.file.lock().len_bytes()?;
        if grows {
            self.disk.0.lock().begin_growing()?;
        } else {
            self.disk.0.lock().begin()?;
        }
        self.file.lock().write(bytes, position)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.0.lock().sync(&self.file)
    }
}

/// The identity of all files of a simulated disk, except copies. Individual files need no distinct identity: a file
/// that is restored to an earlier state stays the same file, as when that happens below a file system.
const FILE: journal::FileId = journal::FileId {
    inode: u64::MAX,
    born_unix_ns: u64::MAX,
};
const COPY: journal::FileId = journal::FileId {
    inode: u64::MAX - 1,
    ..FILE
};

impl journal::DiskFile for Opened {
    fn id(&self) -> io::Result<Option<journal::FileId>> {
        if self.disk.0.lock().is_copy {
            return Ok(Some(COPY));
        }
        // A file from before the simulation has recorded another identity, so none is reported.
        let is_known = self.file.lock().was_made_here();
        Ok(is_known.then_some(FILE))
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.file.lock().len_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read(buffer, offset)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write(bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        Opened::sync(self)
    }
}

impl volumes::Disk for SimulatedDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn volumes::DiskFile>> {
        let file = self.0.lock().create(path)?;
        Ok(Box::new(self.opened(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn volumes::DiskFile>> {
        let file = self.0.lock().open(path)?;
        Ok(Box::new(self.opened(file)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.lock().rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.lock().remove(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.lock().sync_directory(path)
    }
}

impl volumes::DiskFile for Opened {
    fn len_bytes(&self) -> io::Result<u64> {
        self.file.lock().len_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.read_exact(buffer, position)
    }

    fn write_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.write(data, position)
    }

    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.read_exact(buffer, position)
    }

    fn write_cached_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.write(data, position)
    }

    fn forget_cached(&self, _: u64, _: u64) {}

    fn allocate(&self, position: u64, length: u64) -> io::Result<()> {
        self.disk.0.lock().begin_growing()?;
        let mut file = self.file.lock();
        let len = file.len_bytes()?;
        file.set_len(len.max(position + length))
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.disk.0.lock().begin()?;
        self.file.lock().set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.sync()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync()
    }
}
