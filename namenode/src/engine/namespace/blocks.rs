//! The journaled state of blocks: which session writes them, how long they are, and how much of them files
//! use. The locations of their replicas are not kept here.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, SessionId};
use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, CHUNK_BYTES};
use harvestfs_protocol::meta::SealedBlock;
use harvestfs_protocol::types::{Durability, PlacementRules};

use super::chunk_set::ChunkSet;
use super::command::{BlockChange, Effects};
use super::extents::{Piece, UseChanges};
use super::views::BlockView;
use crate::engine::count::Count;

/// All blocks that files use or sessions write.
#[derive(Debug, Default)]
pub(super) struct BlockTable {
    blocks: BTreeMap<BlockId, Block>,
    /// The blocks of each open session; each is in `blocks`.
    by_writer: BTreeSet<(SessionId, BlockId)>,
    /// The id of the last block allocated, or another id that the next one must exceed.
    last: u64,
    live_bytes: Count,
    /// Blocks touched by the command in progress; [`Self::settle`] empties it.
    touched: Vec<Touched>,
}

#[derive(Debug)]
struct Block {
    committed_bytes: u32,
    sealed_bytes: Option<u32>,
    writer: Option<SessionId>,
    /// The chunks that its writer has committed; empty once it has no writer.
    committed: ChunkSet,
    /// The rules last announced in [`Effects`].
    rules: PlacementRules,
    /// Bytes that files use, by the rules of these files; ordered by [`strength`].
    uses: Vec<(PlacementRules, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Touched {
    block: BlockId,
    committed_bytes: u32,
}

/// A sort key for rules: more demanding ones sort later.
fn strength(rules: &PlacementRules) -> (u8, bool, Option<u8>) {
    (
        rules.replication,
        rules.durability == Durability::Strict,
        rules.class.map(|class| class as u8),
    )
}

impl Block {
    fn live_bytes(&self) -> u64 {
        self.uses.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Adds to the bytes used by files with `rules`, or subtracts what was added before. `id` is the block
    /// itself, for messages.
    fn change_use(&mut self, id: BlockId, rules: PlacementRules, bytes: i64) {
        let place = self
            .uses
            .binary_search_by_key(&strength(&rules), |(rules, _)| strength(rules));
        let before = place.map_or(0, |index| self.uses[index].1);
        let Some(after) = before.checked_add_signed(bytes) else {
            panic!(
                "the use of block {id} by files with {rules:?} is {before} bytes and cannot change \
                 by {bytes}"
            );
        };
        match place {
            Ok(index) if after == 0 => _ = self.uses.remove(index),
            Ok(index) => self.uses[index].1 = after,
            Err(_) if after == 0 => {}
            Err(index) => {
                self.uses.reserve_exact(1);
                self.uses.insert(index, (rules, after));
            }
        }
    }

    /// The combined rules of the files that use it: those of the most demanding file, but strict when any
    /// file is strict.
    fn wanted_rules(&self) -> Option<PlacementRules> {
        let (strongest, _) = self.uses.last()?;
        let strict = self
            .uses
            .iter()
            .any(|(rules, _)| rules.durability == Durability::Strict);
        Some(PlacementRules {
            durability: if strict {
                Durability::Strict
            } else {
                Durability::Space
            },
            ..*strongest
        })
    }

    /// Whether it is sealed and files use less than half of it.
    fn is_sparse(&self) -> bool {
        self.sealed_bytes
            .is_some_and(|sealed| self.live_bytes() * 2 < u64::from(sealed))
    }

    /// Whether no file uses it and none will: it has no writer any more, or its writer has committed all
    /// that it wrote. Data that was not committed yet may still be, even when everything else is unused.
    fn is_garbage(&self) -> bool {
        let all_committed = self
            .sealed_bytes
            .is_some_and(|sealed| self.committed.has_all_below(sealed));
        self.uses.is_empty() && (self.writer.is_none() || all_committed)
    }

    /// Takes the block from its writer, which is returned and will commit no more of it.
    fn leave(&mut self) -> Option<SessionId> {
        self.committed.clear();
        self.writer.take()
    }

    fn view(&self, block: BlockId) -> BlockView {
        BlockView {
            block,
            committed_bytes: self.committed_bytes.into(),
            live_bytes: self.live_bytes(),
            rules: self.rules,
            writer: self.writer,
            sealed_bytes: self.sealed_bytes.map(u64::from),
        }
    }
}

impl BlockTable {
    /// Blocks that sessions write, or may write.
    pub fn being_written(&self) -> impl Iterator<Item = BlockId> {
        self.by_writer.iter().map(|&(_, block)| block)
    }

    pub fn get(&self, block: BlockId) -> Option<BlockView> {
        self.blocks.get(&block).map(|found| found.view(block))
    }

    /// Whether a block is sealed and files use less than half of it.
    pub fn is_sparse(&self, block: BlockId) -> bool {
        self.blocks.get(&block).is_some_and(Block::is_sparse)
    }

    pub fn iter(&self) -> impl Iterator<Item = BlockView> {
        self.blocks.iter().map(|(&id, block)| block.view(id))
    }

    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes that files use; bytes that several files share count once for each.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes.get()
    }

    /// The id of the last block allocated.
    pub fn last(&self) -> u64 {
        self.last
    }

    pub fn set_last(&mut self, last: u64) {
        self.last = last;
    }

    /// Allocates a block for a session.
    pub fn allocate(
        &mut self,
        writer: SessionId,
        rules: PlacementRules,
        effects: &mut Effects,
    ) -> BlockId {
        // From 1: no block is 0.
        self.last += 1;
        let block = BlockId(self.last);
        let known = self.blocks.insert(
            block,
            Block {
                committed_bytes: 0,
                sealed_bytes: None,
                writer: Some(writer),
                committed: ChunkSet::default(),
                rules,
                uses: Vec::new(),
            },
        );
        assert!(known.is_none(), "block {block} was allocated twice");
        self.by_writer.insert((writer, block));
        effects.blocks.push(BlockChange::Allocated {
            block,
            rules,
            writer,
        });
        block
    }

    /// Checks that a session may commit a piece of a block.
    pub fn check_commit(&self, session: SessionId, piece: &Piece) -> Result<(), FsError> {
        let block = self.written_by(session, piece.block)?;
        let end = u64::from(piece.block_offset) + u64::from(piece.length_bytes);
        let limit = block.sealed_bytes.map_or(BLOCK_BYTES_MAX, u64::from);
        if end > limit {
            return Err(FsError::InvalidArgument(format!(
                "block {} has {limit} bytes at most, not {end}",
                piece.block
            )));
        }
        Ok(())
    }

    /// The number of blocks that a session writes; counting stops at `max`.
    pub fn count_written_by(&self, session: SessionId, max: usize) -> usize {
        let own = (session, BlockId(0))..=(session, BlockId(u64::MAX));
        self.by_writer.range(own).take(max).count()
    }

    fn written_by(&self, session: SessionId, block: BlockId) -> Result<&Block, FsError> {
        self.blocks
            .get(&block)
            .filter(|found| found.writer == Some(session))
            .ok_or_else(|| {
                FsError::InvalidArgument(format!("block {block} is not one of this session"))
            })
    }

    /// A block that a file, a session or the command in progress refers to, and that therefore exists.
    #[track_caller]
    fn known_mut(&mut self, block: BlockId) -> &mut Block {
        match self.blocks.get_mut(&block) {
            Some(found) => found,
            None => panic!("block {block} is used or written, but is not in the table"),
        }
    }

    /// Records the commit of a piece that [`Self::check_commit`] has accepted.
    pub fn committed(&mut self, piece: &Piece) {
        let committed_bytes = piece.block_offset + piece.length_bytes;
        let block = self.known_mut(piece.block);
        assert!(
            block.writer.is_some(),
            "block {} has no writer, but more of it is committed",
            piece.block
        );
        let committed = &mut block.committed;
        committed.add_bytes(piece.block_offset, committed_bytes);
        match self.touched.last_mut() {
            Some(last) if last.block == piece.block => {
                last.committed_bytes = last.committed_bytes.max(committed_bytes);
            }
            _ => self.touched.push(Touched {
                block: piece.block,
                committed_bytes,
            }),
        }
    }

    /// Applies the changes in the use of blocks by an edit of a file with these rules.
    pub fn account(&mut self, rules: PlacementRules, changes: &mut UseChanges) {
        for (block, bytes) in changes.drain() {
            if bytes == 0 {
                continue;
            }
            self.known_mut(block).change_use(block, rules, bytes);
            self.live_bytes.change(bytes);
            if self.touched.last().is_none_or(|last| last.block != block) {
                self.touched.push(Touched {
                    block,
                    committed_bytes: 0,
                });
            }
        }
    }

    /// Checks a request to seal blocks.
    pub fn check_seal(&self, session: SessionId, seals: &[SealedBlock]) -> Result<(), FsError> {
        let mut seen = BTreeSet::new();
        for seal in seals {
            let block = self.written_by(session, seal.block)?;
            let fits = match block.sealed_bytes {
                // A sealed block keeps its length; 0 means that the session will commit no more of it.
                Some(sealed) => [u64::from(sealed), 0].contains(&seal.length_bytes),
                None => (u64::from(block.committed_bytes)..=BLOCK_BYTES_MAX)
                    .contains(&seal.length_bytes),
            };
            if !fits {
                return Err(FsError::InvalidArgument(format!(
                    "block {} cannot be sealed at {} bytes",
                    seal.block, seal.length_bytes
                )));
            }
            if !seen.insert(seal.block) {
                return Err(FsError::InvalidArgument(format!(
                    "block {} is named twice",
                    seal.block
                )));
            }
        }
        Ok(())
    }

    /// Carries out a request that [`Self::check_seal`] has accepted.
    pub fn seal(&mut self, seals: &[SealedBlock], effects: &mut Effects) {
        for seal in seals {
            let block = self.known_mut(seal.block);
            if seal.length_bytes == 0 {
                block.sealed_bytes.get_or_insert(0);
                if let Some(writer) = block.leave() {
                    self.by_writer.remove(&(writer, seal.block));
                }
            } else if block.sealed_bytes.is_none() {
                // At most BLOCK_BYTES_MAX, as checked.
                block.sealed_bytes = Some(seal.length_bytes as u32);
                effects.blocks.push(BlockChange::Sealed {
                    block: seal.block,
                    length_bytes: seal.length_bytes,
                });
            }
            self.touched.push(Touched {
                block: seal.block,
                committed_bytes: 0,
            });
        }
    }

    /// Takes the blocks of a session that has ended from it, and seals those that files use.
    pub fn close_writer(&mut self, session: SessionId, effects: &mut Effects) {
        let mine: Vec<_> = self
            .by_writer
            .range((session, BlockId(0))..=(session, BlockId(u64::MAX)))
            .map(|&(_, block)| block)
            .collect();
        for id in mine {
            self.by_writer.remove(&(session, id));
            let block = self.known_mut(id);
            let writer = block.leave();
            assert_eq!(writer, Some(session), "block {id} has another writer");
            if !block.uses.is_empty() && block.sealed_bytes.is_none() {
                block.sealed_bytes = Some(block.committed_bytes);
                effects.blocks.push(BlockChange::Sealed {
                    block: id,
                    length_bytes: block.committed_bytes.into(),
                });
            }
            self.touched.push(Touched {
                block: id,
                committed_bytes: 0,
            });
        }
    }

    /// Whether no command that touched a block is in progress.
    pub fn is_settled(&self) -> bool {
        self.touched.is_empty()
    }

    /// Ends a command: announces the changes of the blocks that it touched, and frees those that
    /// nothing uses any more.
    pub fn settle(&mut self, effects: &mut Effects) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        for (
            index,
            &Touched {
                block,
                committed_bytes,
            },
        ) in touched.iter().enumerate()
        {
            // The last entry of a block has the greatest committed length.
            if touched
                .get(index + 1)
                .is_some_and(|next| next.block == block)
            {
                continue;
            }
            self.settle_block(block, committed_bytes, effects);
        }
        touched.clear();
        // Reuses the allocation.
        self.touched = touched;
    }

    fn settle_block(&mut self, id: BlockId, committed_bytes: u32, effects: &mut Effects) {
        let block = self.known_mut(id);
        if committed_bytes > block.committed_bytes {
            assert!(
                block
                    .sealed_bytes
                    .is_none_or(|sealed| committed_bytes <= sealed),
                "{committed_bytes} bytes of block {id} are committed, which is sealed at {:?}",
                block.sealed_bytes
            );
            block.committed_bytes = committed_bytes;
            effects.blocks.push(BlockChange::Grew {
                block: id,
                committed_bytes: committed_bytes.into(),
            });
        }
        if block.is_garbage() {
            if let Some(writer) = block.writer {
                self.by_writer.remove(&(writer, id));
            }
            self.blocks.remove(&id);
            effects.blocks.push(BlockChange::Freed { block: id });
            return;
        }
        if let Some(rules) = block.wanted_rules()
            && rules != block.rules
        {
            block.rules = rules;
            effects
                .blocks
                .push(BlockChange::RulesChanged { block: id, rules });
        }
    }

    /// The chunks that the writer of a block has committed.
    pub fn committed_chunks(&self, block: BlockId) -> ChunkSet {
        let found = self.blocks.get(&block);
        found.map_or_else(ChunkSet::default, |block| block.committed.clone())
    }

    /// Adds a block from a snapshot, without its uses. Returns false when it contradicts itself or is out
    /// of order.
    pub fn restore(&mut self, view: &BlockView, committed: ChunkSet) -> bool {
        let ordered = self
            .blocks
            .last_key_value()
            .is_none_or(|(&last, _)| last < view.block);
        let sizes = (
            u32::try_from(view.committed_bytes),
            view.sealed_bytes.map(u32::try_from).transpose(),
        );
        let (Ok(committed_bytes), Ok(sealed_bytes)) = sizes else {
            return false;
        };
        let known = (1..=self.last).contains(&view.block.0);
        if !ordered || !known || !committed.is_sound() {
            return false;
        }
        if let Some(writer) = view.writer {
            self.by_writer.insert((writer, view.block));
        }
        self.blocks.insert(
            view.block,
            Block {
                committed_bytes,
                sealed_bytes,
                writer: view.writer,
                committed,
                rules: view.rules,
                uses: Vec::new(),
            },
        );
        true
    }

    /// Adds to the uses of a restored block. Returns false when there is no such block.
    pub fn restore_use(&mut self, rules: PlacementRules, piece: &Piece) -> bool {
        let Some(block) = self.blocks.get_mut(&piece.block) else {
            return false;
        };
        block.change_use(piece.block, rules, piece.length_bytes.into());
        self.live_bytes += u64::from(piece.length_bytes);
        true
    }

    /// The uses of a block, for checks.
    pub fn uses(&self, block: BlockId) -> &[(PlacementRules, u64)] {
        self.blocks.get(&block).map_or(&[], |block| &block.uses)
    }

    /// The first inconsistency found in a block by itself, if any.
    pub fn fault(&self, id: BlockId) -> Option<&'static str> {
        let block = self.blocks.get(&id)?;
        let indexed = block
            .writer
            .is_none_or(|writer| self.by_writer.contains(&(writer, id)));
        let chunks_end = u64::from(block.committed_bytes).next_multiple_of(CHUNK_BYTES as u64);
        if !indexed {
            Some("the index of its writer's blocks lacks it")
        } else if block.is_garbage() {
            Some("nothing uses it, but it was not freed")
        } else if block.writer.is_some() && block.committed.end_bytes() != chunks_end {
            Some("the chunks committed do not fit the committed length")
        } else if block.writer.is_none() && !block.committed.is_empty() {
            Some("it has no writer, but remembers what that committed")
        } else if block.writer.is_none() && block.sealed_bytes.is_none() {
            Some("it has no writer, but is not sealed")
        } else if block
            .sealed_bytes
            .is_some_and(|sealed| sealed < block.committed_bytes)
        {
            Some("more of it is committed than its length")
        } else if block
            .wanted_rules()
            .is_some_and(|rules| rules != block.rules)
        {
            Some("its rules are not those of the files that use it")
        } else {
            None
        }
    }

    /// The number of entries in the index of writers.
    pub fn written_blocks(&self) -> usize {
        self.by_writer.len()
    }

    /// Estimated memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let per_block = size_of::<(BlockId, Block)>() + size_of::<(PlacementRules, u64)>();
        // Nodes of these trees are about two thirds full.
        let tables = self.blocks.len() * per_block
            + self.by_writer.len() * size_of::<(SessionId, BlockId)>();
        (tables + tables / 2) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: PlacementRules = PlacementRules {
        replication: 3,
        durability: Durability::Strict,
        class: None,
    };

    fn piece(block: BlockId) -> Piece {
        Piece {
            file_offset: 0,
            block,
            block_offset: 0,
            length_bytes: 5,
        }
    }

    #[test]
    #[should_panic(expected = "block 0000000000000007 is used or written, but is not in the table")]
    fn the_use_of_an_unknown_block_stops() {
        let mut changes = UseChanges::default();
        changes.add(&piece(BlockId(7)));
        BlockTable::default().account(RULES, &mut changes);
    }

    #[test]
    #[should_panic(expected = "is 0 bytes and cannot change by -5")]
    fn what_was_not_used_cannot_go_out_of_use() {
        let mut table = BlockTable::default();
        let block = table.allocate(SessionId(1), RULES, &mut Effects::default());
        let mut changes = UseChanges::default();
        changes.remove(&piece(block));
        table.account(RULES, &mut changes);
    }
}
