//! Events for observers. Nothing is decided by them.

use std::collections::VecDeque;

use harvestfs_protocol::ids::{BlockId, NodeId};

use super::Cluster;

/// Maximum number of events that wait to be taken; beyond it, the oldest are dropped.
const WAITING_MAX: usize = 256;

/// An event that an operator may want to know about immediately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A server came back without the volumes that it had.
    Reimaged {
        /// The server.
        node: NodeId,
        /// Replicas that it held.
        replicas: u64,
    },
    /// A datanode was silent for too long: what it holds counts as lost.
    Died {
        /// The datanode.
        node: NodeId,
    },
    /// So many datanodes fell silent together that repair waits.
    RepairHeld,
    /// Repair resumes after that.
    RepairReleased,
    /// A repair or a move ended.
    RepairEnded {
        /// The block.
        block: BlockId,
        /// The datanode that it was to be copied from.
        source: NodeId,
        /// The datanode that it was to be copied to.
        target: NodeId,
        /// The block had enough replicas, but not in the right places.
        is_move: bool,
        /// How it ended.
        end: RepairEnd,
    },
    /// No replica of a block is known any more.
    Lost {
        /// The block.
        block: BlockId,
    },
    /// The end of a lost block is given up, and the rest of it is kept.
    Shortened {
        /// The block.
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
    /// The target has the replica.
    Done,
    /// It failed or took too long; the block waits again.
    Failed,
}

/// Events that have not been taken yet.
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
    /// Takes the events since the last call, oldest first; if there were more than 256, the last 256.
    pub fn take_happenings(&mut self) -> impl Iterator<Item = Happening> {
        self.happenings.0.drain(..)
    }
}
