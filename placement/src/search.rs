//! An exhaustive search for servers of a block, for when random draws found none.

use rand::Rng;
use rand::seq::SliceRandom;
use rustc_hash::FxHashMap;

use crate::diversity::{Constraints, Spread};
use crate::policy::{Nodes, Request};
use crate::view::{ServerView, View};

/// Servers examined before the search gives up. Enough to examine every choice in a cluster of some dozen servers; in
/// a large cluster the search finds an existing choice, or refuses a block that only just fits.
const STEPS_MAX: u32 = 20_000;

/// Searches for `request.wanted` servers that, together with the existing ones, satisfy the constraints. Returns the
/// largest set that it found.
pub(crate) fn search(
    view: &View,
    request: &Request<'_>,
    constraints: Constraints,
    rng: &mut dyn Rng,
) -> Nodes {
    let mut candidates: Vec<&ServerView> = view
        .servers()
        .iter()
        .filter(|server| view.is_open(server, request.lane, request.class))
        .filter(|server| request.admits(&[], server.node))
        .filter(|server| is_apart_in_grid(view, server, constraints))
        .collect();
    candidates.shuffle(rng);
    let existing = request.existing.iter();
    let existing: Vec<&ServerView> = existing.filter_map(|&node| view.server(node)).collect();
    find(view, candidates, &existing, request.wanted, constraints).best
}

/// The result of [`most_apart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MostApart {
    /// Number of servers that were found.
    pub count: u8,
    /// Whether this is the maximum: everything was examined, or as many as wanted were found.
    pub is_most: bool,
}

/// Determines how many of `wanted` replicas some servers can take such that the constraints hold; whether the servers
/// are open does not matter.
#[must_use]
pub fn most_apart<'a>(
    view: &'a View,
    servers: impl Iterator<Item = &'a ServerView> + Clone,
    wanted: u8,
    constraints: Constraints,
) -> MostApart {
    let candidates = servers.filter(|server| is_apart_in_grid(view, server, constraints));
    // Among many servers the first ones that fit suffice, and the others need not be examined.
    if fit_in_order(view, candidates.clone(), wanted, constraints) {
        return MostApart {
            count: wanted,
            is_most: true,
        };
    }
    let candidates: Vec<&ServerView> = candidates.collect();
    let mut is_most = true;
    let most = (1..=wanted).rev().find(|&count| {
        let search = find(view, candidates.clone(), &[], count, constraints);
        is_most &= search.steps <= STEPS_MAX;
        search.best.len() == usize::from(count)
    });
    MostApart {
        count: most.unwrap_or(0),
        is_most,
    }
}

/// Whether enough servers are found by taking each server that fits those taken before it.
fn fit_in_order<'a>(
    view: &View,
    servers: impl Iterator<Item = &'a ServerView>,
    wanted: u8,
    constraints: Constraints,
) -> bool {
    let mut spread = Spread::default();
    let mut left = wanted;
    for server in servers {
        if left == 0 {
            break;
        }
        let mut longer = spread.clone();
        longer.add(server, view.cell_of(server));
        let crowded = longer.crowded(wanted.into()).bits() & constraints.bits() != 0;
        if spread.allows(server, constraints) && !crowded {
            spread = longer;
            left -= 1;
        }
    }
    left == 0
}

/// Outside the grid, nothing keeps rows and columns apart.
fn is_apart_in_grid(view: &View, server: &ServerView, constraints: Constraints) -> bool {
    !constraints.contains(Constraints::COLUMN) || view.cell_of(server).is_some()
}

/// Searches with backtracking. Servers that share tenant and rack are equivalent, so of each such kind no more are
/// examined than are wanted.
fn find<'a>(
    view: &'a View,
    mut candidates: Vec<&'a ServerView>,
    existing: &[&ServerView],
    wanted: u8,
    constraints: Constraints,
) -> Search<'a> {
    let mut kinds: FxHashMap<_, u8> = FxHashMap::default();
    candidates.retain(|server| {
        let seen = kinds.entry((server.tenant, server.rack)).or_default();
        let is_needed = *seen < wanted;
        *seen += u8::from(is_needed);
        is_needed
    });
    let mut spread = Spread::default();
    for server in existing {
        spread.add(server, view.cell_of(server));
    }
    let in_grid = spread.in_grid() + u32::from(wanted);
    let mut search = Search {
        view,
        // Rows that the existing replicas crowd cannot be fixed by adding more.
        constraints: constraints.without(spread.crowded(in_grid)),
        wanted: usize::from(wanted),
        in_grid,
        picked: Nodes::new(),
        best: Nodes::new(),
        steps: 0,
    };
    search.extend(&candidates, &spread);
    search.check(spread);
    search
}

struct Search<'a> {
    view: &'a View,
    constraints: Constraints,
    wanted: usize,
    /// Number of replicas in the grid once all are found.
    in_grid: u32,
    picked: Nodes,
    best: Nodes,
    steps: u32,
}

impl Search<'_> {
    /// Asserts that the result satisfies the constraints in addition to the existing replicas, which `spread`
    /// contains.
    fn check(&self, mut spread: Spread) {
        let (found, wanted) = (self.best.len(), self.wanted);
        assert!(found <= wanted, "{found} servers for {wanted} replicas");
        for &node in &self.best {
            let server = self.view.drawn(node);
            let allowed = spread.allows(server, self.constraints);
            spread.add(server, self.view.cell_of(server));
            let crowded = spread.crowded(self.in_grid).bits() & self.constraints.bits();
            assert!(
                allowed && crowded == 0,
                "{node} breaks {:?} among {:?}",
                self.constraints,
                self.best
            );
        }
    }

    /// Adds servers from `candidates` to those in `spread`; returns true once there are enough, or once the limit of
    /// steps is reached.
    fn extend(&mut self, candidates: &[&ServerView], spread: &Spread) -> bool {
        if self.picked.len() > self.best.len() {
            self.best = self.picked.clone();
        }
        if self.picked.len() == self.wanted {
            return true;
        }
        for (index, &server) in candidates.iter().enumerate() {
            if candidates.len() - index + self.picked.len() < self.wanted {
                break;
            }
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return true;
            }
            if !spread.allows(server, self.constraints) {
                continue;
            }
            let mut longer = spread.clone();
            longer.add(server, self.view.cell_of(server));
            if longer.crowded(self.in_grid).bits() & self.constraints.bits() != 0 {
                continue;
            }
            self.picked.push(server.node);
            if self.extend(&candidates[index + 1..], &longer) {
                return true;
            }
            self.picked.pop();
        }
        false
    }
}
