//! The guarantees of the block store, on real files.

mod abandoned;
mod crash;
mod faults;
mod joining;
mod lifecycle;
mod quota;
mod recorded;
mod volumes;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::data::chunk_checksums;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::types::StorageClass;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinHandle;

use super::buffer::Buffer;
use super::volume::{Found, Volume};
use super::*;
use crate::engine::link::LinkId;
use crate::engine::link::changes::Pending;

pub const BLOCK_BYTES: u64 = 16 << 20;

pub fn options(path: &Path, quota_bytes: u64) -> VolumeOptions {
    VolumeOptions {
        path: path.to_owned(),
        quota_bytes,
        class: StorageClass::Disk,
    }
}

/// A store over volumes, which one more may join, with a link to a namenode.
pub fn store_of(volumes: Vec<(Arc<Volume>, Vec<Found>)>) -> BlockStore {
    let store = BlockStore::new(volumes, 1, BufferPool::new(16 << 20), 1 << 20, 1);
    store.changes().of(LinkId(0)).begin();
    store
}

/// A volume of a server, with so many threads.
pub fn open_volume(
    options: &VolumeOptions,
    disk: Arc<dyn Disk>,
    threads: usize,
) -> Result<(Arc<Volume>, Vec<Found>), VolumeError> {
    Volume::open(options, "dn1", disk, threads, &Progress::default())
}

/// A store over one volume at `path`.
pub fn store_at(path: &Path, quota_bytes: u64, disk: Arc<dyn Disk>) -> BlockStore {
    let volume = open_volume(&options(path, quota_bytes), disk, 2);
    store_of(vec![volume.unwrap()])
}

pub fn real_store(path: &Path) -> BlockStore {
    store_at(path, 1 << 30, Arc::new(RealDisk))
}

/// Data that differs from block to block.
pub fn data(seed: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    StdRng::seed_from_u64(seed).fill_bytes(&mut data);
    data
}

pub fn packet(block_offset: u64, data: &[u8], sync: bool) -> WritePacket {
    let mut buffer = Buffer::unpooled(data.len());
    buffer.copy_from_slice(data);
    buffer.pad_to_page();
    WritePacket {
        block_offset,
        data: buffer.freeze(),
        checksums: chunk_checksums(data),
        sync,
    }
}

pub async fn create(store: &BlockStore, block: u64) -> Result<BlockWriter, StoreError> {
    store
        .create(BlockId(block), None, Origin::Pipeline, BLOCK_BYTES)
        .await
}

/// Writes a block in packets of 64 KiB and seals it.
pub async fn write_sealed(store: &BlockStore, block: u64, data: &[u8]) -> Result<(), StoreError> {
    let mut writer = create(store, block).await?;
    for (index, piece) in data.chunks(64 * 1024).enumerate() {
        let packet = packet(index as u64 * 64 * 1024, piece, false);
        writer.write(vec![packet], false).await?;
    }
    writer.seal(data.len() as u64).await
}

/// The `length` bytes of a replica from `offset` on.
pub async fn read(
    store: &BlockStore,
    block: u64,
    offset: u64,
    length: u64,
) -> Result<Bytes, StoreError> {
    let block = BlockId(block);
    let mut range = ChunkRange::covering(offset, length).unwrap();
    store.check_readable(block, range)?;
    let mut all = Vec::new();
    while let Some(piece) = range.take_piece(1 << 20) {
        let piece = store.read(block, piece, true).await?;
        assert_eq!(chunk_checksums(&piece.data), piece.checksums);
        all.extend_from_slice(&piece.data);
    }
    let start = (offset % 4096) as usize;
    Ok(Bytes::from(all).slice(start..start + length as usize))
}

/// A thread of a volume that waits, as for a disk that does not respond.
pub struct WaitingThread {
    answer: std::sync::mpsc::Sender<()>,
    job: JoinHandle<Result<(), StoreError>>,
}

impl WaitingThread {
    /// Returns once it waits.
    pub async fn begin(volume: &Arc<Volume>) -> Self {
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (answer, answered) = std::sync::mpsc::channel();
        let volume = volume.clone();
        let job = tokio::spawn(async move {
            let job = move || {
                begun.send(()).unwrap();
                answered.recv().unwrap();
                Ok(())
            };
            volume.run(job).await
        });
        has_begun.await.unwrap();
        Self { answer, job }
    }

    pub fn waits(&self) -> bool {
        !self.job.is_finished()
    }

    /// Makes the disk respond.
    pub async fn end(self) {
        self.answer.send(()).unwrap();
        self.job.await.unwrap().unwrap();
    }
}

/// All changes so far.
pub fn changes(store: &BlockStore) -> Vec<harvestfs_protocol::node::ReplicaChange> {
    match store.changes().of(LinkId(0)).lock().take() {
        Pending::Changes(changes) => changes.into_iter().map(|(_, change)| change).collect(),
        Pending::Everything => panic!("not that many changes"),
    }
}
