//! What owners do to their servers, with notice: reimages that wait until the data is safe, and quotas
//! that shrink by a deadline.

use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use harvestfs_protocol::limits::BLOCKS_PER_REPORT_MAX;
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::placement::{ReimageImpact, RepairLimits, WaitingBlock};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::Cluster;
use super::node::Life;
use super::table::{NodeIx, ReplicaState, Slot, StorageIx};

/// A quota that a node has to be commanded to keep.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuotaOrder {
    storage: StorageIx,
    quota_bytes: u64,
    /// When the quota must be met.
    deadline_ms: u64,
    /// When the command is to be sent, or sent again.
    send_ms: u64,
}

impl QuotaOrder {
    pub(super) fn is_not_of(&self, storage: StorageIx) -> bool {
        self.storage != storage
    }
}

impl Cluster {
    /// What would become of data if these nodes were reimaged now. O(blocks on them).
    #[must_use]
    pub fn reimage_impact(&self, nodes: &[NodeId]) -> ReimageImpact {
        let nodes: FxHashSet<NodeIx> = nodes
            .iter()
            .filter_map(|&node| self.node_index(node))
            .collect();
        self.impact(&nodes)
    }

    /// Whether the contents of all these nodes are known. One that was not heard from since the start, or that has
    /// not reported yet, may have anything. One that was declared dead has nothing any more.
    #[must_use]
    pub fn have_reported(&self, nodes: &[NodeId]) -> bool {
        nodes.iter().all(|&node| {
            let node = self.node_index(node).map(|at| &self.nodes[at as usize]);
            node.is_none_or(|node| match node.life {
                Life::Unheard => false,
                Life::Alive => self.is_inventoried(node),
                Life::Dead { .. } => true,
            })
        })
    }

    /// What would become of data without these nodes.
    pub(super) fn impact(&self, nodes: &FxHashSet<NodeIx>) -> ReimageImpact {
        let (replicas, slots) = self.slots_on_any(nodes);
        let mut impact = ReimageImpact {
            replicas,
            ..ReimageImpact::default()
        };
        for slot in slots {
            self.add_impact(slot, nodes, &mut impact);
        }
        impact
    }

    /// The number of replicas on these nodes, and their blocks in the order of their slots.
    pub(super) fn slots_on_any(&self, nodes: &FxHashSet<NodeIx>) -> (u64, Vec<Slot>) {
        let mut replicas = 0;
        let mut seen: FxHashSet<Slot> = FxHashSet::default();
        for &node in nodes {
            let slots = self.slots_on(node);
            replicas += slots.len() as u64;
            seen.extend(slots);
        }
        let mut slots: Vec<Slot> = seen.into_iter().collect();
        slots.sort_unstable();
        (replicas, slots)
    }

    fn add_impact(&self, slot: Slot, nodes: &FxHashSet<NodeIx>, impact: &mut ReimageImpact) {
        let Some(block) = self.table.get(slot).filter(|it| it.required_bytes > 0) else {
            return;
        };
        let holders = self.holders(slot, block);
        let survivors = holders.iter().filter(|node| !nodes.contains(node)).count();
        let list = |blocks: &mut Vec<BlockId>| {
            if blocks.len() < BLOCKS_PER_REPORT_MAX {
                blocks.push(block.id);
            }
        };
        if survivors < block.wanted() {
            impact.waiting += 1;
            // Nothing is copied yet from servers that are not held.
            let held = nodes.iter().all(|node| self.draining.contains(node));
            if held && impact.waiting_blocks.len() < BLOCKS_PER_REPORT_MAX {
                impact.waiting_blocks.push(WaitingBlock {
                    block: block.id,
                    elsewhere: survivors as u32,
                    wanted: block.wanted() as u32,
                    why: self.why_not_repaired(self.now_ms, slot).to_string(),
                });
            }
        }
        assert!(
            survivors <= holders.len(),
            "of {holders:?}, {survivors} survive"
        );
        if survivors == 0 {
            impact.lost += 1;
            list(&mut impact.lost_blocks);
        } else if survivors == 1 && block.wanted() > 1 {
            impact.exposed += 1;
            list(&mut impact.exposed_blocks);
        }
    }

    /// Blocks that have a replica on a node, or are being written there.
    pub(super) fn slots_on(&self, node: NodeIx) -> Vec<Slot> {
        let storages = self.nodes[node as usize].storages.iter();
        let mut slots: Vec<Slot> = storages
            .filter(|&&storage| self.table.home(storage).usable)
            .flat_map(|&storage| self.table.storages[storage as usize].blocks())
            .copied()
            .chain(self.pipelines_with(node))
            .collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Starts or ends the draining of a node: everything that it holds is copied elsewhere within the
    /// repair budgets, and it is given nothing new. Draining ends by itself when the node is reimaged.
    pub fn set_draining(&mut self, now_ms: u64, node: NodeId, draining: bool) {
        self.advance(now_ms);
        let Some(index) = self.node_index(node) else {
            return;
        };
        let changed = if draining {
            self.draining.insert(index)
        } else {
            self.draining.remove(&index)
        };
        if !changed {
            return;
        }
        self.demands.note_change();
        self.refresh_node(index);
        for slot in self.slots_on(index) {
            self.settle(slot);
        }
    }

    /// Whether a node is being drained; see [`Cluster::set_draining`].
    #[must_use]
    pub fn is_draining(&self, node: NodeId) -> bool {
        self.node_index(node)
            .is_some_and(|index| self.draining.contains(&index))
    }

    /// Has a node's volumes use no more than `quota_bytes` by a deadline, `deadline_ms` from now: one
    /// volume, or all together, which share it in proportion to their present quotas. Returns whether
    /// there is such a volume.
    pub fn set_quota(
        &mut self,
        now_ms: u64,
        node: NodeId,
        storage: Option<StorageId>,
        quota_bytes: u64,
        deadline_ms: u64,
    ) -> bool {
        self.advance(now_ms);
        let Some(index) = self.node_index(node) else {
            return false;
        };
        let volumes: SmallVec<[StorageIx; 2]> = self.nodes[index as usize]
            .storages
            .iter()
            .copied()
            .filter(|&it| {
                let volume = &self.table.storages[it as usize];
                storage.is_none_or(|wanted| volume.id() == wanted)
            })
            .collect();
        let quota_of =
            |it: StorageIx| u128::from(self.table.storages[it as usize].status.quota_bytes);
        let all = volumes.iter().map(|&it| quota_of(it)).sum::<u128>();
        let orders: SmallVec<[QuotaOrder; 2]> = volumes
            .iter()
            .map(|&it| {
                // An equal share if the volumes have no quota at present.
                let equal = u128::from(quota_bytes) / volumes.len() as u128;
                let share = (u128::from(quota_bytes) * quota_of(it))
                    .checked_div(all)
                    .unwrap_or(equal);
                assert!(
                    share <= u128::from(quota_bytes),
                    "{share} bytes are the share of one volume of {all} bytes, of {quota_bytes}"
                );
                QuotaOrder {
                    storage: it,
                    // At most the whole, which is a `u64`.
                    quota_bytes: share as u64,
                    deadline_ms: self.now_ms.saturating_add(deadline_ms),
                    send_ms: self.now_ms,
                }
            })
            .collect();
        let waiting = &mut self.nodes[index as usize].quotas;
        waiting.retain(|it| !volumes.contains(&it.storage));
        waiting.extend(orders);
        !volumes.is_empty()
    }

    /// The command for the next quota of a node. Repeated until a heartbeat shows the quota.
    pub(super) fn next_quota(&mut self, node: NodeIx) -> Option<NodeCommand> {
        let now_ms = self.now_ms;
        let storages = &self.table.storages;
        let quotas = &mut self.nodes[node as usize].quotas;
        quotas.retain(|it| storages[it.storage as usize].status.quota_bytes != it.quota_bytes);
        let order = quotas.iter_mut().find(|it| it.send_ms <= now_ms)?;
        order.send_ms = now_ms + self.options.command_retry_ms;
        Some(NodeCommand::SetQuota {
            storage: self.table.storages[order.storage as usize].id(),
            quota_bytes: order.quota_bytes,
            deadline_ms: order.deadline_ms.saturating_sub(now_ms),
        })
    }

    /// Reacts to the fill of a volume in a heartbeat: chooses replicas to leave it when its owner wants
    /// space back, and lets those that are left stay when there is space again.
    pub(super) fn mind_quota(&mut self, node: NodeIx, storage: StorageIx) {
        let usable = self.table.home(storage).usable;
        let status = self.table.storages[storage as usize].status;
        let over_bytes = status.used_bytes.saturating_sub(status.quota_bytes);
        let Some(remaining_ms) = status.shrinks_in_ms.filter(|_| over_bytes > 0 && usable) else {
            if !self.victims.is_empty() {
                self.spare_victims(node, storage);
            }
            return;
        };
        // If the orphans are on another volume of the node, victims are chosen once the orphans are
        // gone.
        let orphans = self.orphans_on(&self.nodes[node as usize]);
        let leaving_bytes = orphans.map(|(_, bytes)| u64::from(bytes)).sum();
        self.choose_victims(node, storage, over_bytes.saturating_sub(leaving_bytes));
        if remaining_ms <= self.options.shrink_margin_ms {
            self.give_up_victims(node, storage);
        }
    }

    fn victims_on(&self, node: NodeIx, storage: StorageIx) -> Vec<Slot> {
        let blocks = self.table.storages[storage as usize]
            .blocks()
            .iter()
            .copied();
        let mut slots: Vec<Slot> = blocks
            .filter(|&slot| self.victims.contains(&(slot, node)))
            .collect();
        slots.sort_unstable();
        slots
    }

    /// Lets the replicas stay that were to leave the volume and are still there: there is space again.
    fn spare_victims(&mut self, node: NodeIx, storage: StorageIx) {
        let mut slots = Vec::new();
        for &(slot, victim_of) in &self.victims {
            let elsewhere = self.table.replica_on(slot, node).is_some()
                && self.table.replica_in(slot, storage).is_none();
            if victim_of == node && !elsewhere {
                slots.push(slot);
            }
        }
        slots.sort_unstable();
        for slot in slots {
            self.victims.remove(&(slot, node));
            self.settle(slot);
        }
    }

    /// Chooses replicas that add up to the bytes that have to go: those with the most copies elsewhere
    /// first.
    fn choose_victims(&mut self, node: NodeIx, storage: StorageIx, over_bytes: u64) {
        let sealed = |slot: Slot| self.table.get(slot).filter(|it| it.sealed);
        let bytes_of = |slot: Slot| sealed(slot).map_or(0, |it| u64::from(it.required_bytes));
        let victims = self.victims_on(node, storage);
        let mut chosen_bytes: u64 = victims.into_iter().map(bytes_of).sum();
        if chosen_bytes >= over_bytes {
            return;
        }
        let mut candidates: Vec<(usize, Slot, u64)> = Vec::new();
        for &slot in self.table.storages[storage as usize].blocks() {
            if let Some(block) = sealed(slot)
                && !self.victims.contains(&(slot, node))
            {
                let holders = self.holders(slot, block);
                let elsewhere = holders.iter().filter(|&&it| it != node).count();
                candidates.push((elsewhere, slot, u64::from(block.required_bytes)));
            }
        }
        candidates.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        for (_, slot, bytes) in candidates {
            if chosen_bytes >= over_bytes {
                break;
            }
            chosen_bytes += bytes;
            self.victims.insert((slot, node));
            self.settle(slot);
        }
    }

    /// Near the deadline, removes replicas that have a confirmed copy elsewhere, although one more is
    /// wanted. The last copies are left to the datanode, which must obey its owner.
    fn give_up_victims(&mut self, node: NodeIx, storage: StorageIx) {
        for slot in self.victims_on(node, storage) {
            let elsewhere = self.confirmed(slot).iter().any(|&it| it != node);
            if let Some(index) = self.table.replica_in(slot, storage)
                && let Some(block) = self.table.get(slot)
                && block.replicas[index].state == ReplicaState::Sealed
                && elsewhere
            {
                let deletes = &mut self.nodes[node as usize].deletes;
                deletes.add_first(block.id, block.required_bytes);
                self.table.set_state(slot, index, ReplicaState::Excess);
                self.settle(slot);
            }
        }
    }

    /// Whether a replica may be removed although fewer than wanted are left.
    pub(super) fn is_given_up(&self, slot: Slot, node: NodeIx) -> bool {
        let Some(index) = self.table.replica_on(slot, node) else {
            return false;
        };
        let Some(block) = self.table.get(slot) else {
            return false;
        };
        let storage = &self.table.storages[block.replicas[index].storage as usize];
        let shrinks_in_ms = storage.status.shrinks_in_ms;
        self.victims.contains(&(slot, node))
            && shrinks_in_ms.is_some_and(|it| it <= self.options.shrink_margin_ms)
    }

    /// The budgets of repair.
    #[must_use]
    pub fn repair_limits(&self) -> RepairLimits {
        self.options.repair_limits()
    }

    /// Changes the budgets of repair. Repairs within the window that were charged before still count.
    pub fn set_repair_limits(&mut self, now_ms: u64, limits: &RepairLimits) {
        self.advance(now_ms);
        self.options.set_repair_limits(limits);
        for index in 0..self.nodes.len() {
            self.refresh_node(index as NodeIx);
        }
        self.retry_repairs();
    }
}
