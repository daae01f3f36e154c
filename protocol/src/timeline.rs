//! Which namenode sent a message, and how much it had seen by then.
//!
//! A namenode begins a new [`Epoch`] each time it starts, and when an operator makes it continue without the records
//! that it lacks. Its timeline is the sequence of epochs in its journal. A [`Position`] names a record of a timeline.
//! A namenode that was restored from a copy, or that runs twice, has a timeline that lacks what others have seen;
//! `docs/adr/0017-timeline-of-the-namenode.md` describes the consequences.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::BlockId;

/// Base-2 logarithm of the number of blocks that one epoch can allocate.
const BLOCKS_BITS: u32 = 22;

/// One run of a namenode.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch {
    /// Greater than the number of each earlier epoch on its timeline, and at least the seconds between 2020 and its
    /// beginning: epochs that begin at different times on different timelines have different numbers.
    pub number: u32,
    /// Random: distinguishes epochs of different timelines that have the same number.
    pub id: u64,
}

impl Epoch {
    /// The largest number: the ids derived from it fit into 53 bits, which JavaScript represents exactly.
    pub const NUMBER_MAX: u32 = (1 << 31) - 1;
    /// Most blocks that one epoch can allocate.
    pub const BLOCKS_MAX: u64 = (1 << BLOCKS_BITS) - 1;

    /// A lower bound: all ids of blocks and sessions of this epoch are greater than this, and no id of an epoch with
    /// a smaller number is.
    #[must_use]
    pub fn ids_after(self) -> u64 {
        u64::from(self.number) << BLOCKS_BITS
    }

    /// Returns the number of the epoch that allocated a block; 0 for blocks from before epochs existed.
    #[must_use]
    pub fn number_of(block: BlockId) -> u32 {
        // Numbers have 31 bits. A larger one from a peer belongs to no epoch, and counts as later than all.
        u32::try_from(block.0 >> BLOCKS_BITS).unwrap_or(u32::MAX)
    }

    /// Returns the last block that it can allocate.
    #[must_use]
    pub fn last_block(self) -> BlockId {
        BlockId(self.ids_after() + Self::BLOCKS_MAX)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:016x}", self.number, self.id)
    }
}

/// A record of the journal on a timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The epoch in which it was written.
    pub epoch: Epoch,
    /// Its number.
    pub record: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "record {} of epoch {}", self.record, self.epoch)
    }
}

/// The authority of a namenode's commands to a datanode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// Its epoch, and its last record on stable storage.
    pub position: Position,
    /// Whether it is in recovery, and so has no authority until an operator decides.
    pub recovering: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_share_no_ids_and_leave_room_for_javascript() {
        let epoch = |number| Epoch { number, id: 7 };
        assert!(epoch(5).last_block().0 < epoch(6).ids_after() + 1);
        assert!(epoch(5).last_block().0 > epoch(5).ids_after());
        assert_eq!(Epoch::number_of(epoch(5).last_block()), 5);
        assert_eq!(Epoch::number_of(BlockId(epoch(5).ids_after() + 1)), 5);
        assert_eq!(Epoch::number_of(BlockId(7)), 0);
        assert!(epoch(Epoch::NUMBER_MAX).last_block().0 < 1 << 53);
    }
}
