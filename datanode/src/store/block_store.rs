//! All replicas of a datanode, and the operations on them.
//!
//! A change that affects both the disk and the map of replicas is made inside one job on the disk's threads, so that a
//! caller that gives up leaves nothing half done. The job owns the replica that it changes
//! ([`super::open_replica::Taken`], [`super::removal::Removal`] and the like): nothing else can change it before the
//! job has ended, and a job that never starts gives it back. Sealing a replica that has to be rewritten first, and
//! removing a large one, take several jobs, which hand the replica on: wherever a caller gives up in between, the
//! replica is as usable as before, or corrupt and to be removed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use harvestfs_protocol::ids::{BlockId, ClusterId, StorageId};
use harvestfs_protocol::node::ReplicaReport;
use harvestfs_protocol::timeline::Position;
use harvestfs_protocol::types::{StorageClass, VolumeStatus};
use tokio::task::JoinSet;

use super::block_writer::BlockWriter;
use super::buffer::BufferPool;
use super::changes::Changes;
use super::doubles::Double;
use super::error::StoreError;
use super::inventory::{Inventory, State};
use super::layout;
use super::open_replica::{Lease, OpenReplica, Origin};
use super::replica::ReplicaWriter;
use super::volume::{Found, Volume, VolumeOptions};
use crate::engine::quota::Charge;
use crate::engine::quota::shrinking::SHRINK_DEADLINE;

/// How long to wait for the obeyed position to be written to the other disks once one has it.
const OTHERS_WAIT: Duration = Duration::from_secs(1);

/// All replicas of a datanode. Cheap to clone.
#[derive(Clone)]
pub struct BlockStore {
    pub(super) inventory: Arc<Inventory>,
}

impl BlockStore {
    /// A store over volumes that were opened, with the replicas found on them; `late` further volumes may
    /// [join](Self::join). Changes are reported to namenodes on at most `links_max` links.
    pub fn new(
        volumes: Vec<(Arc<Volume>, Vec<Found>)>,
        late: usize,
        buffers: BufferPool,
        table_cache_bytes: usize,
        links_max: usize,
    ) -> Self {
        let inventory = Inventory::new(volumes, late, buffers, table_cache_bytes, links_max);
        Self {
            inventory: Arc::new(inventory),
        }
    }

    /// Adds a volume that was opened late, with the replicas found on it. Returns its files that do not count.
    pub fn join(&self, volume: &Arc<Volume>, found: Vec<Found>) -> Vec<Double> {
        self.inventory.join(volume, found)
    }

    /// The queues of replica changes for the namenodes.
    pub fn changes(&self) -> &Arc<Changes> {
        &self.inventory.changes
    }

    /// The buffers for packets.
    pub fn buffers(&self) -> &BufferPool {
        &self.inventory.buffers
    }

    /// The status of the volumes for heartbeats. Accesses no disk.
    pub fn status(&self) -> Vec<VolumeStatus> {
        self.inventory.volumes().map(|v| v.status()).collect()
    }

    /// Bytes that would have to be freed until no volume is above its quota or nearly full. Until then, space matters
    /// more than sparing the disks.
    pub fn pressure_bytes(&self) -> u64 {
        let healthy = self.inventory.volumes().filter(|v| v.health.is_good());
        healthy.map(|volume| volume.quota.pressure_bytes()).sum()
    }

    /// Whether a replica is on a volume that is above its quota and responds.
    pub fn is_above_quota(&self, block: BlockId) -> bool {
        let volume = {
            let replicas = self.inventory.lock();
            let entry = replicas.get(&block);
            entry.map(|entry| self.inventory.volume(entry.volume))
        };
        volume.is_some_and(|it| it.check_usable().is_ok() && it.quota.excess_bytes() > 0)
    }

    /// The volumes that can be used.
    pub fn healthy_storages(&self) -> Vec<StorageId> {
        let healthy = self.inventory.volumes().filter(|v| v.health.is_good());
        healthy.map(|v| v.storage()).collect()
    }

    /// All volumes, including those that cannot be used.
    pub fn volumes(&self) -> Vec<Arc<Volume>> {
        self.inventory.volumes().cloned().collect()
    }

    /// Changes a volume's quota; see [`Volume::set_quota`].
    ///
    /// # Errors
    /// The disk's error.
    pub async fn set_quota(
        &self,
        storage: StorageId,
        quota_bytes: u64,
        time: Duration,
    ) -> Result<(), StoreError> {
        match self.inventory.volume_index(storage) {
            Some(index) => {
                let volume = self.inventory.volume(index);
                volume.set_quota(quota_bytes, time, None).await
            }
            // The volume was reimaged since; the new one has the configured quota.
            None => Ok(()),
        }
    }

    /// Applies the quotas of a configuration where they differ from the previous one. A slow disk does not delay the
    /// quotas of other volumes.
    pub async fn configure_quotas(&self, configured: &[VolumeOptions]) {
        let mut changes = JoinSet::new();
        for volume in self.inventory.volumes() {
            let options = configured.iter().find(|it| it.path == volume.path());
            let Some(options) = options else {
                continue;
            };
            let quota_bytes = options.quota_bytes;
            if quota_bytes == volume.configured_quota_bytes() {
                continue;
            }
            let volume = volume.clone();
            changes.spawn(async move {
                let changed = volume.set_quota(quota_bytes, SHRINK_DEADLINE, Some(quota_bytes));
                if let Err(error) = changed.await {
                    tracing::warn!(%error, "the quota is not written down");
                }
            });
        }
        changes.join_all().await;
    }

    /// Volumes that should be below their quota by now, and how many bytes they are above it.
    pub fn overdue(&self, now: Instant) -> Vec<(StorageId, u64)> {
        let volumes = self.inventory.volumes();
        let usable = volumes.filter(|v| v.check_usable().is_ok());
        let overdue = usable.filter(|volume| volume.time_to_shrink(now) == Some(0));
        overdue
            .map(|volume| (volume.storage(), volume.quota.excess_bytes()))
            .collect()
    }

    /// Selects the replicas to give up to free so many bytes of a volume, in order.
    pub fn victims(&self, storage: StorageId, excess_bytes: u64) -> Vec<BlockId> {
        let index = self.inventory.volume_index(storage);
        index.map_or_else(Vec::new, |index| {
            self.inventory.victims(index, excess_bytes)
        })
    }

    /// Whether no usable volume responds now.
    pub fn is_silent(&self) -> bool {
        let mut healthy = self.inventory.volumes().filter(|v| v.health.is_good());
        healthy.next().is_some_and(|first| first.is_silent()) && healthy.all(|it| it.is_silent())
    }

    /// The cluster that the volumes belong to, once that is known: not while good volumes belong to different ones, as
    /// when a disk of another cluster was put into the server. The first registration decides which of them go down.
    pub fn cluster(&self) -> Option<ClusterId> {
        let good = self.inventory.volumes().filter(|v| v.health.is_good());
        let mut clusters = good.filter_map(|v| v.cluster());
        match clusters.next() {
            Some(first) => clusters.all(|it| it == first).then_some(first),
            None => self.inventory.volumes().find_map(|v| v.cluster()),
        }
    }

    /// Makes the volumes part of a cluster. Volumes of another cluster are taken down.
    pub async fn claim(&self, cluster: ClusterId) {
        // Simultaneously: the registration waits for it, and one disk may be slow.
        join_all(self.volumes().iter().map(|it| it.join_cluster(cluster))).await;
    }

    /// The latest position that was obeyed before the start, according to the volumes of a cluster, or to those of
    /// none. What another volume says is about the namenodes of another cluster, whose epochs have nothing to do with
    /// those of this one.
    pub fn obeyed_at_start(&self, cluster: Option<ClusterId>) -> Option<Position> {
        let volumes = self.inventory.volumes();
        let of_cluster = volumes.filter(|volume| volume.cluster() == cluster);
        let obeyed = of_cluster.filter_map(|volume| volume.obeyed_at_start());
        obeyed.max_by_key(|it| (it.epoch, it.record))
    }

    /// Records the position of the obeyed namenode on all volumes that respond soon: deletions on each of them wait
    /// for this, and one volume that has it is enough. Returns the volumes that have it.
    ///
    /// # Errors
    /// The error of the last volume, if no volume has the position.
    pub async fn write_obeyed(&self, position: Position) -> Result<Vec<StorageId>, StoreError> {
        let (usable, others): (Vec<_>, Vec<_>) = self
            .volumes()
            .into_iter()
            .partition(|it| it.check_usable().is_ok());
        let asked = if usable.is_empty() { others } else { usable };
        let writes = asked.iter().map(|it| async move {
            it.write_obeyed(position).await?;
            Ok::<_, StoreError>(it.storage())
        });
        let mut writes: FuturesUnordered<_> = writes.collect();
        let mut have_it = Vec::new();
        while let Some(written) = writes.next().await {
            match written {
                Ok(storage) => {
                    have_it.push(storage);
                    break;
                }
                Err(error) if writes.is_empty() => return Err(error),
                Err(_) => {}
            }
        }
        // A write that has not started by then is left to the next call.
        let others = async {
            while let Some(written) = writes.next().await {
                have_it.extend(written.ok());
            }
        };
        let _ = tokio::time::timeout(OTHERS_WAIT, others).await;
        Ok(have_it)
    }

    /// All replicas of a volume, in no order.
    pub fn replicas_of(&self, storage: StorageId) -> Vec<ReplicaReport> {
        let Some(wanted) = self.inventory.volume_index(storage) else {
            return Vec::new();
        };
        let replicas = self.inventory.lock();
        let of_volume = replicas.iter().filter(|(_, e)| e.volume == wanted);
        of_volume
            .filter_map(|(&block, entry)| entry.report(block))
            .collect()
    }

    /// The replicas of a volume that wait for the namenode to command their deletion, in no order.
    pub fn corrupt_replicas_of(&self, storage: StorageId) -> Vec<BlockId> {
        let Some(wanted) = self.inventory.volume_index(storage) else {
            return Vec::new();
        };
        let replicas = self.inventory.lock();
        let of_volume = replicas.iter().filter(|(_, e)| e.volume == wanted);
        let corrupt = of_volume.filter(|(_, entry)| match &entry.state {
            State::Condemned { .. } | State::Corrupt { .. } => true,
            State::Open(replica) => replica.is_corrupt(),
            State::Sealed { .. } | State::Deleting => false,
        });
        corrupt.map(|(&block, _)| block).collect()
    }

    /// The sealed replicas of a volume, in no order.
    pub fn sealed_of(&self, storage: StorageId) -> Vec<BlockId> {
        let reports = self.replicas_of(storage);
        let sealed = reports.into_iter().filter(|report| report.sealed);
        sealed.map(|report| report.block).collect()
    }

    /// The state of a replica, for a report; `None` for a replica on a volume that is down, with which it is lost.
    pub fn report(&self, block: BlockId) -> Option<(StorageId, ReplicaReport)> {
        let replicas = self.inventory.lock();
        let entry = replicas.get(&block)?;
        let volume = self.inventory.volume(entry.volume);
        if !volume.health.is_good() {
            return None;
        }
        Some((volume.storage(), entry.report(block)?))
    }

    /// Reports the actual state of a replica that the namenode believes to be on a volume, even if there is none.
    pub fn answer(&self, storage: StorageId, block: BlockId) {
        self.inventory.answer(storage, block);
    }

    /// Reports the state of a replica again.
    pub fn report_again(&self, block: BlockId) {
        self.inventory.report_have(block);
    }

    /// Creates a replica on the volume with the most room, if possible of the requested class.
    ///
    /// # Errors
    /// [`StoreError::ReplicaExists`], [`StoreError::NoSpace`], [`StoreError::Silent`], or the disk's error.
    pub async fn create(
        &self,
        block: BlockId,
        class: Option<StorageClass>,
        origin: Origin,
        block_bytes: u64,
    ) -> Result<BlockWriter, StoreError> {
        // A repair may be requested with any length; no replica holds more than this.
        let chunks_max = layout::chunks_for(block_bytes).unwrap_or(u32::MAX);
        let mut refused = Vec::new();
        loop {
            let (index, charge) = self.inventory.reserve(class, origin, &refused)?;
            let result = self
                .create_on(index, block, origin, chunks_max, charge)
                .await;
            match result {
                Err(StoreError::NoSpace | StoreError::Disk { .. })
                    if refused.len() + 1 < self.inventory.volumes().count() =>
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
        let volume = self.inventory.volume(index).clone();
        let replica = OpenReplica::writing(origin);
        let creation = self.inventory.add(block, index, &replica)?;
        let inventory = self.inventory.clone();
        let created_on = volume.clone();
        let created = replica.clone();
        let job = move || {
            let path = open_path(&created_on, block, origin);
            let id = (block, created_on.storage());
            let disk = created_on.disk().clone();
            if origin == Origin::Repair {
                // A file that an earlier repair may have left is no replica. Usually there is none; if one cannot be
                // removed, it is in the way, which the next step reports.
                let _ = disk.remove(&path);
            }
            match ReplicaWriter::create(disk, path, id, chunks_max, charge) {
                Ok(writer) => {
                    let lease = Lease::new(created, writer, created_on);
                    creation.done();
                    // In the job, so that the replica is reported even if its creator has given up.
                    inventory.report_have(block);
                    Ok(lease)
                }
                Err(error) => {
                    if error.is_missing() {
                        let reason = "its directories are gone";
                        created_on.health.fail(reason, created_on.path());
                    }
                    drop(creation);
                    Err(error)
                }
            }
        };
        let lease = volume.run(job).await?;
        Ok(BlockWriter::new(
            self.clone(),
            block,
            volume,
            replica,
            lease,
        ))
    }

    /// Puts the unsealed replicas on stable storage, as far as the disks allow.
    pub async fn sync_open_replicas(&self) {
        let open = self.inventory.open_replicas();
        // Simultaneously: the process is to end soon, and one disk may not respond.
        let volumes = self.volumes();
        join_all(volumes.iter().map(|it| sync_open_of(it, &open))).await;
    }
}

/// Syncs the open replicas that are on one volume.
async fn sync_open_of(volume: &Arc<Volume>, open: &[(BlockId, Arc<Volume>)]) {
    for (block, on) in open {
        if !Arc::ptr_eq(on, volume) {
            continue;
        }
        let disk = volume.disk().clone();
        let path = volume.open_path(*block);
        let job = move || {
            let synced = disk.open(&path).and_then(|file| file.sync_all());
            synced.map_err(StoreError::disk("syncing", &path))
        };
        if let Err(error) = volume.run(job).await {
            tracing::warn!(%block, %error, "cannot sync an open replica");
            if error.is_of_volume() {
                return;
            }
        }
    }
}

pub(super) fn open_path(volume: &Volume, block: BlockId, origin: Origin) -> PathBuf {
    match origin {
        Origin::Pipeline => volume.open_path(block),
        Origin::Repair => volume.repair_path(block),
    }
}
