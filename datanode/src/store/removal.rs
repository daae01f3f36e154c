//! Removal of replicas, in one step or piece by piece.

use std::io;
use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::ReplicaChange;

use super::block_store::BlockStore;
use super::error::StoreError;
use super::inventory::{Entry, Inventory, State, ToDelete};
use super::open_replica::Taken;
use super::volume::Volume;
use crate::engine::quota::Charge;

/// Bytes cut off at a time: so few that a sync of the primary tenant does not wait long for them.
pub(super) const PIECE_BYTES: u64 = 32 << 20;

/// A replica that can no longer be read, and whose file still exists. Each job on the file owns this while it runs, so
/// that no other replica of the block can be created in the meantime. If this is dropped before the file is removed,
/// the replica is kept as corrupt, to be deleted again.
#[must_use = "the replica is removed only by `finish`"]
pub struct Removal {
    inventory: Arc<Inventory>,
    block: BlockId,
    volume: Arc<Volume>,
    /// `None` only when the file has been removed, and this is about to be dropped.
    charge: Option<Charge>,
    /// The disk refused the removal. The replica is then reported with its volume, and not immediately: another
    /// attempt would fail the same way.
    is_refused: bool,
}

impl BlockStore {
    /// Removes a replica; does nothing if there is none.
    ///
    /// # Errors
    /// The disk's error; the replica is then kept as corrupt, to be deleted again.
    pub async fn delete(&self, block: BlockId) -> Result<(), StoreError> {
        match self.start_removal(block).await? {
            Some(removal) => removal.finish().await.map(drop),
            None => Ok(()),
        }
    }

    /// Takes a replica out of service; `None` if there is none, or it is being removed or moved aside.
    ///
    /// # Errors
    /// Its volume cannot be used, or it is being written and its writer does not let go.
    pub async fn start_removal(&self, block: BlockId) -> Result<Option<Removal>, StoreError> {
        match self.inventory.start_deleting(block)? {
            ToDelete::Nothing => Ok(None),
            ToDelete::Now(removal) => Ok(Some(removal)),
            ToDelete::Open(volume, replica) => {
                let taken = replica.take_over().await?;
                let removal = self.inventory.start_deleting_taken(block, &volume, taken);
                removal.map(Some)
            }
        }
    }

    /// Removes an open replica that was taken over, and no other replica.
    ///
    /// # Errors
    /// Its volume cannot be used, and the replica is free again; or as for [`BlockStore::delete`].
    pub(super) async fn delete_taken(
        &self,
        block: BlockId,
        volume: &Arc<Volume>,
        taken: Taken,
    ) -> Result<(), StoreError> {
        let removal = self.inventory.start_deleting_taken(block, volume, taken)?;
        removal.finish().await.map(drop)
    }

    /// Blocks for which a repair started a replica and could not remove it when it gave up, because the disk did not
    /// respond; including repairs that are giving up right now.
    pub fn abandoned_repairs(&self) -> Vec<BlockId> {
        self.inventory.abandoned_repairs()
    }

    /// Removes such a leftover. It is no replica, and would block further repairs here permanently.
    ///
    /// # Errors
    /// As for [`BlockStore::delete`].
    pub async fn delete_abandoned_repair(&self, block: BlockId) -> Result<(), StoreError> {
        match self.inventory.abandoned_repair(block) {
            None => Ok(()),
            Some((volume, replica)) => {
                let taken = replica.take_over().await?;
                self.delete_taken(block, &volume, taken).await
            }
        }
    }
}

const HAS_CHARGE: &str = "a removal has the charge until the replica is removed";

impl Removal {
    pub(super) fn new(
        inventory: Arc<Inventory>,
        block: BlockId,
        volume: Arc<Volume>,
        charge: Charge,
    ) -> Self {
        Self {
            inventory,
            block,
            volume,
            charge: Some(charge),
            is_refused: false,
        }
    }

    /// Cuts a piece off the replica, and returns its size in bytes, or the disk's error, after which
    /// [`Removal::finish`] may still work. Returns 0 once the rest is small, or if the replica was never sealed. A
    /// reader that still has the file open finds it too short, and reads another replica.
    ///
    /// # Errors
    /// The volume cannot be used; the replica is then kept as corrupt, to be deleted again.
    pub async fn cut(mut self) -> Result<(Self, Result<u64, StoreError>), StoreError> {
        if self.bytes() <= PIECE_BYTES {
            return Ok((self, Ok(0)));
        }
        let volume = self.volume.clone();
        volume
            .run(move || {
                let cut = cut(&self.volume, self.block);
                if let Ok(cut_bytes) = cut {
                    let rest_bytes = self.bytes() - cut_bytes;
                    self.charge
                        .as_mut()
                        .expect(HAS_CHARGE)
                        .shrink_to(rest_bytes);
                }
                Ok((self, cut))
            })
            .await
    }

    /// Removes the rest of the replica, and returns its size in bytes.
    ///
    /// # Errors
    /// The disk's error; the replica is then kept as corrupt, to be deleted again.
    pub async fn finish(self) -> Result<u64, StoreError> {
        let volume = self.volume.clone();
        volume.run(move || self.finish_now()).await
    }

    fn bytes(&self) -> u64 {
        self.charge.as_ref().expect(HAS_CHARGE).bytes()
    }

    fn finish_now(mut self) -> Result<u64, StoreError> {
        if let Err(error) = remove_files(&self.volume, self.block) {
            self.is_refused = true;
            return Err(error);
        }
        let (volume, block) = (&self.volume, self.block);
        let charge = self.charge.take().expect(HAS_CHARGE);
        let bytes = charge.bytes();
        self.inventory.remove(block, charge);
        self.inventory
            .changes
            .push(volume.storage(), ReplicaChange::Deleted(block));
        Ok(bytes)
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.inventory.keep_as_corrupt(self.block, charge);
            if !self.is_refused {
                // The caller that wanted it removed has to request that again.
                self.inventory
                    .changes
                    .push(self.volume.storage(), ReplicaChange::Corrupt(self.block));
            }
        }
    }
}

impl Inventory {
    /// Keeps a replica as corrupt, and unreadable: a part of the file may be missing, and it was to be removed.
    fn keep_as_corrupt(&self, block: BlockId, charge: Charge) {
        let corrupt = State::Corrupt { chunks: 0, charge };
        self.replace(block, "being removed", corrupt, |before| {
            matches!(before, State::Deleting)
        });
    }

    /// Removes the entry of a replica whose file is removed.
    fn remove(&self, block: BlockId, charge: Charge) {
        let removed = self.lock().remove(&block);
        let Some(Entry {
            generation,
            state: State::Deleting,
            ..
        }) = removed
        else {
            panic!("the file of {block} is removed, which was not to be");
        };
        self.tables.forget(generation);
        if let Some(file) = self.files.forget(generation) {
            file.release_when_closed(charge);
        }
    }
}

/// Removes all files that a volume has of a block, in whichever directory. Blocks on the disk.
pub(super) fn remove_files(volume: &Volume, block: BlockId) -> Result<(), StoreError> {
    let places = [
        volume.sealed_path(block),
        volume.open_path(block),
        volume.repair_path(block),
        volume.corrupt_path(block),
    ];
    for path in &places {
        match volume.disk().remove(path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(StoreError::disk("removing", path)(error)),
        }
    }
    Ok(())
}

/// Cuts a piece off a sealed replica's file, and returns its size in bytes; 0 once the rest is small. Blocks on the
/// disk.
pub(super) fn cut(volume: &Volume, block: BlockId) -> Result<u64, StoreError> {
    let disk = volume.disk();
    // If the datanode ends before the rest is removed, the remainder must not be taken for a replica.
    let path = volume.corrupt_path(block);
    match disk.rename(&volume.sealed_path(block), &path) {
        Ok(()) => {}
        // It may be there already.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(StoreError::disk("moving aside", &path)(error)),
    }
    let shorten = || {
        let file = match disk.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            opened => opened?,
        };
        let rest_bytes = file.len_bytes()?.saturating_sub(PIECE_BYTES);
        if rest_bytes == 0 {
            return Ok(0);
        }
        file.set_len(rest_bytes)?;
        Ok(PIECE_BYTES)
    };
    shorten().map_err(StoreError::disk("shortening", &path))
}
