//! Disks that fail, hang, or forget what was not synced. They work on real files.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::store::{Disk, DiskFile, RealDisk};

/// Operations that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Read,
    Write,
    Sync,
    Create,
    Allocate,
    Rename,
    /// Querying the size of a file that is not open.
    Size,
}

/// A real disk whose operations fail or hang on demand.
#[derive(Default)]
pub struct FaultyDisk {
    rules: Arc<Rules>,
}

#[derive(Default)]
struct Rules {
    failing: Mutex<Vec<(Fault, PathBuf, i32)>>,
    /// Positions from which on files cannot be read.
    bad_from: Mutex<Option<u64>>,
    hanging: Mutex<Hanging>,
    released: Condvar,
}

#[derive(Default)]
struct Hanging {
    all: bool,
    one: Option<(Fault, PathBuf)>,
    /// Operations that wait.
    operations: usize,
}

impl Hanging {
    fn concerns(&self, fault: Fault, path: &Path) -> bool {
        let one = self.one.as_ref();
        self.all || one.is_some_and(|(which, dir)| *which == fault && path.starts_with(dir))
    }
}

impl FaultyDisk {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Makes `fault` on files below `dir` fail with `errno` from now on.
    pub fn fail(&self, fault: Fault, dir: &Path, errno: rustix::io::Errno) {
        let rule = (fault, dir.to_owned(), errno.raw_os_error());
        self.rules.failing.lock().push(rule);
    }

    /// Makes the data after a position in a file unreadable from now on.
    pub fn fail_reads_from(&self, position: u64) {
        *self.rules.bad_from.lock() = Some(position);
    }

    /// Makes everything work again.
    pub fn heal(&self) {
        self.rules.failing.lock().clear();
        *self.rules.bad_from.lock() = None;
        let mut hanging = self.rules.hanging.lock();
        (hanging.all, hanging.one) = (false, None);
        self.rules.released.notify_all();
    }

    /// Makes all operations hang until [`FaultyDisk::heal`].
    pub fn hang(&self) {
        self.rules.hanging.lock().all = true;
    }

    /// The same for one kind of operations on files below `dir`.
    pub fn hang_on(&self, fault: Fault, dir: &Path) {
        self.rules.hanging.lock().one = Some((fault, dir.to_owned()));
    }

    /// Waits until so many operations hang.
    pub async fn wait_for_hanging(&self, operations: usize) {
        while self.rules.hanging.lock().operations != operations {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Rules {
    fn check(&self, fault: Fault, path: &Path) -> io::Result<()> {
        let mut hanging = self.hanging.lock();
        hanging.operations += 1;
        while hanging.concerns(fault, path) {
            self.released.wait(&mut hanging);
        }
        hanging.operations -= 1;
        let failing = self.failing.lock();
        let rule = failing
            .iter()
            .find(|(which, dir, _)| *which == fault && path.starts_with(dir));
        match rule {
            Some((_, _, errno)) => Err(io::Error::from_raw_os_error(*errno)),
            None => Ok(()),
        }
    }
}

impl Disk for FaultyDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.rules.check(Fault::Create, path)?;
        self.wrap(path, RealDisk.create(path)?)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.rules.check(Fault::Read, path)?;
        self.wrap(path, RealDisk.open(path)?)
    }

    fn file_bytes(&self, path: &Path) -> io::Result<u64> {
        self.rules.check(Fault::Size, path)?;
        RealDisk.file_bytes(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rules.check(Fault::Rename, from)?;
        RealDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.rules.check(Fault::Write, path)?;
        RealDisk.remove(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.rules.check(Fault::Sync, path)?;
        RealDisk.sync_dir(path)
    }
}

impl FaultyDisk {
    fn wrap(&self, path: &Path, file: Box<dyn DiskFile>) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(FaultyFile {
            file,
            path: path.to_owned(),
            rules: self.rules.clone(),
        }))
    }
}

struct FaultyFile {
    file: Box<dyn DiskFile>,
    path: PathBuf,
    rules: Arc<Rules>,
}

impl DiskFile for FaultyFile {
    fn len_bytes(&self) -> io::Result<u64> {
        self.file.len_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.rules.check(Fault::Read, &self.path)?;
        let end = position + buffer.len() as u64;
        if self.rules.bad_from.lock().is_some_and(|from| end > from) {
            return Err(rustix::io::Errno::IO.into());
        }
        self.file.read_at(buffer, position)
    }

    fn write_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.rules.check(Fault::Write, &self.path)?;
        self.file.write_at(data, position)
    }

    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.rules.check(Fault::Read, &self.path)?;
        self.file.read_cached_at(buffer, position)
    }

    fn write_cached_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.rules.check(Fault::Write, &self.path)?;
        self.file.write_cached_at(data, position)
    }

    fn forget_cached(&self, position: u64, length: u64) {
        self.file.forget_cached(position, length);
    }

    fn allocate(&self, position: u64, length: u64) -> io::Result<()> {
        self.rules.check(Fault::Allocate, &self.path)?;
        self.file.allocate(position, length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.rules.check(Fault::Write, &self.path)?;
        self.file.set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.rules.check(Fault::Sync, &self.path)?;
        self.file.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.rules.check(Fault::Sync, &self.path)?;
        self.file.sync_all()
    }
}

/// A real disk that records all operations, so that the state after a power loss at any time can be made from the
/// record. After a failed sync, the data that it was to write can still be read, and no later sync writes it.
#[derive(Default)]
pub struct RecordingDisk {
    record: Arc<Record>,
}

#[derive(Default)]
struct Record {
    operations: Mutex<Vec<Operation>>,
    next_file: AtomicU64,
    /// The files by their current names.
    names: Mutex<HashMap<PathBuf, u64>>,
    next_sync_fails: AtomicBool,
}

#[derive(Clone, Debug)]
enum Operation {
    Create(u64, PathBuf),
    Write(u64, u64, Vec<u8>),
    Grow(u64, u64),
    SetLen(u64, u64),
    SyncFile(u64),
    FailedSync(u64),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncDir(PathBuf),
}

/// The smallest unit that a disk writes atomically.
const SECTOR_BYTES: usize = 512;

impl RecordingDisk {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Number of operations so far: a point in time in the record.
    pub fn now(&self) -> usize {
        self.record.operations.lock().len()
    }

    /// Makes the next sync of a file fail: the data that it was to write is lost, which does not show before a power
    /// loss.
    pub fn fail_next_sync(&self) {
        self.record.next_sync_fails.store(true, Ordering::Relaxed);
    }

    /// Writes to `image` what a power loss at `moment` may leave of `volume`: everything that was synced, and any part
    /// of the rest.
    pub fn crash(&self, moment: usize, seed: u64, volume: &Path, image: &Path) {
        let mut rng = StdRng::seed_from_u64(seed);
        let operations = self.record.operations.lock()[..moment].to_vec();
        let mut contents: HashMap<u64, Vec<u8>> = HashMap::new();
        let mut names: HashMap<PathBuf, u64> = HashMap::new();
        // The names as the running system saw them.
        let mut seen: HashMap<PathBuf, u64> = HashMap::new();
        // Directory changes reach the disk in order; how many of them is random.
        let names_until = rng.random_range(0..=moment);
        for (index, operation) in operations.iter().enumerate() {
            let later = &operations[index..];
            match operation {
                Operation::Create(file, path) => {
                    contents.entry(*file).or_default();
                    seen.insert(path.clone(), *file);
                    if index < names_until || dir_synced(later, path) {
                        names.insert(path.clone(), *file);
                    }
                }
                Operation::Rename(from, to) => {
                    let file = seen.remove(from).unwrap();
                    seen.insert(to.clone(), file);
                    if index < names_until || dir_synced(later, to) {
                        names.remove(from);
                        names.insert(to.clone(), file);
                    }
                }
                Operation::Remove(path) => {
                    seen.remove(path);
                    if index < names_until || dir_synced(later, path) {
                        names.remove(path);
                    }
                }
                Operation::Write(file, position, data) => {
                    let content = contents.entry(*file).or_default();
                    let synced = written_by_sync(later, *file);
                    for (sector, bytes) in data.chunks(SECTOR_BYTES).enumerate() {
                        let start = *position as usize + sector * SECTOR_BYTES;
                        if synced || rng.random() {
                            let end = start + bytes.len();
                            content.resize(content.len().max(end), 0);
                            content[start..end].copy_from_slice(bytes);
                        }
                    }
                }
                Operation::Grow(file, end) => {
                    let content = contents.entry(*file).or_default();
                    if file_synced(later, *file) || rng.random() {
                        content.resize(content.len().max(*end as usize), 0);
                    }
                }
                Operation::SetLen(file, len) => {
                    let content = contents.entry(*file).or_default();
                    if file_synced(later, *file) || rng.random() {
                        content.resize(*len as usize, 0);
                    }
                }
                Operation::SyncFile(_) | Operation::FailedSync(_) | Operation::SyncDir(_) => {}
            }
        }
        fs::copy(volume.join("VERSION"), image.join("VERSION")).unwrap();
        for (path, file) in names {
            let path = image.join(path.strip_prefix(volume).unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &contents[&file]).unwrap();
        }
    }
}

fn dir_synced(later: &[Operation], path: &Path) -> bool {
    let dir = path.parent().unwrap();
    later
        .iter()
        .any(|operation| matches!(operation, Operation::SyncDir(synced) if synced == dir))
}

/// Whether a sync wrote the data written before it. A failed sync marked it clean without writing it.
fn written_by_sync(later: &[Operation], file: u64) -> bool {
    let first = later.iter().find_map(|operation| match operation {
        Operation::SyncFile(synced) if *synced == file => Some(true),
        Operation::FailedSync(failed) if *failed == file => Some(false),
        _ => None,
    });
    first.unwrap_or(false)
}

fn file_synced(later: &[Operation], file: u64) -> bool {
    later
        .iter()
        .any(|operation| matches!(operation, Operation::SyncFile(synced) if *synced == file))
}

impl Record {
    fn add(&self, operation: Operation) {
        self.operations.lock().push(operation);
    }

    fn sync(&self, file: u64, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.next_sync_fails.swap(false, Ordering::Relaxed) {
            self.add(Operation::FailedSync(file));
            return Err(rustix::io::Errno::IO.into());
        }
        sync()?;
        self.add(Operation::SyncFile(file));
        Ok(())
    }
}

impl Disk for RecordingDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = RealDisk.create(path)?;
        let id = self.record.next_file.fetch_add(1, Ordering::Relaxed);
        self.record.add(Operation::Create(id, path.to_owned()));
        self.record.names.lock().insert(path.to_owned(), id);
        let record = self.record.clone();
        Ok(Box::new(RecordingFile { file, id, record }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = RealDisk.open(path)?;
        let id = self.record.names.lock()[path];
        let record = self.record.clone();
        Ok(Box::new(RecordingFile { file, id, record }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)?;
        self.record
            .add(Operation::Rename(from.to_owned(), to.to_owned()));
        let mut names = self.record.names.lock();
        if let Some(id) = names.remove(from) {
            names.insert(to.to_owned(), id);
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove(path)?;
        self.record.add(Operation::Remove(path.to_owned()));
        self.record.names.lock().remove(path);
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_dir(path)?;
        self.record.add(Operation::SyncDir(path.to_owned()));
        Ok(())
    }
}

struct RecordingFile {
    file: Box<dyn DiskFile>,
    id: u64,
    record: Arc<Record>,
}

impl DiskFile for RecordingFile {
    fn len_bytes(&self) -> io::Result<u64> {
        self.file.len_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.file.read_at(buffer, position)
    }

    fn write_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.file.write_at(data, position)?;
        self.record
            .add(Operation::Write(self.id, position, data.to_vec()));
        Ok(())
    }

    fn read_cached_at(&self, buffer: &mut [u8], position: u64) -> io::Result<()> {
        self.file.read_cached_at(buffer, position)
    }

    fn write_cached_at(&self, data: &[u8], position: u64) -> io::Result<()> {
        self.file.write_cached_at(data, position)?;
        // The page cache writes whole pages; their other sectors do not change.
        self.record
            .add(Operation::Write(self.id, position, data.to_vec()));
        Ok(())
    }

    fn forget_cached(&self, position: u64, length: u64) {
        self.file.forget_cached(position, length);
    }

    fn allocate(&self, position: u64, length: u64) -> io::Result<()> {
        self.file.allocate(position, length)?;
        self.record.add(Operation::Grow(self.id, position + length));
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)?;
        self.record.add(Operation::SetLen(self.id, length));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.record.sync(self.id, || self.file.sync_data())
    }

    fn sync_all(&self) -> io::Result<()> {
        self.record.sync(self.id, || self.file.sync_all())
    }
}
