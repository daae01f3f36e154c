//! Replicas that are in the wrong place: diversity, and what leaves a server.

use harvestfs_placement::{
    Constraints, ServerView,
    diversity::{conflicts, held},
};
use harvestfs_protocol::{ids::NodeId, types::Durability};
use smallvec::SmallVec;

use super::{
    Cluster,
    queue::rank_of,
    table::{Block, NodeIx, Slot},
};

impl Cluster {
    /// Whether the replica on a node is to leave it as soon as another one is made: its server is
    /// drained, its owner wants the space back, or a server that is emptier gets it.
    pub(super) fn is_leaving(&self, slot: Slot, node: NodeIx) -> bool {
        self.draining.contains(&node)
            || self.victims.contains(&(slot, node))
            || self.balance.moving.get(&slot) == Some(&node)
    }

    /// A node as placement knows it.
    fn server(&self, node: NodeIx) -> Option<&ServerView> {
        self.view.server_at(node as usize)
    }

    /// The ids by which placement knows nodes.
    pub(super) fn ids(&self, nodes: impl Iterator<Item = NodeIx>) -> SmallVec<[NodeId; 8]> {
        nodes.map(|node| self.nodes[node as usize].id).collect()
    }

    /// What a block was promised: everything that the policy keeps, if it is strict.
    pub(super) fn promised(&self, block: &Block) -> Constraints {
        match block.rules.durability {
            Durability::Strict => self.policy.constraints(),
            Durability::Space => Constraints::NONE,
        }
    }

    /// The constraints that hold among the replicas of a block.
    pub(super) fn held(&self, nodes: &[NodeIx]) -> Constraints {
        held(
            &self.view,
            nodes.iter().filter_map(|&node| self.server(node)),
        )
    }

    /// How many constraints hold, and whether one does not that was promised. Counts sealed blocks
    /// with replicas only: others are still being placed, or lost.
    pub(super) fn diversity(&self, block: &Block, holders: &[NodeIx]) -> (Option<u8>, bool) {
        let watched = self.options.watch_diversity && !self.safe_mode;
        if !watched || !block.sealed || block.required_bytes == 0 || holders.is_empty() {
            return (None, false);
        }
        let held = self.held(holders);
        (
            Some(held.count() as u8),
            !held.contains(self.promised(block)),
        )
    }

    /// The replica whose move mends most: without it, the fewest conflicts with what was promised
    /// are left. `None` when there are none.
    pub(super) fn misfit(&self, slot: Slot) -> Option<NodeIx> {
        let block = self.table.get(slot)?;
        let holders = self.holders(slot, block);
        let promised = self.promised(block);
        let without = |left_out: Option<NodeIx>| {
            let rest = holders.iter().filter(|&&node| Some(node) != left_out);
            let servers = rest.filter_map(|&node| self.server(node));
            conflicts(&self.view, servers, promised)
        };
        if without(None) == 0 {
            return None;
        }
        let ids = self.ids(holders.iter().copied());
        let surplus = self.policy.surplus(&self.view, &ids)?;
        holders.get(surplus).copied()
    }

    /// The rank of a block that has to be repaired: the fewer survivors and the more often their
    /// tenants are reimaged, the sooner.
    pub(super) fn repair_rank(&self, holders: &[NodeIx], survivors: usize) -> usize {
        let mean = self.view.mean_reimage_rate();
        // That all survivors are reimaged at about the same time, over that of average ones.
        let risk: f64 = holders
            .iter()
            .filter_map(|&node| self.server(node))
            .map(|server| self.view.reimage_rate(server) / mean)
            .product();
        let class = match risk {
            risk if risk > 4.0 => 0,
            risk if risk > 1.0 => 1,
            risk if risk > 0.25 => 2,
            _ => 3,
        };
        rank_of(survivors, class)
    }
}
