//! Where checkpoints are: `STORE/JOB/000001/`, each with its images and manifest. The directory is
//! an ordinary one, meant to be on a mount of HarvestFS.
//!
//! A dump goes into a hidden directory that gets its number, by one rename, when everything in it
//! is durable. So after any interruption, what is listed is whole, and the one before it is
//! still there.

#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use harvestfs_protocol::{durable, machine};
use rustix::fs::{FlockOperation, OFlags};

use crate::manifest::{JobName, MANIFEST_BYTES_MAX, MANIFEST_FILE, Manifest, ManifestError};

/// Starts the name of a dump that is not finished.
const DRAFT_PREFIX: &str = ".dump-";
/// Starts the name of a checkpoint on its way out.
const REMOVED_PREFIX: &str = ".removed-";
const LOCK_FILE: &str = ".lock";
/// A dump of another node that is older than this is taken for given up; so is a measurement.
const DRAFT_AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Starts the name of a file that measures a store.
pub const PROBE_PREFIX: &str = ".probe-";
/// Starts the name of a directory in a store for measurements with jobs.
pub const BENCH_PREFIX: &str = ".bench-";

/// What went wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system refused something.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There is no such directory.
    #[error(
        "there is no directory {} for checkpoints: mount the file system if that is not done, and make \
         the directory the first time (`mkdir {}`)",
        .0.display(), .0.display()
    )]
    NoStore(PathBuf),
    /// A manifest that cannot be used.
    #[error("checkpoint {number} of job {job} is not usable: {source}")]
    Manifest {
        /// The job.
        job: JobName,
        /// Which.
        number: u32,
        /// Why not.
        source: ManifestError,
    },
    /// The directory of a job or checkpoint is a link: what it leads to is in a directory that nobody has judged.
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
        /// Which.
        number: u32,
    },
    /// Another command works on the job.
    #[error("another command is working on job {0}: wait for it to end")]
    Locked(JobName),
    /// A checkpoint of that number appeared meanwhile.
    #[error("another node stored checkpoint {number} of job {job} meanwhile; try again")]
    Overtaken {
        /// The job.
        job: JobName,
        /// Which.
        number: u32,
    },
}

/// Names the step and the path of an error.
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
    /// The store in a directory, which is never made here: where a file system is not mounted, that would
    /// have checkpoints stored on another one.
    ///
    /// # Errors
    /// [`StoreError::NoStore`] when it is not there.
    pub fn open(directory: PathBuf) -> Result<Self, StoreError> {
        match fs::metadata(&directory) {
            Ok(metadata) if metadata.is_dir() => Ok(Self { directory }),
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

    /// All jobs that have a directory, in the order of their names. A link to one is none: whoever can make links here
    /// would have root change what it leads to.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn jobs(&self) -> Result<Vec<Job>, StoreError> {
        let mut names: Vec<JobName> = names_in(&self.directory)?
            .iter()
            .filter_map(|name| name.parse().ok())
            // A file beside them may have such a name, too.
            .filter(|name: &JobName| self.job(name.clone()).is_there().is_ok_and(|is| is))
            .collect();
        names.sort();
        Ok(names.into_iter().map(|name| self.job(name)).collect())
    }

    /// Removes what measurements left half-way.
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

/// A checkpoint that is there.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// What it consists of.
    pub manifest: Manifest,
    /// Where.
    pub directory: PathBuf,
}

impl Job {
    /// Its name.
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

    /// The numbers of its checkpoints, ascending.
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

    /// One checkpoint.
    ///
    /// # Errors
    /// When it is not there or its manifest is not usable; [`StoreError::Link`] when its directory is a link.
    pub fn checkpoint(&self, number: u32) -> Result<Checkpoint, StoreError> {
        let directory = self.directory.join(directory_name(number));
        // Images are replaced in it.
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

    /// The newest checkpoint; none: there is none.
    ///
    /// # Errors
    /// When the newest one is not usable: an older one is never taken in its place without being
    /// asked for.
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

    /// Keeps other commands of this mount away from the job until the lock is dropped.
    ///
    /// # Errors
    /// [`StoreError::Locked`] when one is at work, [`StoreError::Link`] when its directory is a link.
    pub fn lock(&self) -> Result<JobLock, StoreError> {
        match fs::create_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.is_there()?;
            }
            made => made.map_err(io_error("make", &self.directory))?,
        }
        let path = self.directory.join(LOCK_FILE);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            // A pipe in its place would be waited for.
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
            .open(&path)
            .map_err(io_error("open", &path))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(JobLock { file }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(StoreError::Locked(self.name.clone())),
            Err(error) => Err(io_error("lock", &path)(error.into())),
        }
    }

    /// Starts a checkpoint. What `maker` left half-done in this job is removed.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn begin(&self, _lock: &JobLock, maker: &str) -> Result<Draft, StoreError> {
        let number = match self.numbers() {
            Ok(numbers) => numbers.last().map_or(1, |last| last + 1),
            Err(StoreError::NoJob(_)) => 1,
            Err(error) => return Err(error),
        };
        let names = names_in(&self.directory)?;
        for name in names.iter().filter(|name| is_draft_of(name, maker)) {
            self.take_away(name.as_ref())?;
        }
        // Locks do not reach to other mounts, and another machine may be named the same: it then removes this one, but
        // none of the two ever writes into that of the other.
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

    /// Replaces the manifest of a checkpoint, at once or not at all.
    pub(crate) fn replace_manifest(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        self.write_manifest(&checkpoint.directory, &checkpoint.manifest)
    }

    /// When this returns, all names in the directory are durable.
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
    /// When it is not there or cannot be removed.
    pub fn remove(&self, _lock: &JobLock, number: u32) -> Result<(), StoreError> {
        if self.take_away(directory_name(number).as_ref())? {
            return Ok(());
        }
        Err(StoreError::NoCheckpoint {
            job: self.name.clone(),
            number,
        })
    }

    /// Removes something as a whole: at no moment is there a checkpoint that lacks some of its images. Locks do not
    /// reach to other mounts, so that another node may be about to give a draft its number: by its path, it finds all
    /// of it or nothing. False: there is nothing of that name.
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

    /// Removes the job with all its checkpoints. What another node begins meanwhile stays.
    ///
    /// # Errors
    /// When it is not there or cannot be removed.
    pub fn remove_all(&self, _lock: &JobLock) -> Result<(), StoreError> {
        for number in self.numbers()? {
            self.take_away(directory_name(number).as_ref())?;
        }
        for name in all_names_in(&self.directory)? {
            if name != LOCK_FILE {
                self.take_away(&name)?;
            }
        }
        remove(&self.directory.join(LOCK_FILE))?;
        match fs::remove_dir(&self.directory) {
            Err(error) if !is_left_to_others(&error) => {
                Err(io_error("remove", &self.directory)(error))
            }
            _ => Ok(()),
        }
    }

    /// Removes all checkpoints that are older than the newest `keep` usable ones (at least one is kept), and
    /// what was given up half-way. Returns the numbers of those removed.
    ///
    /// # Errors
    /// When something cannot be removed; what was removed until then stays so.
    pub fn collect(
        &self,
        _lock: &JobLock,
        maker: &str,
        keep: usize,
    ) -> Result<Vec<u32>, StoreError> {
        let mut old = self.numbers()?;
        let mut kept = 0;
        // One that is not usable is no reason to be without one that is.
        while kept < keep.max(1)
            && let Some(number) = old.pop()
        {
            kept += usize::from(self.checkpoint(number).is_ok());
        }
        for &number in &old {
            // Another node may have been first: its lock does not reach here.
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

/// While it lives, no other command of this mount works on the job.
#[derive(Debug)]
pub struct JobLock {
    file: File,
}

impl Drop for JobLock {
    fn drop(&mut self) {
        // To close it would not do: a child that this process is about to execute has it open too for a moment.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

/// A checkpoint in the making; gone when it is dropped uncommitted.
#[derive(Debug)]
pub struct Draft {
    job: Job,
    number: u32,
    directory: PathBuf,
    is_committed: bool,
}

impl Draft {
    /// The number that it is going to have.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Where the images go. Every file in it must be durable before [`Draft::commit`].
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes it a checkpoint. When this returns, it survives all that HarvestFS survives.
    ///
    /// # Errors
    /// When it is not certain that everything is durable; it is no checkpoint then, or one that may not
    /// survive.
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
            // The file system may be what failed; the next dump or `gc` removes it then.
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

/// Writes a file of a draft and waits until its content is durable; its name is so with the manifest.
///
/// # Errors
/// When that fails.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut file = File::create_new(path).map_err(io_error("create", path))?;
    file.write_all(bytes).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

/// Whether it is the name of a draft of `maker`.
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

/// The names in a directory without those that are not UTF-8: these are not ours.
fn names_in(directory: &Path) -> Result<Vec<String>, StoreError> {
    let names = all_names_in(directory)?.into_iter();
    Ok(names.filter_map(|name| name.into_string().ok()).collect())
}

/// All names in a directory that is there; none when it is not.
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

/// Removes a directory with what is in it, or a file.
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

/// Whether something was not removed because of others: they have done it, or go on making files in a directory that
/// they have open, which the next `gc` removes.
fn is_left_to_others(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty
    )
}

/// How long ago something was changed; 0 when that is not known.
fn age(path: &Path) -> Duration {
    let changed = fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
    changed
        .ok()
        .and_then(|changed| SystemTime::now().duration_since(changed).ok())
        .unwrap_or_default()
}
