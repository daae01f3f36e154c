//! Membership: registration, heartbeats, liveness, safe mode, storms.

use std::cmp::Reverse;

use harvestfs_placement::{Lane, Lanes, Location};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::node::{Heartbeat, ServerDescription};
use harvestfs_protocol::types::VolumeStatus;
use smallvec::SmallVec;

use super::node::{Life, Node, Space};
use super::prefetch::PREFETCHED;
use super::table::{NodeIx, Slot, Storage, StorageIx};
use super::{Cluster, ClusterError, Happening};

/// The minimum number of nodes in a storm: the loss of one node is never a storm, however small the
/// cluster.
const STORM_NODES_MIN: usize = 2;

/// Many nodes that fell silent together: more likely a network partition than that many dead servers.
#[derive(Debug, Default)]
pub(super) struct Storm {
    /// While it lasts: nodes that died since the first time belong to it; it ends at the second time at
    /// the latest.
    active: Option<(u64, u64)>,
}

impl Cluster {
    /// Adds a server that is known from the journal. It is not alive until it registers.
    pub fn add_server(&mut self, node: NodeId, server: &ServerDescription) {
        self.add_node(node, server);
    }

    fn add_node(&mut self, node: NodeId, server: &ServerDescription) -> NodeIx {
        let known = self.node_index(node);
        self.view.insert(
            node,
            &Location {
                rack: &server.rack,
                environment: &server.environment,
                machine_function: &server.machine_function,
                host: server.data_addr.ip(),
            },
        );
        if let Some(index) = known {
            if !is_at_home(&self.nodes[index as usize].server, server) {
                self.demands.note_change();
            }
            *self.nodes[index as usize].server = server.clone();
            return index;
        }
        self.demands.note_change();
        let index = self.nodes.len() as NodeIx;
        let window_ms = self.options.repair_window_ms;
        self.nodes
            .push(Node::new(node, server.clone(), self.now_ms, window_ms));
        // Both only grow, together: a node's index is that of its server in the view.
        assert_eq!(
            self.view.servers().len(),
            self.nodes.len(),
            "servers in the view and nodes, with node {node}"
        );
        index
    }

    /// Registers a datanode with exactly these volumes. The replicas on any other volumes that it had
    /// before are lost immediately. A full report of each volume is expected next.
    ///
    /// Commands that it was given earlier must be done or dropped by then.
    pub fn register(
        &mut self,
        now_ms: u64,
        node: NodeId,
        server: &ServerDescription,
        volumes: &[VolumeStatus],
    ) {
        self.advance(now_ms);
        let moved = self
            .node_index(node)
            .is_some_and(|index| !is_at_home(&self.nodes[index as usize].server, server));
        if self.nodes.is_empty() {
            self.demands.note_founding(self.now_ms);
        }
        let index = self.add_node(node, server);
        // Earlier commands may not have reached it.
        self.cancel_repairs_to(index);
        self.takeover.connected(index);
        let now_ms = self.now_ms;
        self.forget_unknown_on(index);
        self.end_restart(index);
        let it = &mut self.nodes[index as usize];
        it.deletes.clear();
        it.seal.clear();
        it.report.clear();
        if self.draining.contains(&index) {
            self.demands.note_change();
        }
        it.life = Life::Alive;
        it.heard = true;
        it.heard_ms = now_ms;
        it.stale = false;
        it.busy = false;
        it.active_streams = 0;
        let before = std::mem::take(&mut it.storages);
        let mut replicas_gone = None;
        for &storage in &before {
            let id = self.table.storages[storage as usize].id();
            if !volumes.iter().any(|volume| volume.storage == id) {
                // It was reimaged, which is what it was drained for.
                self.draining.remove(&index);
                self.nodes[index as usize]
                    .quotas
                    .retain(|it| it.is_not_of(storage));
                self.storage_indexes.remove(&id);
                let blocks = self.table.storages[storage as usize].blocks().len() as u64;
                *replicas_gone.get_or_insert(0) += blocks;
                self.lose(storage);
            }
        }
        if let Some(replicas) = replicas_gone {
            self.happenings.note(Happening::Reimaged { node, replicas });
        }
        for volume in volumes {
            let storage = self.register_volume(index, volume);
            let storages = &mut self.nodes[index as usize].storages;
            if !storages.contains(&storage) {
                storages.push(storage);
            }
        }
        if !self.recovering {
            let storages = &self.nodes[index as usize].storages;
            self.takeover.registered(index, storages);
        }
        self.refresh_node(index);
        self.take_back_deletions(index);
        if moved && self.options.watch_diversity {
            // What it still holds may be in the wrong place now.
            for slot in self.slots_on(index) {
                self.settle(slot);
            }
        }
    }

    fn register_volume(&mut self, node: NodeIx, volume: &VolumeStatus) -> StorageIx {
        let known = self.storage_indexes.get(&volume.storage).copied();
        let storage = match known {
            Some(storage) if self.table.home(storage).node == node => storage,
            _ => {
                if let Some(moved) = known {
                    // The disk moved here from another server, which has lost it.
                    let former = self.table.home(moved).node;
                    let it = &mut self.nodes[former as usize];
                    it.storages.retain(|s| *s != moved);
                    // What its owner ordered would be sent there without end.
                    it.quotas.retain(|order| order.is_not_of(moved));
                    self.lose(moved);
                    self.refresh_node(former);
                }
                let it = Storage::new(*volume, self.options.repair_window_ms);
                let storage = self.table.add_storage(node, it);
                self.storage_indexes.insert(volume.storage, storage);
                storage
            }
        };
        let it = &mut self.table.storages[storage as usize];
        it.status = *volume;
        it.report_ms = self.now_ms;
        it.next_part = 0;
        let home = self.table.home_mut(storage);
        home.inventoried = false;
        home.usable = volume.healthy;
        if !volume.healthy {
            self.lose(storage);
        }
        storage
    }

    /// Marks a volume as unusable: its replicas no longer count.
    fn lose(&mut self, storage: StorageIx) {
        let home = self.table.home_mut(storage);
        home.usable = false;
        home.inventoried = false;
        if !self.table.storages[storage as usize].blocks().is_empty() {
            self.gone.push_back(storage);
        }
    }

    /// Notes that the connection to a datanode ended. The datanode counts as stale, not as dead.
    pub fn disconnected(&mut self, now_ms: u64, node: NodeId) {
        self.advance(now_ms);
        if let Some(index) = self.node_index(node) {
            self.nodes[index as usize].stale = true;
            self.refresh_node(index);
        }
    }

    /// Processes a heartbeat. The commands of the reply come from [`Cluster::next_commands`].
    ///
    /// # Errors
    /// The node must register again: [`ClusterError::NotRegistered`] when it never did or was declared
    /// dead, [`ClusterError::UnknownStorage`] when it has a volume that it did not register.
    pub fn heartbeat(
        &mut self,
        now_ms: u64,
        node: NodeId,
        heartbeat: &Heartbeat,
    ) -> Result<(), ClusterError> {
        self.advance(now_ms);
        let index = self.live_node(node)?;
        self.takeover.heard(index);
        let now_ms = self.now_ms;
        let it = &mut self.nodes[index as usize];
        it.heard_ms = now_ms;
        it.stale = false;
        it.busy = heartbeat.busy;
        it.active_streams = heartbeat.active_streams;
        it.removable_bytes = heartbeat.removable_bytes;
        let mut result = Ok(());
        for storage in it.storages.clone() {
            let id = self.table.storages[storage as usize].id();
            let status = heartbeat.volumes.iter().find(|v| v.storage == id);
            self.update_volume(index, storage, status);
            self.mind_quota(index, storage);
        }
        for volume in &heartbeat.volumes {
            let known = self.storage_indexes.get(&volume.storage);
            if known.is_none_or(|&known| self.table.home(known).node != index) {
                result = Err(ClusterError::UnknownStorage(volume.storage));
            }
        }
        self.refresh_node(index);
        result
    }

    /// Updates the status of a volume; `None` if the node does not name it any more.
    fn update_volume(&mut self, node: NodeIx, storage: StorageIx, status: Option<&VolumeStatus>) {
        let it = &mut self.table.storages[storage as usize];
        let was_healthy = it.status.healthy;
        match status {
            Some(status) => it.status = *status,
            None => it.status.healthy = false,
        }
        match (was_healthy, it.status.healthy) {
            (true, false) => self.lose(storage),
            (false, true) => {
                it.next_part = 0;
                self.table.home_mut(storage).usable = true;
                self.ask_for_report(node, storage);
            }
            _ => {}
        }
    }

    /// The index of a node whose events are accepted.
    pub(super) fn live_node(&self, node: NodeId) -> Result<NodeIx, ClusterError> {
        self.node_index(node)
            .filter(|&index| self.nodes[index as usize].is_alive())
            .ok_or(ClusterError::NotRegistered(node))
    }

    /// Whether a node is alive and was heard from recently.
    pub(super) fn is_fresh(&self, node: NodeIx) -> bool {
        let node = &self.nodes[node as usize];
        let silent_ms = self.ms_since(node.heard_ms);
        node.is_alive() && !node.stale && silent_ms <= self.options.stale_after_ms
    }

    pub(super) fn ask_for_report(&mut self, node: NodeIx, storage: StorageIx) {
        self.table.storages[storage as usize].report_ms = self.now_ms;
        let report = &mut self.nodes[node as usize].report;
        if !report.contains(&storage) {
            report.push(storage);
        }
    }

    /// Updates the space of a node in the placement view, and what it can take now.
    pub(super) fn refresh_node(&mut self, index: NodeIx) {
        let (space, capacity_blocks) = self.count_space(index);
        let node = &mut self.nodes[index as usize];
        node.space = space;
        self.view.set_capacity(node.id, capacity_blocks);
        self.refresh_offer(index);
    }

    /// Counts the combined space of the usable volumes of a node, and what they can hold in all, used
    /// or free, in blocks.
    pub(super) fn count_space(&self, index: NodeIx) -> (Space, u32) {
        let mut space = Space::none();
        let mut capacity_blocks: u32 = 0;
        for &storage in &self.nodes[index as usize].storages {
            let home = self.table.home(storage);
            if !home.usable {
                continue;
            }
            space.inventoried &= home.inventoried;
            let it = &self.table.storages[storage as usize];
            // A server has few volumes, as the namespace checks when it registers.
            space.volumes += 1;
            // A datanode may report any numbers for its volumes.
            let free_bytes = it.status.quota_bytes.saturating_sub(it.status.used_bytes);
            let blocks = |bytes: u64| {
                u32::try_from(bytes / self.options.block_bytes.max(1)).unwrap_or(u32::MAX)
            };
            space.room.add(it.class(), blocks(free_bytes));
            capacity_blocks = capacity_blocks.saturating_add(blocks(it.status.quota_bytes));
        }
        (space, capacity_blocks)
    }

    /// Updates what a node can take according to the placement view, after it was given work or has
    /// done some. Uses the space that [`Cluster::refresh_node`] counted last.
    pub(super) fn refresh_offer(&mut self, index: NodeIx) {
        let node = &mut self.nodes[index as usize];
        let open = node.is_available()
            && !self.draining.contains(&index)
            && !self.maintenance.contains_key(&index);
        // A node that has not reported yet may hold the very block that is to be repaired.
        let may_receive = open
            && node.space.inventoried
            && node.incoming.len() < self.options.repairs_in_flight_per_node as usize;
        let received = if may_receive {
            node.as_target.used(self.now_ms)
        } else {
            0
        };
        // The datanode spreads what it receives over its volumes.
        let options = &self.options;
        let volumes = u32::from(node.space.volumes);
        let limit = |per_node: u32, lane| {
            per_node.min(options.repairs_per_volume(lane).saturating_mul(volumes))
        };
        let repair_limit = limit(options.repairs_per_window, Lane::Repair);
        let urgent_limit = limit(options.urgent_repairs_per_window, Lane::Urgent);
        if received >= repair_limit && node.reopens_ms.is_none() {
            node.reopens_ms = node.as_target.falls_at_ms();
            if let Some(at_ms) = node.reopens_ms {
                self.reopening.push(Reverse((at_ms, index)));
            }
        }
        let lanes = Lanes {
            write: open,
            repair: may_receive && received < repair_limit,
            urgent: may_receive && received < urgent_limit,
        };
        let coming = node.awaited + node.incoming.len() as u32;
        assert!(
            node.replicate.len() <= node.incoming.len(),
            "node {} gets commands for more repairs than it receives: {:?} of {:?}",
            node.id,
            node.replicate,
            node.incoming
        );
        let room = node.space.room.less(coming);
        self.view.set_room_and_lanes_at(index as usize, room, lanes);
    }

    /// Lets nodes take part in repair again once their budgets have room again.
    pub(super) fn reopen_nodes(&mut self) {
        while let Some(&Reverse((at_ms, index))) = self.reopening.peek()
            && at_ms <= self.now_ms
        {
            self.reopening.pop();
            self.nodes[index as usize].reopens_ms = None;
            self.refresh_offer(index);
        }
    }

    /// Finds nodes that fell silent. O(nodes); runs about 20 times within the shorter one of the stale
    /// and the dead timeout.
    pub(super) fn scan_nodes(&mut self) {
        if self.now_ms < self.next_scan_ms {
            return;
        }
        let shortest_ms = self.options.stale_after_ms.min(self.options.dead_after_ms);
        self.next_scan_ms = self.now_ms + (shortest_ms / 20).max(1);
        for index in 0..self.nodes.len() {
            self.scan_node(index as NodeIx);
        }
        self.update_storm();
    }

    fn scan_node(&mut self, index: NodeIx) {
        let may_be_away = self.is_in_maintenance(index);
        let silent_ms = self.ms_since(self.nodes[index as usize].heard_ms);
        let node = &mut self.nodes[index as usize];
        match node.life {
            Life::Dead { .. } => return,
            Life::Alive | Life::Unheard
                if silent_ms > self.options.dead_after_ms && !may_be_away =>
            {
                node.life = Life::Dead {
                    since_ms: self.now_ms,
                };
                node.stale = true;
                if self.draining.contains(&index) {
                    self.demands.note_change();
                }
                if node.heard {
                    self.happenings.note(Happening::Died { node: node.id });
                }
                node.deletes.clear();
                node.seal.clear();
                node.report.clear();
                for storage in node.storages.clone() {
                    self.lose(storage);
                }
                self.cancel_repairs_to(index);
                self.forget_pipelines_of(index);
                self.forget_unknown_on(index);
            }
            Life::Alive => {
                node.stale |= silent_ms > self.options.stale_after_ms;
                self.request_overdue_reports(index);
            }
            Life::Unheard => {}
        }
        self.refresh_node(index);
    }

    /// Requests a report again that was never completed, and periodically a new one.
    fn request_overdue_reports(&mut self, index: NodeIx) {
        for storage in self.nodes[index as usize].storages.clone() {
            let home = self.table.home(storage);
            // The command to report may also have gone unanswered.
            let due_ms = if home.inventoried && self.takeover.is_proven(storage) {
                self.options.full_report_interval_ms
            } else {
                self.options.report_timeout_ms
            };
            let report_ms = self.table.storages[storage as usize].report_ms;
            if home.usable && self.ms_since(report_ms) > due_ms {
                self.ask_for_report(index, storage);
            }
        }
    }

    /// Whether repair waits because of a storm.
    pub(super) fn is_storm(&self) -> bool {
        self.storm.active.is_some()
    }

    pub(super) fn storm_remaining_ms(&self, now_ms: u64) -> Option<u64> {
        let (_, until_ms) = self.storm.active?;
        Some(until_ms.saturating_sub(now_ms))
    }

    fn update_storm(&mut self) {
        let window_start_ms = self.now_ms.saturating_sub(self.options.storm_window_ms);
        let since_ms = self
            .storm
            .active
            .map_or(window_start_ms, |(since_ms, _)| since_ms);
        let (mut missing, mut heard, mut died) = (0, 0, false);
        for (index, node) in self.nodes.iter().enumerate() {
            // The silence of a node in maintenance says nothing about the network.
            if self.is_in_maintenance(index as NodeIx) {
                continue;
            }
            match node.life {
                Life::Dead { since_ms: at } if at >= since_ms => {
                    missing += 1;
                    died |= at == self.now_ms;
                }
                Life::Alive if self.ms_since(node.heard_ms) > self.options.stale_after_ms => {
                    missing += 1;
                }
                Life::Alive => heard += 1,
                Life::Unheard => {
                    missing += 1;
                    died |= !self.safe_mode;
                }
                Life::Dead { .. } => {}
            }
        }
        let share = f64::from(missing) / f64::from((missing + heard).max(1));
        let many = missing as usize >= STORM_NODES_MIN && share > self.options.storm_share;
        match self.storm.active {
            None if many && died => {
                let until_ms = self.now_ms + self.options.storm_hold_ms;
                self.storm.active = Some((window_start_ms, until_ms));
                self.happenings.note(Happening::RepairHeld);
            }
            Some((_, until_ms)) if !many || self.now_ms >= until_ms => {
                self.storm.active = None;
                self.happenings.note(Happening::RepairReleased);
            }
            _ => {}
        }
    }

    pub(super) fn update_safe_mode(&mut self) {
        if !self.safe_mode {
            return;
        }
        let reported = self.totals.not_lost() as f64;
        let relevant = self.totals.relevant.get() as f64;
        let enough = self.options.safe_mode_reported_share * relevant;
        let timed_out = self.ms_since(self.started_ms) >= self.options.safe_mode_max_ms;
        // Repair would only race with the nodes that are still about to report.
        let all_heard = self
            .nodes
            .iter()
            .enumerate()
            .all(|(index, node)| match node.life {
                Life::Unheard => self.is_in_maintenance(index as NodeIx),
                Life::Alive => self.is_inventoried(node),
                Life::Dead { .. } => true,
            });
        if timed_out || (reported >= enough && all_heard) {
            self.safe_mode = false;
            // Only now is the space of the servers known.
            self.rebuild_grid(self.now_ms);
            self.settle_from = Some(0);
            self.update_storm();
        }
    }

    /// Whether all usable volumes of a node sent a full report since it registered.
    pub(super) fn is_inventoried(&self, node: &Node) -> bool {
        node.storages.iter().all(|&storage| {
            let home = self.table.home(storage);
            home.inventoried || !home.usable
        })
    }

    /// Settles all blocks, a bounded number per tick. In safe mode nothing was queued for repair or
    /// removal; now everything is.
    pub(super) fn settle_after_safe_mode(&mut self) {
        let Some(from) = self.settle_from else {
            return;
        };
        let end = self.table.slots_end();
        let to = end.min(from.saturating_add(self.options.work_per_tick as u32));
        for slot in from..to {
            self.settle(slot);
            self.note_earlier_loss(slot);
        }
        self.settle_from = (to < end).then_some(to);
        if self.settle_from.is_none() {
            self.unnoted_from = Slot::MAX;
        }
    }

    /// Takes replicas on lost volumes out of the tables, a bounded number per tick.
    pub(super) fn work_off_gone_storages(&mut self) {
        let mut budget = self.options.work_per_tick;
        while budget > 0
            && let Some(&storage) = self.gone.front()
        {
            let home = self.table.home(storage);
            // The volume may have come back in the meantime; then its report shows what is there.
            if home.usable {
                self.gone.pop_front();
                continue;
            }
            // The blocks are scattered over memory: several are fetched at the same time.
            let blocks = self.table.storages[storage as usize].blocks();
            let last = blocks.iter().rev().take(PREFETCHED.min(budget));
            let last: SmallVec<[Slot; PREFETCHED]> = last.copied().collect();
            if last.is_empty() {
                self.gone.pop_front();
            }
            budget -= last.len();
            self.prefetch_holders(&last);
            for slot in last {
                if let Some(index) = self.table.replica_in(slot, storage) {
                    let block = self.table.known(slot).id;
                    let deletes = &mut self.nodes[home.node as usize].deletes;
                    deletes.forget_command(block);
                    self.leave_pipeline(slot, home.node);
                    self.table.remove_replica(slot, index);
                }
                self.settle(slot);
            }
        }
    }
}

/// Whether a server is still in the same place, as far as placement is concerned.
fn is_at_home(before: &ServerDescription, now: &ServerDescription) -> bool {
    before.rack == now.rack
        && before.environment == now.environment
        && before.machine_function == now.machine_function
}
