//! The replicas and constraints that blocks can get of those that they ask for: from the servers that
//! the cluster has, and from those that are available now.
//!
//! There are three cases:
//! - *What the cluster does not have* is not demanded. The cluster has its registered servers, up or
//!   not, except those that were decommissioned. When there are fewer of them than replicas wanted,
//!   blocks get one replica on each. Of the constraints that blocks are promised, those that these
//!   servers can keep are demanded; they are added one after the other, the ones whose loss costs most
//!   first: environment, rack, machine function, column, row. Blocks that lack anything for this reason
//!   are *curtailed*.
//! - *What is away for now* (busy, silent, drained, in maintenance, not registered since the start) is not demanded
//!   of a writer: blocks are written with at least [`ClusterOptions::min_write_replicas`] replicas, and repair makes
//!   the others. With fewer, writes wait.
//! - *What is full* is not compensated for: strict blocks are refused.

use std::net::IpAddr;

use harvestfs_placement::{Constraints, Lane, Nodes, Request, ServerView, most_apart};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::limits::REPLICATION_MAX;
use harvestfs_protocol::outlook::{Shortage, Unavailable, WriteOutlook, WriteVerdict};
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass};
use rand::Rng;

use super::Cluster;
use super::node::Life;
use super::table::{Block, NodeIx};

/// What the cluster can give a block that wants a given number of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    /// Replicas.
    pub(super) replicas: u8,
    /// The constraints promised by the policy that these replicas can keep.
    pub(super) constraints: Constraints,
}

/// The demands of blocks by the number of replicas that they want, from 1.
#[derive(Debug, Default)]
pub(super) struct Demands {
    /// Empty until servers are known and the first grid is built: until then, everything is demanded.
    known: Vec<Demand>,
    outdated: bool,
    /// When the first server of the cluster registered, if that was since the namenode started.
    founded_ms: Option<u64>,
}

impl Demands {
    /// Notes that servers joined or left, or that their places in the grid changed.
    pub(super) fn note_change(&mut self) {
        self.outdated = true;
    }

    /// Notes that the first server of the cluster registers: others will follow.
    pub(super) fn note_founding(&mut self, now_ms: u64) {
        self.founded_ms = Some(now_ms);
    }
}

/// Whether a server is available to a writer, and if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It is no longer part of the cluster.
    Decommissioned,
    Open,
    Busy,
    Silent,
    Drained,
    InMaintenance,
    Unregistered,
    Full,
}

impl Cluster {
    /// Recomputes what blocks can get if the servers have changed.
    pub(super) fn refresh_demands(&mut self) {
        if !self.demands.outdated || self.grid_is_unknown() {
            return;
        }
        self.demands.outdated = false;
        let demands = (1..=REPLICATION_MAX).map(|wanted| self.demand_among_members(wanted));
        let demands: Vec<Demand> = demands.collect();
        assert!(
            demands
                .windows(2)
                .all(|pair| pair[0].replicas <= pair[1].replicas),
            "blocks that want more replicas can have fewer: {demands:?}"
        );
        if demands != self.demands.known {
            self.demands.known = demands;
            if !self.safe_mode {
                self.settle_from = Some(0);
            }
        }
    }

    fn demand_among_members(&self, wanted: u8) -> Demand {
        let members = || {
            let servers = self.view.servers().iter().enumerate();
            let members = servers.filter(|(index, _)| !self.is_decommissioned(*index as NodeIx));
            members.map(|(_, server)| server)
        };
        let replicas = members().take(wanted.into()).count() as u8;
        let can_keep = |constraints| {
            let found = most_apart(&self.view, members(), replicas, constraints);
            // In a large cluster, nothing is given up because a search ended too early.
            found.count == replicas || !found.is_most
        };
        let promised = self.policy.constraints();
        let mut constraints = Constraints::NONE;
        if can_keep(promised) {
            constraints = promised;
        } else {
            for (constraint, _) in Constraints::RELAXED_IN_ORDER.into_iter().rev() {
                let more = constraints.union(constraint);
                if promised.contains(constraint) && can_keep(more) {
                    constraints = more;
                }
            }
        }
        Demand {
            replicas,
            constraints,
        }
    }

    /// Whether a server has left the cluster permanently: it was drained and is dead.
    fn is_decommissioned(&self, node: NodeIx) -> bool {
        let is_dead = matches!(self.nodes[node as usize].life, Life::Dead { .. });
        is_dead && self.draining.contains(&node)
    }

    /// What is demanded for blocks that want so many replicas.
    fn demand(&self, replication: u8) -> Demand {
        let wanted = replication.max(1);
        let known = self.demands.known.get(usize::from(wanted) - 1).copied();
        known.unwrap_or_else(|| self.all_of(wanted))
    }

    /// The number of replicas that a block is to have: those that it asks for, as far as there are
    /// servers for them.
    pub(super) fn due(&self, block: &Block) -> usize {
        self.demand(block.rules.replication).replicas.into()
    }

    /// The constraints that the policy promises a block, but the cluster cannot keep.
    pub(super) fn given_up(&self, rules: &PlacementRules) -> Constraints {
        let kept = self.demand(rules.replication).constraints;
        self.policy.constraints().without(kept)
    }

    /// The minimum number of replicas with which a block may be written.
    fn needed(&self, demand: Demand) -> u8 {
        self.options.min_write_replicas.min(demand.replicas).max(1)
    }

    /// Whether the cluster is new, so that more servers will register soon.
    fn is_growing(&self) -> bool {
        let since_ms = self.demands.founded_ms.map(|at_ms| self.ms_since(at_ms));
        self.nodes.is_empty()
            || since_ms.is_some_and(|since_ms| since_ms < self.options.stale_after_ms)
    }

    /// What is demanded for new blocks: while the cluster is growing, everything that they ask for.
    fn demand_of_writers(&self, rules: &PlacementRules) -> Demand {
        if self.is_growing() {
            self.all_of(rules.replication.max(1))
        } else {
            self.demand(rules.replication)
        }
    }

    /// The number of replicas that a new block is to have in the end.
    #[must_use]
    pub fn due_of_new(&self, rules: &PlacementRules) -> u8 {
        self.demand_of_writers(rules).replicas
    }

    /// The minimum number of replicas with which a new block may be written.
    #[must_use]
    pub fn needed_by_new(&self, rules: &PlacementRules) -> u8 {
        self.needed(self.demand_of_writers(rules))
    }

    fn all_of(&self, replicas: u8) -> Demand {
        Demand {
            replicas,
            constraints: self.policy.constraints(),
        }
    }

    fn standing(&self, index: usize, class: Option<StorageClass>, exclude: &[NodeId]) -> Standing {
        let (ix, node) = (index as NodeIx, &self.nodes[index]);
        let room = self.view.server_at(index).map(|server| server.room);
        let is_full = room.is_none_or(|room| room.blocks(class) == 0);
        match node.life {
            _ if self.is_decommissioned(ix) => Standing::Decommissioned,
            Life::Alive if is_full => Standing::Full,
            _ if self.is_in_maintenance(ix) => Standing::InMaintenance,
            _ if self.draining.contains(&ix) => Standing::Drained,
            Life::Unheard => Standing::Unregistered,
            Life::Dead { .. } => Standing::Silent,
            Life::Alive if node.stale || exclude.contains(&node.id) => Standing::Silent,
            Life::Alive if node.busy => Standing::Busy,
            Life::Alive => Standing::Open,
        }
    }

    fn unavailable(&self, class: Option<StorageClass>, exclude: &[NodeId]) -> Unavailable {
        let mut sum = Unavailable::default();
        for index in 0..self.nodes.len() {
            let count = match self.standing(index, class, exclude) {
                Standing::Decommissioned | Standing::Open => continue,
                Standing::Busy => &mut sum.busy,
                Standing::Silent => &mut sum.silent,
                Standing::Drained => &mut sum.drained,
                Standing::InMaintenance => &mut sum.in_maintenance,
                Standing::Unregistered => &mut sum.unregistered,
                Standing::Full => &mut sum.full,
            };
            *count += 1;
        }
        sum
    }

    /// Servers that are open and, with `with_away`, also those that are away and not known to be full.
    fn servers_for(
        &self,
        class: Option<StorageClass>,
        exclude: &[NodeId],
        with_away: bool,
    ) -> impl Iterator<Item = &ServerView> + Clone {
        let servers = self.view.servers().iter().enumerate();
        let wanted = move |standing| match standing {
            Standing::Open => true,
            Standing::Full | Standing::Decommissioned => false,
            _ => with_away,
        };
        servers
            .filter(move |(index, _)| wanted(self.standing(*index, class, exclude)))
            .map(|(_, server)| server)
    }

    /// Constraints that are demanded of a block with these rules.
    fn demanded(rules: &PlacementRules, demand: Demand) -> Constraints {
        match rules.durability {
            Durability::Strict => demand.constraints,
            Durability::Space => Constraints::NONE,
        }
    }

    /// The number of replicas that open servers can take now within the demanded constraints.
    fn most_apart_now(&self, rules: &PlacementRules, exclude: &[NodeId], demand: Demand) -> u8 {
        let open = self.servers_for(rules.class, exclude, false);
        let constraints = Self::demanded(rules, demand);
        most_apart(&self.view, open, demand.replicas, constraints).count
    }

    /// Whether a shortage will pass: the block could be placed if all servers that are away were back,
    /// or more servers are expected.
    fn is_passing(&self, rules: &PlacementRules, demand: Demand, exclude: &[NodeId]) -> bool {
        let constraints = Self::demanded(rules, demand);
        let servers = self.servers_for(rules.class, exclude, true);
        let found = most_apart(&self.view, servers, demand.replicas, constraints);
        self.is_growing() || demand.replicas == 0 || found.count == demand.replicas
    }

    /// Asks the policy to place a new block, with no more replicas and constraints than the cluster can
    /// give.
    pub(super) fn choose_for_writing(
        &self,
        rules: &PlacementRules,
        exclude: &[NodeId],
        writer: Option<IpAddr>,
        rng: &mut dyn Rng,
    ) -> Result<Nodes, FsError> {
        let demand = self.demand_of_writers(rules);
        assert!(
            demand.replicas <= rules.replication.max(1),
            "{demand:?} is more than {rules:?} ask for"
        );
        let request = Request {
            wanted: demand.replicas,
            existing: &[],
            exclude,
            writer,
            class: rules.class,
            lane: Lane::Write,
            durability: rules.durability,
            given_up: self.policy.constraints().without(demand.constraints),
        };
        match self.policy.choose(&self.view, &request, rng) {
            // There is no server at all.
            Ok(nodes) if nodes.is_empty() => self.choose_fewer(&request, rules, nodes, rng),
            Ok(nodes) => Ok(nodes),
            Err(few) => self.choose_fewer(&request, rules, few.placeable, rng),
        }
    }

    /// Chooses servers for a block that the policy found no place for, doing without servers that are
    /// away; `placeable` is the most that the policy found.
    fn choose_fewer(
        &self,
        request: &Request<'_>,
        rules: &PlacementRules,
        placeable: Nodes,
        rng: &mut dyn Rng,
    ) -> Result<Nodes, FsError> {
        let (exclude, demand) = (request.exclude, self.demand_of_writers(rules));
        let mut best = placeable;
        if !self.is_passing(rules, demand, exclude) {
            if rules.durability == Durability::Space && !best.is_empty() {
                return Ok(best);
            }
            return Err(self.refusal(rules, exclude, best.len()));
        }
        let needed = self.needed(demand);
        let apart = self.most_apart_now(rules, exclude, demand);
        // The policy draws servers one after the other, and not always as many as it could. If fewer
        // than needed keep the constraints, any others will do: the server that is away may have been
        // the only one of its environment.
        for (wanted, durability) in [(apart, rules.durability), (needed, Durability::Space)] {
            if best.len() >= wanted.into() {
                continue;
            }
            let fewer = Request {
                wanted,
                durability,
                ..*request
            };
            let chosen = self.policy.choose(&self.view, &fewer, rng);
            best = chosen.unwrap_or_else(|few| few.placeable);
        }
        if best.len() < needed.into() {
            return Err(FsError::TooFewDatanodes(Shortage {
                needed,
                placeable: best.len() as u8,
                unavailable: self.unavailable(rules.class, exclude),
            }));
        }
        Ok(best)
    }

    fn refusal(&self, rules: &PlacementRules, exclude: &[NodeId], placeable: usize) -> FsError {
        // Whether a server that is away has room is not known.
        let has_room = self
            .servers_for(rules.class, exclude, true)
            .next()
            .is_some();
        if has_room {
            FsError::InsufficientDiversity {
                wanted: rules.replication,
                placeable: placeable as u8,
            }
        } else {
            FsError::NoSpace
        }
    }

    /// What would happen now to a write with these rules. O(servers) unless few constraints can be
    /// kept.
    #[must_use]
    pub fn write_outlook(&self, rules: &PlacementRules) -> WriteOutlook {
        let demand = self.demand_of_writers(rules);
        let needed = self.needed(demand);
        let strict = rules.durability == Durability::Strict;
        let constraints = Self::demanded(rules, demand);
        let given_up = if strict {
            self.policy.constraints().without(constraints)
        } else {
            Constraints::NONE
        };
        let is_curtailed = demand.replicas < rules.replication || given_up != Constraints::NONE;
        let apart = self.most_apart_now(rules, &[], demand);
        let mut at_once = apart;
        let verdict = if demand.replicas == 0 {
            WriteVerdict::Waits
        } else if apart == demand.replicas {
            match is_curtailed {
                true => WriteVerdict::Curtailed,
                false => WriteVerdict::Whole,
            }
        } else if self.is_passing(rules, demand, &[]) {
            let open = self
                .servers_for(rules.class, &[], false)
                .take(needed.into());
            at_once = apart.max(open.count() as u8);
            match at_once >= needed {
                true => WriteVerdict::Fewer,
                false => WriteVerdict::Waits,
            }
        } else if !strict && apart > 0 {
            WriteVerdict::Fewer
        } else if self.servers_for(rules.class, &[], true).next().is_some() {
            WriteVerdict::NotDiverse
        } else {
            WriteVerdict::Full
        };
        WriteOutlook {
            verdict,
            wanted: rules.replication,
            possible: demand.replicas,
            not_kept: given_up.names().map(String::from).collect(),
            needed,
            at_once,
            unavailable: self.unavailable(rules.class, &[]),
            writable_bytes: if verdict < WriteVerdict::Waits {
                // If more replicas are placed than keep the constraints, they are placed without them.
                let kept = if at_once > apart {
                    Constraints::NONE
                } else {
                    constraints
                };
                self.writable_bytes(rules.class, at_once, kept)
            } else {
                0
            },
        }
    }

    /// Bytes that can be written with so many replicas, kept apart by environment, machine function and
    /// rack as the constraints demand; rows and columns are ignored. Servers that are merely busy
    /// count: they are soon free again.
    fn writable_bytes(
        &self,
        class: Option<StorageClass>,
        replicas: u8,
        constraints: Constraints,
    ) -> u64 {
        let servers = self.view.servers().iter().enumerate();
        let free: Vec<(&ServerView, u64)> = servers
            .filter(|(index, _)| {
                let standing = self.standing(*index, class, &[]);
                matches!(standing, Standing::Open | Standing::Busy)
            })
            .map(|(index, server)| (server, self.free_bytes(index as NodeIx, class)))
            .collect();
        let by = |key: fn(usize, &ServerView) -> u64| {
            let mut groups = rustc_hash::FxHashMap::<u64, u64>::default();
            for (index, (server, bytes)) in free.iter().enumerate() {
                let sum = groups.entry(key(index, server)).or_default();
                *sum = sum.saturating_add(*bytes);
            }
            apart_bytes(groups.into_values().collect(), replicas.into())
        };
        let mut least = by(|index, _| index as u64);
        for (constraint, key) in [
            (
                Constraints::ENVIRONMENT,
                (|_, it| it.environment.number().into()) as fn(usize, &ServerView) -> u64,
            ),
            (Constraints::MACHINE_FUNCTION, |_, it| {
                it.function.number().into()
            }),
            (Constraints::RACK, |_, it| it.rack.number().into()),
        ] {
            if constraints.contains(constraint) {
                least = least.min(by(key));
            }
        }
        least
    }

    fn free_bytes(&self, node: NodeIx, class: Option<StorageClass>) -> u64 {
        let volumes = self.nodes[node as usize].storages.iter();
        volumes
            .filter(|&&storage| self.table.home(storage).usable)
            .map(|&storage| &self.table.storages[storage as usize])
            .filter(|volume| class.is_none_or(|class| volume.class() == class))
            .map(|volume| (volume.status.quota_bytes).saturating_sub(volume.status.used_bytes))
            .fold(0, u64::saturating_add)
    }
}

/// The most bytes that can be stored with each byte in `replicas` different groups, given the free
/// bytes of each group.
fn apart_bytes(mut free: Vec<u64>, replicas: usize) -> u64 {
    free.sort_unstable_by(|a, b| b.cmp(a));
    // The largest groups, `full` of them, hold all of it; the others share the remaining copies.
    let most = (0..replicas).map(|full| {
        let rest = free
            .iter()
            .skip(full)
            .fold(0, |sum: u64, it| sum.saturating_add(*it));
        rest / (replicas - full) as u64
    });
    most.min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_apart_is_bounded_by_the_small_ones() {
        for (free, replicas, expected) in [
            (vec![10, 10, 10], 3, 10),
            (vec![10, 10, 1], 3, 1),
            (vec![100, 6, 4], 2, 10),
            (vec![4, 4, 4, 4], 3, 5),
            (vec![9, 9], 3, 0),
            (vec![], 1, 0),
        ] {
            assert_eq!(apart_bytes(free.clone(), replicas), expected, "{free:?}");
        }
    }
}
