//! A program on a mount that creates, changes, renames, removes and reads files in a directory of its own,
//! and reads what programs on other mounts have closed.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::SmallRng;

use super::job::{Check, Job, Place};
use super::model::{Change, Entry, Files, Returned};
use super::state::{Era, Shared};
use super::work::Reports;
use super::{name, verify};
use crate::live::metrics::Operation;
use crate::live::scenario::MountSpec;
use crate::live::verify::Comparison;
use crate::random;

/// What was promised to the programs on all mounts.
pub(crate) type Promises = Arc<Vec<Mutex<Files>>>;

/// A program on one mount.
pub(crate) struct Program {
    spec: MountSpec,
    place: Place,
    /// The mount point.
    at: PathBuf,
    promises: Promises,
    rng: SmallRng,
    next_name: u64,
}

/// The percentages of operations that read its own files, and those of other mounts.
const OWN_READ_PERCENT: u32 = 35;
const OTHER_READ_PERCENT: u32 = 20;
/// One change of data out of this many ends with `close` alone, without `fsync`.
const UNSYNCED: u32 = 4;

impl Program {
    /// Creates a program on the mount at `at`; the seed decides what it does.
    pub fn new(
        spec: &MountSpec,
        (mount, at): (usize, &Path),
        seed: u64,
        promises: &Promises,
        all: (&Arc<Shared>, &Reports),
    ) -> Self {
        Self {
            spec: spec.clone(),
            place: Place::new((mount, at), &name(mount), all),
            at: at.to_owned(),
            promises: Arc::clone(promises),
            rng: random::stream(seed, &name(mount)),
            next_name: 0,
        }
    }

    fn directory(&self, of: usize) -> PathBuf {
        self.at.join(name(of))
    }

    fn path(&self, file: &str) -> PathBuf {
        self.place.directory.join(file)
    }

    /// Draws a file of a mount whose last change returned.
    fn choose(&mut self, of: usize) -> Option<String> {
        let files = self.promises[of].lock();
        let count = files.usable().count();
        if count == 0 {
            return None;
        }
        let chosen = files.usable().nth(self.rng.random_range(0..count));
        chosen.map(|(name, ..)| name.clone())
    }

    fn entry(&self, of: usize, file: &str) -> Option<Entry> {
        self.promises[of].lock().get(file).cloned()
    }

    /// The contents of one of its own usable files.
    fn content(&self, file: &str) -> Vec<u8> {
        let files = self.promises[self.place.mount].lock();
        let mut usable = files.usable();
        let found = usable.find(|(name, ..)| *name == file);
        found.map_or_else(Vec::new, |(_, _, version)| version.to_vec())
    }

    fn read(&mut self, era: Era, of: usize, file: &str) {
        let disturbances = self.place.shared.undisturbed(of);
        let Some(before) = self.entry(of, file) else {
            return;
        };
        if of != self.place.mount && !before.is_visible(disturbances) {
            return;
        }
        let began = Instant::now();
        let read = fs::read(self.directory(of).join(file));
        let took = began.elapsed();
        let same_era = self.place.counts(era);
        let after = self.entry(of, file);
        let undisturbed =
            of == self.place.mount || self.place.shared.undisturbed(of) == disturbances;
        let comparable = same_era && undisturbed && after.is_some_and(|after| after.is_as(&before));
        let found = match &read {
            Ok(bytes) => Some(bytes.as_slice()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                return self.place.failed(Operation::Read, "read", error);
            }
        };
        let difference = before.difference(found).filter(|_| comparable);
        if found.is_some() {
            let compared = comparable && difference.is_none();
            let bytes = found.filter(|_| compared).map_or(0, <[u8]>::len);
            self.place.reports.done(Operation::Read, took, bytes);
        }
        if let Some(difference) = difference {
            let path = format!("/{}/{file}", name(of));
            let by = name(self.place.mount);
            let text = format!("{path} on {by} during the run: {difference}");
            self.place.reports.wrong(&text);
        }
    }

    fn create(&mut self, era: Era) {
        let file = self.new_name();
        let bytes = self.bytes();
        let (path, sync) = (self.path(&file), self.syncs());
        let to = bytes.clone();
        self.change_data(era, file, to, false, sync, move || {
            let file = File::create_new(path)?;
            file.write_all_at(&bytes, 0)?;
            Ok(file)
        });
    }

    fn overwrite(&mut self, era: Era, file: String) {
        let mut content = self.content(&file);
        let bytes = self.bytes();
        let offset = self.rng.random_range(0..=content.len());
        let end = offset + bytes.len();
        if content.len() < end {
            content.resize(end, 0);
        }
        content[offset..end].copy_from_slice(&bytes);
        self.write_at(era, file, content, bytes, offset);
    }

    fn append(&mut self, era: Era, file: String) {
        let mut content = self.content(&file);
        let bytes = self.bytes();
        // Now and then after a hole.
        let hole = if self.rng.random_range(0..4) == 0 {
            self.rng.random_range(1..20_000)
        } else {
            0
        };
        let offset = content.len() + hole;
        // Writing nothing makes no hole.
        if !bytes.is_empty() {
            content.resize(offset, 0);
            content.extend_from_slice(&bytes);
        }
        self.write_at(era, file, content, bytes, offset);
    }

    fn write_at(&mut self, era: Era, file: String, to: Vec<u8>, bytes: Vec<u8>, offset: usize) {
        if to.len() > self.bytes_max() {
            return self.truncate(era, file);
        }
        let (path, sync) = (self.path(&file), self.syncs());
        self.change_data(era, file, to, false, sync, move || {
            let file = File::options().write(true).open(path)?;
            file.write_all_at(&bytes, offset as u64)?;
            Ok(file)
        });
    }

    fn truncate(&mut self, era: Era, file: String) {
        let mut content = self.content(&file);
        let len = self.rng.random_range(0..=content.len() + 10_000);
        content.resize(len, 0);
        let path = self.path(&file);
        self.change_data(era, file, content, true, true, move || {
            let file = File::options().write(true).open(path)?;
            file.set_len(len as u64)?;
            Ok(file)
        });
    }

    fn replace(&mut self, era: Era, file: String) {
        let temporary = self.new_name();
        let bytes = self.bytes();
        let (from, to) = (self.path(&temporary), self.path(&file));
        let written = {
            let (from, bytes) = (from.clone(), bytes.clone());
            self.change_data(
                era,
                temporary.clone(),
                bytes.clone(),
                false,
                true,
                move || {
                    let file = File::create_new(from)?;
                    file.write_all_at(&bytes, 0)?;
                    Ok(file)
                },
            )
        };
        if !written {
            return;
        }
        let changes = [
            Change {
                name: temporary,
                to: None,
                whole: true,
            },
            Change {
                name: file,
                to: Some(Arc::new(bytes)),
                whole: true,
            },
        ];
        self.change(era, Operation::Rename, true, &changes, || {
            fs::rename(from, to)
        });
    }

    fn unlink(&mut self, era: Era, file: String) {
        let path = self.path(&file);
        let changes = [Change {
            name: file,
            to: None,
            whole: true,
        }];
        self.change(era, Operation::Unlink, true, &changes, || {
            fs::remove_file(path)
        });
    }

    fn change_data(
        &mut self,
        era: Era,
        name: String,
        to: Vec<u8>,
        whole: bool,
        sync: bool,
        write: impl FnOnce() -> io::Result<File>,
    ) -> bool {
        // The next change syncs what was left unsynced, so that at most two versions are possible.
        let unsynced = self.promises[self.place.mount]
            .lock()
            .get(&name)
            .is_some_and(|entry| !entry.is_synced());
        let sync = sync || unsynced;
        let to = Some(Arc::new(to));
        let changes = [Change { name, to, whole }];
        self.change(era, Operation::Write, sync, &changes, || {
            let file = write()?;
            if sync {
                file.sync_all()?;
            }
            close(file)
        })
    }

    fn change(
        &mut self,
        era: Era,
        operation: Operation,
        durable: bool,
        changes: &[Change],
        act: impl FnOnce() -> io::Result<()>,
    ) -> bool {
        // The name that must exist, unless it is new. In a rename, that is the first one.
        let first = changes.first().map(|change| change.name.as_str());
        let held = {
            let mut files = self.promises[self.place.mount].lock();
            let held = first.filter(|name| files.holds(name));
            files.begin(changes);
            held
        };
        let undisturbed = self.place.shared.undisturbed(self.place.mount);
        let began = Instant::now();
        let acted = act();
        let took = began.elapsed();
        let returned = match &acted {
            Ok(()) if !self.place.counts(era) => Returned::Not,
            Ok(()) if durable => Returned::Durable,
            Ok(()) => Returned::Visible(
                undisturbed
                    .filter(|_| undisturbed == self.place.shared.undisturbed(self.place.mount)),
            ),
            Err(_) => Returned::Not,
        };
        if let Err(error) = &acted
            && error.kind() == ErrorKind::NotFound
            && let Some(file) = held
            && self.place.counts(era)
            && undisturbed.is_some()
            && undisturbed == self.place.shared.undisturbed(self.place.mount)
        {
            let path = format!("/{}/{file}", name(self.place.mount));
            let text = format!("{path} during the run: it is not there");
            self.place.reports.wrong(&text);
        }
        self.promises[self.place.mount]
            .lock()
            .end(changes, returned);
        match acted {
            Ok(()) => self.place.reports.done(operation, took, 0),
            Err(error) => self.place.failed(operation, operation.name(), &error),
        }
        returned != Returned::Not
    }

    fn new_name(&mut self) -> String {
        self.next_name += 1;
        format!("file-{}", self.next_name)
    }

    fn syncs(&mut self) -> bool {
        self.rng.random_range(0..UNSYNCED) > 0
    }

    fn bytes_max(&self) -> usize {
        self.spec.file_kib_max as usize * 1_024
    }

    fn bytes(&mut self) -> Vec<u8> {
        let max = self.bytes_max();
        let len = random::length(&mut self.rng, max);
        let mut bytes = vec![0; len];
        self.rng.fill(&mut bytes[..]);
        bytes
    }
}

impl Job for Program {
    fn interrupted(&mut self) {
        self.promises[self.place.mount].lock().forget_unsynced();
    }

    fn begin(&mut self) -> io::Result<()> {
        self.place.make()
    }

    fn step(&mut self, era: Era) {
        let dice = self.rng.random_range(0..100);
        if dice < OTHER_READ_PERCENT && self.promises.len() > 1 {
            let other = self.rng.random_range(0..self.promises.len() - 1);
            let other = other + usize::from(other >= self.place.mount);
            if let Some(file) = self.choose(other) {
                self.read(era, other, &file);
            }
            return;
        }
        let Some(file) = self.choose(self.place.mount) else {
            return self.create(era);
        };
        if dice < OTHER_READ_PERCENT + OWN_READ_PERCENT {
            return self.read(era, self.place.mount, &file);
        }
        let full = {
            let files = self.promises[self.place.mount].lock();
            files.usable().count() >= self.spec.files_max
        };
        match self.rng.random_range(0..10) {
            0 => self.unlink(era, file),
            1 => self.truncate(era, file),
            2 | 3 => self.append(era, file),
            4 | 5 => self.overwrite(era, file),
            6 => self.replace(era, file),
            _ if full => self.unlink(era, file),
            _ => self.create(era),
        }
    }

    fn compare(&mut self, check: &Check<'_>, to: &mut Comparison) {
        let files = self.promises[self.place.mount].lock();
        check
            .runtime
            .block_on(verify::compare(check.client, self.place.mount, &files, to));
    }
}

/// Closes a file and returns the error, which dropping it would hide.
fn close(file: File) -> io::Result<()> {
    Ok(nix::unistd::close(file)?)
}
