//! The store of checkpoints: `STORE/JOB/000001/` and so on, each with its images and manifest. `STORE`
//! is an ordinary directory, meant to be on a HarvestFS mount.
//!
//! A dump is written to a hidden directory, which a single rename gives its number once everything in
//! it is durable. So after any interruption every listed checkpoint is complete, and the previous one
//! still exists.

mod lock;
#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use harvestfs_protocol::{durable, machine};

pub use self::lock::JobLock;
use self::lock::LOCK_FILE;
use crate::manifest::{JobName, MANIFEST_BYTES_MAX, MANIFEST_FILE, Manifest, ManifestError};

/// Prefix of the name of an unfinished dump.
const DRAFT_PREFIX: &str = ".dump-";
/// Prefix of the name of a checkpoint that is being removed.
const REMOVED_PREFIX: &str = ".removed-";
/// The last number that a checkpoint can have.
const LAST_NUMBER: u32 = u32::MAX;
/// Age above which another node's dump, or a measurement, is considered abandoned.
const DRAFT_AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Prefix of the name of a file that is written to measure a store.
pub const PROBE_PREFIX: &str = ".probe-";
/// Prefix of the name of a directory in a store for measurements with jobs.
pub const BENCH_PREFIX: &str = ".bench-";

/// What went wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file system operation failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The path on which it was attempted.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is no such directory.
    #[error(
        "there is no directory {} for checkpoints: mount the file system if that is not done, and make \
         the directory the first time (`mkdir {}`)",
        .0.display(), .0.display()
    )]
    NoStore(PathBuf),
    /// A manifest is not usable.
    #[error("checkpoint {number} of job {job} is not usable: {source}")]
    Manifest {
        /// The job.
        job: JobName,
        /// The checkpoint's number.
        number: u32,
        /// The cause.
        source: ManifestError,
    },
    /// The directory of a job or checkpoint is a symbolic link: the directory that contains its target was not checked.
    #[error("{} is a link: move the directory that it leads to here first", .0.display())]
    Link(PathBuf),
    /// There is no such job.
    #[error("there is no checkpoint of a job {0}; `harvestfs checkpoint list` shows what there is")]
    NoJob(JobName),
    /// There is no such checkpoint.
    #[error(
        "job {job} has no checkpoint {number}; `harvestfs checkpoint list` shows what there is"
    )]
    NoCheckpoint {
        /// The job.
        job: JobName,
        /// The checkpoint's number.
        number: u32,
    },
    /// Another command is working on the job.
    #[error("another command is working on job {0}: wait for it to end")]
    Locked(JobName),
    /// No number is left for another checkpoint of the job.
    #[error(
        "no number is left after checkpoint {LAST_NUMBER} of job {0}: remove that \
         (`harvestfs checkpoint rm {0} --number {LAST_NUMBER}`)"
    )]
    NoNumber(JobName),
    /// Another node stored a checkpoint of that number in the meantime.
    #[error("another node stored checkpoint {number} of job {job} meanwhile; try again")]
    Overtaken {
        /// The job.
        job: JobName,
        /// The checkpoint's number.
        number: u32,
    },
}

/// Adds the operation and the path to an error.
pub(crate) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { what, path, source }
}

/// A directory of jobs.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

impl Store {
    /// Opens the store in a directory, which is never created here: when the file system is not mounted, creating it
    /// would store checkpoints on another one. Links in its path are resolved once: the directories that
    /// [`crate::trust`] judges are then those that are used, even if somebody changes a link meanwhile.
    ///
    /// # Errors
    /// [`StoreError::NoStore`] when the directory does not exist.
    pub fn open(directory: PathBuf) -> Result<Self, StoreError> {
        let found = directory
            .canonicalize()
            .and_then(|path| Ok((fs::metadata(&path)?, path)));
        match found {
            Ok((metadata, directory)) if metadata.is_dir() => Ok(Self { directory }),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("use", &directory)(error))
            }
            _ => Err(StoreError::NoStore(directory)),
        }
    }

    /// Its directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// All jobs that have a directory, sorted by name. A symbolic link does not count: a user who can create links here
    /// could make root modify the link's target.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn jobs(&self) -> Result<Vec<Job>, StoreError> {
        let mut names: Vec<JobName> = names_in(&self.directory)?
            .iter()
            .filter_map(|name| name.parse().ok())
            // A plain file may have such a name, too.
            .filter(|name: &JobName| self.job(name.clone()).is_there().is_ok_and(|is| is))
            .collect();
        names.sort();
        Ok(names.into_iter().map(|name| self.job(name)).collect())
    }

    /// Removes what interrupted measurements left behind.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn collect(&self) -> Result<(), StoreError> {
        for name in names_in(&self.directory)? {
            let path = self.directory.join(&name);
            let is_old = || age(&path) > DRAFT_AGE_MAX;
            if name.starts_with(PROBE_PREFIX) && is_old() {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(io_error("remove", &path)(error));
                    }
                    _ => {}
                }
            } else if name.starts_with(BENCH_PREFIX) && is_old() {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// A job, whether or not it has checkpoints.
    #[must_use]
    pub fn job(&self, name: JobName) -> Job {
        Job {
            directory: self.directory.join(name.as_str()),
            name,
        }
    }
}

/// The checkpoints of one job.
#[derive(Clone, Debug)]
pub struct Job {
    name: JobName,
    directory: PathBuf,
}

/// An existing checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its contents.
    pub manifest: Manifest,
    /// Its directory.
    pub directory: PathBuf,
}

impl Job {
    /// The job's name.
    #[must_use]
    pub fn name(&self) -> &JobName {
        &self.name
    }

    /// Its directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether it has a directory.
    fn is_there(&self) -> Result<bool, StoreError> {
        match fs::symlink_metadata(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Ok(metadata) if metadata.is_symlink() => Err(StoreError::Link(self.directory.clone())),
            metadata => {
                let metadata = metadata.map_err(io_error("look at", &self.directory))?;
                Ok(metadata.is_dir())
            }
        }
    }

    /// The numbers of the job's checkpoints, ascending.
    ///
    /// # Errors
    /// [`StoreError::NoJob`] when it has no directory, [`StoreError::Link`] when that is a link.
    pub fn numbers(&self) -> Result<Vec<u32>, StoreError> {
        if !self.is_there()? {
            return Err(StoreError::NoJob(self.name.clone()));
        }
        let mut numbers: Vec<u32> = names_in(&self.directory)?
            .iter()
            .filter_map(|name| number_of(name))
            .collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Opens one checkpoint.
    ///
    /// # Errors
    /// When it does not exist or its manifest is not usable; [`StoreError::Link`] when its directory is a link.
    pub fn checkpoint(&self, number: u32) -> Result<Checkpoint, StoreError> {
        let directory = self.directory.join(directory_name(number));
        // Compaction replaces images in it: it must not do that elsewhere.
        if directory.is_symlink() {
            return Err(StoreError::Link(directory));
        }
        let path = directory.join(MANIFEST_FILE);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !directory.exists() => {
                return Err(StoreError::NoCheckpoint {
                    job: self.name.clone(),
                    number,
                });
            }
            file => file.map_err(io_error("open", &path))?,
        };
        let mut bytes = Vec::new();
        file.take(MANIFEST_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(io_error("read", &path))?;
        let manifest = Manifest::decode(&bytes).map_err(|source| StoreError::Manifest {
            job: self.name.clone(),
            number,
            source,
        })?;
        Ok(Checkpoint {
            manifest,
            directory,
        })
    }

    /// The newest checkpoint; `None` when the job has none.
    ///
    /// # Errors
    /// When the newest one is not usable: an older one is never used in its place unless it is requested.
    pub fn newest(&self) -> Result<Option<Checkpoint>, StoreError> {
        match self.numbers() {
            Err(StoreError::NoJob(_)) => Ok(None),
            Err(error) => Err(error),
            Ok(numbers) => numbers
                .last()
                .map(|&last| self.checkpoint(last))
                .transpose(),
        }
    }

    /// Starts a checkpoint, and removes unfinished ones that `maker` left in this job.
    ///
    /// # Errors
    /// When the directory cannot be created; [`StoreError::NoNumber`] after the checkpoint with the last number.
    pub fn begin(&self, _lock: &JobLock, maker: &str) -> Result<Draft, StoreError> {
        let number = match self.numbers() {
            // Others may have made a directory of any name.
            Ok(numbers) => match numbers.last() {
                Some(last) => last
                    .checked_add(1)
                    .ok_or_else(|| StoreError::NoNumber(self.name.clone()))?,
                None => 1,
            },
            Err(StoreError::NoJob(_)) => 1,
            Err(error) => return Err(error),
        };
        let names = names_in(&self.directory)?;
        for name in names.iter().filter(|name| is_draft_of(name, maker)) {
            self.take_away(name.as_ref())?;
        }
        // Locks do not extend to other mounts, and another machine may have the same name: it then removes this draft,
        // but neither machine ever writes into the other's.
        let chance = machine::random::<u64>();
        let name = format!("{DRAFT_PREFIX}{maker}.{chance:016x}");
        let directory = self.directory.join(name);
        fs::create_dir(&directory).map_err(io_error("make", &directory))?;
        Ok(Draft {
            job: self.clone(),
            number,
            directory,
            is_committed: false,
        })
    }

    /// Atomically replaces the manifest of a checkpoint.
    pub(crate) fn replace_manifest(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        self.write_manifest(&checkpoint.directory, &checkpoint.manifest)
    }

    /// Writes a manifest. When this returns, all names in the directory are durable.
    fn write_manifest(&self, directory: &Path, manifest: &Manifest) -> Result<(), StoreError> {
        let path = directory.join(MANIFEST_FILE);
        durable::replace_file(&path, &self.encode(manifest)?, 0o644)
            .map_err(io_error("write", &path))
    }

    fn encode(&self, manifest: &Manifest) -> Result<Vec<u8>, StoreError> {
        manifest.encode().map_err(|source| StoreError::Manifest {
            job: self.name.clone(),
            number: manifest.number,
            source,
        })
    }

    /// Removes a checkpoint.
    ///
    /// # Errors
    /// When it does not exist or cannot be removed.
    pub fn remove(&self, _lock: &JobLock, number: u32) -> Result<(), StoreError> {
        if self.take_away(directory_name(number).as_ref())? {
            return Ok(());
        }
        Err(StoreError::NoCheckpoint {
            job: self.name.clone(),
            number,
        })
    }

    /// Removes a directory entry, renaming it first so that no checkpoint is ever visible without some of its images.
    /// Locks do not extend to other mounts, so another node may be about to give a draft its number: at its path, that
    /// node finds all of it or nothing. Returns false when nothing has that name.
    fn take_away(&self, name: &OsStr) -> Result<bool, StoreError> {
        let path = self.directory.join(name);
        let chance = machine::random::<u64>();
        let removed = format!("{REMOVED_PREFIX}{chance:016x}");
        let removed = self.directory.join(removed);
        match durable::rename(&path, &removed) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            renamed => renamed.map_err(io_error("remove", &path))?,
        }
        remove(&removed)?;
        Ok(true)
    }

    /// Removes the job with all its checkpoints, except for any that another node begins in the meantime.
    ///
    /// # Errors
    /// When it does not exist or cannot be removed.
    pub fn remove_all(&self, _lock: &JobLock) -> Result<(), StoreError> {
        for number in self.numbers()? {
            self.take_away(directory_name(number).as_ref())?;
        }
        for name in all_names_in(&self.directory)? {
            if name != LOCK_FILE {
                self.take_away(&name)?;
            }
        }
        // Last: another command can lock a new file of that name from now on, and keeps the directory with it.
        remove(&self.directory.join(LOCK_FILE))?;
        match fs::remove_dir(&self.directory) {
            Err(error) if !is_left_to_others(&error) => {
                Err(io_error("remove", &self.directory)(error))
            }
            _ => Ok(()),
        }
    }

    /// Removes all checkpoints that are older than the newest `keep` usable ones (at least one is kept), and
    /// abandoned dumps. Returns the numbers of the removed checkpoints.
    ///
    /// # Errors
    /// When something cannot be removed; what was removed before that stays removed.
    pub fn collect(
        &self,
        _lock: &JobLock,
        maker: &str,
        keep: usize,
    ) -> Result<Vec<u32>, StoreError> {
        let mut old = self.numbers()?;
        let mut kept = 0;
        // An unusable checkpoint does not count: it must not cost the last usable one.
        while kept < keep.max(1)
            && let Some(number) = old.pop()
        {
            kept += usize::from(self.checkpoint(number).is_ok());
        }
        for &number in &old {
            // Another node may have removed it first: its lock does not extend to this mount.
            self.take_away(directory_name(number).as_ref())?;
        }
        for name in names_in(&self.directory)? {
            let path = self.directory.join(&name);
            let is_given_up = is_draft_of(&name, maker)
                || name.starts_with(DRAFT_PREFIX) && age(&path) > DRAFT_AGE_MAX;
            if name.starts_with(REMOVED_PREFIX) {
                remove(&path)?;
            } else if is_given_up {
                self.take_away(name.as_ref())?;
            }
        }
        Ok(old)
    }
}

/// An unfinished checkpoint, removed when it is dropped uncommitted.
#[derive(Debug)]
pub struct Draft {
    job: Job,
    number: u32,
    directory: PathBuf,
    is_committed: bool,
}

impl Draft {
    /// The number that the checkpoint is going to have.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The directory for the images. Every file in it must be durable before [`Draft::commit`].
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes it a checkpoint. When this returns, it survives everything that HarvestFS survives.
    ///
    /// # Errors
    /// When it is not certain that everything is durable: then there is no checkpoint, or one that may not
    /// survive a crash.
    pub fn commit(mut self, manifest: Manifest) -> Result<Checkpoint, StoreError> {
        let job = &self.job;
        job.write_manifest(&self.directory, &manifest)?;
        let directory = job.directory.join(directory_name(self.number));
        let renamed = durable::rename_to_new(&self.directory, &directory);
        renamed.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => StoreError::Overtaken {
                job: job.name.clone(),
                number: self.number,
            },
            _ => io_error("rename to", &directory)(error),
        })?;
        self.is_committed = true;
        Ok(Checkpoint {
            manifest,
            directory,
        })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_committed {
            // The file system may be what failed; then the next dump or `gc` removes it.
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

/// Writes a file of a draft and waits until its content is durable; its name becomes durable with the manifest.
///
/// # Errors
/// When that fails.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut file = File::create_new(path).map_err(io_error("create", path))?;
    file.write_all(bytes).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

/// Whether `name` is that of a draft of `maker`.
fn is_draft_of(name: &str, maker: &str) -> bool {
    let draft = name.strip_prefix(DRAFT_PREFIX);
    draft
        .and_then(|it| it.rsplit_once('.'))
        .is_some_and(|(of, _)| of == maker)
}

fn directory_name(number: u32) -> String {
    format!("{number:06}")
}

fn number_of(name: &str) -> Option<u32> {
    let number = name.parse().ok()?;
    (directory_name(number) == name).then_some(number)
}

/// The names in a directory, except those that are not UTF-8, which are not ours.
fn names_in(directory: &Path) -> Result<Vec<String>, StoreError> {
    let names = all_names_in(directory)?.into_iter();
    Ok(names.filter_map(|name| name.into_string().ok()).collect())
}

/// All names in a directory; none when it does not exist.
fn all_names_in(directory: &Path) -> Result<Vec<OsString>, StoreError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error("list", directory))?,
    };
    entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .map(|name| name.map_err(io_error("list", directory)))
        .collect()
}

/// Removes a directory with its contents, or a file.
fn remove(path: &Path) -> Result<(), StoreError> {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => fs::remove_file(path),
        removed => removed,
    };
    match removed {
        Err(error) if !is_left_to_others(&error) => Err(io_error("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Whether a removal failed only because of other processes: they have removed it already, or keep creating files in
/// the directory, which the next `gc` removes.
fn is_left_to_others(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty
    )
}

/// Time since a file was last modified; 0 when that is not known.
fn age(path: &Path) -> Duration {
    let changed = fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
    changed
        .ok()
        .and_then(|changed| SystemTime::now().duration_since(changed).ok())
        .unwrap_or_default()
}
