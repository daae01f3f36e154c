//! Blocks whose end is lost: all servers that had it lost power before it was synced, or died, and only incomplete
//! replicas are left. What the longest of them has is as precious as any other block: other files that use the block
//! may have synced it. So these replicas are sealed, as all replicas are, which shows how much they have, and after
//! some time the longest one counts as the whole block, and is repaired and watched. A replica that has more, and
//! comes back later, makes the block longer again. A corrupt one does not, but it stays meanwhile, and readers are
//! offered it after the others.
//!
//! After a restart of the namenode, all committed bytes are required again, until the same time has passed.

use std::collections::VecDeque;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::ReplicaReport;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::table::{NodeIx, ReplicaState, Slot};
use super::{Cluster, Happening};

/// A sealed replica that is incomplete, as its datanode reported it.
#[derive(Clone, Copy, Debug)]
struct Incomplete {
    node: NodeIx,
    length_bytes: u64,
}

/// A block whose end is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortenedBlock {
    /// The block.
    pub block: BlockId,
    /// Bytes that are left.
    pub left_bytes: u32,
    /// Bytes that are committed.
    pub committed_bytes: u32,
}

/// Lost blocks with incomplete replicas, and blocks that were shortened to what is left of them.
#[derive(Debug, Default)]
pub(super) struct Salvage {
    incomplete: FxHashMap<Slot, SmallVec<[Incomplete; 3]>>,
    /// The committed bytes of blocks whose end is lost.
    shortened: FxHashMap<Slot, u32>,
    /// Lost blocks with incomplete replicas: (when to look, block).
    pub(super) waiting: VecDeque<(u64, BlockId)>,
    queued: FxHashSet<Slot>,
}

impl Salvage {
    pub(super) fn forget(&mut self, slot: Slot) {
        self.incomplete.remove(&slot);
        self.shortened.remove(&slot);
        self.queued.remove(&slot);
    }

    /// The committed bytes of a block whose end is lost; `None` for other blocks.
    pub(super) fn committed_bytes(&self, slot: Slot) -> Option<u32> {
        self.shortened.get(&slot).copied()
    }

    /// Notes the length of a replica that a datanode reported and that was judged to have this state.
    pub(super) fn note(
        &mut self,
        slot: Slot,
        node: NodeIx,
        length_bytes: u64,
        state: ReplicaState,
    ) {
        if state == ReplicaState::Short {
            let replicas = self.incomplete.entry(slot).or_default();
            replicas.retain(|replica| replica.node != node);
            replicas.push(Incomplete { node, length_bytes });
        } else if let Some(replicas) = self.incomplete.get_mut(&slot) {
            replicas.retain(|replica| replica.node != node);
            if replicas.is_empty() {
                self.incomplete.remove(&slot);
            }
        }
    }
}

impl Cluster {
    /// Blocks whose end is lost, in no order.
    pub fn shortened(&self) -> impl Iterator<Item = ShortenedBlock> {
        self.salvage
            .shortened
            .iter()
            .map(|(&slot, &committed_bytes)| {
                let block = self.table.known(slot);
                ShortenedBlock {
                    block: block.id,
                    left_bytes: block.required_bytes,
                    committed_bytes,
                }
            })
    }

    /// Schedules another look at a lost block that has incomplete replicas.
    pub(super) fn await_salvage(&mut self, slot: Slot) {
        if !self.salvage.incomplete.contains_key(&slot) {
            return;
        }
        if self.salvage.queued.insert(slot) {
            let due_ms = self.now_ms + self.options.salvage_delay_ms;
            let block = self.table.known(slot).id;
            self.salvage.waiting.push_back((due_ms, block));
            let (queued, waiting) = (self.salvage.queued.len(), self.salvage.waiting.len());
            assert!(
                queued <= waiting,
                "{queued} lost blocks are to be looked at, {waiting} at some time"
            );
        }
    }

    /// Shortens lost blocks that have waited long enough to what is left of them.
    pub(super) fn salvage_lost(&mut self) {
        for _ in 0..self.options.work_per_tick {
            match self.salvage.waiting.front() {
                Some(&(due_ms, _)) if due_ms <= self.now_ms => {}
                _ => break,
            }
            let Some((_, block)) = self.salvage.waiting.pop_front() else {
                break;
            };
            let Some(slot) = self.table.slot(block) else {
                continue;
            };
            if self.salvage.queued.remove(&slot) {
                self.shorten_lost(slot);
            }
        }
    }

    fn shorten_lost(&mut self, slot: Slot) {
        let block = self.table.known(slot);
        let tally = self.tally(slot, block);
        let is_incomplete = block.sealed && tally.is_incomplete();
        let is_usable = |index: usize| self.table.home(block.replicas[index].storage).usable;
        let is_undecided = (0..block.replicas.len()).any(|index| {
            block.replicas[index].state == ReplicaState::Unconfirmed && is_usable(index)
        });
        let here = |replica: &Incomplete| {
            let index = self.table.replica_on(slot, replica.node)?;
            let is_short = block.replicas[index].state == ReplicaState::Short;
            (is_usable(index) && is_short).then_some((index, replica.length_bytes))
        };
        let incomplete = self.salvage.incomplete.get(&slot);
        let found: SmallVec<[_; 3]> = incomplete.into_iter().flatten().filter_map(here).collect();
        let longest = found.iter().map(|&(_, bytes)| bytes).max();
        if !is_incomplete {
            return;
        }
        let Some(longest) = longest.filter(|&bytes| bytes > 0 && !is_undecided) else {
            return self.await_salvage(slot);
        };
        let (id, required_bytes) = (block.id, block.required_bytes);
        let shortened = self.salvage.committed_bytes(slot);
        let committed_bytes = shortened.unwrap_or(required_bytes);
        let longest_bytes = u32::try_from(longest).unwrap_or(u32::MAX);
        let left_bytes = longest_bytes.min(committed_bytes);
        self.require_only(slot, left_bytes, committed_bytes);
        for (index, bytes) in found {
            if bytes >= left_bytes.into() {
                let storage = self.table.known(slot).replicas[index].storage;
                let node = self.table.home(storage).node;
                // One that was commanded to be removed may be gone already.
                let state = match self.nodes[node as usize].deletes.is_commanded(id) {
                    true => ReplicaState::Deleting,
                    false => ReplicaState::Sealed,
                };
                self.table.set_state(slot, index, state);
            }
        }
        self.happenings.note(Happening::Shortened {
            block: id,
            left_bytes,
            committed_bytes,
        });
        self.settle(slot);
    }

    /// Whether corrupt replicas of a block stay, because its end is lost and they may have some of it. They make way
    /// when all that is left of the block is on one server, and repair finds no other.
    pub(super) fn keeps_corrupt(&self, slot: Slot) -> bool {
        let is_shortened = self.salvage.committed_bytes(slot).is_some();
        let is_safe = || {
            let health = self.table.known(slot).health;
            !health.under_replicated || self.confirmed(slot).len() > 1
        };
        is_shortened && is_safe()
    }

    /// Makes a block whose end is lost longer again if a reported replica has more of it than all
    /// others.
    pub(super) fn lengthen(&mut self, slot: Slot, node: NodeIx, report: &ReplicaReport) {
        let Some(committed_bytes) = self.salvage.committed_bytes(slot) else {
            return;
        };
        let block = self.table.known(slot);
        let known = self.table.replica_on(slot, node);
        let is_corrupt =
            known.is_some_and(|index| block.replicas[index].state == ReplicaState::Corrupt);
        if is_corrupt || self.nodes[node as usize].deletes.is_commanded(block.id) {
            return;
        }
        let reported = u32::try_from(report.length_bytes).unwrap_or(u32::MAX);
        let left_bytes = reported.min(committed_bytes);
        if left_bytes <= block.required_bytes {
            return;
        }
        let (length_bytes, replicas) = (block.required_bytes.into(), block.replicas.clone());
        for (index, replica) in replicas.iter().enumerate() {
            let state = match replica.state {
                ReplicaState::Sealed | ReplicaState::Excess => ReplicaState::Short,
                ReplicaState::Open => ReplicaState::Unconfirmed,
                _ => continue,
            };
            let node = self.table.home(replica.storage).node;
            self.nodes[node as usize].deletes.remove(report.block);
            self.salvage.note(slot, node, length_bytes, state);
            self.table.set_state(slot, index, state);
        }
        self.cancel_repair_of(slot);
        self.require_only(slot, left_bytes, committed_bytes);
    }

    fn require_only(&mut self, slot: Slot, left_bytes: u32, committed_bytes: u32) {
        assert!(
            left_bytes <= committed_bytes,
            "{left_bytes} bytes are left of {committed_bytes} in slot {slot}"
        );
        self.table.known_mut(slot).required_bytes = left_bytes;
        if left_bytes < committed_bytes {
            self.salvage.shortened.insert(slot, committed_bytes);
        } else {
            self.salvage.shortened.remove(&slot);
        }
    }
}
