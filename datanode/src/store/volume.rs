//! One volume: a directory on a disk, with a quota.
//!
//! ```text
//! VERSION          which volume this is (see `version_file`)
//! LOCK             locked by the process that uses the volume
//! OBEYED           how far the namenode was that was obeyed (see `obeyed_file`)
//! open/<block>     replicas that are written to, or whose writer is gone
//! repair/<block>   replicas that a repair is fetching; removed at start
//! sealed/<xx>/<block>  sealed replicas; xx is the last byte of the block id modulo 64, in hex
//! corrupt/<block>  replicas that failed verification, until the namenode has them deleted
//! ```

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harvestfs_protocol::ids::{BlockId, ClusterId, StorageId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::timeline::Position;
use harvestfs_protocol::types::{StorageClass, VolumeStatus};
use harvestfs_protocol::{durable, machine, unix_now_ms};
use parking_lot::Mutex;

use super::clock::now;
use super::disk::Disk;
use super::doubles::Doubles;
use super::error::{StoreError, VolumeError};
use super::health::Health;
use super::jobs::{BROKEN_OFF, InTurn};
use super::place::{LOCK_FILE, Place};
use super::progress::Progress;
use super::pulse::Pulse;
use super::reading::is_of_no_replica;
use super::trusted::{Trusted, trusted_chunks};
use super::version_file::VersionFile;
use super::workers::Workers;
use super::{layout, obeyed_file, quota_file};
use crate::engine::disk::silence::GIVE_UP_AFTER;
use crate::engine::quota::shrinking::{SetQuota, Shrinking};
use crate::engine::quota::{Charge, Quota, REPLICA_OVERHEAD_BYTES};

/// Number of directories for sealed replicas: with a million replicas, each directory is still small enough for fast
/// lookups in the file system.
const SEALED_DIRS: u64 = 64;
/// The mode of the directories of replicas.
const PRIVATE: u32 = 0o700;

const OPEN_DIR: &str = "open";
const REPAIR_DIR: &str = "repair";
const SEALED_DIR: &str = "sealed";
const CORRUPT_DIR: &str = "corrupt";

/// The maximum number of chunks of a replica.
const CHUNKS_MAX: u32 = (BLOCK_BYTES_MAX / layout::PAGE_BYTES as u64) as u32;

/// A volume as configured.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// Its directory, which is created if it is missing, unlike its parent.
    pub path: PathBuf,
    /// The space that the primary tenant grants, in bytes.
    pub quota_bytes: u64,
    /// The class of its disk.
    pub class: StorageClass,
}

/// A volume in use.
pub struct Volume {
    pub(super) path: PathBuf,
    storage: StorageId,
    class: StorageClass,
    /// The space that the primary tenant grants, and its usage.
    pub quota: Arc<Quota>,
    /// The quota reported in heartbeats: a lowered quota takes effect before it is reported.
    said_quota_bytes: AtomicU64,
    /// What is known about its disk.
    pub health: Arc<Health>,
    /// Number of replicas being written.
    pub writers: AtomicU32,
    /// Number of repairs that it was chosen to receive since the start; a volume that joins late starts with the
    /// lowest count of the others.
    pub repairs: AtomicU64,
    pub(super) pulse: Arc<Pulse>,
    pub(super) workers: Workers,
    /// Serializes the replacement of its small files.
    pub(super) in_turn: InTurn,
    /// Its files that do not count.
    pub(super) doubles: Doubles,
    last_change: Mutex<LastChange>,
    disk: Arc<dyn Disk>,
    version: Mutex<VersionFile>,
    obeyed_at_start: Option<Position>,
    pub(super) place: Arc<Place>,
}

/// The origin of the quota in force.
struct LastChange {
    shrinking: Shrinking,
    /// Number of changes that have begun since the volume was opened: a change that is no longer the latest when it
    /// reaches the disk has no effect.
    begun: u64,
}

/// A replica that was found at the start.
pub struct Found {
    /// The block.
    pub block: BlockId,
    /// Chunks that can be read.
    pub chunks: u32,
    /// Its state.
    pub state: FoundState,
    /// The space that it takes.
    pub charge: Charge,
}

/// The state in which a replica was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundState {
    /// It is open, without a writer.
    Open,
    /// Complete.
    Sealed,
    /// It is corrupt, to be deleted when the namenode commands so.
    Corrupt,
}

impl Volume {
    /// Opens a volume, formatting an empty directory, and lists the replicas on it. Reads data of open replicas only.
    /// Blocks on the disk, whose answers `progress` counts.
    ///
    /// # Errors
    /// Why the volume cannot be used.
    pub fn open(
        options: &VolumeOptions,
        server: &str,
        disk: Arc<dyn Disk>,
        threads: usize,
        progress: &Progress,
    ) -> Result<(Arc<Self>, Vec<Found>), VolumeError> {
        let path = &options.path;
        match fs::create_dir(path) {
            Ok(()) => durable::sync_name_of(path).map_err(VolumeError::io(path))?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(VolumeError::Missing { path: path.clone() });
            }
            Err(error) => return Err(VolumeError::io(path)(error)),
        }
        progress.answered();
        match VersionFile::read(path)? {
            // As early as possible: without the id, the namenode would take the server for reimaged.
            Some(version) if version.server == server => progress.found(version.storage),
            Some(_) => {}
            None => check_empty(path)?,
        }
        progress.answered();
        let place = Arc::new(Place::take(path)?);
        progress.answered();
        let version = match VersionFile::read(path)? {
            Some(version) => version,
            None => format(path, server)?,
        };
        if version.server != server {
            return Err(VolumeError::OtherServer {
                path: path.clone(),
                found: version.server,
                expected: server.to_owned(),
            });
        }
        progress.found(version.storage);
        progress.answered();
        make_dirs(path, progress)?;
        let health = Arc::<Health>::default();
        let on_panic = {
            let (health, path) = (health.clone(), path.clone());
            // The change that the job was making may be half done.
            move || health.fail(BROKEN_OFF, &path)
        };
        let workers = Workers::start("disk", threads, on_panic).map_err(VolumeError::io(path))?;
        // A clock before 1970 delays the deadline.
        let now_unix_ms = unix_now_ms().unwrap_or(0);
        let set = quota_file::read(path);
        progress.answered();
        let obeyed_at_start = obeyed_file::read(path);
        progress.answered();
        let (quota_bytes, shrinking) =
            Shrinking::at_start(options.quota_bytes, set, now(), now_unix_ms);
        progress.limited(quota_bytes);
        let volume = Arc::new(Self {
            path: path.clone(),
            storage: version.storage,
            class: options.class,
            quota: Quota::new(quota_bytes),
            said_quota_bytes: AtomicU64::new(quota_bytes),
            last_change: Mutex::new(LastChange {
                shrinking,
                begun: 0,
            }),
            health,
            writers: AtomicU32::new(0),
            repairs: AtomicU64::new(0),
            pulse: Arc::default(),
            in_turn: InTurn::default(),
            doubles: Doubles::default(),
            disk,
            workers,
            version: Mutex::new(version),
            obeyed_at_start,
            place,
        });
        let found = volume.find_replicas(progress)?;
        Ok((volume, found))
    }

    /// Makes the volume part of a cluster, permanently. Blocks on the disk.
    ///
    /// # Errors
    /// [`VolumeError::OtherCluster`], or the disk's error.
    pub fn claim(&self, cluster: ClusterId) -> Result<(), VolumeError> {
        let mut version = self.version();
        match version.cluster {
            Some(found) if found == cluster => Ok(()),
            Some(found) => Err(VolumeError::OtherCluster {
                path: self.path.clone(),
                found,
                expected: cluster,
            }),
            None => {
                version.cluster = Some(cluster);
                version.write(&self.path)?;
                *self.version.lock() = version;
                Ok(())
            }
        }
    }

    /// The cluster that it belongs to, once that is known.
    pub fn cluster(&self) -> Option<ClusterId> {
        self.version().cluster
    }

    fn version(&self) -> VersionFile {
        self.version.lock().clone()
    }

    /// The volume's id.
    pub fn storage(&self) -> StorageId {
        self.storage
    }

    /// The class of its disk.
    pub fn class(&self) -> StorageClass {
        self.class
    }

    /// Its disk.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The volume's status for heartbeats. Accesses no disk.
    pub fn status(&self) -> VolumeStatus {
        if self.pulse.is_over() {
            let minutes = GIVE_UP_AFTER.as_secs() / 60;
            let reason = format!("the disk did not answer for {minutes} minutes");
            self.health.fail(&reason, &self.path);
        }
        VolumeStatus {
            storage: self.storage,
            class: self.class,
            quota_bytes: self.said_quota_bytes.load(Ordering::Relaxed),
            used_bytes: self.quota.used_bytes(),
            healthy: self.health.is_good(),
            shrinks_in_ms: self.time_to_shrink(now()),
        }
    }

    /// Changes the volume's quota: immediately for new data, within `time` for existing data. The quota holds until it
    /// is changed again, or the configured quota differs from what it is now; `configured_bytes` is the configured
    /// quota, if that changed.
    ///
    /// # Errors
    /// The disk's error: the quota then holds only until the next start.
    pub async fn set_quota(
        self: &Arc<Self>,
        quota_bytes: u64,
        time: Duration,
        configured_bytes: Option<u64>,
    ) -> Result<(), StoreError> {
        let configured_bytes = configured_bytes.unwrap_or(self.configured_quota_bytes());
        // A clock before 1970 moves only the deadline after a restart.
        let now_unix_ms = unix_now_ms().unwrap_or(0);
        let set = SetQuota::new(configured_bytes, quota_bytes, time, now_unix_ms);
        let shrinking = Shrinking::within(configured_bytes, time, now());
        let number = {
            let mut last = self.last_change.lock();
            last.begun += 1;
            if quota_bytes < self.quota.limit_bytes() {
                // The primary tenant needs the space: it must not be filled while a slow disk delays the change.
                last.shrinking = shrinking;
                self.quota.set_limit(quota_bytes);
            }
            last.begun
        };
        let path = self.path.clone();
        let write = move || {
            quota_file::write(&set, &path).map_err(StoreError::disk("writing the quota of", &path))
        };
        // First: once a heartbeat reports the quota, the namenode does not send it again after a crash.
        let written = self.run_in_turn(write).await;
        let mut last = self.last_change.lock();
        if last.begun != number {
            // A later change may have lowered the quota, and is in force already.
            return written;
        }
        last.shrinking = shrinking;
        self.quota.set_limit(quota_bytes);
        self.said_quota_bytes.store(quota_bytes, Ordering::Relaxed);
        tracing::info!(volume = %self.path.display(), quota_bytes, "the quota is changed");
        written
    }

    /// The configured quota in bytes, even while another quota holds.
    pub fn configured_quota_bytes(&self) -> u64 {
        self.last_change.lock().shrinking.configured_bytes()
    }

    /// While the usage exceeds the quota: milliseconds until it must no longer do so.
    pub fn time_to_shrink(&self, now: Instant) -> Option<u64> {
        let excess_bytes = self.quota.excess_bytes();
        self.last_change.lock().shrinking.left_ms(excess_bytes, now)
    }

    /// The position of the namenode that was obeyed before the volume was opened, as recorded on the volume.
    pub fn obeyed_at_start(&self) -> Option<Position> {
        self.obeyed_at_start
    }

    /// Records the position of the obeyed namenode.
    ///
    /// # Errors
    /// The disk's error.
    pub async fn write_obeyed(&self, position: Position) -> Result<(), StoreError> {
        let path = self.path.clone();
        self.run_in_turn(move || {
            obeyed_file::write(position, &path)
                .map_err(StoreError::disk("writing the obeyed namenode of", &path))
        })
        .await
    }

    /// The path of an open replica's file.
    pub fn open_path(&self, block: BlockId) -> PathBuf {
        self.path.join(OPEN_DIR).join(layout::file_name(block))
    }

    /// The path of the file of a replica that a repair is fetching.
    pub fn repair_path(&self, block: BlockId) -> PathBuf {
        self.path.join(REPAIR_DIR).join(layout::file_name(block))
    }

    /// The path of a sealed replica's file.
    pub fn sealed_path(&self, block: BlockId) -> PathBuf {
        self.path
            .join(SEALED_DIR)
            .join(sealed_dir(block.0))
            .join(layout::file_name(block))
    }

    /// The path of a corrupt replica's file.
    pub fn corrupt_path(&self, block: BlockId) -> PathBuf {
        self.path.join(CORRUPT_DIR).join(layout::file_name(block))
    }

    fn find_replicas(&self, progress: &Progress) -> Result<Vec<Found>, VolumeError> {
        let repair_dir = self.path.join(REPAIR_DIR);
        for (_, path, _) in self.replica_files(&repair_dir, progress)? {
            // A file that remains blocks at most a repair of this block.
            self.of_one_file(fs::remove_file(&path), &path)?;
            progress.answered();
        }
        let mut found = Vec::new();
        let corrupt_dir = self.path.join(CORRUPT_DIR);
        for (block, _, file_bytes) in self.replica_files(&corrupt_dir, progress)? {
            let chunks = chunks_left(file_bytes);
            found.push(self.found(block, file_bytes, chunks, FoundState::Corrupt));
        }
        for dir in 0..SEALED_DIRS {
            let dir = self.path.join(SEALED_DIR).join(sealed_dir(dir));
            for (block, path, file_bytes) in self.replica_files(&dir, progress)? {
                let (chunks, state) = match file_bytes.map(layout::chunks_in_file) {
                    Some(Some(chunks)) => (chunks, FoundState::Sealed),
                    Some(None) => {
                        tracing::error!(
                            file = %path.display(), file_bytes,
                            "no sealed replica can have this size: it is corrupt"
                        );
                        let aside = self.corrupt_path(block);
                        // A file that is not moved is found to be corrupt at the next start too.
                        self.of_one_file(self.disk.rename(&path, &aside), &path)?;
                        progress.answered();
                        (chunks_left(file_bytes), FoundState::Corrupt)
                    }
                    // It is not moved: the next start may find nothing wrong with it.
                    None => (chunks_left(None), FoundState::Corrupt),
                };
                found.push(self.found(block, file_bytes, chunks, state));
            }
        }
        let open_dir = self.path.join(OPEN_DIR);
        for (block, path, file_bytes) in self.replica_files(&open_dir, progress)? {
            let trusted = self
                .disk
                .open(&path)
                .and_then(|file| trusted_chunks(&*file, (block, self.storage), progress));
            progress.answered();
            let (chunks, state) = match trusted {
                Ok(Trusted { chunks, damage }) => {
                    if let Some(error) = damage {
                        tracing::error!(
                            file = %path.display(), chunks, %error,
                            "an open replica cannot be read to its end: what is before that counts"
                        );
                        self.health.note_error(&error, &path);
                    }
                    (chunks, FoundState::Open)
                }
                // If it were reported as corrupt, it could be removed; if it were not mentioned, it would be in the
                // way of another replica. As long as the volume is unavailable as a whole, everything on it stays as
                // it is, and the next start finds it.
                Err(error) if is_of_no_replica(&error) => {
                    return Err(VolumeError::io(&path)(error));
                }
                // Any other error concerns this file only: the next start would find the same, and all other files
                // would be unavailable because of it.
                Err(error) => {
                    tracing::error!(file = %path.display(), %error, "cannot read an open replica");
                    self.health.note_error(&error, &path);
                    // Its contents are unknown.
                    (chunks_left(None), FoundState::Corrupt)
                }
            };
            found.push(self.found(block, file_bytes, chunks, state));
        }
        Ok(found)
    }

    fn found(
        &self,
        block: BlockId,
        file_bytes: Option<u64>,
        chunks: u32,
        state: FoundState,
    ) -> Found {
        // The space of a file of unknown size is not guessed: good replicas could be given up for it.
        let bytes = file_bytes.unwrap_or(0) + REPLICA_OVERHEAD_BYTES;
        Found {
            block,
            chunks,
            state,
            charge: self.quota.count_existing(bytes),
        }
    }

    /// Passes on the result of an operation on one file; `None` if it failed, so that one bad file does not make all
    /// others unavailable.
    ///
    /// # Errors
    /// The error is not about this file.
    fn of_one_file<T>(
        &self,
        done: std::io::Result<T>,
        path: &Path,
    ) -> Result<Option<T>, VolumeError> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(error) if is_of_no_replica(&error) => Err(VolumeError::io(path)(error)),
            Err(error) => {
                tracing::error!(file = %path.display(), %error, "this file cannot be used; the others are");
                self.health.note_error(&error, path);
                Ok(None)
            }
        }
    }

    /// Lists the replica files in a directory, with their sizes in bytes where these can be determined.
    fn replica_files(
        &self,
        dir: &Path,
        progress: &Progress,
    ) -> Result<Vec<(BlockId, PathBuf, Option<u64>)>, VolumeError> {
        let mut files = Vec::new();
        let entries = fs::read_dir(dir).map_err(VolumeError::io(dir))?;
        progress.answered();
        for entry in entries {
            progress.answered();
            let path = entry.map_err(VolumeError::io(dir))?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            match name.and_then(layout::parse_file_name) {
                Some(block) => {
                    let file_bytes = self.of_one_file(self.disk.file_bytes(&path), &path)?;
                    files.push((block, path, file_bytes));
                }
                None => tracing::warn!(file = %path.display(), "this is no replica; ignored"),
            }
        }
        Ok(files)
    }
}

/// Counts a writer of a volume as long as this exists.
pub struct WriterCount(Arc<Volume>);

impl WriterCount {
    /// Counts one more writer.
    pub fn new(volume: Arc<Volume>) -> Self {
        volume.writers.fetch_add(1, Ordering::Relaxed);
        Self(volume)
    }
}

impl Drop for WriterCount {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of chunks that the file of a corrupt replica may still hold: each is verified when it is read. If the
/// file's size is unknown, the replica may be whole, and the last of its block, so it must not count as empty.
fn chunks_left(file_bytes: Option<u64>) -> u32 {
    file_bytes.map_or(CHUNKS_MAX, |file_bytes| {
        layout::chunks_within(file_bytes).unwrap_or(0)
    })
}

fn sealed_dir(block: u64) -> String {
    format!("{:02x}", block % SEALED_DIRS)
}

fn check_empty(path: &Path) -> Result<(), VolumeError> {
    for entry in fs::read_dir(path).map_err(VolumeError::io(path))? {
        let name = entry.map_err(VolumeError::io(path))?.file_name();
        // Left by a fresh file system, or by a start that was interrupted.
        let harmless = ["lost+found", LOCK_FILE];
        if !harmless.iter().any(|harmless| name == *harmless) && !durable::is_temporary(&name) {
            return Err(VolumeError::NotAVolume {
                path: path.to_owned(),
            });
        }
    }
    Ok(())
}

fn format(path: &Path, server: &str) -> Result<VersionFile, VolumeError> {
    let version = VersionFile {
        storage: StorageId(machine::random()),
        cluster: None,
        server: server.to_owned(),
    };
    version.write(path)?;
    Ok(version)
}

fn make_dirs(path: &Path, progress: &Progress) -> Result<(), VolumeError> {
    let sealed = path.join(SEALED_DIR);
    let tops = [OPEN_DIR, REPAIR_DIR, CORRUPT_DIR, SEALED_DIR].map(|dir| path.join(dir));
    let below = (0..SEALED_DIRS).map(|dir| sealed.join(sealed_dir(dir)));
    for dir in tops.iter().cloned().chain(below) {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(PRIVATE)
            .create(&dir)
            .map_err(VolumeError::io(&dir))?;
        progress.answered();
    }
    for dir in &tops {
        // Earlier releases gave all users access to the directories, and created files that all may read.
        fs::set_permissions(dir, fs::Permissions::from_mode(PRIVATE))
            .map_err(VolumeError::io(dir))?;
        progress.answered();
    }
    durable::sync_directory(&sealed).map_err(VolumeError::io(&sealed))?;
    progress.answered();
    // Makes the directory entries durable that are about to be read and relied upon.
    durable::recover_noting(path, || progress.answered()).map_err(VolumeError::io(path))?;
    progress.answered();
    Ok(())
}
