//! The interface of all placement policies.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::{Durability, StorageClass};
use harvestfs_telemetry::hours::WeekHours;
use rand::Rng;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::diversity::{Constraints, conflicts, held};
use crate::greedy::Greedy;
use crate::grid::{CALM_POINTS, LeastReimaged, Scope};
use crate::spread::{Harvest, History};
use crate::stock::Stock;
use crate::view::{Lane, ServerView, View};

/// Servers, best first; three fit without a heap allocation.
pub type Nodes = SmallVec<[NodeId; 4]>;

/// A request to a policy: servers for further replicas of one block.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Further replicas wanted; at least 1.
    pub wanted: u8,
    /// Servers that have a replica that stays. None of them is chosen again, and the new ones are chosen such that
    /// all together are spread well.
    pub existing: &'a [NodeId],
    /// Servers not to choose for other reasons: they have just failed the client, or hold a bad replica.
    pub exclude: &'a [NodeId],
    /// Host of the writer, if known, so that the first replica can be placed near it.
    pub writer: Option<IpAddr>,
    /// The requested class of volume, if any.
    pub class: Option<StorageClass>,
    /// The purpose of the replicas.
    pub lane: Lane,
    /// Strict: the policy's constraints hold among all replicas, or nothing is chosen. Space: they are given up one
    /// at a time, in the order of [`Constraints::RELAXED_IN_ORDER`], for each replica that has no place under them.
    pub durability: Durability,
    /// Constraints of the policy that do not apply, with either durability, because the servers of the cluster cannot
    /// satisfy them.
    pub given_up: Constraints,
}

impl Request<'_> {
    /// Whether a server may be chosen in addition to those already `chosen`: it is none of them, holds no replica
    /// that stays, and is not excluded.
    #[must_use]
    pub fn admits(&self, chosen: &[NodeId], node: NodeId) -> bool {
        let taken = [chosen, self.existing, self.exclude];
        !taken.iter().any(|nodes| nodes.contains(&node))
    }

    /// Whether each of these may be chosen in addition to the others.
    #[inline]
    fn admits_all(&self, nodes: &[NodeId]) -> bool {
        let is_repeated = |index: usize| nodes[..index].contains(&nodes[index]);
        let has_none = |taken: &[NodeId]| !taken.iter().any(|node| nodes.contains(node));
        !(1..nodes.len()).any(is_repeated) && has_none(self.existing) && has_none(self.exclude)
    }
}

/// Fewer servers than requested can take a replica.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} replicas wanted, {} can be placed", placeable.len())]
pub struct TooFew {
    /// Number of further replicas that were requested.
    pub wanted: u8,
    /// The servers that can take one. The caller decides whether fewer are sufficient.
    pub placeable: Nodes,
}

/// Decides where replicas go. A pure function of its arguments: the same view, request and state
/// of the random generator give the same servers.
pub trait Policy: Send {
    /// Which policy this is.
    fn kind(&self) -> PolicyKind;

    /// The constraints that it guarantees for the replicas of a block with `durability=strict`.
    fn constraints(&self) -> Constraints;

    /// Which tenants it wants in the grid.
    fn scope(&self) -> Scope;

    /// Does the same as [`Policy::choose`], which checks the result of this method.
    ///
    /// # Errors
    /// [`TooFew`] if there is no place for that many; it carries the servers that can take one.
    fn find(&self, view: &View, request: &Request<'_>, rng: &mut dyn Rng) -> Result<Nodes, TooFew>;

    /// Chooses `request.wanted` different servers, in the order of the write pipeline.
    ///
    /// # Errors
    /// [`TooFew`] if there is no place for that many; it carries the servers that can take one.
    ///
    /// # Panics
    /// If the policy returns a server twice, one that the request excludes, or a number of servers other than it
    /// claims.
    fn choose(
        &self,
        view: &View,
        request: &Request<'_>,
        rng: &mut dyn Rng,
    ) -> Result<Nodes, TooFew> {
        let found = self.find(view, request, rng);
        let wanted = usize::from(request.wanted);
        let is_right = match &found {
            Ok(nodes) => nodes.len() == wanted && request.admits_all(nodes),
            Err(TooFew { placeable, .. }) => {
                placeable.len() < wanted && request.admits_all(placeable)
            }
        };
        if !is_right {
            stop(self.kind(), request, &found);
        }
        found
    }

    /// Whether a block is spread as well on the servers `after` as on those `before`: no constraint that holds is
    /// broken, the policy's constraints are not farther from holding, at least as many replicas are in the grid and
    /// on calm tenants, all owners are simultaneously busy in no more hours, and the sum of the tenants' reimage
    /// rates is no higher.
    fn keeps(&self, view: &View, before: &[NodeId], after: &[NodeId]) -> bool {
        let servers = |nodes: &[NodeId]| -> SmallVec<[&ServerView; 8]> {
            nodes.iter().filter_map(|&node| view.server(node)).collect()
        };
        let calm = |servers: &[&ServerView]| {
            let points = servers.iter().map(|it| u32::from(view.calm_points(it)));
            points.sum::<u32>().min(CALM_POINTS.into())
        };
        let all_busy = |servers: &[&ServerView]| {
            let busy = servers.iter().map(|it| view.busy_hours(it));
            busy.fold(WeekHours::ALL, WeekHours::common).count()
        };
        let in_grid = |servers: &[&ServerView]| {
            let cells = servers.iter().filter_map(|it| view.cell_of(it));
            cells.count()
        };
        let distance =
            |servers: &[&ServerView]| conflicts(view, servers.iter().copied(), self.constraints());
        let all_held = |servers: &[&ServerView]| held(view, servers.iter().copied());
        let rates =
            |servers: &[&ServerView]| servers.iter().map(|it| view.reimage_rate(it)).sum::<f64>();
        assert_eq!(
            before.len(),
            after.len(),
            "a block moves from {before:?} to {after:?}"
        );
        let (before, after) = (servers(before), servers(after));
        all_held(&after).contains(all_held(&before))
            && distance(&after) <= distance(&before)
            && in_grid(&after) >= in_grid(&before)
            && calm(&after) >= calm(&before)
            && all_busy(&after) <= all_busy(&before)
            && rates(&after) <= rates(&before)
    }

    /// Chooses which of the servers that hold a block should give up its replica, so that the rest is spread best: an
    /// index into `replicas`. `None` when `replicas` is empty. A server that the view does not know has no conflicts,
    /// and counts as reimaged all the time and as full.
    ///
    /// By default, the criteria are in this order: the fewest remaining conflicts with the policy's constraints; the
    /// fewest with all constraints; the fewest hours of the week in which all others are busy; the tenant that is
    /// reimaged most; the fullest server.
    fn surplus(&self, view: &View, replicas: &[NodeId]) -> Option<usize> {
        let servers: SmallVec<[Option<&ServerView>; 8]> =
            replicas.iter().map(|&node| view.server(node)).collect();
        let cost = |left_out: usize| {
            let rest = |constraints| {
                let others = servers.iter().enumerate();
                let rest = others.filter_map(|(i, it)| if i == left_out { None } else { *it });
                conflicts(view, rest, constraints)
            };
            let others = servers.iter().enumerate().filter(|(i, _)| *i != left_out);
            let busy = others.filter_map(|(_, it)| Some(view.busy_hours((*it)?)));
            let all_busy = busy.fold(WeekHours::ALL, WeekHours::common).count();
            (rest(self.constraints()), rest(Constraints::ALL), all_busy)
        };
        let rate = |i: usize| servers[i].map_or(f64::INFINITY, |it| view.reimage_rate(it));
        let room = |i: usize| servers[i].map_or(0, |it| it.room.blocks(None));
        (0..replicas.len()).min_by(|&a, &b| {
            (cost(a).cmp(&cost(b)))
                .then(rate(b).total_cmp(&rate(a)))
                .then(room(a).cmp(&room(b)))
        })
    }
}

/// Separate from the check, which every block passes through.
#[cold]
fn stop(kind: PolicyKind, request: &Request<'_>, found: &Result<Nodes, TooFew>) -> ! {
    panic!("{kind} may not answer {request:?} with {found:?}")
}

/// The available policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// [`Stock`]: the placement of HDFS.
    Stock,
    /// [`Greedy`]: best tenants first.
    Greedy,
    /// [`History`]: Algorithm 2 of OSDI'16.
    History,
    /// [`Harvest`]: Algorithm 2 and the additions of this project.
    #[default]
    Harvest,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Stock, Self::Greedy, Self::History, Self::Harvest];

    /// The name by which configuration chooses it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Greedy => "greedy",
            Self::History => "history",
            Self::Harvest => "harvest",
        }
    }

    /// Creates the policy.
    #[must_use]
    pub fn build(self, options: &PolicyOptions) -> Box<dyn Policy> {
        match self {
            Self::Stock => Box::new(Stock),
            Self::Greedy => Box::new(Greedy),
            Self::History => Box::new(History),
            Self::Harvest => Box::new(Harvest {
                locality: options.locality,
                scope: Scope::LeastReimaged(options.grid),
            }),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not among the accepted ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{name}`; accepted: {accepted}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    accepted: String,
}

impl UnknownName {
    fn new(what: &'static str, name: &str, accepted: &[&str]) -> Self {
        Self {
            what,
            name: name.into(),
            accepted: accepted.join(", "),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| UnknownName::new("policy", name, &Self::ALL.map(Self::name)))
    }
}

/// The options of a policy; only `harvest` uses them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyOptions {
    /// Whether the first replica goes to the writer's server.
    pub locality: Locality,
    /// How many tenants are in the grid.
    pub grid: LeastReimaged,
}

/// Whether the first replica of a block goes to a server on the writer's host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Locality {
    /// If one there is in the grid and can take it.
    #[default]
    Prefer,
    /// If one there can take it, in the grid or not.
    Require,
    /// Not deliberately.
    Off,
}

impl Locality {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Prefer, Self::Require, Self::Off];

    /// The name by which configuration chooses it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Locality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Locality {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = Self::ALL.into_iter().find(|it| it.name() == name);
        known.ok_or_else(|| UnknownName::new("locality", name, &Self::ALL.map(Self::name)))
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;
    use crate::view::{Lanes, Location, Room};

    /// Answers with the same servers to every request.
    struct Always(Vec<u32>);

    impl Policy for Always {
        fn kind(&self) -> PolicyKind {
            PolicyKind::Stock
        }

        fn constraints(&self) -> Constraints {
            Constraints::NONE
        }

        fn scope(&self) -> Scope {
            Scope::Everything
        }

        fn find(&self, _: &View, _: &Request<'_>, _: &mut dyn Rng) -> Result<Nodes, TooFew> {
            Ok(self.0.iter().map(|&node| NodeId(node)).collect())
        }
    }

    fn choose(policy: &dyn Policy, exclude: &[NodeId]) -> Nodes {
        let mut view = View::new();
        for node in 0..4 {
            let location = Location {
                rack: "r",
                environment: "e",
                machine_function: "f",
                host: [127, 0, 0, 1].into(),
            };
            let mut room = Room::default();
            room.add(StorageClass::Disk, 9);
            view.insert(NodeId(node), &location);
            view.set_room(NodeId(node), room);
            view.set_lanes(NodeId(node), Lanes::ALL);
        }
        view.rebuild_grid(policy.scope());
        let request = Request {
            wanted: 2,
            existing: &[],
            exclude,
            writer: None,
            class: None,
            lane: Lane::Write,
            durability: Durability::Space,
            given_up: Constraints::NONE,
        };
        let chosen = policy.choose(&view, &request, &mut SmallRng::seed_from_u64(1));
        chosen.expect("there are enough servers")
    }

    #[test]
    fn a_right_answer_is_given() {
        assert_eq!(choose(&Always(vec![0, 1]), &[NodeId(2)]).len(), 2);
        for kind in PolicyKind::ALL {
            assert_eq!(
                choose(&*kind.build(&PolicyOptions::default()), &[]).len(),
                2
            );
        }
    }

    #[test]
    #[should_panic(expected = "stock may not answer")]
    fn a_server_that_is_chosen_twice_stops() {
        choose(&Always(vec![1, 1]), &[]);
    }

    #[test]
    #[should_panic(expected = "stock may not answer")]
    fn an_excluded_server_that_is_chosen_stops() {
        choose(&Always(vec![0, 2]), &[NodeId(2)]);
    }

    #[test]
    #[should_panic(expected = "stock may not answer")]
    fn another_number_of_servers_than_wanted_stops() {
        choose(&Always(vec![0]), &[]);
    }
}
