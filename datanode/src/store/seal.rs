//! Sealing replicas whose writers are gone, or are to be stopped.

use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;

use super::block_store::{BlockStore, open_path};
use super::error::StoreError;
use super::inventory::{Inventory, Readable, State};
use super::layout;
use super::open_replica::{OpenReplica, Taken};
use super::replica::{ReplicaWriter, is_loss};
use super::volume::Volume;
use crate::engine::quota::Charge;
use crate::engine::removal::sealing::{self, Look, Sealing};

impl BlockStore {
    /// Cuts a replica whose writer is gone, or is to be stopped, to `length_bytes` and seals it. A replica that is
    /// already sealed stays as it is.
    ///
    /// # Errors
    /// [`StoreError::ShortReplica`], [`StoreError::NoSuchReplica`], or the disk's error.
    pub async fn seal(&self, block: BlockId, length_bytes: u64) -> Result<(), StoreError> {
        self.seal_while(block, length_bytes, &|| true).await
    }

    /// As [`BlockStore::seal`], but if the replica is shorter, even empty, seals it at its actual length: no more data
    /// will arrive. A replica that has to be rewritten first is rewritten piece by piece, as long as `may_go_on`.
    ///
    /// # Errors
    /// As [`BlockStore::seal`]; [`StoreError::Busy`] if it may not continue; the next call resumes from there.
    pub async fn seal_what_is_there(
        &self,
        block: BlockId,
        length_bytes: u64,
        may_go_on: impl Fn() -> bool,
    ) -> Result<(), StoreError> {
        let mut length_bytes = length_bytes;
        loop {
            match self.seal_while(block, length_bytes, &may_go_on).await {
                Err(StoreError::ShortReplica { have_bytes }) => {
                    match sealing::shorter(length_bytes, have_bytes) {
                        Some(shorter_bytes) => length_bytes = shorter_bytes,
                        None => return Err(StoreError::ShortReplica { have_bytes }),
                    }
                }
                sealed => return sealed,
            }
        }
    }

    /// Whether a replica has to be rewritten before it is sealed.
    pub fn is_unproven(&self, block: BlockId) -> bool {
        let replicas = self.inventory.lock();
        let entry = replicas.get(&block);
        entry.is_some_and(
            |entry| matches!(&entry.state, State::Open(replica) if replica.is_unproven()),
        )
    }

    async fn seal_while(
        &self,
        block: BlockId,
        length_bytes: u64,
        may_go_on: &impl Fn() -> bool,
    ) -> Result<(), StoreError> {
        let Some(chunks) = layout::chunks_for(length_bytes) else {
            // Beyond any replica.
            let have_bytes = layout::chunk_bytes(self.inventory.intact(block)?.chunks);
            return Err(StoreError::ShortReplica { have_bytes });
        };
        let sealing = Sealing::at(chunks);
        let readable = self.inventory.intact(block)?;
        let look = sealing.look(readable.chunks, readable.open.is_none())?;
        let (Look::TakeOver, Some(replica)) = (look, readable.open.clone()) else {
            return Ok(());
        };
        let volume = readable.volume.clone();
        let taken = replica.take_over().await?;
        let next = sealing.taken(replica.chunks(), replica.is_unproven())?;
        let inventory = self.inventory.clone();
        let reopen = move || Reopened::new(inventory, block, readable, taken);
        if next == sealing::Taken::Seal {
            return volume.run(move || reopen()?.seal(chunks)).await;
        }
        let mut reopened = volume.run(reopen).await?;
        loop {
            let before = reopened;
            let (after, is_proven) = volume.run(move || before.write_on(chunks)).await?;
            reopened = after;
            if is_proven {
                break;
            }
            if !may_go_on() {
                volume.run(move || reopened.interrupt()).await?;
                return Err(StoreError::Busy);
            }
        }
        volume.run(move || reopened.seal(chunks)).await
    }
}

const HAS_WRITER: &str = "a replica that is open again has its writer until it is sealed";

/// A replica that was taken over and reopened. Each job on it owns this while it runs. If this is dropped before the
/// replica is sealed, the replica is free again.
struct Reopened {
    inventory: Arc<Inventory>,
    block: BlockId,
    found: Readable,
    replica: Arc<OpenReplica>,
    /// `None` only when it is being sealed, and this is about to be dropped.
    writer: Option<ReplicaWriter>,
    /// Number of chunks that need not be rewritten any more: whole groups.
    written: u32,
}

impl Reopened {
    fn new(
        inventory: Arc<Inventory>,
        block: BlockId,
        found: Readable,
        taken: Taken,
    ) -> Result<Self, StoreError> {
        let (replica, charge) = taken.begin();
        match reopen(&found.volume, block, &replica, charge) {
            Ok(writer) => Ok(Self {
                written: replica.proven_chunks(),
                inventory,
                block,
                found,
                replica,
                writer: Some(writer),
            }),
            Err((error, charge)) => {
                replica.put_back(charge);
                note_loss(&inventory, block, &found, &error);
                Err(error)
            }
        }
    }

    /// Rewrites the next group of a replica that is to be sealed at `chunks`. Returns whether that was the last one.
    /// Chunks that no longer match their checksums, or cannot be read, are lost.
    fn write_on(mut self, chunks: u32) -> Result<(Self, bool), StoreError> {
        if self.written > 0 && self.written >= chunks {
            return Ok((self, true));
        }
        let wanted = layout::group_end(self.written).min(chunks);
        let id = (self.block, self.found.volume.storage());
        let writer = self.writer.as_mut().expect(HAS_WRITER);
        let written = writer
            .write_group_again(id, self.written, chunks)
            .inspect_err(|error| note_loss(&self.inventory, self.block, &self.found, error))?;
        if written < wanted {
            self.replica.cut(written);
            Sealing::at(chunks).proven(written)?;
        }
        self.written = written;
        Ok((self, written == chunks))
    }

    /// Puts the rewritten chunks on stable storage, so that they are not rewritten again.
    fn interrupt(mut self) -> Result<(), StoreError> {
        self.writer.as_mut().expect(HAS_WRITER).sync()?;
        self.replica.set_proven_chunks(self.written);
        Ok(())
    }

    fn seal(mut self, chunks: u32) -> Result<(), StoreError> {
        let writer = self.writer.take().expect(HAS_WRITER);
        let volume = &self.found.volume;
        self.inventory
            .seal_now(self.block, volume, &self.replica, writer, chunks)
    }
}

impl Drop for Reopened {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            if writer.has_failed_sync() {
                self.replica.set_unproven();
            }
            self.replica.put_back(writer.close());
        }
    }
}

/// Condemns a replica that is lost: sealing it would be retried in vain forever, and it would count as good.
fn note_loss(inventory: &Inventory, block: BlockId, found: &Readable, error: &StoreError) {
    if is_loss(error) {
        inventory.condemn(block, found);
    }
}

/// Reopens a replica that is to be sealed. An earlier attempt to seal it may have moved its file, and failed after
/// that.
fn reopen(
    volume: &Volume,
    block: BlockId,
    replica: &OpenReplica,
    charge: Charge,
) -> Result<ReplicaWriter, (StoreError, Charge)> {
    let (disk, path) = (volume.disk(), open_path(volume, block, replica.origin));
    let reopen =
        |charge| ReplicaWriter::reopen(disk.clone(), path.clone(), replica.chunks(), charge);
    match reopen(charge) {
        Err((error, charge))
            if error.is_missing() && disk.rename(&volume.sealed_path(block), &path).is_ok() =>
        {
            reopen(charge)
        }
        reopened => reopened,
    }
}
