//! One datanode as the engine knows it.

use std::collections::VecDeque;

use harvestfs_placement::Room;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::ServerDescription;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::budget::Budget;
use super::doubts::Doubts;
use super::owners::QuotaOrder;
use super::table::{Slot, StorageIx};

/// Times that a delete command is sent before the replica is left to the next full report.
const DELETE_ATTEMPTS_MAX: u8 = 3;
/// Stale entries that a list may hold however few others it has.
const STALE_MAX: usize = 1_024;

/// The liveness of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// Known from the journal; not heard from since the namenode started.
    Unheard,
    /// Registered and sending heartbeats.
    Alive,
    /// Silent for too long; what it held counts as lost. It must register again.
    Dead {
        /// When it was declared dead.
        since_ms: u64,
    },
}

/// The combined space of the usable volumes of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Space {
    /// Blocks that fit below their quotas.
    pub(super) room: Room,
    /// Number of usable volumes.
    pub(super) volumes: u16,
    /// Whether a full report of each has arrived since the node registered.
    pub(super) inventoried: bool,
}

impl Space {
    /// The space of a node without usable volumes.
    pub(super) fn none() -> Self {
        Self {
            room: Room::default(),
            volumes: 0,
            inventoried: true,
        }
    }
}

/// A datanode. Its fields are in the order in which repair reads them, so that repair waits for few
/// cache lines: the first line has identity and liveness; then come the repairs that it served, those
/// that it received, and those that it is to receive, each in one line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Node {
    pub(super) id: NodeId,
    /// Repairs that it serves as a source now.
    pub(super) outgoing: u32,
    pub(super) life: Life,
    /// Silent for a while, disconnected, or reported as unresponsive by a client.
    pub(super) stale: bool,
    pub(super) busy: bool,
    /// Is in the list of nodes with new commands.
    pub(super) commanded: bool,
    /// Blocks whose pipeline it is in and that it has not reported yet.
    pub(super) awaited: u32,
    /// Its volumes, as last registered.
    pub(super) storages: SmallVec<[StorageIx; 2]>,
    /// Repairs that it served, in a sliding window.
    pub(super) as_source: Budget,
    /// Repairs that it received, in a sliding window.
    pub(super) as_target: Budget,
    /// Blocks that it is to receive or receives now.
    pub(super) incoming: SmallVec<[Slot; 4]>,
    /// Blocks that it is to receive and has been sent no command for yet, in order: no more than it may
    /// receive at a time.
    pub(super) replicate: SmallVec<[Slot; 4]>,
    /// Its space, as last counted.
    pub(super) space: Space,
    /// When its exhausted repair budget has room again.
    pub(super) reopens_ms: Option<u64>,
    /// When it was last heard from; at first, when it was added.
    pub(super) heard_ms: u64,
    pub(super) heard: bool,
    pub(super) active_streams: u32,
    /// Bytes of replicas that it may still be commanded to remove, until its next heartbeat.
    pub(super) removable_bytes: u64,
    pub(super) seal: VecDeque<BlockId>,
    pub(super) report: SmallVec<[StorageIx; 2]>,
    /// Quotas that its owner has set and that it has not confirmed.
    pub(super) quotas: SmallVec<[QuotaOrder; 1]>,
    pub(super) server: Box<ServerDescription>,
    pub(super) deletes: Box<Deletes>,
    pub(super) doubts: Box<Doubts>,
}

impl Node {
    pub(super) fn new(
        id: NodeId,
        server: ServerDescription,
        now_ms: u64,
        repair_window_ms: u64,
    ) -> Self {
        Self {
            id,
            server: Box::new(server),
            storages: SmallVec::new(),
            life: Life::Unheard,
            heard_ms: now_ms,
            heard: false,
            stale: true,
            busy: false,
            active_streams: 0,
            removable_bytes: 0,
            awaited: 0,
            as_source: Budget::new(repair_window_ms),
            as_target: Budget::new(repair_window_ms),
            outgoing: 0,
            incoming: SmallVec::new(),
            replicate: SmallVec::new(),
            space: Space::none(),
            seal: VecDeque::new(),
            report: SmallVec::new(),
            deletes: Box::default(),
            doubts: Box::default(),
            quotas: SmallVec::new(),
            commanded: false,
            reopens_ms: None,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.life == Life::Alive
    }

    /// Alive, heard from recently, and not needed by its primary tenant.
    pub(super) fn is_available(&self) -> bool {
        self.is_alive() && !self.stale && !self.busy
    }
}

/// Whether most entries of a list are stale, so that a pass over all of it pays off. A namenode that follows another
/// one works off no list, so whatever it learns to be done has to leave the lists in this way.
pub(super) fn is_mostly_stale(listed: usize, counting_max: usize) -> bool {
    listed > 4 * counting_max + STALE_MAX
}

/// Replicas that a node has to remove: excess or bad ones, and those of blocks that do not exist. Each
/// command is repeated a few times, until the node confirms the removal.
#[derive(Debug, Default)]
pub(super) struct Deletes {
    /// Removals that are not confirmed yet, with the approximate size of each in bytes. Blocks are
    /// shorter than 4 GiB.
    pending: FxHashMap<BlockId, u32>,
    /// Commands to be sent; those no longer pending are skipped.
    queue: VecDeque<BlockId>,
    /// Commands that were sent, in the order of the next attempt.
    sent: VecDeque<Sent>,
    /// Blocks in the table whose replicas here the node was commanded to remove, as long as it may still do so, or
    /// may have done so without this being known. Includes those that are left to the next full report.
    commanded: FxHashSet<BlockId>,
}

#[derive(Debug)]
struct Sent {
    retry_ms: u64,
    block: BlockId,
    attempts: u8,
}

/// The next step in a node's list of removals.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextDelete {
    /// A command to send, after this many earlier attempts.
    Send {
        block: BlockId,
        bytes: u32,
        attempts: u8,
    },
    /// A command was sent too often; the replica is left to the next full report.
    GiveUp,
}

impl Deletes {
    pub(super) fn add(&mut self, block: BlockId, bytes: u32) {
        if self.pending.insert(block, bytes).is_none() {
            self.queue.push_back(block);
        }
    }

    /// Adds a removal before all others: something waits for the space, or to put another replica on
    /// that node.
    pub(super) fn add_first(&mut self, block: BlockId, bytes: u32) {
        if self.pending.insert(block, bytes).is_none() {
            self.queue.push_front(block);
        }
    }

    /// Takes a replica off the list: it is gone, or is to stay. Returns whether it was on the list.
    pub(super) fn remove(&mut self, block: BlockId) -> bool {
        let was_pending = self.pending.remove(&block).is_some();
        if was_pending && is_mostly_stale(self.queued(), self.pending.len()) {
            let pending = &self.pending;
            let mut seen = FxHashSet::default();
            self.queue
                .retain(|block| pending.contains_key(block) && seen.insert(*block));
            seen.clear();
            self.sent
                .retain(|sent| pending.contains_key(&sent.block) && seen.insert(sent.block));
        }
        was_pending
    }

    /// Drops everything that is to be sent. Commands that were sent may have been carried out.
    pub(super) fn clear(&mut self) {
        *self = Self {
            commanded: std::mem::take(&mut self.commanded),
            ..Self::default()
        };
    }

    /// Notes that the command to remove a replica of a block in the table was sent.
    pub(super) fn note_command(&mut self, block: BlockId) {
        self.commanded.insert(block);
    }

    /// Whether a command to remove the replica may still be carried out, or may have been without this
    /// being known.
    pub(super) fn is_commanded(&self, block: BlockId) -> bool {
        self.commanded.contains(&block)
    }

    /// Forgets earlier commands to remove the node's replica of a block: it is not in the table any more, or is known
    /// to have outlived the command.
    pub(super) fn forget_command(&mut self, block: BlockId) {
        self.commanded.remove(&block);
    }

    /// The blocks in the table whose replicas it was commanded to remove, in order.
    pub(super) fn commanded(&self) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = self.commanded.iter().copied().collect();
        blocks.sort_unstable();
        blocks
    }

    pub(super) fn pending(&self) -> impl Iterator<Item = (BlockId, u32)> {
        self.pending.iter().map(|(&block, &bytes)| (block, bytes))
    }

    /// The maximum number of entries that `next` may return now.
    pub(super) fn queued(&self) -> usize {
        self.queue.len() + self.sent.len()
    }

    pub(super) fn next(&mut self, now_ms: u64) -> Option<NextDelete> {
        while let Some(first) = self.sent.front() {
            if first.retry_ms > now_ms {
                break;
            }
            let Sent {
                block, attempts, ..
            } = self.sent.pop_front()?;
            let Some(&bytes) = self.pending.get(&block) else {
                continue;
            };
            if attempts >= DELETE_ATTEMPTS_MAX {
                self.pending.remove(&block);
                return Some(NextDelete::GiveUp);
            }
            return Some(NextDelete::Send {
                block,
                bytes,
                attempts,
            });
        }
        while let Some(block) = self.queue.pop_front() {
            if let Some(&bytes) = self.pending.get(&block) {
                return Some(NextDelete::Send {
                    block,
                    bytes,
                    attempts: 0,
                });
            }
        }
        None
    }

    /// Schedules the next attempt for `retry_ms`, unless the removal is confirmed before.
    pub(super) fn again(&mut self, block: BlockId, attempts: u8, retry_ms: u64) {
        assert!(
            attempts <= DELETE_ATTEMPTS_MAX,
            "the command to remove a replica of block {block} was sent {attempts} times"
        );
        assert!(
            self.sent
                .back()
                .is_none_or(|last| last.retry_ms <= retry_ms),
            "block {block} comes again at {retry_ms} ms, before {:?}",
            self.sent.back()
        );
        self.sent.push_back(Sent {
            retry_ms,
            block,
            attempts,
        });
    }

    /// Memory of the tables in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.pending.capacity() * (size_of::<(BlockId, u32)>() + 2)
            + self.queue.capacity() * size_of::<BlockId>()
            + self.sent.capacity() * size_of::<Sent>()
            + self.commanded.capacity() * (size_of::<BlockId>() + 2)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn what_is_gone_does_not_stay_in_the_lists() {
        let mut deletes = Deletes::default();
        for block in (0..100_000).map(BlockId) {
            deletes.add(block, 1);
            if !block.0.is_multiple_of(100) {
                assert!(deletes.remove(block));
            }
        }
        assert!(deletes.queued() <= 4 * 1_000 + STALE_MAX + 1);
        let mut left = Vec::new();
        while let Some(NextDelete::Send { block, .. }) = deletes.next(0) {
            left.push(block.0);
        }
        let expected: Vec<u64> = (0..100_000).step_by(100).collect();
        assert_eq!(left, expected);
    }

    #[test]
    fn what_repair_looks_at_lies_in_four_cache_lines() {
        assert!(offset_of!(Node, as_source) == 64 && offset_of!(Node, as_target) == 128);
        assert_eq!(offset_of!(Node, incoming), 192);
        assert!(offset_of!(Node, space) + size_of::<Space>() <= 256);
    }
}
