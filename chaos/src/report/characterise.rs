//! Statistics of datacentres, compared with what the paper states (its figures 1 to 6).

use super::{Axis, Bars, Lines, Series, Statement, Table};
use crate::datacentre::MONTHS;
use crate::simulate::characterise::Character;

const PATTERN_NAMES: [&str; 3] = ["periodic", "constant", "unpredictable"];

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// One row per datacentre.
#[must_use]
pub fn table(characters: &[Character]) -> Table {
    let mut table = Table::new(&[
        "datacentre",
        "servers",
        "tenants",
        "reimages",
        "per server and month",
        "servers <= 1 (%)",
        "tenants <= 1 (%)",
        "tenants <= 8 changes (%)",
        "most in 4 h",
        "tenants per./const./unpred. (%)",
        "servers per./const./unpred. (%)",
        "utilisation (%)",
    ]);
    for it in characters {
        let shares = |shares: [f64; 3]| shares.map(percent).join(" / ");
        table.row(&[
            it.datacentre.clone(),
            it.facts.servers.to_string(),
            it.facts.tenants.to_string(),
            it.facts.reimages.to_string(),
            format!("{:.2}", it.facts.rate_mean),
            percent(it.facts.calm_servers_share),
            percent(it.facts.calm_tenants_share),
            percent(it.facts.steady_tenants_share),
            it.facts.most_in_4_hours.to_string(),
            shares(it.tenant_shares),
            shares(it.server_shares),
            percent(it.utilisation),
        ]);
    }
    table
}

/// The statements of the paper.
#[must_use]
pub fn statements(characters: &[Character]) -> Vec<Statement> {
    let least = |stated: &str, aim: f64, value: fn(&Character) -> f64| {
        let least = characters.iter().map(value).fold(f64::INFINITY, f64::min);
        Statement {
            stated: stated.to_owned(),
            measured: Some(format!("at least {} %", percent(least))),
            holds: least >= aim,
        }
    };
    let mean = |value: fn(&Character) -> f64| {
        characters.iter().map(value).sum::<f64>() / characters.len().max(1) as f64
    };
    let about = |stated: &str, value: f64, range: std::ops::RangeInclusive<f64>| Statement {
        stated: stated.to_owned(),
        measured: Some(format!("{} % on average", percent(value))),
        holds: range.contains(&value),
    };
    vec![
        about(
            "paper: periodic tenants are a small minority",
            mean(|it| it.tenant_shares[0]),
            0.0..=0.25,
        ),
        about(
            "paper: they hold about 40 % of the servers",
            mean(|it| it.server_shares[0]),
            0.35..=0.45,
        ),
        about(
            "paper: periodic and constant ones hold about 75 % of the servers",
            mean(|it| it.server_shares[0] + it.server_shares[1]),
            0.70..=0.80,
        ),
        least(
            "paper: 90 % of servers are reimaged at most once a month",
            0.9,
            |it| it.facts.calm_servers_share,
        ),
        least(
            "paper: 80 % of tenants are reimaged at most once per server and month",
            0.8,
            |it| it.facts.calm_tenants_share,
        ),
        least(
            "paper: 80 % of tenants change their group at most 8 times in 35",
            0.8,
            |it| it.facts.steady_tenants_share,
        ),
    ]
}

fn linear(label: &str, to: f64) -> Axis {
    Axis {
        label: label.to_owned(),
        logarithmic: false,
        from: 0.0,
        to,
    }
}

/// The cumulative distribution of sorted values: each value, and the percentage of values that are not larger.
fn distribution(sorted: &[f64]) -> Vec<(f64, f64)> {
    let count = sorted.len().max(1) as f64;
    let steps = sorted.iter().enumerate();
    steps
        .map(|(place, &value)| (value, 100.0 * (place + 1) as f64 / count))
        .collect()
}

fn distributions(
    title: &str,
    x: Axis,
    characters: &[Character],
    values: fn(&Character) -> &[f64],
) -> String {
    let series = characters.iter().map(|it| Series {
        name: it.datacentre.clone(),
        points: distribution(values(it)),
        ranges: Vec::new(),
    });
    let plot = Lines {
        title: title.to_owned(),
        x,
        y: linear("share (%)", 100.0),
        series: series.collect(),
    };
    plot.to_svg()
}

fn shares(title: &str, characters: &[Character], shares: fn(&Character) -> [f64; 3]) -> String {
    let series = PATTERN_NAMES
        .iter()
        .enumerate()
        .map(|(number, name)| Series {
            name: (*name).to_owned(),
            points: characters
                .iter()
                .enumerate()
                .map(|(group, it)| (group as f64, 100.0 * shares(it)[number]))
                .collect(),
            ranges: Vec::new(),
        });
    let plot = Bars {
        title: title.to_owned(),
        groups: characters.iter().map(|it| it.datacentre.clone()).collect(),
        y: linear("share (%)", 100.0),
        series: series.collect(),
    };
    plot.to_svg()
}

/// The plots, as pairs of file name and contents.
#[must_use]
pub fn plots(characters: &[Character]) -> Vec<(String, String)> {
    let mut plots = Vec::new();
    if let Some(first) = characters.first() {
        for (name, sample) in [
            ("periodic", &first.periodic),
            ("unpredictable", &first.unpredictable),
        ] {
            let line = |points: &[(f64, f64)]| {
                vec![Series {
                    name: name.to_owned(),
                    points: points.to_vec(),
                    ranges: Vec::new(),
                }]
            };
            let strongest = sample
                .by_frequency
                .iter()
                .map(|it| it.1)
                .fold(1.0, f64::max);
            let time = Lines {
                title: format!("CPU use of a {name} tenant of {}", first.datacentre),
                x: linear("hour", 720.0),
                y: linear("CPU (%)", 100.0),
                series: line(&sample.by_hour),
            };
            let frequency = Lines {
                title: format!("Spectrum of a {name} tenant of {}", first.datacentre),
                x: linear("cycles per month", 100.0),
                y: linear("strength (points)", strongest),
                series: line(&sample.by_frequency),
            };
            plots.push((format!("figure1-{name}-time.svg"), time.to_svg()));
            plots.push((format!("figure1-{name}-frequency.svg"), frequency.to_svg()));
        }
    }
    plots.push((
        "figure2.svg".into(),
        shares("Tenants per pattern", characters, |it| it.tenant_shares),
    ));
    plots.push((
        "figure3.svg".into(),
        shares("Servers per pattern", characters, |it| it.server_shares),
    ));
    plots.push((
        "figure4.svg".into(),
        distributions(
            "Reimages of servers",
            linear("reimages per month", 4.0),
            characters,
            |it| &it.server_rates,
        ),
    ));
    plots.push((
        "figure5.svg".into(),
        distributions(
            "Reimages of tenants",
            linear("reimages per server and month", 4.0),
            characters,
            |it| &it.tenant_rates,
        ),
    ));
    plots.push((
        "figure6.svg".into(),
        distributions(
            "Changes of the group of reimage frequency",
            linear("changes", f64::from(MONTHS - 1)),
            characters,
            |it| &it.group_changes,
        ),
    ));
    plots
}
