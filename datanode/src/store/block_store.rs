//! All replicas of a datanode: which are here, and what becomes of them.
//!
//! One map knows every replica. It is locked for lookups and single changes, never while a disk is
//! accessed. What changes on disk and in the map together is done inside one job on the disk's
//! threads, so that a caller who gives up leaves nothing half done.

use std::collections::HashMap;
use std::collections::hash_map;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harvestfs_protocol::ids::{BlockId, ClusterId, StorageId};
use harvestfs_protocol::node::{ReplicaChange, ReplicaReport};
use harvestfs_protocol::types::{StorageClass, VolumeStatus};

use super::block_writer::BlockWriter;
use super::buffer::BufferPool;
use super::caches::{FileCache, TableCache};
use super::changes::Changes;
use super::error::StoreError;
use super::layout;
use super::open_replica::{Lease, OpenReplica, Origin};
use super::quota::{Charge, REPLICA_OVERHEAD_BYTES};
use super::replica::ReplicaWriter;
use super::volume::{Found, FoundState, Volume};

/// All replicas of a datanode. Cheap to clone.
#[derive(Clone)]
pub struct BlockStore {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    volumes: Vec<Arc<Volume>>,
    replicas: Mutex<HashMap<BlockId, Entry>>,
    pub(super) files: FileCache,
    pub(super) tables: TableCache,
    pub(super) buffers: BufferPool,
    pub(super) changes: Arc<Changes>,
}

struct Entry {
    volume: usize,
    state: State,
}

enum State {
    /// May be written to.
    Open(Arc<OpenReplica>),
    /// Complete.
    Sealed { chunks: u32, charge: Charge },
    /// Does not match its checksums, or cannot be read.
    Corrupt(Charge),
    /// Its file is being removed.
    Deleting,
}

/// What a reader needs to know about a replica.
pub(super) struct Readable {
    pub(super) volume: Arc<Volume>,
    /// Chunks that may be read.
    pub(super) chunks: u32,
    /// Present if the replica is not sealed.
    pub(super) open: Option<Arc<OpenReplica>>,
}

/// What is to be taken over to seal it.
enum ToSeal {
    Done,
    Open(Arc<Volume>, Arc<OpenReplica>),
}

impl BlockStore {
    /// A store over volumes that were opened, with what was found on them.
    pub fn new(
        volumes: Vec<(Arc<Volume>, Vec<Found>)>,
        buffers: BufferPool,
        table_cache_bytes: usize,
    ) -> Self {
        let mut replicas = HashMap::new();
        let mut opened = Vec::with_capacity(volumes.len());
        for (index, (volume, found)) in volumes.into_iter().enumerate() {
            for found in found {
                add_found(&mut replicas, index, found);
            }
            opened.push(volume);
        }
        Self {
            inner: Arc::new(Inner {
                volumes: opened,
                replicas: Mutex::new(replicas),
                files: FileCache::default(),
                tables: TableCache::new(table_cache_bytes),
                buffers,
                changes: Arc::default(),
            }),
        }
    }

    /// What happens to replicas, for the namenode.
    pub fn changes(&self) -> &Arc<Changes> {
        &self.inner.changes
    }

    /// The buffers for packets.
    pub fn buffers(&self) -> &BufferPool {
        &self.inner.buffers
    }

    /// What a heartbeat says about the volumes. Touches no disk.
    pub fn status(&self) -> Vec<VolumeStatus> {
        self.inner.volumes.iter().map(|v| v.status()).collect()
    }

    /// The volumes that can be used.
    pub fn healthy_storages(&self) -> Vec<StorageId> {
        let healthy = self.inner.volumes.iter().filter(|v| v.health.is_good());
        healthy.map(|v| v.storage()).collect()
    }

    /// The cluster that the volumes belong to, once that is known.
    pub fn cluster(&self) -> Option<ClusterId> {
        self.inner.volumes.iter().find_map(|v| v.cluster())
    }

    /// Makes the volumes part of a cluster. Those of another cluster go down.
    pub async fn claim(&self, cluster: ClusterId) {
        for volume in &self.inner.volumes {
            let claimed = volume.clone();
            let result = volume
                .run(move || {
                    if let Err(error) = claimed.claim(cluster) {
                        claimed.health.fail(&error.to_string(), claimed.path());
                    }
                    Ok(())
                })
                .await;
            if let Err(error) = result {
                tracing::warn!(%error, "the volume is not part of the cluster");
            }
        }
    }

    /// All replicas of a volume, in no order.
    pub fn replicas_of(&self, storage: StorageId) -> Vec<ReplicaReport> {
        let Some(wanted) = self.inner.volume_index(storage) else {
            return Vec::new();
        };
        let replicas = self.inner.lock();
        let of_volume = replicas.iter().filter(|(_, e)| e.volume == wanted);
        of_volume
            .filter_map(|(&block, entry)| entry.report(block))
            .collect()
    }

    /// The replicas that wait for the namenode's order to be deleted.
    pub fn corrupt_replicas(&self) -> Vec<(StorageId, BlockId)> {
        let replicas = self.inner.lock();
        let corrupt = replicas.iter().filter(|(_, entry)| match &entry.state {
            State::Corrupt(_) => true,
            State::Open(replica) => replica.is_corrupt(),
            State::Sealed { .. } | State::Deleting => false,
        });
        corrupt
            .map(|(&block, entry)| (self.inner.volumes[entry.volume].storage(), block))
            .collect()
    }

    /// The sealed replicas of a volume, in order.
    pub fn sealed_of(&self, storage: StorageId) -> Vec<BlockId> {
        let reports = self.replicas_of(storage);
        let sealed = reports.into_iter().filter(|report| report.sealed);
        let mut blocks: Vec<BlockId> = sealed.map(|report| report.block).collect();
        blocks.sort_unstable();
        blocks
    }

    /// What is known about a replica, for a report.
    pub fn report(&self, block: BlockId) -> Option<(StorageId, ReplicaReport)> {
        let replicas = self.inner.lock();
        let entry = replicas.get(&block)?;
        let storage = self.inner.volumes[entry.volume].storage();
        Some((storage, entry.report(block)?))
    }

    /// Tells the namenode again what is known about a replica.
    pub fn report_again(&self, block: BlockId) {
        self.inner.report_have(block);
    }

    /// Creates a replica on the volume that has most room, if possible of the class asked for.
    ///
    /// # Errors
    /// [`StoreError::ReplicaExists`], [`StoreError::NoSpace`], or what the disk says.
    pub async fn create(
        &self,
        block: BlockId,
        class: Option<StorageClass>,
        origin: Origin,
        block_bytes: u64,
    ) -> Result<BlockWriter, StoreError> {
        let chunks_max = layout::chunks_for(block_bytes).unwrap_or(u32::MAX);
        let mut refused = Vec::new();
        loop {
            let (index, charge) = self
                .inner
                .reserve(class, &refused)
                .ok_or(StoreError::NoSpace)?;
            let result = self
                .create_on(index, block, origin, chunks_max, charge)
                .await;
            match result {
                Err(StoreError::NoSpace | StoreError::Disk { .. })
                    if refused.len() + 1 < self.inner.volumes.len() =>
                {
                    refused.push(index);
                }
                result => return result,
            }
        }
    }

    async fn create_on(
        &self,
        index: usize,
        block: BlockId,
        origin: Origin,
        chunks_max: u32,
        charge: Charge,
    ) -> Result<BlockWriter, StoreError> {
        let volume = self.inner.volumes[index].clone();
        let replica = OpenReplica::writing(origin);
        match self.inner.lock().entry(block) {
            hash_map::Entry::Occupied(_) => return Err(StoreError::ReplicaExists),
            hash_map::Entry::Vacant(vacant) => vacant.insert(Entry {
                volume: index,
                state: State::Open(replica.clone()),
            }),
        };
        let inner = self.inner.clone();
        let created_on = volume.clone();
        let created = replica.clone();
        let job = move || {
            let path = open_path(&created_on, block, origin);
            let id = (block, created_on.storage());
            let disk = created_on.disk().clone();
            match ReplicaWriter::create(disk, path, id, chunks_max, charge) {
                Ok(writer) => Ok(Lease::new(created, writer, created_on)),
                Err(error) => {
                    inner.lock().remove(&block);
                    created.end();
                    Err(error)
                }
            }
        };
        let lease = match volume.run(job).await {
            Ok(lease) => lease,
            Err(error) => {
                // The job may never have run, if the volume is down.
                if matches!(error, StoreError::VolumeDown { .. }) {
                    self.inner.lock().remove(&block);
                    replica.end();
                }
                return Err(error);
            }
        };
        self.inner.report_have(block);
        Ok(BlockWriter::new(
            self.clone(),
            block,
            volume,
            replica,
            lease,
        ))
    }

    /// Cuts a replica whose writer is gone, or is to be, to `length_bytes` and seals it. A replica
    /// that is sealed already stays as it is.
    ///
    /// # Errors
    /// [`StoreError::ShortReplica`], [`StoreError::NoSuchReplica`], or what the disk says.
    pub async fn seal(&self, block: BlockId, length_bytes: u64) -> Result<(), StoreError> {
        let chunks = layout::chunks_for(length_bytes).unwrap_or(u32::MAX);
        let (volume, replica) = match self.inner.find_to_seal(block, chunks)? {
            ToSeal::Done => return Ok(()),
            ToSeal::Open(volume, replica) => (volume, replica),
        };
        let charge = replica.take_over().await?;
        if replica.chunks() < chunks {
            let have_bytes = layout::chunk_bytes(replica.chunks());
            replica.put_back(charge);
            return Err(StoreError::ShortReplica { have_bytes });
        }
        let inner = self.inner.clone();
        let sealed_on = volume.clone();
        volume
            .run(move || {
                let disk = sealed_on.disk().clone();
                let path = open_path(&sealed_on, block, replica.origin);
                match ReplicaWriter::reopen(disk, path, replica.chunks(), charge) {
                    Ok(writer) => inner.seal_now(block, &sealed_on, &replica, writer, chunks),
                    Err((error, charge)) => {
                        replica.put_back(charge);
                        Err(error)
                    }
                }
            })
            .await
    }

    /// Puts the replicas that are not sealed on stable storage, as far as the disks let it.
    pub async fn sync_open_replicas(&self) {
        for (block, volume) in self.inner.open_replicas() {
            let disk = volume.disk().clone();
            let path = volume.open_path(block);
            let job = move || {
                let synced = disk.open(&path).and_then(|file| file.sync_all());
                synced.map_err(StoreError::disk("syncing", &path))
            };
            if let Err(error) = volume.run(job).await {
                tracing::warn!(%block, %error, "cannot sync an open replica");
            }
        }
    }

    /// Removes a replica; without one, does nothing.
    ///
    /// # Errors
    /// What the disk says; the replica is then kept as corrupt, to be deleted again.
    pub async fn delete(&self, block: BlockId) -> Result<(), StoreError> {
        let Some((volume, open)) = self.inner.find_to_delete(block) else {
            return Ok(());
        };
        let charge = match open {
            Some(replica) => Some(replica.take_over().await?),
            None => None,
        };
        let Some(charge) = self.inner.start_deleting(block, charge) else {
            return Ok(());
        };
        let inner = self.inner.clone();
        let deleted_on = volume.clone();
        volume
            .run(move || inner.delete_now(block, &deleted_on, charge))
            .await
    }
}

fn add_found(replicas: &mut HashMap<BlockId, Entry>, volume: usize, found: Found) {
    let state = match found.state {
        FoundState::Open => State::Open(OpenReplica::found(found.chunks, found.charge)),
        FoundState::Sealed => State::Sealed {
            chunks: found.chunks,
            charge: found.charge,
        },
        FoundState::Corrupt => State::Corrupt(found.charge),
    };
    let entry = Entry { volume, state };
    match replicas.entry(found.block) {
        hash_map::Entry::Vacant(vacant) => {
            vacant.insert(entry);
        }
        hash_map::Entry::Occupied(mut occupied) => {
            tracing::error!(block = %found.block, "there are two files for one replica");
            if matches!(entry.state, State::Sealed { .. }) {
                occupied.insert(entry);
            }
        }
    }
}

fn open_path(volume: &Volume, block: BlockId, origin: Origin) -> PathBuf {
    match origin {
        Origin::Pipeline => volume.open_path(block),
        Origin::Repair => volume.repair_path(block),
    }
}

impl Entry {
    /// What the namenode is told; nothing about what cannot be read.
    fn report(&self, block: BlockId) -> Option<ReplicaReport> {
        let (chunks, sealed) = match &self.state {
            State::Open(replica) if replica.origin == Origin::Repair => return None,
            State::Open(replica) if replica.is_corrupt() => return None,
            State::Open(replica) => (replica.chunks(), false),
            State::Sealed { chunks, .. } => (*chunks, true),
            State::Corrupt(_) | State::Deleting => return None,
        };
        Some(ReplicaReport {
            block,
            length_bytes: layout::chunk_bytes(chunks),
            sealed,
        })
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, HashMap<BlockId, Entry>> {
        // Under the lock there are single changes, which a panic cannot split.
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn volume_index(&self, storage: StorageId) -> Option<usize> {
        self.volumes.iter().position(|v| v.storage() == storage)
    }

    fn open_replicas(&self) -> Vec<(BlockId, Arc<Volume>)> {
        let replicas = self.lock();
        let open = replicas.iter().filter(
            |(_, entry)| matches!(&entry.state, State::Open(it) if it.origin == Origin::Pipeline),
        );
        open.map(|(&block, entry)| (block, self.volumes[entry.volume].clone()))
            .collect()
    }

    /// Chooses a volume for a new replica and reserves what it takes at first: the class asked for
    /// before others, then the most room for each writer.
    fn reserve(&self, class: Option<StorageClass>, refused: &[usize]) -> Option<(usize, Charge)> {
        let mut candidates: Vec<(bool, u64, usize)> = Vec::new();
        for (index, volume) in self.volumes.iter().enumerate() {
            if volume.health.is_good() && !refused.contains(&index) {
                let is_other_class = class.is_some_and(|class| class != volume.class());
                let writers = u64::from(volume.writers.load(Ordering::Relaxed));
                let room = volume.quota.available_bytes() / (1 + writers);
                candidates.push((is_other_class, u64::MAX - room, index));
            }
        }
        candidates.sort_unstable();
        candidates.into_iter().find_map(|(_, _, index)| {
            let charge = self.volumes[index].quota.reserve(REPLICA_OVERHEAD_BYTES)?;
            Some((index, charge))
        })
    }

    /// Puts what is known about a replica on the list of changes.
    pub(super) fn report_have(&self, block: BlockId) {
        let replicas = self.lock();
        if let Some(entry) = replicas.get(&block)
            && let Some(report) = entry.report(block)
        {
            let storage = self.volumes[entry.volume].storage();
            self.changes.push(storage, ReplicaChange::Have(report));
        }
    }

    /// Looks a replica up for reading.
    pub(super) fn readable(&self, block: BlockId) -> Result<Readable, StoreError> {
        let replicas = self.lock();
        let entry = replicas.get(&block).ok_or(StoreError::NoSuchReplica)?;
        let (chunks, open) = match &entry.state {
            State::Open(replica) if replica.origin == Origin::Repair => {
                return Err(StoreError::NoSuchReplica);
            }
            State::Open(replica) if replica.is_corrupt() => {
                return Err(StoreError::Corrupt { offset: 0 });
            }
            State::Open(replica) => (replica.chunks(), Some(replica.clone())),
            State::Sealed { chunks, .. } => (*chunks, None),
            State::Corrupt(_) => return Err(StoreError::Corrupt { offset: 0 }),
            State::Deleting => return Err(StoreError::NoSuchReplica),
        };
        Ok(Readable {
            volume: self.volumes[entry.volume].clone(),
            chunks,
            open,
        })
    }

    fn find_to_seal(&self, block: BlockId, chunks: u32) -> Result<ToSeal, StoreError> {
        let readable = self.readable(block)?;
        if readable.chunks < chunks && readable.open.is_none() {
            return Err(StoreError::ShortReplica {
                have_bytes: layout::chunk_bytes(readable.chunks),
            });
        }
        Ok(match readable.open {
            None => ToSeal::Done,
            Some(replica) => ToSeal::Open(readable.volume, replica),
        })
    }

    /// Seals a replica that nobody else can touch. Blocks on the disk.
    pub(super) fn seal_now(
        &self,
        block: BlockId,
        volume: &Volume,
        replica: &OpenReplica,
        writer: ReplicaWriter,
        chunks: u32,
    ) -> Result<(), StoreError> {
        match writer.seal(chunks, &volume.sealed_path(block)) {
            Ok(charge) => {
                if let Some(entry) = self.lock().get_mut(&block) {
                    entry.state = State::Sealed { chunks, charge };
                }
                replica.end();
                self.report_have(block);
                Ok(())
            }
            Err((error, charge)) => {
                replica.put_back(charge);
                Err(error)
            }
        }
    }

    fn find_to_delete(&self, block: BlockId) -> Option<(Arc<Volume>, Option<Arc<OpenReplica>>)> {
        let replicas = self.lock();
        let entry = replicas.get(&block)?;
        let open = match &entry.state {
            State::Open(replica) => Some(replica.clone()),
            State::Sealed { .. } | State::Corrupt(_) => None,
            State::Deleting => return None,
        };
        Some((self.volumes[entry.volume].clone(), open))
    }

    /// Marks a replica as being deleted and returns what it takes; `None` if it is gone meanwhile.
    /// `charge` is that of an open replica that was taken over.
    fn start_deleting(&self, block: BlockId, charge: Option<Charge>) -> Option<Charge> {
        let mut replicas = self.lock();
        let entry = replicas.get_mut(&block)?;
        match std::mem::replace(&mut entry.state, State::Deleting) {
            State::Sealed { charge, .. } | State::Corrupt(charge) => Some(charge),
            State::Open(_) if charge.is_some() => charge,
            other => {
                entry.state = other;
                None
            }
        }
    }

    fn delete_now(
        &self,
        block: BlockId,
        volume: &Volume,
        charge: Charge,
    ) -> Result<(), StoreError> {
        let places = [
            volume.sealed_path(block),
            volume.open_path(block),
            volume.repair_path(block),
            volume.corrupt_path(block),
        ];
        for path in &places {
            match volume.disk().remove(path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    if let Some(entry) = self.lock().get_mut(&block) {
                        entry.state = State::Corrupt(charge);
                    }
                    return Err(StoreError::disk("removing", path)(error));
                }
            }
        }
        self.tables.forget(block);
        if let Some(file) = self.files.forget(block) {
            file.release_when_closed(charge);
        }
        self.lock().remove(&block);
        self.changes
            .push(volume.storage(), ReplicaChange::Deleted(block));
        Ok(())
    }

    /// Takes a replica that cannot be trusted out of service and reports it. Blocks on the disk.
    pub(super) fn condemn(&self, block: BlockId, volume: &Volume) {
        let was_sealed = {
            let mut replicas = self.lock();
            let Some(entry) = replicas.get_mut(&block) else {
                return;
            };
            match std::mem::replace(&mut entry.state, State::Deleting) {
                State::Sealed { charge, .. } => {
                    entry.state = State::Corrupt(charge);
                    true
                }
                State::Open(replica) => {
                    let was_known = replica.set_corrupt();
                    entry.state = State::Open(replica);
                    if was_known {
                        return;
                    }
                    false
                }
                known => {
                    entry.state = known;
                    return;
                }
            }
        };
        tracing::error!(%block, volume = %volume.path().display(), "the replica is corrupt");
        self.changes
            .push(volume.storage(), ReplicaChange::Corrupt(block));
        self.tables.forget(block);
        self.files.forget(block);
        if was_sealed {
            // So that it is known after a restart. If it fails, the scrubber finds it again.
            let moved = volume
                .disk()
                .rename(&volume.sealed_path(block), &volume.corrupt_path(block));
            if let Err(error) = moved {
                tracing::warn!(%block, %error, "cannot move the corrupt replica aside");
            }
        }
    }
}
