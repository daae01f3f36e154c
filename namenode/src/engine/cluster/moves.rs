//! Replicas in the wrong place: diversity, and replicas that leave a server.

use harvestfs_placement::diversity::{conflicts, held};
use harvestfs_placement::{Constraints, ServerView};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::Durability;
use smallvec::SmallVec;

use super::Cluster;
use super::queue::{LEAVING, rank_of};
use super::settle::SCORES;
use super::table::{Block, NodeIx, Slot};

/// How far apart the replicas of a block are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Diversity {
    /// How many constraints hold.
    pub(super) score: Option<u8>,
    /// A promised constraint does not hold.
    pub(super) misplaced: bool,
    /// A constraint does not hold that would have been promised if the cluster could keep it.
    pub(super) curtailed: bool,
}

impl Cluster {
    /// Whether the replica on a node is to leave it as soon as another one is made: its server is
    /// drained, its owner wants the space back, or an emptier server is to have it.
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

    /// What a block was promised: everything that the policy keeps and the cluster can keep, if it is
    /// strict.
    pub(super) fn promised(&self, block: &Block) -> Constraints {
        match block.rules.durability {
            Durability::Strict => {
                let constraints = self.policy.constraints();
                constraints.without(self.given_up(&block.rules))
            }
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

    /// How many constraints hold, and what follows from those that do not. Considers only sealed blocks
    /// with replicas: others are still being placed, or lost.
    pub(super) fn diversity(&self, block: &Block, holders: &[NodeIx]) -> Diversity {
        let watched = self.options.watch_diversity && !self.safe_mode;
        if !watched || !block.sealed || block.required_bytes == 0 || holders.is_empty() {
            return Diversity::default();
        }
        let held = self.held(holders);
        let strict = block.rules.durability == Durability::Strict;
        let score = held.count() as u8;
        assert!(
            usize::from(score) < SCORES,
            "{score} constraints hold of block {}",
            block.id
        );
        Diversity {
            score: Some(score),
            misplaced: !held.contains(self.promised(block)),
            curtailed: strict && !held.contains(self.given_up(&block.rules)),
        }
    }

    /// The node whose replica should move: the one without which, according to the policy, the others
    /// are spread best. `None` when no promised constraint is broken. After attempts that found no
    /// place for it, the replicas that are in conflict take turns: of two that share something, perhaps
    /// only one can be placed elsewhere.
    pub(super) fn misfit(&self, slot: Slot, attempts: u8) -> Option<NodeIx> {
        let block = self.table.get(slot)?;
        let holders = self.holders(slot, block);
        let promised = self.promised(block);
        let without = |left_out: Option<NodeIx>| {
            let rest = holders.iter().filter(|&&node| Some(node) != left_out);
            let servers = rest.filter_map(|&node| self.server(node));
            conflicts(&self.view, servers, promised)
        };
        let conflicts = without(None);
        if conflicts == 0 {
            return None;
        }
        if attempts > 0 {
            let in_the_way = holders.iter().copied();
            let in_the_way: SmallVec<[NodeIx; 8]> = in_the_way
                .filter(|&node| without(Some(node)) < conflicts)
                .collect();
            let turn = usize::from(attempts).checked_rem(in_the_way.len());
            return turn.map(|turn| in_the_way[turn]);
        }
        let ids = self.ids(holders.iter().copied());
        let surplus = self.policy.surplus(&self.view, &ids)?;
        holders.get(surplus).copied()
    }

    /// The rank of a block that has to be repaired: the fewer survivors and the more often their
    /// tenants are reimaged, the sooner.
    pub(super) fn repair_rank(&self, holders: &[NodeIx], survivors: usize) -> usize {
        let mean = self.view.mean_reimage_rate();
        // The risk that all survivors are reimaged at about the same time, relative to average servers.
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
        let rank = rank_of(survivors, class);
        assert!(
            rank < LEAVING,
            "{rank} is no rank of repair, with {survivors} survivors"
        );
        rank
    }
}
