//! The grid: each tenant in one of nine cells, by how often it is reimaged and how busy it gets.

use std::cmp::Ordering;

/// Number of columns, of rows, and of replicas per round.
pub const SIDE: usize = 3;
/// Number of cells.
pub const CELLS: usize = SIDE * SIDE;

/// A cell of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell(u8);

impl Cell {
    /// The cell in a row and a column, both below [`SIDE`].
    ///
    /// # Panics
    /// If one of them is not.
    #[must_use]
    pub fn new(row: usize, column: usize) -> Self {
        assert!(row < SIDE && column < SIDE, "no cell {row}, {column}");
        Self((row * SIDE + column) as u8)
    }

    /// All cells, row by row.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..CELLS as u8).map(Self)
    }

    /// Returns its row: 0 has the lowest peaks of CPU utilisation.
    #[must_use]
    pub fn row(self) -> usize {
        usize::from(self.0) / SIDE
    }

    /// Returns its column: 0 is reimaged least.
    #[must_use]
    pub fn column(self) -> usize {
        usize::from(self.0) % SIDE
    }

    /// Its number, below [`CELLS`].
    #[must_use]
    pub fn number(self) -> usize {
        usize::from(self.0)
    }
}

/// What the grid has to know about a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GridTenant {
    /// Number of its servers. A tenant without servers is in no cell.
    pub servers: u32,
    /// Free space in blocks, which is balanced between the cells.
    pub free_blocks: u64,
    /// Total space, used or free, in blocks.
    pub capacity_blocks: u64,
    /// Reimages per server and month; at least 0.
    pub reimages: f64,
    /// Share of the time in which it was busy, 0 to 1.
    pub busy_share: f64,
    /// Peak CPU utilisation, as a share of all cores.
    pub peak: f64,
}

impl GridTenant {
    /// Returns the criterion for a place in the grid: reimages per month in which its servers can be used. A tenant
    /// that is always busy is of no use, however rarely it is reimaged.
    #[must_use]
    pub fn cost(&self) -> f64 {
        (self.reimages + 0.01) / (1.0 - self.busy_share).max(0.01)
    }

    /// Compares in the order of rows: first the tenants that were never busy, by their peak; then those that were
    /// busy for the shortest time.
    fn busier(&self, other: &Self) -> Ordering {
        (self.busy_share.total_cmp(&other.busy_share)).then(self.peak.total_cmp(&other.peak))
    }
}

/// Which tenants are in the grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scope {
    /// All tenants.
    Everything,
    /// The least reimaged tenants that the data needs; see [`LeastReimaged`].
    LeastReimaged(LeastReimaged),
}

/// How many of the least reimaged tenants are in the grid: enough that together they have `headroom` times the space
/// that is used in the whole cluster, at least `share_min` of all space, and at least `tenants_min` tenants. Reimages
/// are counted per time in which a tenant is not busy ([`GridTenant::cost`]). No tenant is left out whose cost is as
/// low as that of one inside, so that without history all are in. Further calm tenants are included as far as they
/// are needed ([`calm_points`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeastReimaged {
    /// Ratio of the space in the grid to the space used in the cluster, above 1.
    pub headroom: f64,
    /// Smallest share of all space, 0 to 1.
    pub share_min: f64,
    /// Fewest tenants.
    pub tenants_min: usize,
}

impl Default for LeastReimaged {
    /// 65 % of the space up to a half-full cluster, all of it from 77 % on, and three tenants per cell.
    fn default() -> Self {
        Self {
            headroom: 1.3,
            share_min: 0.65,
            tenants_min: 3 * CELLS,
        }
    }
}

/// The assignment of tenants to cells.
///
/// Columns are made first: the tenants in the order of their reimage rate, cut in three such that the free space
/// differs as little as whole tenants allow; then rows within each column, in the order of the time that they are
/// busy and of the peak CPU utilisation. So rows need not align across columns.
///
/// A column of fewer than three tenants cannot fill its rows, and any choice of rows is equally even. Then the rows
/// are chosen such that, first, most cells have partners in other rows and columns, and second, tenants are close to
/// where their peak would put them in the whole cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grid {
    cells: Vec<Option<Cell>>,
}

impl Grid {
    /// Puts tenants into cells; they are identified by their index in `tenants`.
    #[must_use]
    pub fn build(tenants: &[GridTenant], scope: Scope) -> Self {
        let mut order: Vec<usize> = (0..tenants.len())
            .filter(|&tenant| tenants[tenant].servers > 0)
            .collect();
        if let Scope::LeastReimaged(limits) = scope {
            order.sort_by(|&a, &b| tenants[a].cost().total_cmp(&tenants[b].cost()));
            let rest = order.split_off(least_reimaged(tenants, &order, limits));
            let more = missing_calm(tenants, &order, &rest);
            order.extend(more);
        }
        order.sort_by(|&a, &b| tenants[a].reimages.total_cmp(&tenants[b].reimages));
        let heights = heights(tenants, &order);
        let mut columns: Vec<Vec<&[usize]>> = Vec::with_capacity(SIDE);
        let groups = cut(tenants, &order);
        let mut sorted: Vec<Vec<usize>> = groups.iter().map(|group| group.to_vec()).collect();
        for column in &mut sorted {
            column.sort_by(|&a, &b| tenants[a].busier(&tenants[b]));
        }
        for column in &sorted {
            columns.push(cut(tenants, column));
        }
        let rows = choose_rows(&columns, &heights);
        let mut cells = vec![None; tenants.len()];
        let mut placed = 0;
        for (column, (groups, rows)) in columns.iter().zip(&rows).enumerate() {
            for (group, &row) in groups.iter().zip(rows.iter()) {
                for &tenant in *group {
                    let before = cells[tenant].replace(Cell::new(row, column));
                    assert_eq!(before, None, "tenant {tenant} is in two cells");
                    placed += 1;
                }
            }
        }
        assert_eq!(placed, order.len(), "tenants in cells, and in the grid");
        Self { cells }
    }

    /// Returns the grid for the tenants in another order: the tenant that was at `i` is at `order[i]`.
    pub(crate) fn reordered(&self, order: &[usize]) -> Self {
        assert_eq!(order.len(), self.cells.len(), "tenants and their cells");
        let mut cells = vec![None; self.cells.len()];
        for (&to, &cell) in order.iter().zip(&self.cells) {
            cells[to] = cell;
        }
        Self { cells }
    }

    /// Returns the cell of a tenant; `None` when it is not in the grid.
    #[must_use]
    pub fn cell(&self, tenant: usize) -> Option<Cell> {
        self.cells.get(tenant).copied().flatten()
    }

    /// Returns the free blocks per cell, in the order of [`Cell::all`].
    #[must_use]
    pub fn free_blocks(&self, tenants: &[GridTenant]) -> [u64; CELLS] {
        let mut sums = [0; CELLS];
        for (tenant, cell) in tenants.iter().zip(&self.cells) {
            if let Some(cell) = cell {
                sums[cell.number()] += tenant.free_blocks;
            }
        }
        sums
    }
}

/// Returns the total space of all tenants and the used part of it, in blocks.
fn capacity_and_used(tenants: &[GridTenant]) -> (f64, f64) {
    let mut sums = (0, 0);
    for it in tenants {
        let Some(used) = it.capacity_blocks.checked_sub(it.free_blocks) else {
            panic!("a tenant has more free space than space: {it:?}");
        };
        sums = (sums.0 + it.capacity_blocks, sums.1 + used);
    }
    (sums.0 as f64, sums.1 as f64)
}

/// Returns how many of the tenants in `order`, from the least reimaged, are in the grid.
fn least_reimaged(tenants: &[GridTenant], order: &[usize], limits: LeastReimaged) -> usize {
    let (capacity, used) = capacity_and_used(tenants);
    let needed = (used * limits.headroom).max(capacity * limits.share_min);
    let mut sum = 0;
    let mut count = 0;
    let mut highest = f64::NEG_INFINITY;
    for &tenant in order {
        let it = &tenants[tenant];
        let enough = sum as f64 >= needed && count >= limits.tenants_min;
        if enough && it.cost() > highest {
            break;
        }
        sum += it.capacity_blocks;
        count += 1;
        highest = it.cost();
    }
    count
}

/// The points that a block's replicas should have together so that one of them is not busy: one replica on a tenant
/// that was never busy or, where these are too few, two on tenants that rarely were.
pub const CALM_POINTS: u8 = 2;
/// Share of the time up to which a tenant counts as rarely busy: if two of them were busy independently of each
/// other, both would be busy simultaneously one ten-thousandth of the time.
const RARELY_BUSY: f64 = 0.01;
/// Ratio of the space of calm tenants in the grid to the space of one in three replicas of all data.
const CALM_HEADROOM: f64 = 1.15;

/// Returns what a replica on each tenant contributes to [`CALM_POINTS`].
#[must_use]
pub fn calm_points(tenants: &[GridTenant]) -> Vec<u8> {
    let never: u64 = (tenants.iter())
        .filter(|it| it.busy_share <= 0.0)
        .map(|it| it.capacity_blocks)
        .sum();
    let enough = never as f64 >= calm_space_needed(tenants);
    let points = |it: &GridTenant| match it.busy_share {
        busy if busy <= 0.0 => CALM_POINTS,
        busy if busy <= RARELY_BUSY && !enough => 1,
        _ => 0,
    };
    tenants.iter().map(points).collect()
}

/// Returns the space in blocks that one in three replicas of all data takes, now or soon.
fn calm_space_needed(tenants: &[GridTenant]) -> f64 {
    let (capacity, used) = capacity_and_used(tenants);
    CALM_HEADROOM * used.max(capacity / 2.0) / SIDE as f64
}

/// Returns the calm tenants of `rest`, the least reimaged first, that the grid needs in addition to those `inside`.
fn missing_calm(tenants: &[GridTenant], inside: &[usize], rest: &[usize]) -> Vec<usize> {
    let points = calm_points(tenants);
    let space = |tenant: usize| {
        let share = f64::from(points[tenant]) / f64::from(CALM_POINTS);
        tenants[tenant].capacity_blocks as f64 * share
    };
    let mut missing = calm_space_needed(tenants);
    missing -= inside.iter().map(|&it| space(it)).sum::<f64>();
    let mut taken = Vec::new();
    for &tenant in rest {
        if missing <= 0.0 {
            break;
        }
        if points[tenant] > 0 {
            missing -= space(tenant);
            taken.push(tenant);
        }
    }
    taken
}

/// The weight of a tenant when space is divided. Full tenants still have some weight, so that no group is left empty
/// while another one has two.
fn weight(tenant: &GridTenant) -> u128 {
    u128::from(tenant.free_blocks) + 1
}

/// Cuts a list into three pieces of as nearly the same weight as possible: with the least sum of squares. Empty
/// pieces are left out.
fn cut<'a>(tenants: &[GridTenant], list: &'a [usize]) -> Vec<&'a [usize]> {
    let mut before: Vec<u128> = Vec::with_capacity(list.len() + 1);
    before.push(0);
    for &tenant in list {
        let sum = before[before.len() - 1] + weight(&tenants[tenant]);
        before.push(sum);
    }
    let total = before[list.len()];
    // Scaled down so that squares cannot overflow.
    let shift = (128 - total.leading_zeros()).saturating_sub(62);
    let square = |weight: u128| (weight >> shift) * (weight >> shift);
    let mut best: Option<(u128, usize, usize)> = None;
    for first in 0..=list.len() {
        // The best cut of the rest is next to its middle.
        let middle = (before[first] + total) / 2;
        let above = before.partition_point(|&sum| sum < middle);
        for second in [above.saturating_sub(1), above] {
            let second = second.clamp(first, list.len());
            let error = square(before[first])
                + square(before[second] - before[first])
                + square(total - before[second]);
            if best.is_none_or(|(least, ..)| error < least) {
                best = Some((error, first, second));
            }
        }
    }
    let Some((_, first, second)) = best else {
        panic!("no cut of {} tenants", list.len());
    };
    [&list[..first], &list[first..second], &list[second..]]
        .into_iter()
        .filter(|piece| !piece.is_empty())
        .collect()
}

/// Returns the rank of each tenant among all in the grid by its peak: from 0, the lowest, to 3.
fn heights(tenants: &[GridTenant], in_grid: &[usize]) -> Vec<f64> {
    let mut order = in_grid.to_vec();
    order.sort_by(|&a, &b| tenants[a].busier(&tenants[b]));
    let total: u128 = order.iter().map(|&it| weight(&tenants[it])).sum();
    let mut heights = vec![0.0; tenants.len()];
    let mut below: u128 = 0;
    for &tenant in &order {
        let own = weight(&tenants[tenant]);
        let middle = below as f64 + own as f64 / 2.0;
        heights[tenant] = SIDE as f64 * middle / total as f64;
        below += own;
    }
    heights
}

/// Returns the rows that a column's pieces can be assigned to, from the lowest.
fn possible_rows(pieces: usize) -> &'static [&'static [usize]] {
    match pieces {
        0 => &[&[]],
        1 => &[&[0], &[1], &[2]],
        2 => &[&[0, 1], &[0, 2], &[1, 2]],
        _ => &[&[0, 1, 2]],
    }
}

fn choose_rows(columns: &[Vec<&[usize]>], heights: &[f64]) -> Vec<&'static [usize]> {
    let mut choices: Vec<Vec<&'static [usize]>> = vec![Vec::new()];
    for column in columns {
        choices = choices
            .iter()
            .flat_map(|before| {
                possible_rows(column.len()).iter().map(|&rows| {
                    let mut choice = before.clone();
                    choice.push(rows);
                    choice
                })
            })
            .collect();
    }
    let distance = |choice: &[&[usize]]| -> f64 {
        let pieces = columns
            .iter()
            .zip(choice)
            .flat_map(|(column, rows)| column.iter().zip(*rows));
        pieces
            .map(|(piece, &row)| {
                let mean = piece.iter().map(|&it| heights[it]).sum::<f64>() / piece.len() as f64;
                (mean - (row as f64 + 0.5)).abs()
            })
            .sum()
    };
    let best = choices.into_iter().min_by(|a, b| {
        cells_with_partners(b)
            .cmp(&cells_with_partners(a))
            .then_with(|| distance(a).total_cmp(&distance(b)))
    });
    let Some(best) = best else {
        panic!("no choice of rows for {} columns", columns.len());
    };
    best
}

/// Returns the size of the largest sets of cells that all differ in row and column, and the number of cells in such
/// sets.
fn cells_with_partners(columns: &[&[usize]]) -> (usize, usize) {
    let mut most = 0;
    let mut members: Vec<[Option<usize>; SIDE]> = Vec::new();
    // One row of each column, or none.
    let options = |column: usize| {
        let rows = columns.get(column).copied().unwrap_or_default();
        rows.iter().map(|&row| Some(row)).chain([None])
    };
    for a in options(0) {
        for b in options(1) {
            for c in options(2) {
                let picked: Vec<usize> = [a, b, c].into_iter().flatten().collect();
                let differ = (1..picked.len()).all(|i| !picked[..i].contains(&picked[i]));
                if !differ || picked.len() < most {
                    continue;
                }
                if picked.len() > most {
                    most = picked.len();
                    members.clear();
                }
                members.push([a, b, c]);
            }
        }
    }
    let mut cells: Vec<(usize, usize)> = members
        .iter()
        .flat_map(|set| set.iter().enumerate())
        .filter_map(|(column, row)| Some((column, (*row)?)))
        .collect();
    cells.sort_unstable();
    cells.dedup();
    (most, cells.len())
}
