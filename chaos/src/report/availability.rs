//! A summary of the availability runs (the paper's figure 16).

use std::collections::BTreeMap;

use super::{Axis, Lines, Series, Statement, Table};
use crate::simulate::availability::Record;

/// One row per run.
#[must_use]
pub fn table(records: &[Record]) -> Table {
    let mut table = Table::new(&[
        "datacentre",
        "scaling",
        "policy",
        "replicas",
        "utilisation (%)",
        "servers busy (%)",
        "failed accesses (%)",
        "blocks with failures",
    ]);
    for record in records {
        table.row(&[
            record.datacentre.clone(),
            record.scaling.clone(),
            record.policy.clone(),
            record.replication.to_string(),
            format!("{:.1}", 100.0 * record.utilisation),
            format!("{:.2}", 100.0 * record.busy_share),
            format!("{:.6}", 100.0 * record.failed_share),
            record.blocks_with_failures.to_string(),
        ]);
    }
    table
}

/// The highest mean utilisation up to which no run of a policy had a failed access, over all
/// datacentres; `None` if there is no run.
fn none_failed_up_to(records: &[Record], policy: &str, scaling: &str) -> Option<f64> {
    let of_policy = || {
        let all = records.iter();
        all.filter(|it| it.policy == policy && it.scaling == scaling && it.replication == 3)
    };
    of_policy().next()?;
    let failed = of_policy().filter(|it| it.failed_accesses > 0);
    let first = failed
        .map(|it| it.target_utilisation)
        .fold(f64::INFINITY, f64::min);
    let fine = of_policy().map(|it| it.target_utilisation);
    Some(fine.filter(|it| *it < first).fold(0.0, f64::max))
}

/// The statements of the paper and the aims of this project, as far as the runs cover them.
#[must_use]
pub fn statements(records: &[Record]) -> Vec<Statement> {
    let up_to = |who: &str, policy: &str, scaling: &str, aim: f64| {
        let reached = none_failed_up_to(records, policy, scaling);
        Statement {
            stated: format!(
                "{who}: {policy} with 3 has no failed access up to {:.0} % ({scaling} scaling)",
                100.0 * aim
            ),
            holds: reached.is_some_and(|reached| reached >= aim),
            measured: reached.map(|reached| format!("up to {:.0} %", 100.0 * reached)),
        }
    };
    vec![
        up_to("paper", "history", "linear", 0.4),
        up_to("paper", "history", "root", 0.5),
        up_to("aim", "harvest", "linear", 0.5),
    ]
}

/// Plots failed accesses over utilisation, as the mean of all datacentres, for one scaling.
#[must_use]
pub fn plot(records: &[Record], scaling: &str) -> Lines {
    let mut lines: BTreeMap<(String, u8), BTreeMap<u32, (f64, f64)>> = BTreeMap::new();
    for record in records.iter().filter(|it| it.scaling == scaling) {
        let line = lines
            .entry((record.policy.clone(), record.replication))
            .or_default();
        let percent = (100.0 * record.target_utilisation).round() as u32;
        let sum = line.entry(percent).or_default();
        sum.0 += 100.0 * record.failed_share;
        sum.1 += 1.0;
    }
    Lines {
        title: format!("Failed accesses, {scaling} scaling"),
        x: Axis {
            label: "average utilisation (%)".into(),
            logarithmic: false,
            from: 20.0,
            to: 90.0,
        },
        y: Axis {
            label: "failed accesses (%)".into(),
            logarithmic: true,
            from: 1e-6,
            to: 100.0,
        },
        series: lines
            .into_iter()
            .map(|((policy, replication), points)| Series {
                name: format!("{policy}, {replication} replicas"),
                points: points
                    .into_iter()
                    .map(|(percent, (sum, count))| (f64::from(percent), sum / count))
                    .collect(),
                ranges: Vec::new(),
            })
            .collect(),
    }
}
