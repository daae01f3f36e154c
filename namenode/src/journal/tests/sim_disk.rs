//! A disk in memory that records every operation, builds the images that a power loss may leave
//! behind, and fails on demand.
//!
//! What a power loss keeps: everything synced; of the rest, each 512-byte sector in any of the
//! states it went through since the last sync of its file, and each change of a name or not.
//!
//! A failed sync does to the file what a power loss does, except that this does not show before the
//! next power loss: reads return what was written, but no later sync writes it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::super::Lsn;
use super::super::disk::{Disk, DiskFile};

const SECTOR_BYTES: usize = 512;

type FileId = usize;
/// File names and contents: what is on the platter.
pub(super) type Image = BTreeMap<String, Vec<u8>>;

/// One entry of the recording.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Create {
        name: String,
        id: FileId,
        len: usize,
    },
    Write {
        id: FileId,
        offset: usize,
        bytes: Vec<u8>,
    },
    Sync {
        id: FileId,
    },
    /// The pages are clean afterwards, and lost; `seed` decides what reached the disk.
    FailedSync {
        id: FileId,
        seed: u64,
    },
    Rename {
        from: String,
        to: String,
        id: FileId,
    },
    Remove {
        name: String,
    },
    SyncDir,
    /// The test may append up to this record from here on.
    Appending(Lsn),
    /// The journal has acknowledged everything up to this record.
    Acknowledged(Lsn),
    /// The snapshot up to this record is installed.
    Installed(Lsn),
    /// From here on, the test has other expectations: those that it keeps at this index.
    Mark(usize),
}

/// Which operation is to fail, counted from now on: 0 is the next one.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) write: Option<(u32, io::ErrorKind)>,
    pub(super) sync: Option<(u32, io::ErrorKind)>,
    pub(super) create: Option<(u32, io::ErrorKind)>,
    pub(super) sync_dir: Option<(u32, io::ErrorKind)>,
}

fn inject(fault: &mut Option<(u32, io::ErrorKind)>) -> io::Result<()> {
    match fault {
        Some((0, kind)) => {
            let kind = *kind;
            *fault = None;
            Err(kind.into())
        }
        Some((left, _)) => {
            *left -= 1;
            Ok(())
        }
        None => Ok(()),
    }
}

#[derive(Default)]
struct State {
    names: BTreeMap<String, FileId>,
    contents: Vec<Vec<u8>>,
    ops: Vec<Op>,
    faults: Faults,
    read_bytes: u64,
}

/// A simulated disk in memory (see the module). Clones share the disk.
#[derive(Clone, Default)]
pub(super) struct SimDisk(Arc<Mutex<State>>);

impl SimDisk {
    /// A disk that holds `image`, all of it durable, with an empty recording.
    pub(super) fn holding(image: &Image) -> Self {
        let mut state = State::default();
        for (name, bytes) in image {
            state.names.insert(name.clone(), state.contents.len());
            state.contents.push(bytes.clone());
        }
        Self(Arc::new(Mutex::new(state)))
    }

    pub(super) fn note(&self, op: Op) {
        self.0.lock().ops.push(op);
    }

    pub(super) fn ops(&self) -> Vec<Op> {
        self.0.lock().ops.clone()
    }

    pub(super) fn fail(&self, faults: Faults) {
        self.0.lock().faults = faults;
    }

    /// The number of bytes that were read.
    pub(super) fn read_bytes(&self) -> u64 {
        self.0.lock().read_bytes
    }

    /// What a reader sees now, synced or not.
    pub(super) fn image(&self) -> Image {
        let state = self.0.lock();
        let content = |(name, &id): (&String, &FileId)| (name.clone(), state.contents[id].clone());
        state.names.iter().map(content).collect()
    }
}

impl Disk for SimDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().names.keys().cloned().collect())
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.0.lock();
        inject(&mut state.faults.create)?;
        let (id, len) = (state.contents.len(), len_bytes as usize);
        state.contents.push(vec![0; len]);
        state.names.insert(name.to_owned(), id);
        let name = name.to_owned();
        state.ops.push(Op::Create { name, id, len });
        Ok(Box::new(SimFile {
            disk: self.clone(),
            id,
        }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn DiskFile>> {
        let state = self.0.lock();
        let id = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        let disk = self.clone();
        Ok(Box::new(SimFile { disk, id }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        let id = state.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.names.insert(to.to_owned(), id);
        let (from, to) = (from.to_owned(), to.to_owned());
        state.ops.push(Op::Rename { from, to, id });
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        state.names.remove(name).ok_or(io::ErrorKind::NotFound)?;
        let name = name.to_owned();
        state.ops.push(Op::Remove { name });
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        inject(&mut state.faults.sync_dir)?;
        state.ops.push(Op::SyncDir);
        Ok(())
    }

    fn location(&self) -> String {
        "simulated disk".to_owned()
    }
}

struct SimFile {
    disk: SimDisk,
    id: FileId,
}

impl DiskFile for SimFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().contents[self.id].len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.0.lock();
        let content = &state.contents[self.id];
        let start = (offset as usize).min(content.len());
        let read = buffer.len().min(content.len() - start);
        buffer[..read].copy_from_slice(&content[start..start + read]);
        state.read_bytes += read as u64;
        Ok(read)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        inject(&mut state.faults.write)?;
        let (id, offset) = (self.id, offset as usize);
        overwrite(&mut state.contents[id], offset, bytes);
        let bytes = bytes.to_vec();
        state.ops.push(Op::Write { id, offset, bytes });
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        let (id, seed) = (self.id, state.ops.len() as u64);
        let synced = inject(&mut state.faults.sync);
        state.ops.push(match &synced {
            Ok(()) => Op::Sync { id },
            Err(_) => Op::FailedSync { id, seed },
        });
        synced
    }
}

fn overwrite(content: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[offset..end].copy_from_slice(bytes);
}

#[derive(Clone, Default)]
struct ReplayedFile {
    synced: Vec<u8>,
    /// Size that the file got when created, as long as that is not synced.
    unsynced_len: usize,
    unsynced: Vec<(usize, Vec<u8>)>,
}

/// Follows a recording and knows, after each operation, what a power loss may leave.
#[derive(Default)]
pub(super) struct Replay {
    names: BTreeMap<String, FileId>,
    unsynced_names: Vec<Op>,
    files: BTreeMap<FileId, ReplayedFile>,
    pub(super) appending: Lsn,
    pub(super) acknowledged: Lsn,
    pub(super) installed: Lsn,
    pub(super) mark: usize,
}

impl Replay {
    /// Starts from a disk made with [`SimDisk::holding`] the same image.
    pub(super) fn from_image(image: &Image) -> Self {
        let mut replay = Self::default();
        for (id, (name, bytes)) in image.iter().enumerate() {
            replay.names.insert(name.clone(), id);
            let file = ReplayedFile {
                synced: bytes.clone(),
                ..ReplayedFile::default()
            };
            replay.files.insert(id, file);
        }
        replay
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match op {
            Op::Create { id, len, .. } => {
                let file = ReplayedFile {
                    unsynced_len: *len,
                    ..ReplayedFile::default()
                };
                self.files.insert(*id, file);
                self.unsynced_names.push(op.clone());
            }
            Op::Rename { .. } | Op::Remove { .. } => self.unsynced_names.push(op.clone()),
            Op::Write { id, offset, bytes } => {
                let file = self.files.entry(*id).or_default();
                file.unsynced.push((*offset, bytes.clone()));
            }
            Op::Sync { id } => {
                let file = self.files.entry(*id).or_default();
                for (offset, bytes) in std::mem::take(&mut file.unsynced) {
                    overwrite(&mut file.synced, offset, &bytes);
                }
                let len = file.unsynced_len.max(file.synced.len());
                file.synced.resize(len, 0);
                file.unsynced_len = 0;
            }
            Op::FailedSync { id, seed } => {
                let file = self.files.entry(*id).or_default();
                file.synced = file.crash(&mut SmallRng::seed_from_u64(*seed));
                file.unsynced.clear();
            }
            Op::SyncDir => {
                for op in std::mem::take(&mut self.unsynced_names) {
                    apply_name(&mut self.names, &op);
                }
            }
            Op::Appending(lsn) => self.appending = *lsn,
            Op::Acknowledged(lsn) => self.acknowledged = *lsn,
            Op::Installed(lsn) => self.installed = *lsn,
            Op::Mark(mark) => self.mark = *mark,
        }
    }

    /// One of the images that a power loss after the operations so far may leave.
    pub(super) fn crash_image(&self, seed: u64) -> Image {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut names = self.names.clone();
        let keep_names = chance(&mut rng);
        for op in &self.unsynced_names {
            if rng.random_bool(keep_names) {
                apply_name(&mut names, op);
            }
        }
        let mut image = Image::new();
        for (name, id) in names {
            let content = self.files.get(&id).map(|file| file.crash(&mut rng));
            image.insert(name, content.unwrap_or_default());
        }
        image
    }
}

impl ReplayedFile {
    fn crash(&self, rng: &mut SmallRng) -> Vec<u8> {
        let mut content = self.synced.clone();
        if self.unsynced_len > content.len() && rng.random_bool(0.5) {
            content.resize(self.unsynced_len, 0);
        }
        let keep = chance(rng);
        // A sector that an earlier write did not bring to the disk may reach it with a later write, and
        // then includes the earlier writes too; in other words, its content stops at some write.
        let mut latest = content.clone();
        let mut stopped = std::collections::BTreeSet::new();
        for (offset, bytes) in &self.unsynced {
            overwrite(&mut latest, *offset, bytes);
            let end = offset + bytes.len();
            for sector in offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
                if stopped.contains(&sector) {
                    continue;
                }
                if !rng.random_bool(keep) {
                    stopped.insert(sector);
                    continue;
                }
                let start = sector * SECTOR_BYTES;
                let stop = (start + SECTOR_BYTES).min(latest.len());
                overwrite(&mut content, start, &latest[start..stop]);
            }
        }
        content
    }
}

/// Mostly nothing or everything or half of it, since each finds different mistakes.
fn chance(rng: &mut SmallRng) -> f64 {
    [0.0, 0.1, 0.5, 0.9, 1.0][rng.random_range(0..5)]
}

fn apply_name(names: &mut BTreeMap<String, FileId>, op: &Op) {
    match op {
        Op::Create { name, id, .. } => {
            names.insert(name.clone(), *id);
        }
        Op::Rename { from, to, id } => {
            if names.get(from) == Some(id) {
                names.remove(from);
            }
            names.insert(to.clone(), *id);
        }
        Op::Remove { name } => {
            names.remove(name);
        }
        Op::Write { .. }
        | Op::Sync { .. }
        | Op::FailedSync { .. }
        | Op::SyncDir
        | Op::Appending(_)
        | Op::Acknowledged(_)
        | Op::Installed(_)
        | Op::Mark(_) => {}
    }
}
