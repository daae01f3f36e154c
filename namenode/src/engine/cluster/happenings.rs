//! What happens, for observers. Nothing is decided by it.

use std::collections::VecDeque;

use harvestfs_protocol::ids::{BlockId, NodeId};

use super::Cluster;

/// Happenings that wait to be taken; the oldest are given up.
const WAITING_MAX: usize = 256;

/// Something that an operator may want to know at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A server came back without the volumes that it had.
    Reimaged {
        /// Which.
        node: NodeId,
        /// Replicas that it held.
        replicas: u64,
    },
    /// A datanode was silent for too long: what it holds counts as lost.
    Died {
        /// Which.
        node: NodeId,
    },
    /// So many datanodes fell silent together that repair waits.
    RepairHeld,
    /// Repair goes on after that.
    RepairReleased,
    /// A repair or a move came to an end.
    RepairEnded {
        /// The block.
        block: BlockId,
        /// The datanode that it was to be copied from.
        source: NodeId,
        /// The datanode that it was to be copied to.
        target: NodeId,
        /// The block had enough replicas, but not in the right places.
        is_move: bool,
        /// How.
        end: RepairEnd,
    },
    /// No replica of a block is known any more.
    Lost {
        /// Which.
        block: BlockId,
    },
    /// The end of a lost block is given up, and what is left of it kept.
    Shortened {
        /// Which.
        block: BlockId,
        /// Bytes that are left.
        left_bytes: u32,
        /// Bytes that were committed.
        committed_bytes: u32,
    },
}

/// How a repair ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepairEnd {
    /// The replica is there.
    Done,
    /// It failed or took too long; the block waits again.
    Failed,
}

/// What happened and was not taken yet.
#[derive(Debug, Default)]
pub(super) struct Happenings(VecDeque<Happening>);

impl Happenings {
    pub(super) fn note(&mut self, happening: Happening) {
        if let Happening::RepairEnded { source, target, .. } = happening {
            assert_ne!(source, target, "a node copied a block to itself");
        }
        if self.0.len() == WAITING_MAX {
            self.0.pop_front();
        }
        self.0.push_back(happening);
        let waiting = self.0.len();
        assert!(waiting <= WAITING_MAX, "{waiting} happenings wait");
    }
}

impl Cluster {
    /// What happened since the last call, oldest first; of a flood, the last 256.
    pub fn take_happenings(&mut self) -> impl Iterator<Item = Happening> {
        self.happenings.0.drain(..)
    }
}
