//! What operators see of the cluster engine.

use harvestfs_protocol::admin::NodeStatus;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::placement::{BalanceOutcome, GridCell};
use harvestfs_protocol::types::NodeInfo;

use super::Cluster;
use super::places::grid_cell;
use super::settle::SCORES;
use super::table::{LEFT_MAX, NodeIx, ReplicaState, StorageIx};
use crate::engine::count::Count;

/// The cluster at a glance. Counts of blocks lag behind while the replicas of a lost node are taken out
/// of the tables, a bounded number per tick.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSummary {
    /// False until safe mode has ended: block locations are still being learned.
    pub ready: bool,
    /// How much longer repair waits at most, in milliseconds, because many nodes fell silent together;
    /// `None` if it does not.
    pub storm_remaining_ms: Option<u64>,
    /// Blocks known.
    pub blocks: u64,
    /// Sealed blocks with fewer replicas than wanted, as far as the cluster has servers for them; lost
    /// ones included.
    pub under_replicated_blocks: u64,
    /// Committed blocks without any replica.
    pub lost_blocks: u64,
    /// The under-replicated blocks by how many replicas are left: 0, 1, 2, more.
    pub missing_by_left: [u64; LEFT_MAX + 1],
    /// Sealed blocks that break a constraint that they were promised.
    pub misplaced_blocks: u64,
    /// Sealed blocks that have less than their files ask for because the cluster lacks the servers.
    pub curtailed_blocks: u64,
    /// Sealed blocks by the number of constraints, of five, that hold among their replicas.
    pub blocks_by_score: [u64; SCORES],
    /// Blocks that wait for repair.
    pub repairs_waiting: u64,
    /// Blocks that wait for the move of a replica.
    pub moves_waiting: u64,
    /// Repairs under way.
    pub repairs_under_way: u64,
    /// Repairs finished since the start.
    pub repairs_done: u64,
    /// Replicas moved since the start, because they were misplaced or had to leave their server.
    pub moves_done: u64,
    /// Repairs or moves that failed or timed out since the start.
    pub repairs_failed: u64,
    /// Nodes that are alive and not in maintenance.
    pub nodes_alive: u64,
    /// Those of them whose primary tenant needs the server.
    pub nodes_busy: u64,
    /// Nodes in maintenance, away or not.
    pub nodes_in_maintenance: u64,
    /// Nodes ever registered.
    pub nodes_known: u64,
    /// Quotas of the healthy volumes of live nodes, in bytes.
    pub quota_bytes: u64,
    /// How much of them is used, in bytes.
    pub used_bytes: u64,
    /// How full the fullest and the emptiest server are, in thousandths.
    pub fill_permille: Option<(u64, u64)>,
    /// Replicas moved to emptier servers since the start.
    pub balance_moves_done: u64,
    /// Volumes that were too full in the last round of balancing, by outcome.
    pub too_full_volumes: [u64; BalanceOutcome::ALL.len()],
    /// Memory that the engine's tables hold, in bytes, estimated from their capacity.
    pub engine_bytes: u64,
    /// Blocks in quarantine.
    pub quarantined_blocks: u64,
    /// What their replicas take, in bytes.
    pub quarantined_bytes: u64,
}

/// The part of a node in repair, and its place in the grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeActivity {
    /// The cell of its tenant, unless that is outside the grid.
    pub cell: Option<GridCell>,
    /// Repairs that it serves now.
    pub repairs_from: u32,
    /// Repairs that it receives now.
    pub repairs_to: u32,
}

/// Counts of replicas for `fsck`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsckCounts {
    /// Replicas that sealed blocks lack, summed over blocks.
    pub missing_replicas: u64,
    /// Committed blocks without any replica.
    pub lost_blocks: u64,
    /// Replicas on live nodes of blocks that do not exist (any more), not yet confirmed removed.
    pub orphan_replicas: u64,
    /// Replicas beyond the wanted number, summed over blocks, including bad ones that are being
    /// replaced and not yet removed.
    pub excess_replicas: u64,
    /// Blocks that are being repaired or wait for it.
    pub under_repair: u64,
}

impl Cluster {
    /// How to reach a node.
    #[must_use]
    pub fn node_info(&self, node: NodeId) -> Option<NodeInfo> {
        let it = &self.nodes[self.node_index(node)? as usize];
        Some(NodeInfo {
            node,
            name: it.server.name.clone(),
            data_addr: it.server.data_addr,
            rack: it.server.rack.clone(),
        })
    }

    /// Blocks that wait for repair or are being repaired.
    #[must_use]
    pub fn under_repair(&self) -> u64 {
        (self.queue.len() + self.in_flight.len()) as u64
    }

    /// Sealed blocks with one replica left that should have more; O(1).
    #[must_use]
    pub fn exposed_blocks(&self) -> u64 {
        self.totals.missing[1].get()
    }

    /// How long the longest-waiting block has waited for repair, in milliseconds. O(blocks that wait).
    #[must_use]
    pub fn oldest_repair_ms(&self, now_ms: u64) -> Option<u64> {
        let since_ms = self.queue.oldest_ms()?;
        Some(now_ms.saturating_sub(since_ms))
    }

    /// The cluster at a glance; O(nodes).
    #[must_use]
    pub fn summary(&self, now_ms: u64) -> ClusterSummary {
        let nodes = self.nodes.iter().enumerate();
        let alive = nodes
            .filter(|(index, node)| node.is_alive() && !self.is_in_maintenance(*index as NodeIx))
            .map(|(_, node)| node);
        // Datanodes may report any numbers for their volumes.
        let usable = self
            .table
            .storages_with_homes()
            .filter(|(home, _)| home.usable);
        let (quota_bytes, used_bytes) =
            usable.fold((0, 0), |(quota, used): (u64, u64), (_, it)| {
                (
                    quota.saturating_add(it.status.quota_bytes),
                    used.saturating_add(it.status.used_bytes),
                )
            });
        let (blocks, relevant) = (self.table.len() as u64, self.totals.relevant.get());
        assert!(
            relevant <= blocks,
            "{relevant} blocks have bytes, of {blocks} in the table"
        );
        let (away, known) = (self.maintenance.len(), self.nodes.len());
        assert!(
            away <= known,
            "{away} nodes are in maintenance, of {known} known"
        );
        let (quarantined_blocks, quarantined_bytes) = self.quarantined_sums();
        ClusterSummary {
            quarantined_blocks,
            quarantined_bytes,
            ready: !self.safe_mode,
            storm_remaining_ms: self.storm_remaining_ms(now_ms),
            blocks,
            under_replicated_blocks: self.totals.under_replicated.get(),
            lost_blocks: self.totals.lost.get(),
            missing_by_left: self.totals.missing.map(Count::get),
            misplaced_blocks: self.totals.misplaced.get(),
            curtailed_blocks: self.totals.curtailed.get(),
            blocks_by_score: self.totals.scores.map(Count::get),
            repairs_waiting: self.queue.repairs(),
            moves_waiting: self.queue.moves(),
            repairs_under_way: self.in_flight.len() as u64,
            repairs_done: self.repairs_done,
            moves_done: self.moves_done,
            repairs_failed: self.repairs_failed,
            nodes_busy: alive.clone().filter(|node| node.busy).count() as u64,
            nodes_alive: alive.count() as u64,
            nodes_in_maintenance: away as u64,
            nodes_known: known as u64,
            quota_bytes,
            used_bytes,
            fill_permille: self.fill_permille(),
            balance_moves_done: self.balance.moves_done,
            too_full_volumes: self.balance.too_full(),
            engine_bytes: self.bytes(),
        }
    }

    fn bytes(&self) -> u64 {
        let nodes: usize = self
            .nodes
            .iter()
            .map(|node| {
                let budgets = node.as_source.bytes() + node.as_target.bytes();
                size_of_val(node) + budgets + node.deletes.bytes()
            })
            .sum();
        let entry_bytes = size_of::<(u64, BlockId)>();
        let timers = (self.seals.capacity() + self.excess.capacity()) * entry_bytes;
        (self.table.bytes() + self.queue.bytes() + nodes + timers) as u64
    }

    /// The name of a node's server.
    pub(super) fn node_name(&self, node: NodeIx) -> &str {
        &self.nodes[node as usize].server.name
    }

    /// The part of a node in repair, and its place in the grid.
    #[must_use]
    pub fn node_activity(&self, node: NodeId) -> Option<NodeActivity> {
        let index = self.node_index(node)?;
        let it = &self.nodes[index as usize];
        let server = self.view.server_at(index as usize);
        Some(NodeActivity {
            cell: server
                .and_then(|server| self.view.cell_of(server))
                .map(grid_cell),
            repairs_from: it.outgoing,
            repairs_to: it.incoming.len() as u32,
        })
    }

    /// Every node ever registered, by number. Clocks and versions are left out: only the server knows
    /// them.
    #[must_use]
    pub fn nodes(&self, now_ms: u64) -> Vec<NodeStatus> {
        let mut nodes: Vec<NodeStatus> = self
            .nodes
            .iter()
            .map(|node| {
                let indexes = || node.storages.iter().copied();
                let storage = |index: StorageIx| &self.table.storages[index as usize];
                NodeStatus {
                    node: node.id,
                    server: (*node.server).clone(),
                    volumes: indexes().map(|it| storage(it).status).collect(),
                    alive: node.is_alive(),
                    busy: node.busy,
                    replicas: indexes()
                        .filter(|&it| self.table.home(it).usable)
                        .map(|it| storage(it).blocks().len() as u64)
                        .sum(),
                    heartbeat_age_ms: node.heard.then(|| now_ms.saturating_sub(node.heard_ms)),
                    clock_ahead_ms: None,
                    version: None,
                    draining: self.is_draining(node.id),
                    maintenance_left_ms: self.maintenance_left_ms(now_ms, node.id),
                }
            })
            .collect();
        nodes.sort_unstable_by_key(|status| status.node);
        nodes
    }

    /// Counts over all blocks; O(blocks).
    #[must_use]
    pub fn fsck(&self) -> FsckCounts {
        let mut counts = FsckCounts {
            under_repair: (self.queue.len() + self.in_flight.len()) as u64,
            ..FsckCounts::default()
        };
        for (slot, block) in self.table.iter() {
            if block.required_bytes == 0 {
                continue;
            }
            let tally = self.tally(slot, block);
            let good = tally.present();
            counts.lost_blocks += u64::from(tally.is_lost());
            if block.sealed {
                counts.missing_replicas += block.wanted().saturating_sub(good) as u64;
                counts.excess_replicas += good.saturating_sub(block.wanted()) as u64;
            }
            let being_removed = block.replicas.iter().filter(|replica| {
                let is_removed = match replica.state {
                    ReplicaState::Corrupt => !self.keeps_corrupt(slot),
                    state => state.is_bad() || state == ReplicaState::Deleting,
                };
                is_removed && self.table.home(replica.storage).usable
            });
            counts.excess_replicas += being_removed.count() as u64;
        }
        for node in self.nodes.iter().filter(|node| node.is_alive()) {
            counts.orphan_replicas += self.orphans_on(node).count() as u64;
        }
        counts
    }
}
