//! Reading open files.

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::FileBlock;
use tokio::task::JoinSet;

use super::File;
use crate::driver::read::readahead::Reader;
use crate::driver::read::reader::read_block;
use crate::driver::session::content::CONTENT_ATTEMPTS;
use crate::engine::cache::extents::ExtentMap;
use crate::engine::read::ahead::{UNIT_BYTES, blocks_after};
use crate::engine::read::sections::{Section, sections};
use crate::error::ClientError;

/// Number of ranges of one read that are fetched in parallel.
const PARALLEL_READS: usize = 8;

impl File {
    /// Reads up to `len` bytes at `offset`, in pieces as they lie in memory; fewer only at the end of the file.
    ///
    /// # Errors
    /// [`ClientError::AllReplicasBusy`], [`ClientError::NoReplica`], [`ClientError::ChangesTooFast`],
    /// and the error that keeps the namenode from answering.
    pub async fn read_pieces(&self, offset: u64, len: usize) -> Result<Vec<Bytes>, ClientError> {
        let ino = self.ino();
        for _ in 0..CONTENT_ATTEMPTS {
            match self.read_once(offset, len).await {
                // Another session changed the file, and the notice about it is still in flight.
                Err(ClientError::LeftFile { .. }) => {
                    let cache = &self.inner.client.core().session.cache;
                    cache.ticket().changed_inode(ino);
                }
                read => return read,
            }
        }
        Err(ClientError::ChangesTooFast { ino })
    }

    fn read_once(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Vec<Bytes>, ClientError>> {
        Box::pin(self.read_now(offset, len))
    }

    async fn read_now(&self, offset: u64, len: usize) -> Result<Vec<Bytes>, ClientError> {
        let handle = &*self.inner;
        if !handle.flags.may_read() {
            return Err(ClientError::NotOpenFor("reading"));
        }
        let core = handle.client.core();
        let wanted = offset..offset.saturating_add(len as u64);
        let mut is_flushed = false;
        let (overlay, memory_end, attr, extents) = loop {
            let has_appends = handle.state.has_appends();
            // Look at the memory first: what leaves it meanwhile is found in the extents.
            let (overlay, memory_end) = handle.state.overlay(wanted.clone());
            let content = core.session.content(&handle.credentials, self.ino());
            let (attr, extents) = content.await?;
            // Only the namenode knows the offsets of appends: behind everything that is committed.
            if !has_appends || is_flushed || wanted.end <= attr.size_bytes {
                break (overlay, memory_end, attr, extents);
            }
            self.files().flush_if_there_is_room(&handle.state).await?;
            is_flushed = true;
        };
        let size_bytes = attr.size_bytes.max(memory_end);
        let range = wanted.start..wanted.end.min(size_bytes);
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let reader = Reader {
            reads: &core.reads,
            ino: self.ino(),
            credentials: &handle.credentials,
            extents: &extents,
            size_bytes,
        };
        let sections = sections(&range, overlay, &extents);
        if needs_blocks(&sections) {
            handle.read_ahead.note(&reader, &range);
        }
        self.fetch(&reader, sections).await
    }

    /// As [`File::read_pieces`], in one piece.
    ///
    /// # Errors
    /// As [`File::read_pieces`].
    pub async fn read(&self, offset: u64, len: usize) -> Result<Bytes, ClientError> {
        let pieces = self.read_pieces(offset, len).await?;
        if let [only] = &pieces[..] {
            return Ok(only.clone());
        }
        let mut whole = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
        for piece in &pieces {
            whole.extend_from_slice(piece);
        }
        Ok(whole.freeze())
    }

    /// As [`File::read_pieces`] if everything is in memory, without waiting.
    #[must_use]
    pub fn try_read_pieces(&self, offset: u64, len: usize) -> Option<Vec<Bytes>> {
        let handle = &*self.inner;
        if !handle.flags.may_read() || handle.state.has_appends() {
            return None;
        }
        let core = handle.client.core();
        let wanted = offset..offset.saturating_add(len as u64);
        let (overlay, memory_end) = handle.state.overlay(wanted.clone());
        let (attr, extents) = core.session.valid_cache()?.content(self.ino())?;
        let size_bytes = attr.size_bytes.max(memory_end);
        let range = wanted.start..wanted.end.min(size_bytes);
        if range.is_empty() {
            return Some(Vec::new());
        }
        let sections = sections(&range, overlay, &extents);
        let mut pieces = Vec::with_capacity(sections.len());
        let from_blocks = needs_blocks(&sections);
        for section in sections {
            match section {
                Section::Memory(data) => pieces.push(data),
                Section::Block {
                    at: FileBlock { block, .. },
                    range,
                } => {
                    let mut at = range.start;
                    while at < range.end {
                        let piece =
                            handle
                                .read_ahead
                                .ready(&core.reads, block, &(at..range.end))?;
                        at += piece.len() as u64;
                        pieces.push(piece);
                    }
                }
            }
        }
        if from_blocks {
            let reader = Reader {
                reads: &core.reads,
                ino: self.ino(),
                credentials: &handle.credentials,
                extents: &extents,
                size_bytes,
            };
            handle.read_ahead.note(&reader, &range);
        }
        Some(pieces)
    }

    /// Assembles the sections of a read, fetching those that are missing.
    async fn fetch(
        &self,
        reader: &Reader<'_>,
        sections: Vec<Section>,
    ) -> Result<Vec<Bytes>, ClientError> {
        let reads = reader.reads;
        let mut pieces: Vec<Bytes> = Vec::with_capacity(sections.len());
        // Indices in `pieces` of data that is still missing.
        let mut missing = Vec::new();
        for section in sections {
            let (start, range) = match section {
                Section::Memory(data) => {
                    pieces.push(data);
                    continue;
                }
                Section::Block { at, range } => (at, range),
            };
            let mut at = range.start;
            while at < range.end {
                let rest = at..range.end;
                if let Some(piece) = self
                    .inner
                    .read_ahead
                    .arrived(reads, start.block, &rest)
                    .await
                {
                    at += piece.len() as u64;
                    pieces.push(piece);
                    continue;
                }
                let end = (at / UNIT_BYTES + 1) * UNIT_BYTES;
                let part = at..end.min(range.end);
                let place = FileBlock {
                    file_offset: start.file_offset + (at - range.start),
                    ..start
                };
                at = part.end;
                missing.push((pieces.len(), (reader.ino, place), part));
                pieces.push(Bytes::new());
            }
        }
        let others = |extents: &ExtentMap| blocks_after(extents, 0);
        if let [(index, place, range)] = &missing[..] {
            let others = || others(reader.extents);
            let data = read_block(reads, reader.credentials, *place, range.clone(), others);
            pieces[*index] = data.await?;
            return Ok(pieces);
        }
        let mut missing = missing.into_iter();
        let mut fetches = JoinSet::new();
        loop {
            while fetches.len() < PARALLEL_READS
                && let Some((index, place, range)) = missing.next()
            {
                let (reads, credentials) = (reader.reads.clone(), reader.credentials.clone());
                let extents = reader.extents.clone();
                fetches.spawn(RequestId::current().scope(async move {
                    let others = || others(&extents);
                    let data = read_block(&reads, &credentials, place, range, others).await;
                    (index, data)
                }));
            }
            match fetches.join_next().await {
                None => return Ok(pieces),
                Some(Ok((index, data))) => pieces[index] = data?,
                // The runtime is shutting down and has cancelled its tasks.
                Some(Err(_)) => return Err(ClientError::Closed),
            }
        }
    }
}

fn needs_blocks(sections: &[Section]) -> bool {
    let from_block = |section: &Section| matches!(section, Section::Block { .. });
    sections.iter().any(from_block)
}
