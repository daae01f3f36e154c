//! The map of all replicas. It is locked for lookups and single changes, never during disk access.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::node::{ReplicaChange, ReplicaReport};
use harvestfs_protocol::types::StorageClass;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use super::buffer::BufferPool;
use super::caches::{FileCache, TableCache};
use super::changes::Changes;
use super::doubles::add_found;
use super::error::StoreError;
use super::layout;
use super::open_replica::{OpenReplica, Origin, Taken};
use super::removal::Removal;
use super::replica::ReplicaWriter;
use super::volume::{Found, FoundState, Volume};
use crate::engine::quota::{Charge, REPLICA_OVERHEAD_BYTES, shrinking, volumes};

/// Volumes, replicas, and caches of their contents.
pub(super) struct Inventory {
    /// The volumes by number. Slots are filled in order: those at the end are for volumes that join later.
    pub(super) slots: Box<[OnceLock<Arc<Volume>>]>,
    replicas: Mutex<FxHashMap<BlockId, Entry>>,
    next_generation: AtomicU64,
    pub(super) files: FileCache,
    pub(super) tables: TableCache,
    pub(super) buffers: BufferPool,
    pub(super) changes: Arc<Changes>,
}

/// Distinguishes the replicas of one block that this datanode has had since it was started: a replica that is removed
/// and created again has another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(u64);

/// One replica.
pub(super) struct Entry {
    pub(super) volume: usize,
    pub(super) generation: Generation,
    pub(super) state: State,
}

/// The state of a replica, which determines what may be done with it.
pub(super) enum State {
    /// May be written to.
    Open(Arc<OpenReplica>),
    /// Complete.
    Sealed {
        chunks: u32,
        charge: Charge,
        /// It was found sealed at the start: only its size is known, and it may never have been read since it was
        /// written.
        is_found: bool,
    },
    /// A sealed replica that was found to be corrupt, while its file is being moved aside: only that job may change
    /// the state.
    Condemned { chunks: u32 },
    /// Some of it does not match its checksums, or cannot be read. The rest may be all that is left of the block and
    /// is still read; a corrupt replica without chunks is not read at all.
    Corrupt { chunks: u32, charge: Charge },
    /// Its file is being removed: only its [`super::removal::Removal`] may change the state.
    Deleting,
}

/// What a reader needs to know about a replica.
pub(super) struct Readable {
    pub(super) volume: Arc<Volume>,
    pub(super) generation: Generation,
    /// Chunks that may be read.
    pub(super) chunks: u32,
    /// Present if the replica is not sealed.
    pub(super) open: Option<Arc<OpenReplica>>,
    /// Some chunks are known to be bad; the others may be read.
    pub(super) is_corrupt: bool,
}

/// A replica that is about to be created. If this is dropped before the file exists, there is no replica.
#[must_use = "without its file there is no replica"]
pub(super) struct Creation {
    inventory: Arc<Inventory>,
    block: BlockId,
    replica: Arc<OpenReplica>,
    is_created: bool,
}

/// The next action to delete a replica.
pub(super) enum ToDelete {
    /// None: the replica is gone, or another job owns it.
    Nothing,
    /// Take it over first.
    Open(Arc<Volume>, Arc<OpenReplica>),
    Now(Removal),
}

impl Entry {
    pub(super) fn found(volume: usize, generation: Generation, found: Found) -> (BlockId, Self) {
        let state = match found.state {
            FoundState::Open => State::Open(OpenReplica::found(found.chunks, found.charge)),
            FoundState::Sealed => State::Sealed {
                chunks: found.chunks,
                charge: found.charge,
                is_found: true,
            },
            FoundState::Corrupt => State::Corrupt {
                chunks: found.chunks,
                charge: found.charge,
            },
        };
        let entry = Self {
            volume,
            generation,
            state,
        };
        (found.block, entry)
    }

    /// The replica's report to the namenode; `None` if it cannot be read.
    pub(super) fn report(&self, block: BlockId) -> Option<ReplicaReport> {
        let (chunks, sealed) = match &self.state {
            State::Open(replica) if replica.origin == Origin::Repair => return None,
            State::Open(replica) if replica.is_corrupt() => return None,
            State::Open(replica) => (replica.chunks(), false),
            State::Sealed { chunks, .. } => (*chunks, true),
            State::Condemned { .. } | State::Corrupt { .. } | State::Deleting => return None,
        };
        Some(ReplicaReport {
            block,
            length_bytes: layout::chunk_bytes(chunks),
            sealed,
        })
    }
}

impl Inventory {
    pub(super) fn new(
        volumes: Vec<(Arc<Volume>, Vec<Found>)>,
        late: usize,
        buffers: BufferPool,
        table_cache_bytes: usize,
        links_max: usize,
    ) -> Self {
        let mut replicas = FxHashMap::default();
        let mut opened = Vec::with_capacity(volumes.len());
        let mut generations = 0..;
        for (index, (volume, found)) in volumes.into_iter().enumerate() {
            opened.push(volume);
            for (found, generation) in found.into_iter().zip(&mut generations) {
                let (block, entry) = Entry::found(index, Generation(generation), found);
                add_found(&mut replicas, &opened, block, entry);
            }
        }
        let slots = opened.into_iter().map(OnceLock::from);
        Self {
            slots: slots
                .chain(std::iter::repeat_with(OnceLock::new).take(late))
                .collect(),
            replicas: Mutex::new(replicas),
            next_generation: AtomicU64::new(generations.start),
            files: FileCache::default(),
            tables: TableCache::new(table_cache_bytes),
            buffers,
            changes: Arc::new(Changes::new(links_max)),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, FxHashMap<BlockId, Entry>> {
        self.replicas.lock()
    }

    pub(super) fn next_generation(&self) -> Generation {
        Generation(self.next_generation.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn volume_index(&self, storage: StorageId) -> Option<usize> {
        self.volumes().position(|v| v.storage() == storage)
    }

    pub(super) fn open_replicas(&self) -> Vec<(BlockId, Arc<Volume>)> {
        let replicas = self.lock();
        let open = replicas.iter().filter(
            |(_, entry)| matches!(&entry.state, State::Open(it) if it.origin == Origin::Pipeline),
        );
        open.map(|(&block, entry)| (block, self.volume(entry.volume).clone()))
            .collect()
    }

    /// Chooses a volume for a new replica and reserves its initial space: the requested class before others; then, for
    /// a repair, the volume that has received the fewest; then the one with the most room per writer.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], or [`StoreError::Silent`] if a disk that may have room does not respond.
    pub(super) fn reserve(
        &self,
        class: Option<StorageClass>,
        origin: Origin,
        refused: &[usize],
    ) -> Result<(usize, Charge), StoreError> {
        let mut candidates = Vec::new();
        for (index, volume) in self.volumes().enumerate() {
            if volume.check_usable().is_ok() && !refused.contains(&index) {
                candidates.push(volumes::Candidate {
                    volume: index,
                    is_other_class: class.is_some_and(|class| class != volume.class()),
                    available_bytes: volume.quota.available_bytes(),
                    writers: volume.writers.load(Ordering::Relaxed),
                    repairs: match origin {
                        Origin::Repair => volume.repairs.load(Ordering::Relaxed),
                        Origin::Pipeline => 0,
                    },
                });
            }
        }
        let reserved = volumes::order(candidates).find_map(|index| {
            let volume = self.volume(index);
            let charge = volume.quota.reserve(REPLICA_OVERHEAD_BYTES)?;
            let repairs = u64::from(origin == Origin::Repair);
            volume.repairs.fetch_add(repairs, Ordering::Relaxed);
            Some((index, charge))
        });
        reserved.ok_or_else(|| {
            let silent = self.volumes().filter(|volume| volume.health.is_good());
            let mut silent = silent.filter_map(|volume| volume.check_usable().err());
            // There may be room on a disk that does not respond.
            silent.next().unwrap_or(StoreError::NoSpace)
        })
    }

    /// Selects replicas of a volume to give up because the volume is above its quota by so much.
    pub(super) fn victims(&self, volume: usize, excess_bytes: u64) -> Vec<BlockId> {
        let candidates = {
            let replicas = self.lock();
            let of_volume = replicas.iter().filter(|(_, entry)| entry.volume == volume);
            of_volume
                .filter_map(|(&block, entry)| {
                    let (worth, charge) = match &entry.state {
                        State::Corrupt { chunks: 0, charge } => (shrinking::Worth::Useless, charge),
                        State::Corrupt { charge, .. } => (shrinking::Worth::Corrupt, charge),
                        State::Sealed { charge, .. } => (shrinking::Worth::Sealed, charge),
                        State::Open(_) | State::Condemned { .. } | State::Deleting => return None,
                    };
                    Some(shrinking::Candidate {
                        block,
                        worth,
                        bytes: charge.bytes(),
                    })
                })
                .collect()
        };
        shrinking::victims(candidates, excess_bytes)
    }

    /// Adds the state of a replica to the queue of changes.
    pub(super) fn report_have(&self, block: BlockId) {
        let replicas = self.lock();
        if let Some(entry) = replicas.get(&block)
            && let Some(report) = entry.report(block)
        {
            let storage = self.volume(entry.volume).storage();
            self.changes.push(storage, ReplicaChange::Have(report));
        }
    }

    /// Adds the actual state of a replica to the queue of changes, for a namenode that believes it to be on this
    /// volume.
    pub(super) fn answer(&self, storage: StorageId, block: BlockId) {
        let replicas = self.lock();
        let (storage, change) = match replicas.get(&block) {
            None => (storage, ReplicaChange::Deleted(block)),
            Some(entry) => {
                let storage = self.volume(entry.volume).storage();
                match (entry.report(block), &entry.state) {
                    (Some(report), _) => (storage, ReplicaChange::Have(report)),
                    // A replica that is being fetched or removed is reported when that is done.
                    (None, State::Open(replica)) if !replica.is_corrupt() => return,
                    (None, State::Deleting) => return,
                    (None, State::Open(_) | State::Condemned { .. } | State::Corrupt { .. }) => {
                        (storage, ReplicaChange::Corrupt(block))
                    }
                    (None, State::Sealed { .. }) => {
                        unreachable!("the sealed replica of {block} is not reported")
                    }
                }
            }
        };
        self.changes.push(storage, change);
    }

    /// Looks up a replica for reading. Corrupt replicas are read too, since each chunk is verified.
    pub(super) fn readable(&self, block: BlockId) -> Result<Readable, StoreError> {
        let replicas = self.lock();
        let entry = replicas.get(&block).ok_or(StoreError::NoSuchReplica)?;
        let (chunks, open, is_corrupt) = match &entry.state {
            State::Open(replica) if replica.origin == Origin::Repair => {
                return Err(StoreError::NoSuchReplica);
            }
            State::Open(replica) => {
                let is_corrupt = replica.is_corrupt();
                (replica.chunks(), Some(replica.clone()), is_corrupt)
            }
            State::Sealed { chunks, .. } => (*chunks, None, false),
            State::Condemned { chunks } | State::Corrupt { chunks, .. } => (*chunks, None, true),
            State::Deleting => return Err(StoreError::NoSuchReplica),
        };
        if is_corrupt && chunks == 0 {
            return Err(StoreError::Corrupt { offset: 0 });
        }
        Ok(Readable {
            volume: self.volume(entry.volume).clone(),
            generation: entry.generation,
            chunks,
            open,
            is_corrupt,
        })
    }

    /// Looks up a replica that is not known to be corrupt.
    pub(super) fn intact(&self, block: BlockId) -> Result<Readable, StoreError> {
        let readable = self.readable(block)?;
        if readable.is_corrupt {
            return Err(StoreError::Corrupt { offset: 0 });
        }
        Ok(readable)
    }

    /// Looks up again a replica that was looked up before, to see what is left of it.
    ///
    /// # Errors
    /// Why it can no longer be read; [`StoreError::NoSuchReplica`] also if the block has a new replica by now.
    pub(super) fn look_again(
        &self,
        block: BlockId,
        before: &Readable,
    ) -> Result<Readable, StoreError> {
        let now = self.readable(block)?;
        if now.generation == before.generation {
            Ok(now)
        } else {
            Err(StoreError::NoSuchReplica)
        }
    }

    /// Seals a replica that the caller owns exclusively. Blocks on the disk.
    pub(super) fn seal_now(
        &self,
        block: BlockId,
        volume: &Volume,
        replica: &Arc<OpenReplica>,
        writer: ReplicaWriter,
        chunks: u32,
    ) -> Result<(), StoreError> {
        match writer.seal(chunks, &volume.sealed_path(block)) {
            Ok(charge) => {
                let sealed = State::Sealed {
                    chunks,
                    charge,
                    is_found: false,
                };
                self.replace_open(block, replica, sealed);
                replica.end();
                self.report_have(block);
                Ok(())
            }
            Err((error, charge)) => {
                // The file may have been cut already, and the sync may be what failed.
                replica.cut(chunks);
                replica.set_unproven();
                replica.put_back(charge);
                Err(error)
            }
        }
    }

    /// Takes a replica out of service to delete it, or returns the replica that has to be taken over first.
    ///
    /// # Errors
    /// Its volume cannot be used.
    pub(super) fn start_deleting(self: &Arc<Self>, block: BlockId) -> Result<ToDelete, StoreError> {
        let mut replicas = self.lock();
        let Some(entry) = replicas.get_mut(&block) else {
            return Ok(ToDelete::Nothing);
        };
        let volume = self.volume(entry.volume).clone();
        volume.check_usable()?;
        Ok(match std::mem::replace(&mut entry.state, State::Deleting) {
            State::Sealed { charge, .. } | State::Corrupt { charge, .. } => {
                ToDelete::Now(Removal::new(self.clone(), block, volume, charge))
            }
            State::Open(replica) => {
                entry.state = State::Open(replica.clone());
                ToDelete::Open(volume, replica)
            }
            // The job that owns it will end; then it may be deleted.
            condemned @ State::Condemned { .. } => {
                entry.state = condemned;
                ToDelete::Nothing
            }
            State::Deleting => ToDelete::Nothing,
        })
    }

    /// Takes an open replica that was taken over out of service, to delete it.
    ///
    /// # Errors
    /// Its volume cannot be used; the replica is free again.
    pub(super) fn start_deleting_taken(
        self: &Arc<Self>,
        block: BlockId,
        volume: &Arc<Volume>,
        taken: Taken,
    ) -> Result<Removal, StoreError> {
        volume.check_usable()?;
        let (replica, charge) = taken.begin();
        self.replace_open(block, &replica, State::Deleting);
        Ok(Removal::new(self.clone(), block, volume.clone(), charge))
    }

    /// A replica that a repair started and abandoned, because its disk did not respond.
    pub(super) fn abandoned_repair(
        &self,
        block: BlockId,
    ) -> Option<(Arc<Volume>, Arc<OpenReplica>)> {
        let replicas = self.lock();
        self.abandoned(replicas.get(&block)?)
    }

    /// Blocks with such a replica.
    pub(super) fn abandoned_repairs(&self) -> Vec<BlockId> {
        let replicas = self.lock();
        let abandoned = replicas
            .iter()
            .filter(|(_, entry)| self.abandoned(entry).is_some());
        abandoned.map(|(&block, _)| block).collect()
    }

    fn abandoned(&self, entry: &Entry) -> Option<(Arc<Volume>, Arc<OpenReplica>)> {
        let volume = self.volume(entry.volume);
        match &entry.state {
            State::Open(replica)
                if replica.origin == Origin::Repair
                    && replica.is_idle()
                    // Otherwise it is lost with the volume: nothing can remove it, and it blocks nothing.
                    && volume.health.is_good() =>
            {
                Some((volume.clone(), replica.clone()))
            }
            State::Open(_)
            | State::Sealed { .. }
            | State::Condemned { .. }
            | State::Corrupt { .. }
            | State::Deleting => None,
        }
    }

    /// Replaces the state of an open replica that the caller has taken.
    fn replace_open(&self, block: BlockId, replica: &Arc<OpenReplica>, state: State) {
        self.replace(
            block,
            "the one that was open",
            state,
            |before| matches!(before, State::Open(it) if Arc::ptr_eq(it, replica)),
        );
    }

    /// Replaces the state of a replica that only the caller may change, after checking that it has the expected state.
    pub(super) fn replace(
        &self,
        block: BlockId,
        expected: &str,
        state: State,
        is_expected: impl FnOnce(&State) -> bool,
    ) {
        let mut replicas = self.lock();
        let entry = replicas.get_mut(&block);
        let Some(entry) = entry.filter(|entry| is_expected(&entry.state)) else {
            panic!("the replica of {block} is gone or not {expected}");
        };
        entry.state = state;
    }

    /// Adds a replica that is about to be created, in place of one that is lost.
    ///
    /// # Errors
    /// [`StoreError::ReplicaExists`]; also while a file of the block is being removed there.
    pub(super) fn add(
        self: &Arc<Self>,
        block: BlockId,
        volume: usize,
        replica: &Arc<OpenReplica>,
    ) -> Result<Creation, StoreError> {
        let created = Entry {
            volume,
            generation: self.next_generation(),
            state: State::Open(replica.clone()),
        };
        let lost = {
            let mut replicas = self.lock();
            let known = replicas.get(&block);
            let is_in_removal = self.volume(volume).doubles.has_in_removal(block);
            if is_in_removal || known.is_some_and(|entry| !self.give_up_lost(entry)) {
                return Err(StoreError::ReplicaExists);
            }
            replicas.insert(block, created)
        };
        if let Some(lost) = lost {
            self.tables.forget(lost.generation);
            self.files.forget(lost.generation);
        }
        Ok(Creation {
            inventory: self.clone(),
            block,
            replica: replica.clone(),
            is_created: false,
        })
    }

    /// Marks a replica as not trustworthy as a whole and reports it, unless it is gone by now, and perhaps replaced by
    /// another one. It can still be read. Blocks on the disk.
    pub(super) fn condemn(&self, block: BlockId, found: &Readable) {
        let Readable {
            volume, generation, ..
        } = found;
        let sealed = {
            let mut replicas = self.lock();
            let entry = replicas.get_mut(&block);
            let Some(entry) = entry.filter(|entry| entry.generation == *generation) else {
                return;
            };
            match std::mem::replace(&mut entry.state, State::Deleting) {
                State::Sealed { chunks, charge, .. } => {
                    entry.state = State::Condemned { chunks };
                    Some((chunks, charge))
                }
                State::Open(replica) => {
                    let was_known = replica.set_corrupt();
                    entry.state = State::Open(replica);
                    if was_known {
                        return;
                    }
                    None
                }
                known @ (State::Condemned { .. } | State::Corrupt { .. } | State::Deleting) => {
                    entry.state = known;
                    return;
                }
            }
        };
        tracing::error!(%block, volume = %volume.path().display(), "the replica is corrupt");
        self.changes
            .push(volume.storage(), ReplicaChange::Corrupt(block));
        self.tables.forget(*generation);
        self.files.let_go(*generation);
        let Some((chunks, charge)) = sealed else {
            return;
        };
        // So that this is known after a restart. If it fails, the scrubber finds the damage again.
        let moved = volume
            .disk()
            .rename(&volume.sealed_path(block), &volume.corrupt_path(block));
        if let Err(error) = moved {
            tracing::warn!(%block, %error, "cannot move the corrupt replica aside");
        }
        let corrupt = State::Corrupt { chunks, charge };
        self.replace(block, "condemned", corrupt, |before| {
            matches!(before, State::Condemned { .. })
        });
    }
}

impl Creation {
    /// Records that the file exists.
    pub(super) fn done(mut self) {
        self.is_created = true;
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        if self.is_created {
            return;
        }
        let removed = self.inventory.lock().remove(&self.block);
        assert!(
            removed.is_some_and(
                |entry| matches!(entry.state, State::Open(it) if Arc::ptr_eq(&it, &self.replica))
            ),
            "the replica of {} that was to be created is gone or another one",
            self.block
        );
        self.replica.end();
    }
}
