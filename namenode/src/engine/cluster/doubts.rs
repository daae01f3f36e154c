//! Replicas that clients could not use. A client may be wrong, or lie, so its complaint alone removes
//! nothing: the datanode is asked to verify the replica, no more often than its disks can bear, and its
//! own report counts.

use std::collections::VecDeque;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::NodeCommand;

use super::Cluster;
use super::table::NodeIx;

/// Replicas that one datanode is asked to verify within [`INTERVAL_MS`]. Further complaints are
/// dropped: a client that cannot use a replica complains again when it next reads it, and each datanode
/// reads everything once in a while.
const ASKED_MAX: usize = 32;
/// A replica is not verified twice within this time.
const INTERVAL_MS: u64 = 10 * 60 * 1000;
/// Once a client has complained that a datanode does not answer, further complaints of this kind about
/// it are ignored for this time.
const SILENCE_INTERVAL_MS: u64 = 60 * 1000;

/// Complaints of clients about one datanode.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Blocks to be verified, in order, each once. They stay while the datanode gets no commands, and
    /// so may be older than what is in `asked`.
    waiting: VecDeque<BlockId>,
    /// Complaints that were accepted within the interval, and when, oldest first.
    asked: VecDeque<(u64, BlockId)>,
    /// Until when complaints that it does not answer are ignored.
    answers_until_ms: u64,
}

impl Doubts {
    /// Whether a client could not use a replica recently. Its datanode may not have verified it yet.
    pub(super) fn is_doubted(&self, now_ms: u64, block: BlockId) -> bool {
        let mut asked = self.asked.iter();
        asked.any(|&(asked_ms, asked)| asked == block && now_ms < asked_ms + INTERVAL_MS)
    }

    fn add(&mut self, now_ms: u64, block: BlockId) {
        while let Some(&(asked_ms, _)) = self.asked.front()
            && asked_ms + INTERVAL_MS <= now_ms
        {
            self.asked.pop_front();
        }
        let is_asked = self.asked.iter().any(|&(_, asked)| asked == block);
        let is_full = self.asked.len() >= ASKED_MAX || self.waiting.len() >= ASKED_MAX;
        if !is_asked && !is_full && !self.waiting.contains(&block) {
            assert!(
                self.asked.back().is_none_or(|last| last.0 <= now_ms),
                "block {block} is doubted at {now_ms} ms, before {:?}",
                self.asked.back()
            );
            self.asked.push_back((now_ms, block));
            self.waiting.push_back(block);
            assert!(
                self.asked.len() <= ASKED_MAX && self.waiting.len() <= ASKED_MAX,
                "asked too often: {:?}, of which wait {:?}",
                self.asked,
                self.waiting
            );
        }
    }
}

impl Cluster {
    /// Notes the complaint of a client that a replica is damaged, too short or missing.
    pub(super) fn doubt_replica(&mut self, node: NodeIx, block: BlockId) {
        let is_known = self
            .table
            .slot(block)
            .and_then(|slot| self.table.replica_on(slot, node));
        if is_known.is_some() {
            let now_ms = self.now_ms;
            self.nodes[node as usize].doubts.add(now_ms, block);
        }
    }

    /// Notes the complaint of a client that a datanode does not answer: it counts as stale until its
    /// next heartbeat.
    pub(super) fn doubt_node(&mut self, node: NodeIx) {
        let now_ms = self.now_ms;
        let it = &mut self.nodes[node as usize];
        if it.doubts.answers_until_ms <= now_ms {
            it.doubts.answers_until_ms = now_ms + SILENCE_INTERVAL_MS;
            it.stale = true;
            self.refresh_node(node);
        }
    }

    pub(super) fn next_verification(&mut self, node: NodeIx) -> Option<NodeCommand> {
        while let Some(block) = self.nodes[node as usize].doubts.waiting.pop_front() {
            let slot = self.table.slot(block);
            let index = slot.and_then(|slot| self.table.replica_on(slot, node));
            if let Some((slot, index)) = slot.zip(index)
                && let Some(it) = self.table.get(slot)
                && !it.replicas[index].state.is_bad()
            {
                let storage = it.replicas[index].storage;
                return Some(NodeCommand::Verify {
                    storage: self.table.storages[storage as usize].id(),
                    block,
                });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// While the namenode recovers, datanodes get no commands, and clients continue to complain.
    #[test]
    fn what_is_never_asked_does_not_pile_up() {
        let mut doubts = Doubts::default();
        for round in 0..10 {
            for block in 0..2 * ASKED_MAX as u64 {
                doubts.add(round * INTERVAL_MS, BlockId(block % 40 + round));
            }
        }
        assert_eq!(doubts.waiting.len(), ASKED_MAX);
        let mut distinct: Vec<BlockId> = doubts.waiting.into();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), ASKED_MAX);
    }
}
