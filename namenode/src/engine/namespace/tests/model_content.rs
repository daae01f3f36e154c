//! The model's files and blocks.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, CHUNK_BYTES};
use harvestfs_protocol::meta::{FallocateMode, FileCommitted};

use super::model::{Answer, Context, Model, ModelBlock, invalid};
use super::*;

const CHUNK: u64 = CHUNK_BYTES as u64;

impl Model {
    pub fn apply_content(&mut self, context: &Context, op: &Mutation) -> Answer {
        match op {
            Mutation::Commit(mutation::Commit { files, .. }) => {
                let files = files
                    .iter()
                    .map(|file| self.within_quotas(|model| model.commit(context, file)));
                Ok(MetaReply::Committed(files.collect()))
            }
            Mutation::Fallocate(mutation::Fallocate {
                ino,
                offset,
                length_bytes,
                mode,
            }) => {
                self.node(*ino)?.file()?;
                if *length_bytes == 0 {
                    return Err(invalid());
                }
                let node = self.node_mut(*ino);
                let end = (offset + length_bytes) as usize;
                let size = node.content.len();
                let (zeroes, extends) = match mode {
                    FallocateMode::Allocate => (false, true),
                    FallocateMode::AllocateKeepSize => (false, false),
                    FallocateMode::PunchHole | FallocateMode::ZeroRangeKeepSize => (true, false),
                    FallocateMode::ZeroRange => (true, true),
                };
                if zeroes {
                    for byte in node.content.iter_mut().take(end).skip(*offset as usize) {
                        *byte = None;
                    }
                }
                if extends && end > size {
                    node.content.resize(end, None);
                }
                if zeroes || node.content.len() != size {
                    node.written(context.caller, context.now);
                }
                // Every mode counts as a write.
                let mtime = node.mtime;
                node.written(context.caller, context.now);
                node.mtime = mtime;
                Ok(MetaReply::Attr(self.attr(*ino)))
            }
            Mutation::CloneRange(mutation::CloneRange {
                source,
                source_offset,
                destination,
                destination_offset,
                length_bytes,
            }) => {
                self.node(*destination)?.file()?;
                self.node(*source)?.file()?;
                let from: Vec<_> = self.inodes[source]
                    .content
                    .iter()
                    .skip(*source_offset as usize)
                    .take(usize::try_from(*length_bytes).unwrap_or(usize::MAX))
                    .copied()
                    .collect();
                if from.is_empty() {
                    return Ok(MetaReply::Attr(self.attr(*destination)));
                }
                let distance = source_offset.abs_diff(*destination_offset);
                if source == destination && distance < from.len() as u64 {
                    return Err(invalid());
                }
                let node = self.node_mut(*destination);
                let start = *destination_offset as usize;
                let end = start + from.len();
                if node.content.len() < end {
                    node.content.resize(end, None);
                }
                node.content[start..end].copy_from_slice(&from);
                node.written(context.caller, context.now);
                Ok(MetaReply::Attr(self.attr(*destination)))
            }
            Mutation::SealBlocks(mutation::SealBlocks { blocks }) => {
                for seal in blocks {
                    let block = self.writable(context.session, seal.block)?;
                    let good = match block.sealed {
                        Some(sealed) => seal.length_bytes == sealed || seal.length_bytes == 0,
                        None => {
                            seal.length_bytes >= block.committed
                                && seal.length_bytes <= BLOCK_BYTES_MAX
                        }
                    };
                    if !good {
                        return Err(invalid());
                    }
                }
                for seal in blocks {
                    let block = self.blocks.get_mut(&seal.block).unwrap();
                    block.sealed = block.sealed.or(Some(seal.length_bytes));
                    if seal.length_bytes == 0 {
                        block.writer = None;
                    }
                }
                Ok(MetaReply::Done)
            }
            other => panic!("the model does not know {other:?}"),
        }
    }

    fn writable(&self, session: SessionId, block: BlockId) -> Result<&ModelBlock, FsError> {
        let found = self.blocks.get(&block);
        found
            .filter(|found| found.writer == Some(session))
            .ok_or_else(invalid)
    }

    fn commit(&mut self, context: &Context, commit: &FileCommit) -> Result<FileCommitted, FsError> {
        if self.node(commit.ino)?.frozen {
            return Err(FsError::ReadOnly);
        }
        self.node(commit.ino)?.file()?;
        for extent in &commit.extents {
            let block = self.writable(context.session, extent.block)?;
            let limit = block.sealed.unwrap_or(BLOCK_BYTES_MAX);
            if extent.length_bytes == 0 || extent.block_end() > limit {
                return Err(invalid());
            }
        }
        for extent in &commit.extents {
            let block = self.blocks.get_mut(&extent.block).unwrap();
            block.committed = block.committed.max(extent.block_end());
            let last = (extent.block_end() - 1) / CHUNK;
            block.chunks.extend(extent.block_offset / CHUNK..=last);
        }
        let node = self.node_mut(commit.ino);
        let base = if commit.append { node.content.len() } else { 0 };
        for extent in &commit.extents {
            for byte in 0..extent.length_bytes {
                let at = base + (extent.file_offset + byte) as usize;
                if node.content.len() <= at {
                    node.content.resize(at + 1, None);
                }
                node.content[at] = Some((extent.block, extent.block_offset + byte));
            }
        }
        if !commit.extents.is_empty() {
            node.written(context.caller, context.now);
        }
        if let Some(mtime) = commit.mtime {
            node.mtime = mtime.0;
            node.ctime = context.now;
        }
        Ok(FileCommitted {
            attr: self.attr(commit.ino),
            append_offset: base as u64,
        })
    }

    pub fn allocated(&mut self, session: SessionId, rules: PlacementRules, blocks: &[BlockId]) {
        for &block in blocks {
            let fresh = ModelBlock {
                writer: Some(session),
                committed: 0,
                chunks: BTreeSet::new(),
                sealed: None,
                rules,
            };
            assert_eq!(self.blocks.insert(block, fresh), None);
        }
    }

    pub fn close_session(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        for block in self.blocks.values_mut() {
            if block.writer == Some(session) {
                block.writer = None;
                block.sealed = block.sealed.or(Some(block.committed));
            }
        }
    }

    /// The bytes of each block that files use, by the rules of these files.
    pub fn uses(&self) -> BTreeMap<BlockId, (u64, Vec<PlacementRules>)> {
        let mut uses: BTreeMap<BlockId, (u64, Vec<PlacementRules>)> = BTreeMap::new();
        let block_of = |byte: &Option<(BlockId, u64)>| byte.map(|(block, _)| block);
        for node in self.inodes.values() {
            let same = |a: &_, b: &_| block_of(a) == block_of(b);
            for run in node.content.chunk_by(same) {
                if let Some(block) = block_of(&run[0]) {
                    let (bytes, rules) = uses.entry(block).or_default();
                    *bytes += run.len() as u64;
                    rules.push(node.rules());
                }
            }
        }
        uses
    }

    /// Ends a command: updates the rules of blocks, and removes unused blocks.
    pub fn settle(&mut self) {
        let uses = self.uses();
        for (id, block) in &mut self.blocks {
            let Some((_, rules)) = uses.get(id) else {
                continue;
            };
            let strict = |rules: &PlacementRules| rules.durability == Durability::Strict;
            block.rules = PlacementRules {
                replication: rules.iter().map(|rules| rules.replication).max().unwrap(),
                durability: if rules.iter().any(strict) {
                    Durability::Strict
                } else {
                    Durability::Space
                },
                class: None,
            };
        }
        self.blocks.retain(|id, block| {
            let chunks = |sealed: u64| 0..sealed.div_ceil(CHUNK);
            let all_committed = block
                .sealed
                .is_some_and(|sealed| chunks(sealed).all(|chunk| block.chunks.contains(&chunk)));
            let finished = block.writer.is_none() || all_committed;
            uses.contains_key(id) || !finished
        });
    }
}
