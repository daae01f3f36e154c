//! Re-creating lost replicas, within the budgets.

use harvestfs_placement::{Lane, Request};
use harvestfs_protocol::{
    ids::{BlockId, NodeId},
    node::NodeCommand,
    token::BlockToken,
    types::NodeInfo,
};
use rand::Rng;
use smallvec::SmallVec;

use super::{
    Cluster,
    queue::{Entry, RANKS},
    table::{NodeIx, ReplicaState, Slot},
};

/// After a failure the wait doubles, up to this many times.
const BACKOFF_DOUBLINGS_MAX: u8 = 6;
/// Sources that a target is told: the one that the repair is charged to, and some to turn to when
/// that one fails.
const SOURCES_MAX: usize = 3;

/// A repair under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    source: NodeIx,
    target: NodeIx,
    deadline_ms: u64,
    attempts: u8,
}

impl Cluster {
    /// Starts repairs, blocks with the fewest survivors first. Within a rank blocks take turns, so
    /// that one whose sources are exhausted does not stop the others.
    pub(super) fn schedule_repairs(&mut self, rng: &mut dyn Rng) {
        for rank in 0..RANKS {
            let lane = if rank == 0 {
                Lane::Urgent
            } else {
                Lane::Repair
            };
            for _ in 0..self
                .queue
                .rank_len(rank)
                .min(self.options.repairs_tried_per_tick)
            {
                if self.view.open_servers(lane, None) == 0 {
                    break;
                }
                let Some(entry) = self.queue.next(rank) else {
                    break;
                };
                if entry.not_before_ms <= self.now_ms {
                    self.try_repair(&entry, lane, rng);
                }
            }
        }
    }

    fn try_repair(&mut self, entry: &Entry, lane: Lane, rng: &mut dyn Rng) {
        let slot = entry.slot;
        let limit = match lane {
            Lane::Urgent => self.options.urgent_repairs_per_window,
            Lane::Write | Lane::Repair => self.options.repairs_per_window,
        };
        let Some(source) = self.choose_source(slot, limit) else {
            return;
        };
        let Some(target) = self.choose_target(entry, lane, rng) else {
            self.make_way(slot);
            let retry_ms = self.now_ms + self.options.repair_retry_ms;
            if let Some(entry) = self.queue.get_mut(slot) {
                entry.not_before_ms = retry_ms;
            }
            return;
        };
        let Some(block) = self.table.get(slot) else {
            return;
        };
        let in_flight = InFlight {
            source,
            target,
            deadline_ms: self.now_ms + self.options.repair_timeout_ms,
            attempts: entry.attempts,
        };
        self.deadlines
            .push_back((in_flight.deadline_ms, block.id, target));
        self.in_flight.insert(slot, in_flight);
        self.queue.remove(slot);
        let from = &mut self.nodes[source as usize];
        from.outgoing += 1;
        from.as_source.charge(self.now_ms);
        let to = &mut self.nodes[target as usize];
        to.incoming.push(slot);
        to.replicate.push_back(slot);
        to.as_target.charge(self.now_ms);
        self.refresh_node(target);
    }

    /// Nodes to copy a block from: those with good replicas; when there is none, those with
    /// replicas that may be good.
    fn sources(&self, slot: Slot) -> SmallVec<[NodeIx; 8]> {
        let Some(block) = self.table.get(slot) else {
            return SmallVec::new();
        };
        let with = |wanted: &dyn Fn(ReplicaState) -> bool| -> SmallVec<[NodeIx; 8]> {
            let usable = block
                .replicas
                .iter()
                .filter(|replica| wanted(replica.state));
            usable
                .map(|replica| &self.table.storages[replica.storage as usize])
                .filter(|storage| storage.usable)
                .map(|storage| storage.node)
                .collect()
        };
        let good = with(&|state| state.is_good() || state == ReplicaState::Excess);
        if good.is_empty() {
            with(&|state| matches!(state, ReplicaState::Corrupt | ReplicaState::Deleting))
        } else {
            good
        }
    }

    fn choose_source(&mut self, slot: Slot, limit: u32) -> Option<NodeIx> {
        let now_ms = self.now_ms;
        let at_once = self.options.repairs_in_flight_per_node;
        let candidates = self.sources(slot);
        candidates
            .into_iter()
            .filter_map(|index| {
                let node = &mut self.nodes[index as usize];
                let used = node.as_source.used(now_ms);
                let open = node.is_available() && node.outgoing < at_once && used < limit;
                open.then_some((node.outgoing, used, index))
            })
            .min()
            .map(|(_, _, index)| index)
    }

    fn choose_target(&self, entry: &Entry, lane: Lane, rng: &mut dyn Rng) -> Option<NodeIx> {
        let block = self.table.get(entry.slot)?;
        let mut existing: SmallVec<[NodeId; 8]> = SmallVec::new();
        let mut exclude: SmallVec<[NodeId; 8]> = SmallVec::new();
        exclude.extend(entry.avoid.map(|node| self.nodes[node as usize].id));
        for replica in &block.replicas {
            let storage = &self.table.storages[replica.storage as usize];
            let node = self.nodes[storage.node as usize].id;
            if storage.usable && replica.state.is_good() {
                existing.push(node);
            } else if storage.usable {
                exclude.push(node);
            }
        }
        for &node in self.pipeline(entry.slot) {
            exclude.push(self.nodes[node as usize].id);
        }
        let request = Request {
            wanted: 1,
            existing: &existing,
            exclude: &exclude,
            writer: None,
            class: block.rules.class,
            lane,
        };
        // A replica on another class of volume is better than none.
        let any_class = Request {
            class: None,
            ..request
        };
        let chosen = self
            .policy
            .choose(&self.view, &request, rng)
            .or_else(|_| self.policy.choose(&self.view, &any_class, rng))
            .ok()?;
        self.node_index(*chosen.first()?)
    }

    /// No server can take another replica. One that holds a bad replica could, without it.
    fn make_way(&mut self, slot: Slot) {
        if !self.confirmed(slot).is_empty() {
            self.remove_bad(slot);
        }
    }

    /// A node reported a good replica of a block that it was to receive.
    pub(super) fn complete_repair(&mut self, slot: Slot, target: NodeIx) {
        if self.is_in_flight(slot, target) && self.end_repair(slot).is_some() {
            self.repairs_done += 1;
        }
    }

    /// A repair failed; the block waits before it is tried again, elsewhere if possible.
    pub(super) fn fail_repair(&mut self, slot: Slot, target: NodeIx) {
        if !self.is_in_flight(slot, target) {
            return;
        }
        let Some(failed) = self.end_repair(slot) else {
            return;
        };
        self.repairs_failed += 1;
        self.settle(slot);
        let doublings = failed.attempts.min(BACKOFF_DOUBLINGS_MAX);
        let retry_ms = self.now_ms + (self.options.repair_retry_ms << doublings);
        if let Some(entry) = self.queue.get_mut(slot) {
            entry.not_before_ms = retry_ms;
            entry.attempts = failed.attempts.saturating_add(1);
            entry.avoid = Some(target);
        }
    }

    fn is_in_flight(&self, slot: Slot, target: NodeIx) -> bool {
        self.in_flight
            .get(&slot)
            .is_some_and(|it| it.target == target)
    }

    fn end_repair(&mut self, slot: Slot) -> Option<InFlight> {
        let ended = self.in_flight.remove(&slot)?;
        let from = &mut self.nodes[ended.source as usize];
        from.outgoing = from.outgoing.saturating_sub(1);
        self.nodes[ended.target as usize]
            .incoming
            .retain(|other| *other != slot);
        self.refresh_node(ended.target);
        Some(ended)
    }

    /// A block is freed.
    pub(super) fn cancel_repair_of(&mut self, slot: Slot) {
        self.end_repair(slot);
    }

    /// A node died or registered anew: what it was to receive is to be repaired elsewhere.
    pub(super) fn cancel_repairs_to(&mut self, node: NodeIx) {
        self.nodes[node as usize].replicate.clear();
        for slot in self.nodes[node as usize].incoming.clone() {
            self.end_repair(slot);
            self.settle(slot);
        }
    }

    /// Repairs that took too long failed.
    pub(super) fn expire_repairs(&mut self) {
        for _ in 0..self.options.work_per_tick {
            let Some(&(deadline_ms, block, target)) = self.deadlines.front() else {
                break;
            };
            if deadline_ms > self.now_ms {
                break;
            }
            self.deadlines.pop_front();
            if let Some(slot) = self.table.slot(block)
                && self
                    .in_flight
                    .get(&slot)
                    .is_some_and(|it| it.deadline_ms == deadline_ms)
            {
                self.fail_repair(slot, target);
            }
        }
    }

    /// The command for the next repair that a node has to be told of.
    pub(super) fn next_replicate(
        &mut self,
        node: NodeIx,
        token: &mut dyn FnMut(BlockId) -> BlockToken,
    ) -> Option<NodeCommand> {
        while let Some(slot) = self.nodes[node as usize].replicate.pop_front() {
            let Some(&in_flight) = self.in_flight.get(&slot) else {
                continue;
            };
            if in_flight.target != node {
                continue;
            }
            let sources = self.sources_to_tell(slot, in_flight.source);
            match self.table.get(slot) {
                Some(block) if !sources.is_empty() => {
                    return Some(NodeCommand::Replicate {
                        block: block.id,
                        length_bytes: u64::from(block.required_bytes),
                        sources,
                        token: token(block.id),
                    });
                }
                _ => self.fail_repair(slot, node),
            }
        }
        None
    }

    fn sources_to_tell(&self, slot: Slot, charged: NodeIx) -> Vec<NodeInfo> {
        let mut sources = self.sources(slot);
        sources.retain(|index| self.nodes[*index as usize].is_available());
        sources.sort_by_key(|&index| index != charged);
        sources.truncate(SOURCES_MAX);
        sources
            .iter()
            .filter_map(|&index| self.node_info(self.nodes[index as usize].id))
            .collect()
    }
}

#[cfg(test)]
impl Cluster {
    /// Repairs under way from and to a node, counted.
    pub(super) fn repairs_of(&self, node: NodeIx) -> (usize, usize) {
        let all = self.in_flight.values();
        let outgoing = all.clone().filter(|it| it.source == node).count();
        (outgoing, all.filter(|it| it.target == node).count())
    }
}
