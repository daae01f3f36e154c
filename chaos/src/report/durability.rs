//! A summary of the durability runs (the paper's figure 15).

use std::collections::BTreeMap;

use super::{Axis, Bars, Series, Statement, Table};
use crate::simulate::durability::Record;

/// The sums over all runs of one policy, replication and datacentre.
#[derive(Clone, Debug, Default, PartialEq)]
struct Cell {
    runs: u64,
    lost: u64,
    lost_min: u64,
    lost_max: u64,
    lost_bound: f64,
    repairs: u64,
    exposed_hours: f64,
    placement_us: f64,
    wall_s: f64,
}

impl Cell {
    fn mean(&self, sum: u64) -> f64 {
        sum as f64 / self.runs as f64
    }
}

type Setup = (String, u8);

/// Results by policy and replication, then by datacentre.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    setups: BTreeMap<Setup, BTreeMap<String, Cell>>,
    fill: f64,
    blocks: u64,
}

impl Summary {
    /// Sums up runs, which should differ only in datacentre, policy, replication and seed.
    #[must_use]
    pub fn of(records: &[Record]) -> Self {
        let mut summary = Self::default();
        for record in records {
            summary.fill = record.fill;
            summary.blocks = record.blocks;
            let setup = (record.policy.clone(), record.replication);
            let cells = summary.setups.entry(setup).or_default();
            let cell = cells.entry(record.datacentre.clone()).or_default();
            if cell.runs == 0 || record.lost_blocks < cell.lost_min {
                cell.lost_min = record.lost_blocks;
            }
            cell.runs += 1;
            cell.lost += record.lost_blocks;
            cell.lost_max = cell.lost_max.max(record.lost_blocks);
            cell.lost_bound += record.lost_blocks_bound;
            cell.repairs += record.repairs;
            cell.exposed_hours += record.single_replica_block_hours;
            cell.placement_us += record.placement_us_per_block;
            cell.wall_s += record.wall_s;
        }
        summary
    }

    /// One row per policy, replication and datacentre.
    #[must_use]
    pub fn table(&self) -> Table {
        let mut table = Table::new(&[
            "policy",
            "replicas",
            "datacentre",
            "runs",
            "lost (mean)",
            "lost (min)",
            "lost (max)",
            "foretold at most",
            "repairs",
            "one replica left (block-hours)",
            "placement (us/block)",
            "run (s)",
        ]);
        for ((policy, replication), cells) in &self.setups {
            for (datacentre, cell) in cells {
                let runs = cell.runs as f64;
                table.row(&[
                    policy.clone(),
                    replication.to_string(),
                    datacentre.clone(),
                    cell.runs.to_string(),
                    format!("{:.1}", cell.mean(cell.lost)),
                    cell.lost_min.to_string(),
                    cell.lost_max.to_string(),
                    format!("{:.1}", cell.lost_bound / runs),
                    format!("{:.0}", cell.mean(cell.repairs)),
                    format!("{:.1}", cell.exposed_hours / runs),
                    format!("{:.2}", cell.placement_us / runs),
                    format!("{:.1}", cell.wall_s / runs),
                ]);
            }
        }
        table
    }

    fn cells(&self, policy: &str, replication: u8) -> Option<&BTreeMap<String, Cell>> {
        self.setups.get(&(policy.to_owned(), replication))
    }

    /// The sums over the datacentres that both setups have.
    fn compare(&self, a: (&str, u8), b: (&str, u8), value: fn(&Cell) -> f64) -> Option<(f64, f64)> {
        let (a, b) = (self.cells(a.0, a.1)?, self.cells(b.0, b.1)?);
        let mut sums = (0.0, 0.0);
        for (datacentre, of_a) in a {
            if let Some(of_b) = b.get(datacentre) {
                sums.0 += value(of_a) / of_a.runs as f64;
                sums.1 += value(of_b) / of_b.runs as f64;
            }
        }
        Some(sums)
    }

    fn lost(cell: &Cell) -> f64 {
        cell.lost as f64
    }

    /// The statement that `better` loses at least `factor` times fewer blocks than `worse`.
    fn fewer(&self, better: (&str, u8), worse: (&str, u8), factor: f64, who: &str) -> Statement {
        let stated = format!(
            "{who}: {} with {} loses at least {factor:.0} times fewer than {} with {}",
            better.0, better.1, worse.0, worse.1
        );
        let sums = self.compare(better, worse, Self::lost);
        Statement {
            stated,
            holds: sums.is_some_and(|(few, many)| many > 0.0 && few * factor <= many),
            measured: sums.map(|(few, many)| {
                let times = if few > 0.0 {
                    format!("{:.0} times", many / few)
                } else {
                    "none lost".to_owned()
                };
                format!("{few:.1} against {many:.1} blocks: {times}")
            }),
        }
    }

    fn none_lost(&self, policy: &str, replication: u8, who: &str) -> Statement {
        let cells = self.cells(policy, replication);
        let most = cells.and_then(|it| it.values().map(|cell| cell.lost_max).max());
        Statement {
            stated: format!("{who}: {policy} with {replication} loses nothing anywhere"),
            holds: most == Some(0),
            measured: most.map(|most| format!("most in a run: {most}")),
        }
    }

    fn repairs(&self, replication: u8) -> Statement {
        let allowed = if self.fill <= 0.5 { 0.8 } else { 1.6 };
        let value = |cell: &Cell| cell.repairs as f64;
        let sums = self.compare(("harvest", replication), ("stock", replication), value);
        let share = sums.map(|(harvest, stock)| harvest / stock.max(1.0));
        let fill = self.fill * 100.0;
        Statement {
            stated: format!(
                "aim: harvest needs at most {allowed} times the repairs of stock \
                 ({replication} replicas, {fill:.0} % full)"
            ),
            holds: share.is_some_and(|share| share <= allowed),
            measured: share.map(|share| format!("{share:.2} times")),
        }
    }

    /// The statements of the paper and the aims of this project, as far as the runs cover them.
    #[must_use]
    pub fn statements(&self) -> Vec<Statement> {
        let everywhere = |policy: &str, replication: u8| {
            let cells = self.cells(policy, replication);
            let least = cells.and_then(|it| it.values().map(|cell| cell.lost_min).min());
            Statement {
                stated: format!("paper: {policy} with {replication} loses blocks everywhere"),
                holds: least.is_some_and(|least| least > 0),
                measured: least.map(|least| format!("fewest in a run: {least}")),
            }
        };
        let each = self
            .cells("harvest", 2)
            .zip(self.cells("stock", 3))
            .map(|(harvest, stock)| {
                let fewer = harvest.iter().filter(|(datacentre, of_harvest)| {
                    stock.get(*datacentre).is_some_and(|of_stock| {
                        of_harvest.mean(of_harvest.lost) < of_stock.mean(of_stock.lost)
                    })
                });
                (fewer.count(), harvest.len())
            });
        vec![
            everywhere("stock", 3),
            everywhere("stock", 4),
            self.fewer(("history", 3), ("stock", 3), 100.0, "paper"),
            self.none_lost("history", 4, "paper"),
            self.none_lost("harvest", 3, "aim"),
            self.fewer(("harvest", 2), ("stock", 3), 10.0, "aim"),
            Statement {
                stated: "aim: harvest with 2 loses fewer than stock with 3 in each".into(),
                holds: each.is_some_and(|(fewer, all)| fewer == all),
                measured: each.map(|(fewer, all)| format!("in {fewer} of {all}")),
            },
            self.repairs(2),
            self.repairs(3),
            self.repairs(4),
        ]
    }

    /// Plots lost blocks in percent, as in figure 15.
    #[must_use]
    pub fn plot(&self) -> Bars {
        let mut groups: Vec<String> = self
            .setups
            .values()
            .flat_map(|cells| cells.keys().cloned())
            .collect();
        groups.sort();
        groups.dedup();
        let percent = |lost: f64| 100.0 * lost / self.blocks.max(1) as f64;
        let series = self
            .setups
            .iter()
            .map(|((policy, replication), cells)| Series {
                name: format!("{policy}, {replication} replicas"),
                points: cells
                    .iter()
                    .map(|(datacentre, cell)| {
                        let group = groups.iter().position(|it| it == datacentre);
                        (group.unwrap_or(0) as f64, percent(cell.mean(cell.lost)))
                    })
                    .collect(),
                ranges: cells
                    .values()
                    .map(|cell| (percent(cell.lost_min as f64), percent(cell.lost_max as f64)))
                    .collect(),
            });
        Bars {
            title: format!("Lost blocks in a year, {:.0} % full", self.fill * 100.0),
            series: series.collect(),
            groups,
            y: Axis {
                label: "lost blocks (%)".into(),
                logarithmic: true,
                from: 1e-5,
                to: 1.0,
            },
        }
    }
}
