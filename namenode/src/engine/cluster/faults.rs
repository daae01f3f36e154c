//! What is wrong with individual blocks, and why it has not been put right yet.

use harvestfs_placement::Lane;
use harvestfs_protocol::ids::{BlockId, NodeId};

use super::Cluster;
use super::table::{Block, NodeIx, Slot, StorageIx};

/// A block that lacks replicas, or has too many or damaged ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFault {
    /// The block.
    pub block: BlockId,
    /// Replicas that it has.
    pub replicas: usize,
    /// Replicas that it should have.
    pub wanted: usize,
    /// Why it is not put right yet.
    pub reason: FaultReason,
}

/// Why a block is not as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultReason {
    /// There is nothing to copy from.
    #[error("all servers that had it are dead or were reimaged: bring one back with its data")]
    NoReplica,
    /// It is being copied.
    #[error("a repair is under way")]
    UnderWay,
    /// Repair is on hold.
    #[error("repair waits, since many servers fell silent together")]
    Storm,
    /// A server that is away may have it.
    #[error("it waits for servers in maintenance, which may have what is missing")]
    Maintenance,
    /// The policy finds no server.
    #[error(
        "no server can take a replica within its constraints, so it waits, and takes any server then: add servers, space or racks"
    )]
    NoPlace,
    /// No server takes replicas now.
    #[error(
        "no server takes replicas now: each is busy, silent, full or leaving: add servers or space"
    )]
    NoTarget,
    /// Nothing can be copied from servers whose owners need them.
    #[error("the owners of all servers that hold it need them, or they are silent")]
    NoSource,
    /// It has one replica on each server of the cluster.
    #[error("the cluster has no more datanodes")]
    NoServer,
    /// It backs off after a failure.
    #[error("the last attempt failed; the next one comes soon")]
    BackOff,
    /// It is not due yet.
    #[error("the repair budget of the servers that hold it is used up, or it is new here")]
    NoBudget,
    /// It is in the queue.
    #[error("it waits for its turn within the budget of repair")]
    Queued,
    /// A report that is needed to decide has not arrived yet.
    #[error("it waits for reports of datanodes")]
    Unknown,
    /// It has excess or damaged replicas that are still being removed.
    #[error("a replica too many, or a damaged one, is being removed")]
    Excess,
}

/// A replica of a block that does not exist (any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrphanReplica {
    /// The block.
    pub block: BlockId,
    /// Where it is.
    pub node: NodeId,
    /// Whether the node was heard from recently, so that it gets commands.
    pub reachable: bool,
}

impl Cluster {
    /// The first replicas of blocks that do not exist (any more) on live nodes that have not confirmed
    /// their removal yet, by node.
    #[must_use]
    pub fn orphans(&self, orphans_max: usize) -> Vec<OrphanReplica> {
        let mut orphans = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            if !node.is_alive() {
                continue;
            }
            let orphans_on_it = self.orphans_on(node);
            let mut blocks: Vec<BlockId> = orphans_on_it.map(|(block, _)| block).collect();
            blocks.sort_unstable();
            let reachable = self.is_fresh(index as NodeIx);
            orphans.extend(blocks.into_iter().map(|block| OrphanReplica {
                block,
                node: node.id,
                reachable,
            }));
            if orphans.len() >= orphans_max {
                orphans.truncate(orphans_max);
                break;
            }
        }
        orphans
    }

    /// The first blocks that lack replicas or have too many; O(blocks) when all is well.
    #[must_use]
    pub fn faults(&self, now_ms: u64, faults_max: usize) -> Vec<BlockFault> {
        let all = self.table.iter();
        all.filter_map(|(slot, block)| self.fault(now_ms, slot, block))
            .take(faults_max)
            .collect()
    }

    fn fault(&self, now_ms: u64, slot: Slot, block: &Block) -> Option<BlockFault> {
        if block.required_bytes == 0 {
            return None;
        }
        let tally = self.tally(slot, block);
        let replicas = tally.present();
        let wanted = block.wanted();
        let kept = match self.keeps_corrupt(slot) {
            true => tally.corrupt,
            false => 0,
        };
        let reason = if tally.is_lost() {
            FaultReason::NoReplica
        } else if block.sealed && replicas < wanted {
            let due = self.due(block);
            assert!(
                due <= wanted,
                "block {} is to have {due} replicas, more than the {wanted} wanted",
                block.id
            );
            if replicas >= due {
                FaultReason::NoServer
            } else {
                self.why_not_repaired(now_ms, slot)
            }
        } else if block.sealed && (replicas > wanted || tally.bad + tally.deleting > kept) {
            FaultReason::Excess
        } else {
            return None;
        };
        Some(BlockFault {
            block: block.id,
            replicas,
            wanted,
            reason,
        })
    }

    /// Why a block that has a replica, and too few of them, is not repaired yet.
    pub(super) fn why_not_repaired(&self, now_ms: u64, slot: Slot) -> FaultReason {
        if let Some(repair) = self.in_flight.get(&slot) {
            let waiting = self.queue.get(slot);
            assert!(
                waiting.is_none(),
                "slot {slot} is repaired, {repair:?}, and waits: {waiting:?}"
            );
            return FaultReason::UnderWay;
        }
        if self.is_storm() {
            return FaultReason::Storm;
        }
        let Some(entry) = self.queue.get(slot) else {
            return if self.is_held_for_maintenance(slot) {
                FaultReason::Maintenance
            } else {
                FaultReason::Unknown
            };
        };
        let sources = self.sources(slot);
        let is_available = |&(node, _): &(NodeIx, StorageIx)| {
            let node = &self.nodes[node as usize];
            node.is_available()
        };
        if entry.unplaced_since_ms.is_some() {
            FaultReason::NoPlace
        } else if !sources.iter().any(is_available) {
            FaultReason::NoSource
        } else if self.view.open_servers(Lane::Write, None) == 0 {
            FaultReason::NoTarget
        } else if entry.due_ms() <= now_ms {
            FaultReason::Queued
        } else if entry.attempts > 0 {
            FaultReason::BackOff
        } else {
            FaultReason::NoBudget
        }
    }
}
