//! Finding servers for a block by looking at all of them: for when luck did not find any.

use rand::{Rng, seq::SliceRandom};
use rustc_hash::FxHashMap;

use crate::{
    diversity::{Constraints, Spread},
    policy::{Nodes, Request},
    view::{ServerView, View},
};

/// Servers looked at before the search gives up. Enough to look at every choice in a cluster of
/// some dozen servers; in a large one the search finds what exists, or refuses a block that only
/// just fits.
const STEPS_MAX: u32 = 20_000;

/// Searches for `request.wanted` servers that together with the existing ones keep the
/// constraints. Returns the most that it found.
///
/// Servers that share tenant and rack are alike, so one of each such kind, drawn at random, stands
/// for all of it, as often as it is asked for.
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
        // Outside the grid nothing keeps rows and columns apart.
        .filter(|server| {
            !constraints.contains(Constraints::COLUMN) || view.cell_of(server).is_some()
        })
        .collect();
    candidates.shuffle(rng);
    let mut kinds: FxHashMap<_, u8> = FxHashMap::default();
    candidates.retain(|server| {
        let seen = kinds.entry((server.tenant, server.rack)).or_default();
        *seen = seen.saturating_add(1);
        *seen <= request.wanted
    });
    let mut spread = Spread::default();
    for server in request
        .existing
        .iter()
        .filter_map(|&node| view.server(node))
    {
        spread.add(server, view.cell_of(server));
    }
    let in_grid = spread.in_grid().saturating_add(request.wanted);
    let mut search = Search {
        view,
        // Rows that the existing ones crowd cannot be mended by adding to them.
        constraints: constraints.without(spread.crowded(in_grid)),
        wanted: usize::from(request.wanted),
        in_grid,
        picked: Nodes::new(),
        best: Nodes::new(),
        steps: 0,
    };
    search.extend(&candidates, &spread);
    search.best
}

struct Search<'a> {
    view: &'a View,
    constraints: Constraints,
    wanted: usize,
    /// Replicas in the grid once all are found.
    in_grid: u8,
    picked: Nodes,
    best: Nodes,
    steps: u32,
}

impl Search<'_> {
    /// Adds servers from `candidates` to what `spread` has; true once there are enough or no time
    /// is left.
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
