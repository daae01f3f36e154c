//! The policies that spread the replicas of a block over the grid: Algorithm 2 of OSDI'16, and this project's
//! extension of it.

use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::Durability;
use harvestfs_telemetry::hours::WeekHours;
use rand::{Rng, RngExt};
use smallvec::SmallVec;

use crate::diversity::{Constraints, Spread, rounds};
use crate::grid::{CALM_POINTS, CELLS, Cell, Scope};
use crate::policy::{Locality, Nodes, Policy, PolicyKind, Request, TooFew};
use crate::search;
use crate::view::{ServerView, View};

/// Attempts to choose the servers of a block, each from the start after the previous one had no server left for one of
/// its replicas; the first half of them puts a replica on the writer's server.
const ATTEMPTS: u32 = 6;

/// Servers that are drawn to find one that was not busy when the others of a block were. This many find one with a
/// probability of 90 % if a quarter of the space qualifies.
const HOURS_DRAWS: u32 = 8;

/// A cell is not searched for calm servers if they have less than its free space divided by this: the search would take
/// long, and there are too few to help many blocks.
const CALM_PART_MIN: u64 = 8;

/// Algorithm 2 of OSDI'16, to the letter: the grid holds all tenants; the first replica goes to the writer's server;
/// each further one to a random class in a new row and column, within it to a random tenant whose environment has
/// none yet, and there to a random server. After every three replicas, all rows and columns are available again.
///
/// Where the paper is silent: a class without a suitable tenant is skipped in favour of another one; if the writer is
/// on no server, or its server cannot take a replica, the first replica goes to any class; if no class is left for a
/// block, the choice is restarted a few times, the last times without the writer's server. When that fails, all
/// servers are searched.
#[derive(Clone, Copy, Debug, Default)]
pub struct History;

/// Algorithm 2 with the additions of this project:
///
/// - the grid holds only the least reimaged tenants that the data needs ([`Harvest::scope`]);
/// - within a cell, a server is drawn with probability proportional to its free space over its tenant's reimage rate,
///   and a cell with probability proportional to its free space, so that small tenants do not fill up first;
/// - of two tenants that history shows reimaged together ([`View::set_together`]), a block avoids the second one
///   where it has the choice;
/// - a block prefers tenants that were never or rarely busy ([`calm_points`](crate::grid::calm_points)) until one of
///   its replicas can be read while all others are busy; where there are none, it prefers tenants that were not busy
///   in the hours of the week in which the others were;
/// - machine functions and racks are treated like environments (section 7 of the paper);
/// - the replica on the writer's server is optional ([`Locality`]).
#[derive(Clone, Copy, Debug)]
pub struct Harvest {
    /// Whether the first replica goes to the writer's server.
    pub locality: Locality,
    /// Which tenants are in the grid.
    pub scope: Scope,
}

impl Default for Harvest {
    fn default() -> Self {
        Self {
            locality: Locality::default(),
            scope: Scope::LeastReimaged(Default::default()),
        }
    }
}

impl Policy for History {
    fn kind(&self) -> PolicyKind {
        PolicyKind::History
    }

    fn constraints(&self) -> Constraints {
        Constraints::ENVIRONMENT
            .union(Constraints::ROW)
            .union(Constraints::COLUMN)
    }

    fn scope(&self) -> Scope {
        Scope::Everything
    }

    fn find(&self, view: &View, request: &Request<'_>, rng: &mut dyn Rng) -> Result<Nodes, TooFew> {
        let way = Way {
            constraints: self.constraints().without(request.given_up),
            locality: Locality::Require,
            by_weight: false,
        };
        way.choose(view, request, rng)
    }
}

impl Policy for Harvest {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Harvest
    }

    fn constraints(&self) -> Constraints {
        Constraints::ALL
    }

    fn scope(&self) -> Scope {
        self.scope
    }

    fn find(&self, view: &View, request: &Request<'_>, rng: &mut dyn Rng) -> Result<Nodes, TooFew> {
        let way = Way {
            constraints: self.constraints().without(request.given_up),
            locality: self.locality,
            by_weight: true,
        };
        way.choose(view, request, rng)
    }
}

/// Cells to choose from, `None` for outside the grid, with the free blocks on their open servers, which are never 0.
type Cells = SmallVec<[(Option<Cell>, u64); CELLS + 1]>;

/// The differences between the two policies.
struct Way {
    constraints: Constraints,
    locality: Locality,
    /// Draw cells by free space, and servers by free space over reimage rate, instead of uniformly.
    by_weight: bool,
}

/// The replicas chosen so far, and what they and the existing ones occupy.
struct Partial {
    nodes: Nodes,
    spread: Spread,
    /// Their calm points ([`calm_points`](crate::grid::calm_points)).
    calm: u32,
    /// Hours of the week in which all of them were busy; all hours as long as there are no replicas.
    busy_hours: WeekHours,
}

impl Way {
    fn choose(
        &self,
        view: &View,
        request: &Request<'_>,
        rng: &mut dyn Rng,
    ) -> Result<Nodes, TooFew> {
        let wanted = usize::from(request.wanted);
        let mut best = Nodes::new();
        for attempt in 0..ATTEMPTS {
            let local = attempt < ATTEMPTS / 2;
            let nodes = self.attempt(view, request, local, false, rng);
            if nodes.len() == wanted {
                return Ok(nodes);
            }
            if nodes.is_empty() {
                // No server is suitable, not even as the first one.
                break;
            }
            if nodes.len() > best.len() {
                best = nodes;
            }
        }
        let nodes = if request.durability == Durability::Space {
            self.attempt(view, request, true, true, rng)
        } else if best.is_empty() {
            // All servers have been examined.
            Nodes::new()
        } else {
            search::search(view, request, self.constraints, rng)
        };
        if nodes.len() == wanted {
            return Ok(nodes);
        }
        if nodes.len() > best.len() {
            best = nodes;
        }
        Err(TooFew {
            wanted: request.wanted,
            placeable: best,
        })
    }

    /// Chooses one server after the other, as many as possible.
    fn attempt(
        &self,
        view: &View,
        request: &Request<'_>,
        local: bool,
        relax: bool,
        rng: &mut dyn Rng,
    ) -> Nodes {
        let mut partial = Partial {
            nodes: Nodes::new(),
            spread: Spread::default(),
            calm: 0,
            busy_hours: WeekHours::ALL,
        };
        let existing = request.existing.iter();
        for server in existing.filter_map(|&node| view.server(node)) {
            partial.add(server, view);
        }
        if local && request.existing.is_empty() && request.wanted > 0 {
            self.take_local(view, request, &mut partial, rng);
        }
        while partial.nodes.len() < usize::from(request.wanted) {
            let drawn = if relax {
                let mut levels = self.constraints.relaxations();
                levels.find_map(|level| self.draw(view, request, &partial, level, rng))
            } else {
                self.draw(view, request, &partial, self.constraints, rng)
            };
            match drawn {
                Some(node) => partial.take(view.drawn(node), view),
                None => break,
            }
        }
        let (count, wanted) = (partial.nodes.len(), usize::from(request.wanted));
        assert!(count <= wanted, "{count} servers for {wanted} replicas");
        partial.nodes
    }

    /// Places the first replica on the writer's server.
    fn take_local(
        &self,
        view: &View,
        request: &Request<'_>,
        partial: &mut Partial,
        rng: &mut dyn Rng,
    ) {
        let Some(host) = request.writer else {
            return;
        };
        let accept = |node: NodeId| {
            let in_grid = || view.server(node).and_then(|it| view.cell_of(it)).is_some();
            let welcome = match self.locality {
                Locality::Prefer => in_grid(),
                Locality::Require => true,
                Locality::Off => false,
            };
            welcome && request.admits(&partial.nodes, node)
        };
        let drawn = view.draw_on_host(request.lane, request.class, host, rng, accept);
        if let Some(node) = drawn {
            partial.take(view.drawn(node), view);
        }
    }

    /// Draws a server for one more replica.
    fn draw(
        &self,
        view: &View,
        request: &Request<'_>,
        partial: &Partial,
        constraints: Constraints,
        rng: &mut dyn Rng,
    ) -> Option<NodeId> {
        // Algorithm 2 finishes one round before it starts the next. With replicas that survived a loss, this may be
        // impossible; what counts is that all replicas can be split into rounds in the end.
        let in_grid = partial.spread.in_grid();
        let missing = u32::from(request.wanted) - partial.nodes.len() as u32;
        let now = rounds(in_grid + 1);
        let complete = rounds(in_grid + missing);
        let allowed = |cell, rounds| partial.spread.allows_cell(cell, constraints, rounds);
        let space = view.open_space(request.lane, request.class);
        let with_space = |cell: Cell| (Some(cell), space[cell.number()]);
        let open = || Cell::all().filter(|cell| space[cell.number()] > 0);
        let mut cells: Cells = open()
            .filter(|&cell| allowed(cell, now))
            .map(with_space)
            .collect();
        if !constraints.contains(Constraints::COLUMN) && space[CELLS] > 0 {
            // Cells no longer matter, and there are none outside the grid.
            cells.push((None, space[CELLS]));
        }
        self.draw_in(view, request, partial, constraints, cells, rng)
            .or_else(|| {
                if request.existing.is_empty() {
                    return None;
                }
                let cells = open()
                    .filter(|&cell| !allowed(cell, now) && allowed(cell, complete))
                    .map(with_space)
                    .collect();
                self.draw_in(view, request, partial, constraints, cells, rng)
            })
    }

    /// Draws a server in one of the cells: if possible, of a tenant that is not reimaged together with another one of
    /// the block; among those, while the block lacks calm points, of a calm tenant; otherwise, while there are hours
    /// in which all replicas of the block may be busy, one that leaves few such hours.
    fn draw_in(
        &self,
        view: &View,
        request: &Request<'_>,
        partial: &Partial,
        constraints: Constraints,
        cells: Cells,
        rng: &mut dyn Rng,
    ) -> Option<NodeId> {
        if cells.is_empty() {
            return None;
        }
        let accept = |server: &ServerView| {
            partial.spread.allows(server, constraints)
                && request.admits(&partial.nodes, server.node)
        };
        if !self.by_weight {
            return self.draw_accepted(view, request, cells, accept, rng);
        }
        let knows_together = view.knows_together();
        let apart = |server: &ServerView| {
            accept(server) && !(knows_together && partial.spread.goes_together(view, server))
        };
        let mut drawn = None;
        if partial.calm < u32::from(CALM_POINTS) {
            let calm_space = view.calm_space(request.lane, request.class);
            let mut calm = cells.clone();
            calm.retain(|(cell, space)| {
                let all = std::mem::replace(space, calm_space[cell.map_or(CELLS, Cell::number)]);
                *space > 0 && *space >= all / CALM_PART_MIN
            });
            let accept = |server: &ServerView| view.calm_points(server) > 0 && apart(server);
            drawn = self.draw_other_hours(view, request, partial, &calm, accept, rng);
        }
        // A tenant that was never busy is less likely to become busy than one that was busy at other times.
        if drawn.is_none() && !partial.busy_hours.is_empty() {
            drawn = self.draw_other_hours(view, request, partial, &cells, apart, rng);
        }
        if drawn.is_none() {
            drawn = self.draw_accepted(view, request, cells.clone(), apart, rng);
        }
        if drawn.is_none() && knows_together {
            drawn = self.draw_accepted(view, request, cells, accept, rng);
        }
        drawn
    }

    /// Of a few accepted servers, takes the one that leaves the fewest hours of the week in which all replicas of the
    /// block may be busy.
    fn draw_other_hours(
        &self,
        view: &View,
        request: &Request<'_>,
        partial: &Partial,
        cells: &Cells,
        accept: impl Fn(&ServerView) -> bool,
        rng: &mut dyn Rng,
    ) -> Option<NodeId> {
        let mut fewest: Option<(NodeId, u32)> = None;
        for _ in 0..HOURS_DRAWS {
            let drawn = self.draw_accepted(view, request, cells.clone(), &accept, rng);
            let server = view.drawn(drawn?);
            let hours = partial.busy_hours.common(view.busy_hours(server));
            if fewest.is_none_or(|(_, fewest)| hours.count() < fewest) {
                fewest = Some((server.node, hours.count()));
            }
            if hours.is_empty() {
                break;
            }
        }
        fewest.map(|(node, _)| node)
    }

    fn draw_accepted(
        &self,
        view: &View,
        request: &Request<'_>,
        mut cells: Cells,
        accept: impl Fn(&ServerView) -> bool,
        rng: &mut dyn Rng,
    ) -> Option<NodeId> {
        let (lane, class) = (request.lane, request.class);
        while !cells.is_empty() {
            let (cell, _) = cells.swap_remove(self.pick(&cells, rng));
            let drawn = if self.by_weight {
                view.draw_by_weight(lane, class, cell, rng, &accept)
            } else {
                view.draw_by_tenant(lane, class, cell, rng, &accept)
            };
            if drawn.is_some() {
                return drawn;
            }
        }
        None
    }

    /// Returns an index into `cells`, which is not empty and whose spaces are not 0.
    fn pick(&self, cells: &[(Option<Cell>, u64)], rng: &mut dyn Rng) -> usize {
        if !self.by_weight {
            return rng.random_range(0..cells.len());
        }
        let total: u64 = cells.iter().map(|(_, space)| space).sum();
        let mut rank = rng.random_range(0..total);
        for (index, (_, space)) in cells.iter().enumerate() {
            if rank < *space {
                return index;
            }
            rank -= space;
        }
        panic!("{rank} blocks beyond the {total} of {cells:?}")
    }
}

impl Partial {
    fn take(&mut self, server: &ServerView, view: &View) {
        self.nodes.push(server.node);
        self.add(server, view);
    }

    fn add(&mut self, server: &ServerView, view: &View) {
        self.spread.add(server, view.cell_of(server));
        self.calm += u32::from(view.calm_points(server));
        self.busy_hours = self.busy_hours.common(view.busy_hours(server));
    }
}
