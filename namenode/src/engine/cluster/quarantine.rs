//! Replicas of blocks that the namenode does not know and cannot assume to be garbage: their numbers
//! were not allocated on its timeline. A namenode that knew more may have allocated them, so they are
//! kept for a while before they are removed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::types::NodeInfo;
use smallvec::SmallVec;

use super::Cluster;
use super::table::NodeIx;

/// Which blocks were allocated on this timeline.
#[derive(Debug, Default)]
pub(super) struct Allocated {
    /// The last number of each range, by the first.
    ranges: BTreeMap<u64, u64>,
    /// Those of them that may have data which was not seen on this timeline.
    unsettled: BTreeSet<BlockId>,
}

impl Allocated {
    /// Whether a block was allocated, and is not unsettled; if it does not exist any more, it was
    /// freed.
    pub(super) fn contains(&self, block: BlockId) -> bool {
        if self.unsettled.contains(&block) {
            return false;
        }
        let below = self.ranges.range(..=block.0).next_back();
        below.is_some_and(|(_, &last)| block.0 <= last)
    }

    /// Notes that a block was allocated; so were all between it and the range below it.
    pub(super) fn add(&mut self, block: BlockId) {
        match self.ranges.range_mut(..=block.0).next_back() {
            Some((_, last)) => *last = block.0.max(*last),
            None => {
                self.ranges.insert(block.0, block.0);
            }
        }
    }
}

/// Blocks in quarantine.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    blocks: BTreeMap<BlockId, Held>,
    /// When the quarantine of each block ends, in order.
    due: VecDeque<(u64, BlockId)>,
}

impl Quarantine {
    fn assert_lists_match(&self) {
        let (blocks, due) = (self.blocks.len(), self.due.len());
        assert_eq!(blocks, due, "in quarantine, by block and by its end");
    }
}

#[derive(Debug)]
struct Held {
    until_ms: u64,
    replicas: SmallVec<[(NodeIx, u32); 3]>,
}

/// A block in quarantine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// The block.
    pub block: BlockId,
    /// Length of the longest replica, in whole chunks.
    pub length_bytes: u64,
    /// Nodes that have a replica.
    pub nodes: Vec<NodeInfo>,
    /// How much longer the replicas are kept, in milliseconds.
    pub kept_ms: u64,
}

impl Cluster {
    /// Sets which blocks were allocated on the timeline so far. Blocks allocated later lie beyond the
    /// last range. `unsettled` are those of them that other timelines may have written to.
    pub fn set_allocated(
        &mut self,
        ranges: impl Iterator<Item = RangeInclusive<BlockId>>,
        unsettled: impl Iterator<Item = BlockId>,
    ) {
        self.allocated.unsettled = unsettled.collect();
        let bounds = ranges.map(|range| (range.start().0, range.end().0));
        self.allocated.ranges = bounds.collect();
    }

    /// Sets whether the namenode is recovering. While it is, nothing is repaired, moved or removed, and
    /// no commands are given.
    pub fn set_recovering(&mut self, recovering: bool) {
        self.recovering = recovering;
    }

    /// Notes that a node has a replica of an unknown block.
    pub(super) fn have_unknown(&mut self, node: NodeIx, block: BlockId, bytes: u32) {
        if self.allocated.contains(block) {
            // It was freed while the node was away.
            self.nodes[node as usize].deletes.add(block, bytes);
            return;
        }
        let until_ms = self.now_ms.saturating_add(self.options.quarantine_ms);
        let Quarantine { blocks, due } = &mut self.quarantine;
        let held = blocks.entry(block).or_insert_with(|| {
            due.push_back((until_ms, block));
            Held {
                until_ms,
                replicas: SmallVec::new(),
            }
        });
        match held.replicas.iter_mut().find(|(other, _)| *other == node) {
            Some((_, known_bytes)) => *known_bytes = bytes.max(*known_bytes),
            None => held.replicas.push((node, bytes)),
        }
        self.quarantine.assert_lists_match();
    }

    /// Releases a block that is known now: a namenode that follows another one may learn of replicas
    /// before it learns of their block.
    pub(super) fn leave_quarantine(&mut self, block: BlockId) {
        let Quarantine { blocks, due } = &mut self.quarantine;
        if blocks.remove(&block).is_some() {
            due.retain(|&(_, other)| other != block);
        }
        self.quarantine.assert_lists_match();
    }

    /// Notes that a node has no replica of an unknown block any more.
    pub(super) fn unknown_removed(&mut self, node: NodeIx, block: BlockId) {
        if let Some(held) = self.quarantine.blocks.get_mut(&block) {
            held.replicas.retain(|(other, _)| *other != node);
        }
    }

    /// Forgets the replicas of unknown blocks on a node that died, or that reports what it has from
    /// scratch.
    pub(super) fn forget_unknown_on(&mut self, node: NodeIx) {
        for held in self.quarantine.blocks.values_mut() {
            held.replicas.retain(|(other, _)| *other != node);
        }
    }

    /// Removes replicas that were kept for long enough, of a bounded number of blocks.
    pub(super) fn end_quarantine(&mut self) {
        for _ in 0..self.options.work_per_tick {
            let Some(&(until_ms, block)) = self.quarantine.due.front() else {
                break;
            };
            if until_ms > self.now_ms {
                break;
            }
            self.quarantine.due.pop_front();
            let Some(held) = self.quarantine.blocks.remove(&block) else {
                panic!("the quarantine of block {block} ends, which is not in it");
            };
            for (node, bytes) in held.replicas {
                self.nodes[node as usize].deletes.add(block, bytes);
            }
            self.quarantine.assert_lists_match();
        }
    }

    /// The number of blocks in quarantine with at least one replica, and the bytes that these replicas
    /// take; O(blocks in quarantine).
    pub(super) fn quarantined_sums(&self) -> (u64, u64) {
        let held = self.quarantine.blocks.values();
        held.filter(|held| !held.replicas.is_empty())
            .fold((0, 0), |(blocks, bytes), held| {
                let replicas = held.replicas.iter().map(|&(_, bytes)| u64::from(bytes));
                (blocks + 1, bytes + replicas.sum::<u64>())
            })
    }

    /// The first blocks in quarantine after `after`, in ascending order.
    #[must_use]
    pub fn quarantined(&self, now_ms: u64, after: BlockId, blocks_max: usize) -> Vec<Quarantined> {
        let behind = (std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded);
        let held = self.quarantine.blocks.range(behind);
        held.filter_map(|(&block, held)| {
            let lengths = held.replicas.iter().map(|&(_, bytes)| u64::from(bytes));
            let nodes = held.replicas.iter().filter_map(|&(node, _)| {
                let node = &self.nodes[node as usize];
                self.node_info(node.id)
            });
            Some(Quarantined {
                block,
                length_bytes: lengths.max()?,
                nodes: nodes.collect(),
                kept_ms: held.until_ms.saturating_sub(now_ms),
            })
        })
        .take(blocks_max)
        .collect()
    }
}
