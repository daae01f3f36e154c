//! The grid on random tenants, and on the small clusters that people try first.

use harvestfs_placement::grid::{CALM_POINTS, GridTenant, calm_points};
use harvestfs_placement::{CELLS, Cell, Grid, LeastReimaged, SIDE, Scope};
use proptest::prelude::*;

fn tenant(free_blocks: u64, reimages: f64, peak: f64) -> GridTenant {
    GridTenant {
        servers: 1,
        free_blocks,
        capacity_blocks: free_blocks * 2,
        reimages,
        busy_share: (peak - 0.6).max(0.0),
        peak,
    }
}

fn tenants(most: usize) -> impl Strategy<Value = Vec<GridTenant>> {
    let one = (0u64..1_000, 0u32..20, 0u32..20).prop_map(|(free, rate, peak)| {
        tenant(free, f64::from(rate) / 10.0, f64::from(peak) / 20.0)
    });
    prop::collection::vec(one, 0..most)
}

/// The least sum of squares of three consecutive pieces, by trying all.
fn least_error(weights: &[u64]) -> u128 {
    let square = |piece: &[u64]| {
        let sum: u128 = piece.iter().map(|&weight| u128::from(weight)).sum();
        sum * sum
    };
    let mut least = u128::MAX;
    for first in 0..=weights.len() {
        for second in first..=weights.len() {
            let error = square(&weights[..first])
                + square(&weights[first..second])
                + square(&weights[second..]);
            least = least.min(error);
        }
    }
    least
}

fn error(weights: [u64; SIDE]) -> u128 {
    weights
        .iter()
        .map(|&it| u128::from(it) * u128::from(it))
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Columns in the order of reimage rates, rows of each in the order of peaks, both cut as
    /// evenly as possible.
    #[test]
    fn cells_are_in_order_and_as_equal_as_tenants_allow(tenants in tenants(40)) {
        let grid = Grid::build(&tenants, Scope::Everything);
        let cells: Vec<Cell> = (0..tenants.len()).map(|it| grid.cell(it).expect("all are in")).collect();
        let weight = |it: usize| tenants[it].free_blocks + 1;
        for a in 0..tenants.len() {
            for b in 0..tenants.len() {
                if tenants[a].reimages < tenants[b].reimages {
                    prop_assert!(cells[a].column() <= cells[b].column());
                }
                let busy = |it: usize| (tenants[it].busy_share, tenants[it].peak);
                if cells[a].column() == cells[b].column() && busy(a) < busy(b) {
                    prop_assert!(cells[a].row() <= cells[b].row());
                }
            }
        }
        let mut by_rate: Vec<usize> = (0..tenants.len()).collect();
        by_rate.sort_by(|&a, &b| tenants[a].reimages.total_cmp(&tenants[b].reimages));
        let weights: Vec<u64> = by_rate.iter().map(|&it| weight(it)).collect();
        let mut columns = [0; SIDE];
        for it in 0..tenants.len() {
            columns[cells[it].column()] += weight(it);
        }
        prop_assert_eq!(error(columns), least_error(&weights));
        for column in 0..SIDE {
            let mut members: Vec<usize> =
                by_rate.iter().copied().filter(|&it| cells[it].column() == column).collect();
            // The busier have higher peaks here.
            members.sort_by(|&a, &b| tenants[a].peak.total_cmp(&tenants[b].peak));
            let weights: Vec<u64> = members.iter().map(|&it| weight(it)).collect();
            let mut rows = [0; SIDE];
            for &it in &members {
                rows[cells[it].row()] += weight(it);
            }
            prop_assert_eq!(error(rows), least_error(&weights));
        }
    }

    /// The grid has the space that the data needs, and the tenants in it are reimaged least.
    #[test]
    fn only_the_least_reimaged_are_in_the_grid(
        tenants in tenants(80),
        headroom in 1.0f64..2.0,
        share_min in 0.0f64..1.0,
        tenants_min in 0usize..30,
    ) {
        // Calm tenants are another matter.
        let idle = |it: GridTenant| GridTenant { busy_share: 0.0, ..it };
        let tenants: Vec<GridTenant> = tenants.into_iter().map(idle).collect();
        let limits = LeastReimaged { headroom, share_min, tenants_min };
        let grid = Grid::build(&tenants, Scope::LeastReimaged(limits));
        let (mut inside, mut outside) = (Vec::new(), Vec::new());
        for (number, it) in tenants.iter().enumerate() {
            if grid.cell(number).is_some() { inside.push(*it) } else { outside.push(*it) }
        }
        let capacity = |list: &[GridTenant]| list.iter().map(|it| it.capacity_blocks).sum::<u64>();
        let free: u64 = tenants.iter().map(|it| it.free_blocks).sum();
        let all = capacity(&tenants);
        let needed = ((all - free) as f64 * headroom).max(all as f64 * share_min);
        if outside.is_empty() {
            return Ok(());
        }
        prop_assert!(capacity(&inside) as f64 >= needed);
        prop_assert!(inside.len() >= tenants_min);
        let highest = inside.iter().map(|it| it.reimages).fold(0.0, f64::max);
        prop_assert!(outside.iter().all(|it| it.reimages > highest));
        // Not one more than needed, but for ties.
        let below: Vec<GridTenant> = inside.iter().copied().filter(|it| it.reimages < highest).collect();
        prop_assert!((capacity(&below) as f64) < needed || below.len() < tenants_min || below.is_empty());
    }
}

/// Tenants that are always busy are of no use; they are replaced by never busy ones, reimaged or not.
#[test]
fn calm_tenants_are_in_the_grid_and_always_busy_ones_are_not() {
    let with = |busy_share, reimages| GridTenant {
        busy_share,
        ..tenant(100, reimages, 0.5)
    };
    // A quarter is always busy, a fifth never, the rest half of the time.
    let mut tenants = vec![with(1.0, 0.01); 25];
    tenants.extend(vec![with(0.5, 0.2); 55]);
    tenants.extend((0..20).map(|it| with(0.0, 1.0 + f64::from(it) / 100.0)));
    let grid = Grid::build(&tenants, Scope::LeastReimaged(LeastReimaged::default()));
    let inside =
        |range: std::ops::Range<usize>| range.filter(|&it| grid.cell(it).is_some()).count();
    assert_eq!(inside(0..25), 0, "always busy");
    // 65 of 100, and what is missing of a third of half the space with a headroom of 0.15.
    assert_eq!((inside(25..80), inside(80..100)), (55, 20));
    let points = calm_points(&tenants);
    assert_eq!((points[0], points[30], points[99]), (0, 0, CALM_POINTS));
    // Half as many do not suffice: rarely busy ones count, too.
    tenants.truncate(90);
    tenants.extend(vec![with(0.01, 0.5); 10]);
    let points = calm_points(&tenants);
    assert_eq!((points[0], points[85], points[95]), (0, CALM_POINTS, 1));
}

/// Without history, and with every small number of tenants, some cells are in three different rows
/// and columns, so that three replicas can be placed.
#[test]
fn few_tenants_without_history_are_still_spread() {
    for count in 0..=12 {
        let tenants = vec![tenant(100, 0.3, 0.5); count];
        for scope in [
            Scope::Everything,
            Scope::LeastReimaged(LeastReimaged::default()),
        ] {
            let grid = Grid::build(&tenants, scope);
            let cells: Vec<Cell> = (0..count).filter_map(|it| grid.cell(it)).collect();
            assert_eq!(cells.len(), count, "all are in the grid");
            let apart = |a: Cell, b: Cell| a.row() != b.row() && a.column() != b.column();
            let most = cells
                .iter()
                .map(|&a| {
                    let partners = || cells.iter().copied().filter(move |&b| apart(a, b));
                    1 + partners()
                        .map(|b| 1 + usize::from(partners().any(|c| apart(b, c))))
                        .max()
                        .unwrap_or(0)
                })
                .max()
                .unwrap_or(0);
            assert_eq!(most, count.min(SIDE), "{count} tenants");
            if count >= CELLS {
                assert!(grid.free_blocks(&tenants).iter().all(|&blocks| blocks > 0));
            }
        }
    }
}

#[test]
fn one_giant_tenant_has_a_cell_of_its_own() {
    let mut tenants = vec![tenant(10, 0.1, 0.2); 30];
    tenants[7] = tenant(10_000, 0.1, 0.2);
    let grid = Grid::build(&tenants, Scope::Everything);
    let giant = grid.cell(7);
    assert_eq!((0..30).filter(|&it| grid.cell(it) == giant).count(), 1);
}

#[test]
fn tenants_without_servers_are_in_no_cell() {
    let mut tenants = vec![tenant(10, 0.1, 0.2); 4];
    tenants[2].servers = 0;
    let grid = Grid::build(&tenants, Scope::Everything);
    assert_eq!(grid.cell(2), None);
    assert_eq!(grid.cell(9), None);
}
