//! The disk of a simulated machine. Its files are in a directory of the real machine; the simulation also keeps what a
//! loss of power would leave: each unsynced sector as it was after any of the writes since the last sync, each length,
//! and one of the states that the names went through. A file that was moved to another directory is lost if only the
//! directory that it left was synced: POSIX promises no more. What is written without the two traits (small files that
//! are replaced as a whole) counts as synced.

mod content;
mod traits;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use self::content::Content;
pub use self::traits::Directory;

/// The faults of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// The percentage of operations that fail.
    pub errors_percent: u32,
    /// The disk is full.
    pub is_full: bool,
    /// The next sync of a file fails; some of what it should have written is lost.
    pub next_sync_fails: bool,
}

/// The disk of a simulated machine. Clones share one disk.
#[derive(Clone, Debug)]
pub struct SimulatedDisk(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    rng: SmallRng,
    /// Its files were copied from another disk, and have another identity than the originals.
    is_copy: bool,
    trouble: Trouble,
    files: BTreeMap<PathBuf, Shared>,
    /// Changes of names that are not synced, in order.
    changes: Vec<Change>,
}

type Shared = Arc<Mutex<Content>>;

#[derive(Debug)]
struct Change {
    file: Shared,
    kind: ChangeKind,
}

#[derive(Debug)]
enum ChangeKind {
    Create(PathBuf),
    Remove(PathBuf),
    Rename {
        from: PathBuf,
        to: PathBuf,
        replaced: Option<Shared>,
        /// The directory that it left was synced since: the old name is gone, whatever happens to the new one.
        has_left: bool,
    },
}

impl Change {
    /// The directory that has to be synced to make it durable.
    fn directory(&self) -> Option<&Path> {
        match &self.kind {
            ChangeKind::Create(path) | ChangeKind::Remove(path) => path.parent(),
            ChangeKind::Rename { to, .. } => to.parent(),
        }
    }
}

impl SimulatedDisk {
    /// Creates a disk without faults.
    pub fn new(seed: u64) -> Self {
        Self::with(seed, false)
    }

    /// Creates a disk without faults whose files were copied from another one.
    pub fn of_copy(seed: u64) -> Self {
        Self::with(seed, true)
    }

    fn with(seed: u64, is_copy: bool) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: SmallRng::seed_from_u64(seed),
            is_copy,
            trouble: Trouble::default(),
            files: BTreeMap::new(),
            changes: Vec::new(),
        })))
    }

    /// Sets the faults of the disk from now on.
    pub fn set_trouble(&self, trouble: Trouble) {
        self.0.lock().trouble = trouble;
    }

    /// Loses what was not synced, in part or as a whole. No running program may have files open.
    ///
    /// # Errors
    /// When the files of this machine cannot be changed.
    pub fn lose_power(&self) -> io::Result<()> {
        let state = &mut *self.0.lock();
        let renamed = |change: &Change| match &change.kind {
            ChangeKind::Rename { replaced, .. } => replaced.clone(),
            ChangeKind::Create(_) | ChangeKind::Remove(_) => None,
        };
        let replaced = state.changes.iter().filter_map(renamed);
        let changed = state.changes.iter().map(|change| Arc::clone(&change.file));
        let mut files: Vec<Shared> = state.files.values().cloned().collect();
        files.extend(changed.chain(replaced));
        for file in files {
            file.lock().lose_power(&mut state.rng)?;
        }
        let changes = std::mem::take(&mut state.changes);
        let kept = state.rng.random_range(0..=changes.len());
        for change in changes[kept..].iter().rev() {
            change.undo()?;
        }
        state.files.clear();
        Ok(())
    }

    /// Everything counts as synced from now on, as if nothing had been written for long. No running program may have
    /// files open.
    pub fn settle(&self) {
        let mut state = self.0.lock();
        state.files.clear();
        state.changes.clear();
    }

    /// Copies a directory with everything below it as a loss of power would leave it if only what was synced had
    /// reached the disk.
    ///
    /// # Errors
    /// When the files of this machine cannot be read, or the copies written.
    pub fn copy_synced(&self, from: &Path, to: &Path) -> io::Result<()> {
        let state = self.0.lock();
        let mut files: BTreeMap<PathBuf, Option<Shared>> = BTreeMap::new();
        for path in files_below(from)? {
            let known = state.files.get(&path).cloned();
            files.insert(path, known);
        }
        // `from` may itself be a copy, to which the changes of names do not apply.
        let is_here = |change: &&Change| change.directory().is_some_and(|it| it.starts_with(from));
        for change in state.changes.iter().rev().filter(is_here) {
            match &change.kind {
                ChangeKind::Create(path) => _ = files.remove(path),
                ChangeKind::Remove(path) => {
                    files.insert(path.clone(), Some(Arc::clone(&change.file)));
                }
                ChangeKind::Rename {
                    from,
                    to,
                    replaced,
                    has_left,
                } => {
                    if let Some(file) = files.remove(to).filter(|_| !has_left) {
                        files.insert(from.clone(), file);
                    }
                    if let Some(replaced) = replaced {
                        files.insert(to.clone(), Some(Arc::clone(replaced)));
                    }
                }
            }
        }
        for (path, file) in files {
            let copy = to.join(path.strip_prefix(from).map_err(io::Error::other)?);
            if let Some(directory) = copy.parent() {
                fs::create_dir_all(directory)?;
            }
            match file {
                // This keeps its mode.
                None => _ = fs::copy(&path, &copy)?,
                Some(file) => fs::write(&copy, file.lock().synced_bytes()?)?,
            }
        }
        Ok(())
    }

    /// Flips one bit of a file.
    ///
    /// # Errors
    /// When the file cannot be changed.
    pub fn rot(&self, path: &Path) -> io::Result<()> {
        let state = &mut *self.0.lock();
        let file = state.known(path)?;
        file.lock().rot(&mut state.rng)
    }
}

impl Change {
    /// Restores the names from before the change, as far as possible.
    fn undo(&self) -> io::Result<()> {
        match &self.kind {
            ChangeKind::Create(path) => remove_if_there(path),
            ChangeKind::Remove(path) => write_again(path, &self.file),
            ChangeKind::Rename {
                from,
                to,
                replaced,
                has_left,
            } => {
                if *has_left {
                    remove_if_there(to)?;
                } else if to.exists() && !from.exists() {
                    fs::rename(to, from)?;
                }
                match replaced {
                    Some(replaced) => write_again(to, replaced),
                    None => Ok(()),
                }
            }
        }
    }
}

fn files_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files.extend(files_below(&entry.path())?);
        } else {
            files.push(entry.path());
        }
    }
    Ok(files)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn write_again(path: &Path, file: &Shared) -> io::Result<()> {
    fs::write(path, file.lock().all()?)
}

impl State {
    /// Begins an operation, which may fail.
    fn begin(&mut self) -> io::Result<()> {
        let percent = self.trouble.errors_percent;
        if percent > 0 && self.rng.random_ratio(percent, 100) {
            return Err(rustix::io::Errno::IO.into());
        }
        Ok(())
    }

    /// As [`State::begin`], for an operation that needs more space.
    fn begin_growing(&mut self) -> io::Result<()> {
        if self.trouble.is_full {
            return Err(rustix::io::Errno::NOSPC.into());
        }
        self.begin()
    }

    fn create(&mut self, path: &Path) -> io::Result<Shared> {
        self.begin_growing()?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(path)?;
        let file = Arc::new(Mutex::new(Content::new(file)));
        self.files.insert(path.to_owned(), Arc::clone(&file));
        self.changes.push(Change {
            file: Arc::clone(&file),
            kind: ChangeKind::Create(path.to_owned()),
        });
        Ok(file)
    }

    fn open(&mut self, path: &Path) -> io::Result<Shared> {
        self.begin()?;
        self.known(path)
    }

    /// The file of that name, which may have existed before the simulation.
    fn known(&mut self, path: &Path) -> io::Result<Shared> {
        if let Some(file) = self.files.get(path).filter(|_| path.exists()) {
            return Ok(Arc::clone(file));
        }
        let file: File = OpenOptions::new().read(true).write(true).open(path)?;
        let file = Arc::new(Mutex::new(Content::of_durable(file)));
        self.files.insert(path.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.begin()?;
        let file = self.known(from)?;
        let replaced = match self.known(to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            replaced => Some(replaced?),
        };
        fs::rename(from, to)?;
        self.files.remove(from);
        self.files.insert(to.to_owned(), Arc::clone(&file));
        let (from, to) = (from.to_owned(), to.to_owned());
        let kind = ChangeKind::Rename {
            from,
            to,
            replaced,
            has_left: false,
        };
        self.changes.push(Change { file, kind });
        Ok(())
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        self.begin()?;
        let file = self.known(path)?;
        fs::remove_file(path)?;
        self.files.remove(path);
        let kind = ChangeKind::Remove(path.to_owned());
        self.changes.push(Change { file, kind });
        Ok(())
    }

    fn sync_directory(&mut self, path: &Path) -> io::Result<()> {
        self.begin()?;
        let (synced, mut left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.changes)
            .into_iter()
            .partition(|change| change.directory() == Some(path));
        // A file with a durable name has been durably created.
        let lasts = |file: &Shared| synced.iter().any(|change| Arc::ptr_eq(&change.file, file));
        left.retain(|change| {
            !(matches!(change.kind, ChangeKind::Create(_)) && lasts(&change.file))
        });
        for change in &mut left {
            if let ChangeKind::Rename { from, has_left, .. } = &mut change.kind
                && from.parent() == Some(path)
            {
                *has_left = true;
            }
        }
        self.changes = left;
        // Durable files that are not open need not be kept; they are opened again when needed.
        self.files
            .retain(|_, file| Arc::strong_count(file) > 1 || !file.lock().is_durable());
        Ok(())
    }

    fn sync(&mut self, file: &Shared) -> io::Result<()> {
        let is_lost = std::mem::take(&mut self.trouble.next_sync_fails);
        if is_lost {
            file.lock().lose(&mut self.rng);
            return Err(rustix::io::Errno::IO.into());
        }
        self.begin()
            .inspect_err(|_| file.lock().lose(&mut self.rng))?;
        file.lock().synced();
        Ok(())
    }
}
