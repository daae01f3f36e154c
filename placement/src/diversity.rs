//! The constraints between the replicas of a block, and how many of them hold.

use smallvec::SmallVec;

use crate::grid::{Cell, SIDE};
use crate::view::{ServerView, TenantId, View};

/// A set of constraints. Each forbids two replicas of a block to share something; rows and columns only within rounds
/// of three replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Constraints(u8);

impl Constraints {
    /// No constraint.
    pub const NONE: Self = Self(0);
    /// No two replicas in one environment.
    pub const ENVIRONMENT: Self = Self(1);
    /// No two replicas in one machine function.
    pub const MACHINE_FUNCTION: Self = Self(2);
    /// No two replicas in one rack.
    pub const RACK: Self = Self(4);
    /// No two replicas of a round in one column of the grid.
    pub const COLUMN: Self = Self(8);
    /// No two replicas of a round in one row of the grid.
    pub const ROW: Self = Self(16);
    /// All of them.
    pub const ALL: Self = Self(31);

    /// Each constraint with its name, in the order in which `durability=space` gives them up: the ones whose loss
    /// costs least come first.
    ///
    /// A shared row only makes two replicas busy at the same time, and a shared column only means that both may be
    /// reimaged often. A machine function can be redeployed as a whole, a rack can fail as a whole; an environment is
    /// routinely reimaged as a whole.
    pub const RELAXED_IN_ORDER: [(Self, &'static str); 5] = [
        (Self::ROW, "row"),
        (Self::COLUMN, "column"),
        (Self::MACHINE_FUNCTION, "machine function"),
        (Self::RACK, "rack"),
        (Self::ENVIRONMENT, "environment"),
    ];

    /// Returns the constraints in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the constraints that are not in the other set.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether this set contains all constraints of the other one.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the number of constraints.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the set as a number below 32, one bit per constraint.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The inverse of [`Constraints::bits`]; higher bits are ignored.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }

    /// Returns the names of the members, in the order in which they are given up.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::RELAXED_IN_ORDER
            .into_iter()
            .filter(move |(constraint, _)| self.contains(*constraint))
            .map(|(_, name)| name)
    }

    /// Returns this set, then the set without its first member to be given up, and so on down to the empty set.
    pub(crate) fn relaxations(self) -> impl Iterator<Item = Self> {
        let mut left = self;
        let fewer = Self::RELAXED_IN_ORDER
            .into_iter()
            .filter(move |(constraint, _)| self.contains(*constraint))
            .map(move |(constraint, _)| {
                left = left.without(constraint);
                left
            });
        std::iter::once(self).chain(fewer)
    }
}

/// Returns the constraints that hold among these replicas.
///
/// Rounds: replicas have no order once they are written, so the question is whether they *can* be split into as few
/// rounds of three as their number allows, such that no round has two replicas in one row or column. This is the case
/// exactly when no row and no column has more replicas than there are rounds (a bipartite multigraph of degree k has
/// an edge colouring with k colours: Koenig). Rows and columns are judged together when both hold, and separately
/// otherwise. Replicas outside the grid share no row and no column.
#[must_use]
pub fn held<'a>(view: &View, replicas: impl IntoIterator<Item = &'a ServerView>) -> Constraints {
    let mut spread = Spread::default();
    let mut broken = Constraints::NONE;
    for server in replicas {
        broken = broken.union(spread.shared(server));
        spread.add(server, view.cell_of(server));
    }
    Constraints::ALL.without(broken.union(spread.crowded(spread.in_grid)))
}

/// Measures how far the replicas are from satisfying the constraints: the number of pairs that share what they must
/// not, plus the replicas in rows and columns beyond what the rounds allow. 0 exactly when all constraints hold;
/// moving a replica from a place with a conflict to one without lowers it.
#[must_use]
pub fn conflicts<'a>(
    view: &View,
    replicas: impl IntoIterator<Item = &'a ServerView>,
    constraints: Constraints,
) -> u32 {
    let mut spread = Spread::default();
    let mut count = 0;
    for server in replicas {
        count += spread.conflicts_with(server, constraints);
        spread.add(server, view.cell_of(server));
    }
    let rounds = rounds(spread.in_grid);
    let beyond = |counts: &[u32; SIDE]| -> u32 {
        let counts = counts.iter();
        counts.map(|&it| it.saturating_sub(rounds)).sum()
    };
    if constraints.contains(Constraints::ROW) {
        count += beyond(&spread.rows);
    }
    if constraints.contains(Constraints::COLUMN) {
        count += beyond(&spread.columns);
    }
    count
}

/// The tenants, racks, rows and columns that the replicas of a block occupy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spread {
    /// Environment, machine function and rack of each replica.
    owners: SmallVec<[(u32, u32, u32); 10]>,
    tenants: SmallVec<[TenantId; 10]>,
    rows: [u32; SIDE],
    columns: [u32; SIDE],
    in_grid: u32,
}

impl Spread {
    pub(crate) fn add(&mut self, server: &ServerView, cell: Option<Cell>) {
        self.owners.push(owners(server));
        self.tenants.push(server.tenant);
        if let Some(cell) = cell {
            self.rows[cell.row()] += 1;
            self.columns[cell.column()] += 1;
            self.in_grid += 1;
        }
    }

    /// Whether history shows the server's tenant reimaged together with the tenant of one of the replicas.
    pub(crate) fn goes_together(&self, view: &View, server: &ServerView) -> bool {
        let mut tenants = self.tenants.iter();
        tenants.any(|&tenant| view.go_together(tenant, server.tenant))
    }

    /// Counts how often the server shares with a replica what `constraints` forbid.
    fn conflicts_with(&self, server: &ServerView, constraints: Constraints) -> u32 {
        let (environment, function, rack) = owners(server);
        let shared = |constraint, same: bool| u32::from(constraints.contains(constraint) && same);
        let owners = self.owners.iter();
        owners
            .map(|other| {
                shared(Constraints::ENVIRONMENT, other.0 == environment)
                    + shared(Constraints::MACHINE_FUNCTION, other.1 == function)
                    + shared(Constraints::RACK, other.2 == rack)
            })
            .sum()
    }

    /// Returns which of environment, machine function and rack the server shares with a replica.
    pub(crate) fn shared(&self, server: &ServerView) -> Constraints {
        let (environment, function, rack) = owners(server);
        let mut shared = Constraints::NONE;
        for other in &self.owners {
            if other.0 == environment {
                shared = shared.union(Constraints::ENVIRONMENT);
            }
            if other.1 == function {
                shared = shared.union(Constraints::MACHINE_FUNCTION);
            }
            if other.2 == rack {
                shared = shared.union(Constraints::RACK);
            }
        }
        shared
    }

    /// Whether a further replica in this cell keeps rows and columns apart, as far as `constraints` demand it, when
    /// each row and column may have `rounds` replicas.
    pub(crate) fn allows_cell(&self, cell: Cell, constraints: Constraints, rounds: u32) -> bool {
        (!constraints.contains(Constraints::ROW) || self.rows[cell.row()] < rounds)
            && (!constraints.contains(Constraints::COLUMN) || self.columns[cell.column()] < rounds)
    }

    /// Returns whether rows or columns are shared more often than rounds of three allow when `in_grid` replicas are
    /// in the grid in the end.
    pub(crate) fn crowded(&self, in_grid: u32) -> Constraints {
        let sums = [&self.rows, &self.columns].map(|counts| counts.iter().sum::<u32>());
        assert_eq!(sums, [self.in_grid; 2], "replicas in rows and in columns");
        assert!(
            self.in_grid as usize <= self.owners.len(),
            "{} of {} replicas are in the grid",
            self.in_grid,
            self.owners.len()
        );
        let rounds = rounds(in_grid);
        let mut crowded = Constraints::NONE;
        if self.rows.iter().any(|&count| count > rounds) {
            crowded = crowded.union(Constraints::ROW);
        }
        if self.columns.iter().any(|&count| count > rounds) {
            crowded = crowded.union(Constraints::COLUMN);
        }
        crowded
    }

    /// Returns how many of the replicas are in the grid.
    pub(crate) fn in_grid(&self) -> u32 {
        self.in_grid
    }

    /// Whether the server may hold a further replica, in any cell.
    pub(crate) fn allows(&self, server: &ServerView, constraints: Constraints) -> bool {
        self.shared(server).bits() & constraints.bits() == 0
    }
}

/// Returns the number of rounds that this many replicas make.
pub(crate) fn rounds(replicas: u32) -> u32 {
    replicas.div_ceil(SIDE as u32)
}

fn owners(server: &ServerView) -> (u32, u32, u32) {
    (
        server.environment.number(),
        server.function.number(),
        server.rack.number(),
    )
}
