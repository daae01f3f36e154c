//! Compaction copies the parts of mostly unused blocks that files still use into new blocks, so
//! that the old blocks can be freed. The content and times of the files do not change.

use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::RELOCATIONS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::{MetaReply, Relocation, SparsePiece, mutation, query};
use harvestfs_protocol::types::{Credentials, FileBlock, PlacementRules};
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::time::Instant;

use crate::api::client::Client;
use crate::api::file::{File, OpenFlags};
use crate::driver::read::reader::read_block;
use crate::error::ClientError;

/// Bytes that are copied before files switch to the copies. Bounds what a failure wastes.
const BATCH_BYTES: u64 = 64 << 20;
/// Bytes that are read at a time.
const READ_BYTES: u64 = 4 << 20;

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Pieces of files that were found in mostly unused blocks.
    pub found_pieces: u64,
    /// Pieces that were moved. Of the others, some changed meanwhile and some could not be read.
    pub moved_pieces: u64,
    /// Bytes that were copied.
    pub copied_bytes: u64,
}

/// One pass through all files.
struct Pass<'a> {
    client: &'a Client,
    bytes_per_s: u64,
    /// Blocks that could not be read; they are not retried in this pass.
    unreadable: FxHashSet<BlockId>,
    done: Compacted,
}

impl Client {
    /// Compacts once, copying at most `bytes_per_s` bytes a second. At most one session of a cluster
    /// compacts at a time.
    ///
    /// # Errors
    /// [`FsError::Busy`] while another session compacts; the error that keeps the copies from being
    /// stored. Pieces that were moved before the error stay moved.
    pub async fn compact(&self, bytes_per_s: u64) -> Result<Compacted, ClientError> {
        let mut pass = Pass {
            client: self,
            bytes_per_s: bytes_per_s.max(1),
            unreadable: FxHashSet::default(),
            done: Compacted::default(),
        };
        let mut from = None;
        loop {
            let op = query::FindSparse { from };
            let session = &self.core().session;
            let MetaReply::SparsePieces { pieces, next } =
                session.query(&Credentials::root(), op).await?
            else {
                return Err(ClientError::UnexpectedReply(query::FindSparse::NAME));
            };
            pass.done.found_pieces += pieces.len() as u64;
            for (rules, batch) in batches(pieces) {
                pass.copy(rules, &batch).await?;
            }
            if next.is_none() {
                return Ok(pass.done);
            }
            from = next;
        }
    }
}

/// Groups pieces with the same rules into batches, each as large as may be moved at a time.
fn batches(pieces: Vec<SparsePiece>) -> Vec<(PlacementRules, Vec<SparsePiece>)> {
    let mut open: FxHashMap<PlacementRules, (u64, Vec<SparsePiece>)> = FxHashMap::default();
    let mut full = Vec::new();
    for piece in pieces {
        let (bytes, batch) = open.entry(piece.rules).or_default();
        *bytes += piece.extent.length_bytes;
        batch.push(piece);
        if *bytes >= BATCH_BYTES || batch.len() == RELOCATIONS_PER_REQUEST_MAX {
            full.push((piece.rules, std::mem::take(batch)));
            *bytes = 0;
        }
    }
    let rest = open.into_iter().map(|(rules, (_, batch))| (rules, batch));
    full.extend(rest.filter(|(_, batch)| !batch.is_empty()));
    full
}

impl Pass<'_> {
    async fn copy(
        &mut self,
        rules: PlacementRules,
        batch: &[SparsePiece],
    ) -> Result<(), ClientError> {
        let scratch = self.scratch(rules).await?;
        let mut relocations = Vec::with_capacity(batch.len());
        let mut end = 0;
        for piece in batch {
            if self.copy_piece(&scratch, end, piece).await? {
                relocations.push(Relocation {
                    ino: piece.ino,
                    extent: piece.extent,
                    scratch_offset: end,
                });
            }
            // The copied part of a piece that cannot be copied as a whole must not be taken for the next piece.
            end += piece.extent.length_bytes;
        }
        if !relocations.is_empty() {
            scratch.sync().await?;
            self.relocate(scratch.ino(), relocations).await?;
        }
        Ok(())
    }

    async fn scratch(&self, rules: PlacementRules) -> Result<File, ClientError> {
        let session = &self.client.core().session;
        let root = Credentials::root();
        let op = mutation::CreateScratch { rules };
        let (ticket, reply) = session.mutate(&root, op).await?;
        let MetaReply::Attr(attr) = reply else {
            return Err(ClientError::UnexpectedReply(mutation::CreateScratch::NAME));
        };
        session.holds.lock().opened(attr.ino, true);
        ticket.changed_attr(&attr);
        let file = File::new(self.client, attr.ino, &root, OpenFlags::WRITE);
        file.state().set_rules(Some(rules));
        Ok(file)
    }

    /// Copies a piece to an offset of the scratch file. Returns false when the piece cannot be
    /// read: its file may have been removed, or its replicas be unavailable.
    async fn copy_piece(
        &mut self,
        scratch: &File,
        offset: u64,
        piece: &SparsePiece,
    ) -> Result<bool, ClientError> {
        let SparsePiece { ino, extent, .. } = piece;
        let reads = &self.client.core().reads;
        let mut copied = 0;
        while copied < extent.length_bytes {
            if self.unreadable.contains(&extent.block) {
                return Ok(false);
            }
            let length = (extent.length_bytes - copied).min(READ_BYTES);
            let from = extent.block_offset + copied;
            let root = Credentials::root();
            let began = Instant::now();
            let at = FileBlock {
                block: extent.block,
                file_offset: extent.file_offset + copied,
            };
            match read_block(reads, &root, (*ino, at), from..from + length, Vec::new).await {
                Ok(data) => scratch.write(offset + copied, data).await?,
                Err(error @ ClientError::Closed) => return Err(error),
                // The file was changed or removed.
                Err(ClientError::LeftFile { .. } | ClientError::Fs(FsError::Stale)) => {
                    return Ok(false);
                }
                Err(error) => {
                    tracing::info!(block = %extent.block, %error, "what is left of a block cannot be copied");
                    self.unreadable.insert(extent.block);
                    return Ok(false);
                }
            }
            copied += length;
            self.done.copied_bytes += length;
            let budget = Duration::from_secs_f64(length as f64 / self.bytes_per_s as f64);
            tokio::time::sleep_until(began + budget).await;
        }
        Ok(true)
    }

    async fn relocate(
        &mut self,
        scratch: InodeId,
        pieces: Vec<Relocation>,
    ) -> Result<(), ClientError> {
        let session = &self.client.core().session;
        let mut inodes: Vec<_> = pieces.iter().map(|piece| piece.ino).collect();
        inodes.dedup();
        let op = mutation::Relocate { scratch, pieces };
        let (ticket, reply) = session.mutate(&Credentials::root(), op).await?;
        let MetaReply::Relocated(moved) = reply else {
            return Err(ClientError::UnexpectedReply(mutation::Relocate::NAME));
        };
        for ino in inodes {
            ticket.changed_inode(ino);
        }
        self.done.moved_pieces += u64::from(moved);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use harvestfs_protocol::name::Name;
    use harvestfs_protocol::types::Extent;

    use super::*;
    use crate::testing::{Cluster, Mood};

    /// Stores a file filled with one byte, from its own client and therefore in its own block.
    async fn stored(cluster: &Cluster, text: &str, bytes: usize) -> (InodeId, Extent) {
        let (client, root) = (cluster.client(text).await, Credentials::root());
        let name = Name::new(text.as_bytes()).unwrap();
        let created = client.create_file(&root, InodeId::ROOT, &name, 0o644, OpenFlags::READ_WRITE);
        let (attr, file) = created.await.unwrap();
        file.write(0, Bytes::from(vec![text.as_bytes()[0]; bytes]))
            .await
            .unwrap();
        file.sync().await.unwrap();
        (attr.ino, extent_of(&client, attr.ino).await)
    }

    async fn extent_of(client: &Client, ino: InodeId) -> Extent {
        let root = Credentials::root();
        let content = client.core().session.content(&root, ino);
        let (_, extents) = content.await.unwrap();
        *extents.from(0).next().expect("it has bytes")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_copied_of_a_file_is_not_taken_for_another_one_that_cannot_be_read() {
        let cluster = Cluster::with_block_bytes(3, 1, 16 << 20).await;
        let (long, mut extent) = stored(&cluster, "long", 5 << 20).await;
        let (short, unreadable) = stored(&cluster, "short", 1 << 20).await;
        assert_ne!(extent.block, unreadable.block);
        // Only its first part can be copied.
        extent.length_bytes = 12 << 20;
        let first = extent.block.0 as u32 % 3;
        let holder = unreadable.block.0 as u32 % 3;
        assert_ne!(first, holder, "both files are on one datanode");
        cluster.datanode(holder + 1).set_mood(Mood::Empty);
        let mut options = cluster.options("compacts");
        options.unreachable_timeout = Duration::from_millis(500);
        options.busy_timeout = Duration::from_millis(500);
        let client = Client::connect(options).await.unwrap();
        let rules = client.core().session.default_rules();
        let piece = |(ino, extent)| SparsePiece { ino, extent, rules };
        let mut pass = Pass {
            client: &client,
            bytes_per_s: u64::MAX,
            unreadable: FxHashSet::default(),
            done: Compacted::default(),
        };
        let batch = [(long, extent), (short, unreadable)].map(piece);
        pass.copy(rules, &batch).await.unwrap();
        assert_eq!(pass.done.moved_pieces, 0);
        assert_eq!(pass.unreadable.len(), 2);
        let other = cluster.client("reads").await;
        assert_eq!(extent_of(&other, short).await, unreadable);
    }
}
