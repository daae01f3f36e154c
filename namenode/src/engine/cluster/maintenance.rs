//! Servers that are away for a while: for that time their blocks are not repaired, and they are given
//! nothing new. Operators put servers in maintenance; a datanode that stops in good order is in
//! maintenance until it is back, or until it has been away for too long for a restart.
//!
//! A node in maintenance that falls silent is not declared dead; its replicas continue to count, and
//! readers try it last. After a restart of the namenode, it is not known what such a node holds until
//! it comes back: until then, a block that lacks no more replicas than there are such nodes waits,
//! unless it has none at all.

use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::placement::ReimageImpact;
use rustc_hash::FxHashSet;

use super::Cluster;
use super::node::Life;
use super::table::{NodeIx, Slot};

/// How long a node may be away.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maintenance {
    until_ms: u64,
    /// It stopped by itself: no operator has to end it.
    ends_on_return: bool,
}

impl Cluster {
    /// Notes that a datanode is stopping. Restarts take moments, so its blocks are not repaired for
    /// now, unless a block would be left with one replica, or none, meanwhile. O(blocks on it).
    pub fn stopping(&mut self, now_ms: u64, node: NodeId) {
        self.advance(now_ms);
        let Ok(index) = self.live_node(node) else {
            return;
        };
        self.nodes[index as usize].stale = true;
        let until_ms = self.now_ms + self.options.restart_wait_ms;
        let waits = self.options.restart_wait_ms > 0
            && !self.is_in_maintenance(index)
            && !self.draining.contains(&index)
            && self.maintenance_impact(&[node]).is_safe();
        if waits {
            self.begin_maintenance(index, until_ms, true);
        }
        self.refresh_node(index);
    }

    /// Ends the maintenance of a node that stopped by itself and registers again.
    pub(super) fn end_restart(&mut self, node: NodeIx) {
        if self
            .maintenance
            .get(&node)
            .is_some_and(|it| it.ends_on_return)
        {
            self.end_maintenance(node);
        }
    }

    /// Lets a node be away until `until_ms`, or, with `None`, no longer.
    pub fn set_maintenance(&mut self, now_ms: u64, node: NodeId, until_ms: Option<u64>) {
        self.advance(now_ms);
        let Some(index) = self.node_index(node) else {
            return;
        };
        match until_ms.filter(|&until_ms| until_ms > self.now_ms) {
            Some(until_ms) => {
                self.begin_maintenance(index, until_ms, false);
                self.refresh_node(index);
            }
            None => self.end_maintenance(index),
        }
    }

    /// How much longer a node may be away, in milliseconds; `None` when it is not in maintenance.
    #[must_use]
    pub fn maintenance_left_ms(&self, now_ms: u64, node: NodeId) -> Option<u64> {
        let maintenance = self.maintenance.get(&self.node_index(node)?)?;
        Some(maintenance.until_ms.saturating_sub(now_ms))
    }

    /// The impact of these nodes being away, in addition to those that may be away already: its lost
    /// blocks could not be read. O(blocks on them).
    #[must_use]
    pub fn maintenance_impact(&self, nodes: &[NodeId]) -> ReimageImpact {
        let asked = nodes.iter().filter_map(|&node| self.node_index(node));
        let away: FxHashSet<NodeIx> = asked.chain(self.maintenance.keys().copied()).collect();
        self.impact(&away)
    }

    pub(super) fn is_in_maintenance(&self, node: NodeIx) -> bool {
        self.maintenance.contains_key(&node)
    }

    /// Ends maintenance whose time is over.
    pub(super) fn expire_maintenance(&mut self) {
        let is_over = |it: &(&NodeIx, &Maintenance)| it.1.until_ms <= self.now_ms;
        let over = self.maintenance.iter().filter(is_over);
        let mut over: Vec<NodeIx> = over.map(|(&node, _)| node).collect();
        over.sort_unstable();
        for node in over {
            self.end_maintenance(node);
        }
    }

    fn begin_maintenance(&mut self, node: NodeIx, until_ms: u64, ends_on_return: bool) {
        assert!(
            until_ms > self.now_ms,
            "node {} may be away until {until_ms} ms, but now are {} ms",
            self.nodes[node as usize].id,
            self.now_ms
        );
        let maintenance = Maintenance {
            until_ms,
            ends_on_return,
        };
        let before = self.maintenance.insert(node, maintenance);
        assert!(
            before.is_none() || !ends_on_return,
            "the restart of node {} would end {before:?} when it is back",
            self.nodes[node as usize].id
        );
    }

    fn end_maintenance(&mut self, node: NodeIx) {
        let had_to_wait = self.may_hold_unknown(node);
        if self.maintenance.remove(&node).is_none() {
            return;
        }
        self.refresh_node(node);
        if had_to_wait && !self.safe_mode {
            // Blocks waited for what the node would report.
            self.settle_from = Some(0);
        }
        // If the node is away, it is declared dead immediately, not with the next periodic scan.
        self.next_scan_ms = self.now_ms;
    }

    /// Whether a block that lacks replicas waits for the reports of nodes in maintenance.
    pub(super) fn waits_for_maintenance(&self, present: usize, wanted: usize) -> bool {
        if self.maintenance.is_empty() || present == 0 {
            return false;
        }
        let nodes = self.maintenance.keys();
        let unknown = nodes.filter(|&&node| self.may_hold_unknown(node)).count();
        wanted <= present + unknown
    }

    /// Whether a node in maintenance may hold replicas that are not known: it has not registered since
    /// the namenode started, or not reported everything yet.
    fn may_hold_unknown(&self, node: NodeIx) -> bool {
        let it = &self.nodes[node as usize];
        self.is_in_maintenance(node) && (it.life == Life::Unheard || !self.is_inventoried(it))
    }

    /// Whether a block is not repaired because it waits for nodes in maintenance.
    pub(super) fn is_held_for_maintenance(&self, slot: Slot) -> bool {
        self.table.get(slot).is_some_and(|block| {
            let present = self.tally(slot, block).present();
            self.waits_for_maintenance(present, self.due(block))
        })
    }
}
