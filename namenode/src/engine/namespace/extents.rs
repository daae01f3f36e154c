//! The extent list of a file, which maps its bytes to blocks.
//!
//! Pieces never overlap and are in file order; neighbours that are contiguous both in the file and
//! in the same block are one piece. Most files are a single piece, which needs no allocation; more
//! pieces form a tree, so that editing stays O(log n) however fragmented a file is.

use std::collections::BTreeMap;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::types::Extent;

use crate::engine::count::Count;

/// Offsets in a block and lengths of pieces are kept in 32 bits.
const _: () = assert!(BLOCK_BYTES_MAX <= u32::MAX as u64);

/// An [`Extent`] in 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub file_offset: u64,
    pub block: BlockId,
    pub block_offset: u32,
    pub length_bytes: u32,
}

impl Piece {
    /// None when it is empty, or exceeds the limits of a block or of a file offset.
    pub fn new(extent: &Extent) -> Option<Self> {
        let block_end = extent.block_offset.checked_add(extent.length_bytes)?;
        extent.file_offset.checked_add(extent.length_bytes)?;
        if extent.length_bytes == 0 || block_end > BLOCK_BYTES_MAX {
            return None;
        }
        Some(Self {
            file_offset: extent.file_offset,
            block: extent.block,
            block_offset: u32::try_from(extent.block_offset).ok()?,
            length_bytes: u32::try_from(extent.length_bytes).ok()?,
        })
    }

    pub fn extent(&self) -> Extent {
        Extent {
            file_offset: self.file_offset,
            length_bytes: self.length_bytes.into(),
            block: self.block,
            block_offset: self.block_offset.into(),
        }
    }

    pub fn file_end(&self) -> u64 {
        self.file_offset + u64::from(self.length_bytes)
    }

    pub fn block_end(&self) -> u32 {
        self.block_offset + self.length_bytes
    }

    /// Whether `next` begins where this ends, both in the file and in the block.
    pub fn continues_in(&self, next: &Self) -> bool {
        self.file_end() == next.file_offset
            && self.block == next.block
            && self.block_end() == next.block_offset
    }

    /// The part below a file offset.
    fn before(&self, offset: u64) -> Option<Self> {
        let kept = offset.checked_sub(self.file_offset)?;
        let length_bytes =
            u32::try_from(kept).map_or(self.length_bytes, |kept| kept.min(self.length_bytes));
        (length_bytes > 0).then_some(Self {
            length_bytes,
            ..*self
        })
    }

    /// The part at and above a file offset.
    fn after(&self, offset: u64) -> Option<Self> {
        if offset <= self.file_offset {
            return Some(*self);
        }
        if offset >= self.file_end() {
            return None;
        }
        // Below the piece's length, which is a u32.
        let skipped = (offset - self.file_offset) as u32;
        Some(Self {
            file_offset: offset,
            block: self.block,
            block_offset: self.block_offset + skipped,
            length_bytes: self.length_bytes - skipped,
        })
    }

    /// The part inside a range of the file.
    pub fn within(&self, from: u64, to: u64) -> Option<Self> {
        self.after(from)?.before(to)
    }
}

/// By how many bytes an edit raises (or lowers) a file's use of each block.
#[derive(Debug, Default)]
pub(super) struct UseChanges(Vec<(BlockId, i64)>);

impl UseChanges {
    pub fn add(&mut self, piece: &Piece) {
        self.push(piece.block, i64::from(piece.length_bytes));
    }

    pub fn remove(&mut self, piece: &Piece) {
        self.push(piece.block, -i64::from(piece.length_bytes));
    }

    fn push(&mut self, block: BlockId, bytes: i64) {
        match self.0.last_mut() {
            Some((last, sum)) if *last == block => *sum += bytes,
            _ => self.0.push((block, bytes)),
        }
    }

    /// The change over all blocks.
    pub fn sum(&self) -> i64 {
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn drain(&mut self) -> impl Iterator<Item = (BlockId, i64)> {
        self.0.drain(..)
    }
}

/// The pieces of one file.
#[derive(Clone, Debug, Default)]
pub(super) enum Extents {
    #[default]
    Empty,
    One(Piece),
    Many(Box<Tree>),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    /// By file offset.
    pieces: BTreeMap<u64, Stretch>,
    allocated_bytes: Count,
}

/// A [`Piece`] without the file offset, which is its key.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    block: BlockId,
    block_offset: u32,
    length_bytes: u32,
}

fn piece((&file_offset, stretch): (&u64, &Stretch)) -> Piece {
    Piece {
        file_offset,
        block: stretch.block,
        block_offset: stretch.block_offset,
        length_bytes: stretch.length_bytes,
    }
}

impl Tree {
    /// Adds a piece to a hole.
    fn put(&mut self, piece: Piece) {
        self.allocated_bytes += u64::from(piece.length_bytes);
        let before = self.pieces.insert(
            piece.file_offset,
            Stretch {
                block: piece.block,
                block_offset: piece.block_offset,
                length_bytes: piece.length_bytes,
            },
        );
        assert!(before.is_none(), "{piece:?} hides {before:?}");
    }

    /// Removes a whole piece.
    fn take(&mut self, piece: &Piece) {
        let before = self.pieces.remove(&piece.file_offset);
        let length_bytes = before.map(|stretch| stretch.length_bytes);
        assert_eq!(
            length_bytes,
            Some(piece.length_bytes),
            "{piece:?} is not in the file"
        );
        self.allocated_bytes -= u64::from(piece.length_bytes);
    }

    fn last_before(&self, offset: u64) -> Option<Piece> {
        self.pieces.range(..offset).next_back().map(piece)
    }

    fn first_from(&self, offset: u64) -> Option<Piece> {
        self.pieces.range(offset..).next().map(piece)
    }

    fn clear(&mut self, from: u64, to: u64, changes: &mut UseChanges) {
        let mut next = self
            .last_before(from)
            .filter(|piece| piece.file_end() > from)
            .or_else(|| self.first_from(from));
        while let Some(piece) = next.filter(|piece| piece.file_offset < to) {
            self.take(&piece);
            if let Some(hidden) = piece.within(from, to) {
                changes.remove(&hidden);
            }
            if let Some(left) = piece.before(from) {
                self.put(left);
            }
            if let Some(right) = piece.after(to) {
                self.put(right);
                break;
            }
            next = self.first_from(from);
        }
    }

    /// Adds a piece to a hole, joined with contiguous neighbours.
    fn insert(&mut self, mut piece: Piece) {
        if let Some(left) = self.last_before(piece.file_offset)
            && left.continues_in(&piece)
        {
            self.take(&left);
            piece = joined(&left, &piece);
        }
        if let Some(right) = self.first_from(piece.file_offset)
            && piece.continues_in(&right)
        {
            self.take(&right);
            piece = joined(&piece, &right);
        }
        self.put(piece);
    }
}

fn joined(left: &Piece, right: &Piece) -> Piece {
    Piece {
        length_bytes: left.length_bytes + right.length_bytes,
        ..*left
    }
}

impl Extents {
    /// Punches a hole at `from..to`.
    pub fn clear(&mut self, from: u64, to: u64, changes: &mut UseChanges) {
        match self {
            Self::Empty => {}
            Self::One(piece) => {
                let Some(hidden) = piece.within(from, to) else {
                    return;
                };
                changes.remove(&hidden);
                let parts = (piece.before(from), piece.after(to));
                *self = match parts {
                    (None, None) => Self::Empty,
                    (Some(piece), None) | (None, Some(piece)) => Self::One(piece),
                    (Some(left), Some(right)) => Self::two(left, right),
                };
            }
            Self::Many(tree) => {
                tree.clear(from, to, changes);
                self.shrink();
            }
        }
    }

    /// Puts a piece in place of everything in its range.
    pub fn write(&mut self, piece: Piece, changes: &mut UseChanges) {
        self.clear(piece.file_offset, piece.file_end(), changes);
        changes.add(&piece);
        match self {
            Self::Empty => *self = Self::One(piece),
            Self::One(only) => {
                *self = if only.continues_in(&piece) {
                    Self::One(joined(only, &piece))
                } else if piece.continues_in(only) {
                    Self::One(joined(&piece, only))
                } else {
                    Self::two(*only, piece)
                }
            }
            Self::Many(tree) => {
                tree.insert(piece);
                self.shrink();
            }
        }
    }

    fn two(one: Piece, other: Piece) -> Self {
        let mut tree = Box::<Tree>::default();
        tree.put(one);
        tree.put(other);
        Self::Many(tree)
    }

    fn shrink(&mut self) {
        if let Self::Many(tree) = self
            && tree.pieces.len() < 2
        {
            *self = tree.first_from(0).map_or(Self::Empty, Self::One);
        }
    }

    /// The pieces that end after a file offset, in file order. The first may start below it.
    pub fn from(&self, offset: u64) -> impl Iterator<Item = Piece> {
        let (one, many) = match self {
            Self::Empty => (None, None),
            Self::One(piece) => (Some(*piece).filter(|piece| piece.file_end() > offset), None),
            Self::Many(tree) => {
                let across = tree
                    .last_before(offset)
                    .filter(|piece| piece.file_end() > offset);
                (across, Some(tree.pieces.range(offset..).map(piece)))
            }
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    /// All pieces, in file order.
    pub fn iter(&self) -> impl Iterator<Item = Piece> {
        self.from(0)
    }

    /// Bytes that pieces cover in a range of the file.
    pub fn covered_bytes(&self, from: u64, to: u64) -> u64 {
        self.from(from)
            .map_while(|piece| piece.within(from, to))
            .map(|piece| u64::from(piece.length_bytes))
            .sum()
    }

    /// Bytes that pieces cover.
    pub fn allocated_bytes(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::One(piece) => piece.length_bytes.into(),
            Self::Many(tree) => tree.allocated_bytes.get(),
        }
    }

    /// Where the last piece ends in the file; 0 without one.
    pub fn end(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::One(piece) => piece.file_end(),
            Self::Many(tree) => tree.last_before(u64::MAX).map_or(0, |last| last.file_end()),
        }
    }

    /// Pieces that are not kept in the inode itself.
    pub fn spilled_pieces(&self) -> usize {
        match self {
            Self::Empty | Self::One(_) => 0,
            Self::Many(tree) => tree.pieces.len(),
        }
    }
}
