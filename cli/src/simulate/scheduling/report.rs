//! Summaries of the runs, next to the figures of the paper (11, 13 and 14).

use std::collections::BTreeMap;

use harvestfs_chaos::report::{Axis, Bars, Lines, Series, Statement, Table};
use harvestfs_cycles::simulate::{PolicyKind, Record};

/// One row per run.
pub fn table(records: &[Record]) -> Table {
    let mut table = Table::new(&[
        "datacentre",
        "scaling",
        "owners (%)",
        "policy",
        "used (%)",
        "jobs",
        "unfinished",
        "job mean (s)",
        "median (s)",
        "p95 (s)",
        "killed",
        "suspended",
        "wasted (%)",
        "reserve taken (%)",
    ]);
    for record in records {
        table.row(&[
            record.datacentre.clone(),
            record.scaling.clone(),
            format!("{:.1}", 100.0 * record.owner_utilisation),
            record.policy.clone(),
            format!("{:.1}", 100.0 * record.utilisation),
            record.jobs.to_string(),
            record.unfinished_jobs.to_string(),
            format!("{:.0}", record.job_mean_s),
            format!("{:.0}", record.job_median_s),
            format!("{:.0}", record.job_p95_s),
            record.killed_tasks.to_string(),
            record.suspended_tasks.to_string(),
            format!("{:.2}", 100.0 * record.wasted_share),
            format!("{:.2}", 100.0 * record.reserve_taken_share),
        ]);
    }
    table
}

/// The parameters of a run, except for the seed.
type Setup = (String, String, u32);

fn setup(record: &Record) -> Setup {
    let percent = (100.0 * record.target_utilisation).round() as u32;
    (record.scaling.clone(), record.datacentre.clone(), percent)
}

/// The mean over the seeds, by setup.
fn means(
    records: &[Record],
    policy: PolicyKind,
    value: fn(&Record) -> f64,
) -> BTreeMap<Setup, f64> {
    let mut sums: BTreeMap<Setup, (f64, f64)> = BTreeMap::new();
    for record in records.iter().filter(|it| it.policy == policy.name()) {
        let sum = sums.entry(setup(record)).or_default();
        sum.0 += value(record);
        sum.1 += 1.0;
    }
    let means = sums.into_iter();
    means
        .map(|(setup, (sum, count))| (setup, sum / count))
        .collect()
}

/// Share by which a policy makes jobs shorter than another one does, by setup.
fn shorter(records: &[Record], policy: PolicyKind, than: PolicyKind) -> BTreeMap<Setup, f64> {
    let of_policy = means(records, policy, |it| it.job_mean_s);
    let of_other = means(records, than, |it| it.job_mean_s);
    let both = of_policy.into_iter().filter_map(|(setup, mean_s)| {
        let other_s = of_other.get(&setup)?;
        Some((setup, 1.0 - mean_s / other_s))
    });
    both.collect()
}

/// A statement that all values are in a range.
fn within(stated: String, values: &[f64], (least, most): (f64, f64)) -> Statement {
    let lowest = values.iter().copied().reduce(f64::min);
    let highest = values.iter().copied().reduce(f64::max);
    let range = lowest.zip(highest);
    Statement {
        stated,
        holds: range.is_some_and(|(lowest, highest)| least <= lowest && highest <= most),
        measured: range
            .map(|(lowest, highest)| format!("{:.0} to {:.0} %", 100.0 * lowest, 100.0 * highest)),
    }
}

/// The statements of the paper, as far as the runs cover them.
pub fn statements(records: &[Record]) -> Vec<Statement> {
    use PolicyKind::{Checkpoint, History, Pt, Stock};
    let gains = shorter(records, History, Pt);
    let mut statements = Vec::new();
    for (scaling, stated, in_dc9, each, in_each) in [
        (
            "linear",
            "0 to 55 %",
            (-0.005, 0.55),
            "12 to 56 %",
            (0.12, 0.56),
        ),
        ("root", "3 to 41 %", (0.03, 0.41), "5 to 45 %", (0.05, 0.45)),
    ] {
        let of_scaling = gains.iter().filter(|(setup, _)| setup.0 == scaling);
        let values = of_scaling.clone().filter(|(setup, _)| setup.1 == "dc9");
        statements.push(within(
            format!("paper: history makes jobs of DC-9 {stated} shorter than pt ({scaling})"),
            &values.map(|(_, gain)| *gain).collect::<Vec<f64>>(),
            in_dc9,
        ));
        let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for (setup, gain) in of_scaling {
            let sum = sums.entry(&setup.1).or_default();
            sum.0 += gain;
            sum.1 += 1.0;
        }
        let means: Vec<f64> = sums.into_values().map(|(sum, count)| sum / count).collect();
        let stated = format!("paper: on average {each} shorter in each datacentre ({scaling})");
        statements.push(within(stated, &means, in_each));
    }
    let both = |policy, other, value: fn(&Record) -> f64| -> Option<(f64, f64)> {
        let of_other = means(records, other, value);
        let of_policy = means(records, policy, value);
        let mut sums = (0.0, 0.0);
        for (setup, value) in of_policy {
            sums.0 += value;
            sums.1 += of_other.get(&setup)?;
        }
        (sums.1 > 0.0).then_some(sums)
    };
    let mut fewer = |stated: &str, policy, other, value: fn(&Record) -> f64| {
        let sums = both(policy, other, value);
        statements.push(Statement {
            stated: stated.to_owned(),
            holds: sums.is_some_and(|(of_policy, of_other)| of_policy < of_other),
            measured: sums
                .map(|(of_policy, of_other)| format!("{:.2} times", of_policy / of_other)),
        });
    };
    let killed = |it: &Record| it.killed_tasks as f64;
    fewer(
        "paper: history kills fewer tasks than pt",
        History,
        Pt,
        killed,
    );
    fewer("paper: stock has the shortest jobs", Stock, History, |it| {
        it.job_mean_s
    });
    fewer(
        "aim: checkpoint wastes less than history",
        Checkpoint,
        History,
        |it| it.wasted_share,
    );
    fewer(
        "aim: checkpoint makes jobs shorter than history",
        Checkpoint,
        History,
        |it| it.job_mean_s,
    );
    statements
}

fn percent_axis(label: &str, from: f64, to: f64) -> Axis {
    Axis {
        label: label.to_owned(),
        logarithmic: false,
        from,
        to,
    }
}

/// The mean length of jobs against utilisation, over all datacentres (figure 13).
pub fn lengths(records: &[Record]) -> Lines {
    let mut series = Vec::new();
    let mut range = (f64::INFINITY, 0.0_f64);
    for policy in PolicyKind::ALL {
        let mut lines: BTreeMap<String, BTreeMap<u32, (f64, f64)>> = BTreeMap::new();
        for ((scaling, _, percent), mean_s) in means(records, policy, |it| it.job_mean_s) {
            let sum = lines
                .entry(scaling)
                .or_default()
                .entry(percent)
                .or_default();
            sum.0 += mean_s;
            sum.1 += 1.0;
        }
        for (scaling, points) in lines {
            let points = points.into_iter();
            let points: Vec<(f64, f64)> = points
                .map(|(percent, (sum, count))| (f64::from(percent), sum / count))
                .collect();
            for (_, mean_s) in &points {
                range = (range.0.min(*mean_s), range.1.max(*mean_s));
            }
            series.push(Series {
                name: format!("{policy}, {scaling}"),
                points,
                ranges: Vec::new(),
            });
        }
    }
    Lines {
        title: "Length of jobs".into(),
        x: percent_axis("average utilisation by owners (%)", 0.0, 100.0),
        y: Axis {
            label: "mean length (s)".into(),
            logarithmic: true,
            from: 10_f64.powf(range.0.clamp(1.0, 1e9).log10().floor()),
            to: 10_f64.powf(range.1.max(10.0).log10().ceil()),
        },
        series,
    }
}

/// Minimum, mean and maximum by which `history` makes jobs shorter than `pt`, for each datacentre (figure 14).
pub fn improvements(records: &[Record]) -> Bars {
    let gains = shorter(records, PolicyKind::History, PolicyKind::Pt);
    let mut datacentres: Vec<String> = gains.keys().map(|setup| setup.1.clone()).collect();
    datacentres.sort();
    datacentres.dedup();
    let mut scalings: Vec<&str> = gains.keys().map(|setup| setup.0.as_str()).collect();
    scalings.dedup();
    let mut series = Vec::new();
    for scaling in scalings {
        let (mut points, mut ranges) = (Vec::new(), Vec::new());
        for (group, datacentre) in datacentres.iter().enumerate() {
            let of_group = gains
                .iter()
                .filter(|(setup, _)| setup.0 == scaling && setup.1 == *datacentre);
            let values: Vec<f64> = of_group.map(|(_, gain)| 100.0 * gain).collect();
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            points.push((group as f64, mean));
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            ranges.push((
                least,
                values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            ));
        }
        series.push(Series {
            name: scaling.to_owned(),
            points,
            ranges,
        });
    }
    Bars {
        title: "How much shorter history makes jobs than pt".into(),
        groups: datacentres,
        y: percent_axis("shorter (%)", 0.0, 100.0),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(datacentre: &str, policy: &str, job_mean_s: f64) -> Record {
        Record {
            datacentre: datacentre.into(),
            policy: policy.into(),
            scaling: "linear".into(),
            target_utilisation: 0.4,
            killed_tasks: 10,
            job_mean_s,
            ..Record::default()
        }
    }

    #[test]
    fn runs_are_compared_with_the_figures_of_the_paper() {
        let records = [
            record("dc9", "pt", 1_000.0),
            record("dc9", "history", 700.0),
            record("dc0", "pt", 1_000.0),
            record("dc0", "history", 900.0),
        ];
        let measured: Vec<(bool, Option<String>)> = statements(&records)
            .into_iter()
            .map(|it| (it.holds, it.measured))
            .collect();
        assert_eq!(measured[0], (true, Some("30 to 30 %".into())));
        // 10 % in DC-0 is less than 12 %.
        assert_eq!(measured[1], (false, Some("10 to 30 %".into())));
        // No run with the other scaling.
        assert_eq!(measured[2], (false, None));
        // The same number was killed.
        assert_eq!(measured[4], (false, Some("1.00 times".into())));
        let bars = improvements(&records);
        assert_eq!(bars.groups, ["dc0", "dc9"]);
        assert!((bars.series[0].points[1].1 - 30.0).abs() < 1e-9);
        assert_eq!(lengths(&records).series[1].points, [(40.0, 800.0)]);
        assert!(table(&records).to_string().contains("dc0"));
    }
}
