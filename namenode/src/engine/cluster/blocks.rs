//! Changes of blocks in the namespace, placement of new ones, locations for readers.

use std::net::IpAddr;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::types::PlacementRules;
use rand::Rng;
use smallvec::SmallVec;

use super::Cluster;
use super::node::is_mostly_stale;
use super::table::{NodeIx, ReplicaState, Slot};
use crate::engine::namespace::BlockChange;

/// The nodes that a writer vouches for: they have everything that it committed.
#[derive(Debug, Default)]
pub(super) struct Writing {
    nodes: SmallVec<[NodeIx; 3]>,
    /// When the block was sealed.
    sealed_ms: Option<u64>,
}

impl Cluster {
    /// The nodes that the writer of a block vouches for, reported or not.
    pub(super) fn pipeline(&self, slot: Slot) -> &[NodeIx] {
        self.writing
            .get(&slot)
            .map_or(&[], |writing| writing.nodes.as_slice())
    }

    /// Applies a change of a block in the namespace. At the start, every block is passed as
    /// `Allocated`, then `Grew` or `Sealed`.
    ///
    /// `Freed` must be passed only once the journal record that frees the block is durable, because the
    /// replicas are removed immediately; all other changes are passed as they are applied.
    pub fn apply_change(&mut self, now_ms: u64, change: &BlockChange) {
        self.advance(now_ms);
        match *change {
            BlockChange::Allocated { block, rules, .. } => {
                self.allocated.add(block);
                self.leave_quarantine(block);
                self.table.add_block(block, rules);
            }
            BlockChange::Grew {
                block,
                committed_bytes,
            } => self.change(block, |it| it.require(committed_bytes)),
            BlockChange::Sealed {
                block,
                length_bytes,
            } => {
                self.change(block, |it| {
                    it.require(length_bytes);
                    it.sealed = true;
                });
                if let Some(slot) = self.table.slot(block) {
                    self.seal_pipeline(slot);
                }
            }
            BlockChange::Freed { block } => self.free(block),
            BlockChange::RulesChanged { block, rules } => {
                self.change(block, |it| it.rules = rules);
            }
        }
    }

    fn change(&mut self, block: BlockId, change: impl FnOnce(&mut super::table::Block)) {
        if let Some(slot) = self.table.slot(block) {
            change(self.table.known_mut(slot));
            self.settle(slot);
        }
    }

    /// Watches until the replicas of a block that was sealed are sealed, too. When the namenode starts,
    /// there is nothing to wait for yet.
    fn seal_pipeline(&mut self, slot: Slot) {
        let now_ms = self.now_ms;
        if let Some(writing) = self.writing.get_mut(&slot) {
            writing.sealed_ms = Some(now_ms);
            self.watch_seal(slot);
            self.close_pipeline_if_reported(slot);
        } else if self.table.get(slot).is_some_and(|it| {
            let mut states = it.replicas.iter().map(|replica| replica.state);
            states.any(ReplicaState::awaits_seal)
        }) {
            self.watch_seal(slot);
        }
    }

    fn free(&mut self, block: BlockId) {
        let Some(slot) = self.table.slot(block) else {
            return;
        };
        self.cancel_repair_of(slot);
        self.drop_pipeline(slot);
        self.seals_queued.remove(&slot);
        self.unsettle(slot);
        let Some(removed) = self.table.remove_block(slot) else {
            return;
        };
        let is_garbage = self.allocated.contains(block);
        for replica in removed.replicas {
            let storage = self.table.home(replica.storage);
            let deletes = &mut self.nodes[storage.node as usize].deletes;
            deletes.forget_command(block);
            if storage.usable && !is_garbage {
                let (index, node) = (replica.storage, storage.node);
                self.have_unknown(node, block, removed.required_bytes);
                self.ask_for_report(node, index);
            } else if storage.usable {
                deletes.add(block, removed.required_bytes);
            }
        }
    }

    /// Drops freed blocks from the lists of blocks to be checked later, once these hold hardly anything else: while
    /// another namenode leads, nothing works them off.
    pub(super) fn forget_freed(&mut self) {
        let table = &self.table;
        for list in [&mut self.excess, &mut self.salvage.waiting] {
            // Each block is in it once.
            if is_mostly_stale(list.len(), table.len()) {
                list.retain(|&(_, block)| table.slot(block).is_some());
            }
        }
    }

    /// Chooses pipelines for `count` new blocks, each of at least one node. A pipeline has fewer nodes
    /// than the rules ask for when the cluster has no more, or no more are available now.
    ///
    /// # Errors
    /// [`FsError::TooFewDatanodes`] while so many servers are away that fewer than
    /// [`ClusterOptions::min_write_replicas`](super::ClusterOptions) can be placed;
    /// [`FsError::InsufficientDiversity`] when a strict block finds no place because servers are full,
    /// and [`FsError::NoSpace`] when all are.
    pub fn place(
        &mut self,
        now_ms: u64,
        count: u32,
        rules: &PlacementRules,
        exclude: &[NodeId],
        writer: Option<IpAddr>,
        rng: &mut dyn Rng,
    ) -> Result<Vec<Vec<NodeId>>, FsError> {
        self.advance(now_ms);
        self.place_new_tenants();
        self.refresh_demands();
        let mut pipelines = Vec::with_capacity(count as usize);
        let mut result = Ok(());
        for _ in 0..count {
            let nodes = match self.choose_for_writing(rules, exclude, writer, rng) {
                Ok(nodes) => nodes,
                Err(error) => {
                    if !matches!(error, FsError::TooFewDatanodes(_)) {
                        self.note_refusal();
                    }
                    result = Err(error);
                    break;
                }
            };
            // The blocks of one request must not count on the same room.
            if count > 1 {
                for &node in &nodes {
                    if let Some(server) = self.view.server(node) {
                        let room = server.room.less(1);
                        self.view.set_room(node, room);
                    }
                }
            }
            pipelines.push(nodes.into_vec());
        }
        if count > 1 {
            for node in pipelines.iter().flatten() {
                if let Some(index) = self.node_index(*node) {
                    self.refresh_offer(index);
                }
            }
        }
        result.map(|()| pipelines)
    }

    /// Sets the nodes that a new block is being written to; they count as holding it before they report
    /// it.
    pub fn set_pipeline(&mut self, block: BlockId, nodes: &[NodeId]) {
        let Some(slot) = self.table.slot(block) else {
            return;
        };
        // A client may name a node twice.
        let mut distinct: SmallVec<[NodeIx; 3]> = SmallVec::new();
        for index in nodes.iter().filter_map(|&node| self.node_index(node)) {
            if !distinct.contains(&index) {
                distinct.push(index);
            }
        }
        let nodes = distinct;
        let before = self.writing.entry(slot).or_default();
        let before = std::mem::replace(&mut before.nodes, nodes.clone());
        for node in before {
            self.unawait(slot, node);
        }
        for node in nodes {
            if self.table.replica_on(slot, node).is_none() {
                self.nodes[node as usize].awaited += 1;
                self.refresh_offer(node);
            }
        }
        self.settle(slot);
    }

    /// Takes note of the nodes that hold all of a block according to the writer that sealed it; to be
    /// called along with the `Sealed` change, before or after it. Other nodes of the pipeline may lack
    /// the end of the block.
    pub fn sealed_by_client(&mut self, now_ms: u64, block: BlockId, nodes: &[NodeId]) {
        self.advance(now_ms);
        let Some(slot) = self.table.slot(block) else {
            return;
        };
        let holders: SmallVec<[NodeIx; 3]> = nodes
            .iter()
            .filter_map(|&node| self.node_index(node))
            .collect();
        if !self.writing.contains_key(&slot) {
            // The namenode restarted since the block was placed: take the writer's word.
            self.set_pipeline(block, nodes);
            if self.table.get(slot).is_some_and(|it| it.sealed) {
                self.seal_pipeline(slot);
            }
        }
        let dropped: SmallVec<[NodeIx; 3]> = self
            .pipeline(slot)
            .iter()
            .copied()
            .filter(|node| !holders.contains(node))
            .collect();
        for node in dropped {
            self.leave_pipeline(slot, node);
            if let Some(index) = self.table.replica_on(slot, node)
                && let Some(it) = self.table.get(slot)
                && it.replicas[index].state == ReplicaState::Open
            {
                // The writer may just have been cut off from it; then nothing is wrong with the
                // replica.
                self.table.set_state(slot, index, ReplicaState::Unconfirmed);
            }
        }
        self.settle(slot);
    }

    /// Releases the room held on a node for a block that it reported, or is no longer expected to
    /// report. To be called before the replica is added to the table.
    fn unawait(&mut self, slot: Slot, node: NodeIx) {
        if self.table.replica_on(slot, node).is_none() {
            let it = &mut self.nodes[node as usize];
            match it.awaited.checked_sub(1) {
                Some(rest) => it.awaited = rest,
                None => panic!(
                    "node {} was not to hold a block that it is awaited of",
                    it.id
                ),
            }
            self.refresh_offer(node);
        }
    }

    /// Notes that a node reports a replica that the table does not have yet.
    pub(super) fn arrive(&mut self, slot: Slot, node: NodeIx) {
        if self.pipeline(slot).contains(&node) {
            self.unawait(slot, node);
        }
    }

    /// Takes a node out of a block's pipeline: its replica is gone or bad, so the writer's word for it
    /// is void.
    pub(super) fn leave_pipeline(&mut self, slot: Slot, node: NodeIx) {
        let Some(writing) = self.writing.get_mut(&slot) else {
            return;
        };
        let before = writing.nodes.len();
        writing.nodes.retain(|other| *other != node);
        if writing.nodes.len() < before {
            self.unawait(slot, node);
        }
    }

    fn drop_pipeline(&mut self, slot: Slot) {
        for node in SmallVec::<[NodeIx; 3]>::from_slice(self.pipeline(slot)) {
            self.leave_pipeline(slot, node);
        }
        let left = self.writing.remove(&slot);
        assert!(
            left.as_ref().is_none_or(|it| it.nodes.is_empty()),
            "nodes are awaited of slot {slot}, whose pipeline is forgotten: {left:?}"
        );
    }

    /// Drops the pipeline of a sealed block once every node has reported its sealed replica: there is
    /// nothing left to wait for.
    pub(super) fn close_pipeline_if_reported(&mut self, slot: Slot) {
        let Some(writing) = self.writing.get(&slot) else {
            return;
        };
        let reported = writing.sealed_ms.is_some()
            && writing.nodes.iter().all(|&node| {
                self.table.replica_on(slot, node).is_some_and(|index| {
                    !self.table.known(slot).replicas[index].state.awaits_seal()
                })
            });
        if reported {
            self.drop_pipeline(slot);
        }
    }

    /// Takes a dead node out of all pipelines.
    pub(super) fn forget_pipelines_of(&mut self, node: NodeIx) {
        for slot in self.pipelines_with(node) {
            self.leave_pipeline(slot, node);
            self.settle(slot);
        }
    }

    /// Takes a node that has reported everything out of the pipelines of blocks that it did not report:
    /// it does not hold them.
    pub(super) fn reconcile_pipelines_of(&mut self, node: NodeIx) {
        for slot in self.pipelines_with(node) {
            let it = self.table.known(slot);
            let begun = it.sealed || it.required_bytes > 0;
            if begun && self.table.replica_on(slot, node).is_none() {
                self.leave_pipeline(slot, node);
                self.settle(slot);
            }
        }
    }

    /// Blocks with a node in their pipeline. O(blocks being written); only for events as rare as a
    /// registration.
    pub(super) fn pipelines_with(&self, node: NodeIx) -> Vec<Slot> {
        let mut slots: Vec<Slot> = self
            .writing
            .iter()
            .filter(|(_, writing)| writing.nodes.contains(&node))
            .map(|(&slot, _)| slot)
            .collect();
        slots.sort_unstable();
        slots
    }

    /// Unsealed blocks that have one replica left, though they are to have several. Only sealed blocks are repaired,
    /// so when the writer of such a block is gone, its session has to end first. Empty while it is not known which
    /// replicas are left.
    pub fn exposed(&self) -> impl Iterator<Item = BlockId> {
        let is_known = !self.safe_mode && !self.is_storm() && !self.recovering;
        let exposed = self.exposed.iter().copied();
        exposed.filter(move |_| is_known)
    }

    /// Schedules a check that all replicas of a sealed block are sealed.
    pub(super) fn watch_seal(&mut self, slot: Slot) {
        if let Some(block) = self.table.get(slot)
            && self.seals_queued.insert(slot)
        {
            let due_ms = self.now_ms + self.options.seal_grace_ms;
            self.seals.push_back((due_ms, block.id));
        }
    }

    /// Has datanodes seal replicas that their writer did not seal, and stops waiting for replicas that
    /// were never reported.
    pub(super) fn check_seals(&mut self) {
        for _ in 0..self.options.work_per_tick {
            match self.seals.front() {
                Some(&(due_ms, _)) if due_ms <= self.now_ms => {}
                _ => break,
            }
            let Some((_, block)) = self.seals.pop_front() else {
                break;
            };
            if let Some(slot) = self.table.slot(block) {
                self.check_seal(slot, block);
            }
        }
    }

    fn check_seal(&mut self, slot: Slot, block: BlockId) {
        self.seals_queued.remove(&slot);
        let sealed_ms = self.writing.get(&slot).and_then(|it| it.sealed_ms);
        if sealed_ms.is_some_and(|at| self.ms_since(at) >= self.options.awaited_report_ms) {
            self.drop_pipeline(slot);
            self.settle(slot);
        }
        let mut open = false;
        for replica in &self.table.known(slot).replicas {
            let storage = self.table.home(replica.storage);
            if replica.state.awaits_seal() && storage.usable {
                open = true;
                let seal = &mut self.nodes[storage.node as usize].seal;
                // Until this namenode gives commands, the check is merely repeated.
                if !self.recovering && !seal.contains(&block) {
                    seal.push_back(block);
                }
            }
        }
        if open || self.writing.contains_key(&slot) {
            self.watch_seal(slot);
        }
    }

    /// Nodes that hold all committed bytes of a block, best first for the reader: on its host, in its rack,
    /// elsewhere, the less loaded first; then stale ones, then busy ones. When there is none, those whose replicas
    /// may still be of some use: corrupt, incomplete or being removed. For a block whose end is lost, nodes with
    /// corrupt replicas come last, since these may have some of it.
    #[must_use]
    pub fn replicas(&self, block: BlockId, reader: Option<IpAddr>) -> Vec<NodeId> {
        let Some((slot, it)) = self
            .table
            .slot(block)
            .and_then(|slot| Some((slot, self.table.get(slot)?)))
        else {
            return Vec::new();
        };
        let mut good: SmallVec<[NodeIx; 8]> = SmallVec::new();
        let mut rest: SmallVec<[NodeIx; 8]> = SmallVec::new();
        let mut corrupt: SmallVec<[NodeIx; 8]> = SmallVec::new();
        let is_shortened = self.salvage.committed_bytes(slot).is_some();
        for replica in &it.replicas {
            let storage = self.table.home(replica.storage);
            if !storage.usable {
            } else if replica.state.is_good() || replica.state == ReplicaState::Excess {
                good.push(storage.node);
            } else {
                rest.push(storage.node);
                if replica.state == ReplicaState::Corrupt && is_shortened {
                    corrupt.push(storage.node);
                }
            }
        }
        for &node in self.pipeline(slot) {
            if self.nodes[node as usize].is_alive() && self.table.replica_on(slot, node).is_none() {
                good.push(node);
            }
        }
        let (mut nodes, last) = if good.is_empty() {
            (rest, SmallVec::new())
        } else {
            (good, corrupt)
        };
        let reader_rack = reader.and_then(|host| self.view.rack_of_host(host));
        nodes.sort_by_cached_key(|&index| {
            let node = &self.nodes[index as usize];
            let server = self.view.server(node.id);
            let distance = match server {
                Some(server) if reader == Some(server.host) => 0,
                Some(server) if reader_rack == Some(server.rack) => 1,
                _ => 2,
            };
            // Among equals, one block is always read from the same node, and different blocks from
            // different nodes.
            let spread = (block.0 ^ u64::from(index)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (node.busy, node.stale, distance, node.active_streams, spread)
        });
        let nodes = nodes.iter().chain(&last);
        nodes.map(|&index| self.nodes[index as usize].id).collect()
    }
}
