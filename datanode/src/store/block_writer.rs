//! The writing end of a replica, for pipelines and repairs.

use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::data::first_mismatch;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::CHUNK_BYTES;

use super::block_store::BlockStore;
use super::error::StoreError;
use super::layout;
use super::open_replica::{Lease, OpenReplica};
use super::replica::Append;
use super::volume::Volume;

/// A packet for the end of a replica.
#[derive(Clone, Debug)]
pub struct WritePacket {
    /// Offset in the block, in bytes; a multiple of the chunk size.
    pub block_offset: u64,
    /// The data: page-aligned, padded with zeros to whole chunks.
    pub data: Bytes,
    /// One checksum for each chunk.
    pub checksums: Vec<u32>,
    /// Whether the data has to be on stable storage before it is acknowledged.
    pub sync: bool,
}

/// Appends to one replica, one batch after the other. When it is dropped, the replica stays open.
pub struct BlockWriter {
    store: BlockStore,
    block: BlockId,
    volume: Arc<Volume>,
    replica: Arc<OpenReplica>,
    lease: Option<Lease>,
}

impl BlockWriter {
    pub(super) fn new(
        store: BlockStore,
        block: BlockId,
        volume: Arc<Volume>,
        replica: Arc<OpenReplica>,
        lease: Lease,
    ) -> Self {
        Self {
            store,
            block,
            volume,
            replica,
            lease: Some(lease),
        }
    }

    /// Completes when the replica is to be sealed or removed: writing can no longer succeed.
    pub async fn fenced(&self) {
        self.replica.fenced().await;
    }

    /// Verifies and writes packets in order; then, if `sync`, puts everything written so far on stable storage. After
    /// an error, the writer can no longer be used.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] for a packet that does not match its checksums, and the errors of
    /// [`super::replica::ReplicaWriter::append`].
    pub async fn write(&mut self, packets: Vec<WritePacket>, sync: bool) -> Result<(), StoreError> {
        let mut lease = self.take_lease()?;
        let job = move || {
            let writer = lease.writer()?;
            for packet in &packets {
                verify(packet)?;
                let first_chunk = layout::chunks_for(packet.block_offset);
                let first_chunk = first_chunk.ok_or_else(|| {
                    let offset = packet.block_offset;
                    StoreError::OutOfOrder(format!("data for offset {offset}, beyond any block"))
                })?;
                writer.append(&Append {
                    first_chunk,
                    data: &packet.data,
                    checksums: &packet.checksums,
                    sync: packet.sync,
                })?;
            }
            if sync {
                writer.sync()?;
            }
            lease.publish();
            Ok(lease)
        };
        self.lease = Some(self.volume.run(job).await?);
        Ok(())
    }

    /// Seals the replica at `length_bytes`, which must be in its last chunk.
    ///
    /// # Errors
    /// [`StoreError::OutOfOrder`] for another length, or the disk's error; the replica is then still open.
    pub async fn seal(&mut self, length_bytes: u64) -> Result<(), StoreError> {
        let mut lease = self.take_lease()?;
        let (inventory, volume) = (self.store.inventory.clone(), self.volume.clone());
        let (block, replica) = (self.block, self.replica.clone());
        let job = move || {
            let chunks = lease.writer()?.chunks();
            if layout::chunks_for(length_bytes) != Some(chunks) {
                return Err(StoreError::OutOfOrder(format!(
                    "{length_bytes} bytes are to be sealed where {} were written",
                    layout::chunk_bytes(chunks)
                )));
            }
            inventory.seal_now(block, &volume, &replica, lease.into_writer(), chunks)
        };
        self.volume.run(job).await
    }

    /// Removes the replica, because no client knows of it; removes only this replica, should it be gone and the block
    /// have another one here.
    ///
    /// # Errors
    /// [`StoreError::OutOfOrder`] if it is sealed or deleted, or about to be; or the disk's error.
    pub async fn discard(mut self) -> Result<(), StoreError> {
        let taken = match self.lease.take() {
            Some(lease) => lease.into_taken(),
            None => self.replica.take_over().await?,
        };
        self.store
            .delete_taken(self.block, &self.volume, taken)
            .await
    }

    fn take_lease(&mut self) -> Result<Lease, StoreError> {
        let failed = || StoreError::OutOfOrder("an earlier write failed".to_owned());
        self.lease.take().ok_or_else(failed)
    }
}

fn verify(packet: &WritePacket) -> Result<(), StoreError> {
    if packet.data.is_empty()
        || !packet.data.len().is_multiple_of(CHUNK_BYTES)
        || !packet.block_offset.is_multiple_of(CHUNK_BYTES as u64)
        || packet.checksums.len() != packet.data.len() / CHUNK_BYTES
    {
        return Err(StoreError::OutOfOrder(
            "a packet must be whole chunks, each with its checksum".to_owned(),
        ));
    }
    match first_mismatch(&packet.data, &packet.checksums) {
        Some(offset) => Err(StoreError::Corrupt {
            offset: packet.block_offset + offset as u64,
        }),
        None => Ok(()),
    }
}
