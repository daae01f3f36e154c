//! Removing replicas, at once or piece by piece.

use std::io;
use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::ReplicaChange;

use super::block_store::BlockStore;
use super::error::StoreError;
use super::inventory::{Inventory, State};
use super::quota::Charge;
use super::volume::Volume;

/// What is cut off at a time: so little that an owner's sync does not wait long for it.
const PIECE_BYTES: u64 = 32 << 20;

/// A replica that can no longer be read, and whose file is still there.
#[must_use = "the replica is removed only by `finish`"]
pub struct Removal {
    inventory: Arc<Inventory>,
    block: BlockId,
    volume: Arc<Volume>,
    charge: Charge,
}

impl BlockStore {
    /// Removes a replica; without one, does nothing.
    ///
    /// # Errors
    /// What the disk says; the replica is then kept as corrupt, to be deleted again.
    pub async fn delete(&self, block: BlockId) -> Result<(), StoreError> {
        match self.start_removal(block).await? {
            Some(removal) => removal.finish().await.map(drop),
            None => Ok(()),
        }
    }

    /// Takes a replica out of service; `None` if there is none.
    ///
    /// # Errors
    /// Its volume cannot be used, or it is being written to and its writer does not let go.
    pub async fn start_removal(&self, block: BlockId) -> Result<Option<Removal>, StoreError> {
        let Some((volume, open)) = self.inventory.find_to_delete(block) else {
            return Ok(None);
        };
        volume.check_usable()?;
        let charge = match open {
            Some(replica) => Some(replica.take_over().await?),
            None => None,
        };
        let charge = self.inventory.start_deleting(block, charge);
        Ok(charge.map(|charge| Removal {
            inventory: self.inventory.clone(),
            block,
            volume,
            charge,
        }))
    }
}

impl Removal {
    /// Cuts a piece off the replica, and returns its bytes; 0 once the rest is small, or if it was never
    /// sealed. A reader that still has the file open finds it too short, and reads another replica.
    ///
    /// # Errors
    /// What the disk says. [`Removal::finish`] may still work.
    pub async fn cut(&mut self) -> Result<u64, StoreError> {
        if self.charge.bytes() <= PIECE_BYTES {
            return Ok(0);
        }
        let (inventory, volume, block) = (self.inventory.clone(), self.volume.clone(), self.block);
        let job = move || match inventory.is_deleting(block) {
            true => cut(&volume, block),
            // A disk that did not answer for long does now, and the rest is gone already.
            false => Ok(0),
        };
        let cut_bytes = self.volume.run(job).await?;
        self.charge.shrink_to(self.charge.bytes() - cut_bytes);
        Ok(cut_bytes)
    }

    /// Removes what is left of the replica, and returns its bytes.
    ///
    /// # Errors
    /// What the disk says; the replica is then kept as corrupt, to be deleted again.
    pub async fn finish(self) -> Result<u64, StoreError> {
        let Self {
            inventory,
            block,
            volume,
            charge,
        } = self;
        let bytes = charge.bytes();
        let removed_from = volume.clone();
        volume
            .run(move || inventory.remove_now(block, &removed_from, charge))
            .await?;
        Ok(bytes)
    }
}

impl Inventory {
    fn remove_now(
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
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    self.replace(block, "being removed", State::Corrupt(charge), |before| {
                        matches!(before, State::Deleting)
                    });
                    return Err(StoreError::disk("removing", path)(error));
                }
            }
        }
        self.tables.forget(block);
        if let Some(file) = self.files.forget(block) {
            file.release_when_closed(charge);
        }
        let removed = self.lock().remove(&block);
        assert!(
            removed.is_some_and(|entry| matches!(entry.state, State::Deleting)),
            "the file of {block} is removed, which was not to be"
        );
        self.changes
            .push(volume.storage(), ReplicaChange::Deleted(block));
        Ok(())
    }
}

fn cut(volume: &Volume, block: BlockId) -> Result<u64, StoreError> {
    let disk = volume.disk();
    // Should the datanode end before the rest is gone, that is not taken for a replica.
    let path = volume.corrupt_path(block);
    match disk.rename(&volume.sealed_path(block), &path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(StoreError::disk("moving aside", &path)(error));
        }
        // It may be there already.
        _ => {}
    }
    let shorten = || {
        let file = match disk.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            opened => opened?,
        };
        let rest_bytes = file.len()?.saturating_sub(PIECE_BYTES);
        if rest_bytes == 0 {
            return Ok(0);
        }
        file.set_len(rest_bytes)?;
        Ok(PIECE_BYTES)
    };
    shorten().map_err(StoreError::disk("shortening", &path))
}
