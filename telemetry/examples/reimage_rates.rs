//! Measures which estimate of reimage rates predicts the next month and the next year best, on the
//! synthetic datacentres: `cargo run --release -p harvestfs-telemetry --example reimage_rates -- TRACES`.
//!
//! For each estimator: deviance of the Poisson distribution per server-month (lower is better; weighs by servers),
//! mean absolute error of the rate over servers, and Spearman's rank correlation over tenants, all averaged over
//! ten datacentres and the predicted years (or months).

mod common;

use std::path::Path;

use harvestfs_telemetry::history::History;
use harvestfs_telemetry::reimages::{Estimator, MONTH_S, Months, rates};

use common::BEGIN_S;

#[derive(Default)]
struct Score {
    deviance: f64,
    error: f64,
    rank: f64,
    runs: f64,
}

fn rank_correlation(pairs: &[(f64, f64)]) -> f64 {
    let ranks = |pick: fn(&(f64, f64)) -> f64| {
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        order.sort_by(|&a, &b| pick(&pairs[a]).total_cmp(&pick(&pairs[b])));
        let mut ranks = vec![0.0; pairs.len()];
        for group in order.chunk_by(|&a, &b| pick(&pairs[a]) == pick(&pairs[b])) {
            let begin = order
                .iter()
                .position(|index| index == &group[0])
                .unwrap_or(0);
            for &index in group {
                ranks[index] = begin as f64 + (group.len() - 1) as f64 / 2.0;
            }
        }
        ranks
    };
    let (a, b) = (ranks(|pair| pair.0), ranks(|pair| pair.1));
    let mean = (pairs.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum()
    };
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}

impl Score {
    /// `months` are counted at the end of the predicted time, which is its newest `ahead`.
    fn add(&mut self, predicted: &[f64], months: &[Months], ahead: usize) {
        let (mut deviance, mut error, mut all) = (0.0, 0.0, 0.0);
        let mut pairs = Vec::new();
        for (rate, months) in predicted.iter().zip(months) {
            let seen: u32 = months.reimages[..ahead].iter().sum();
            let server_months: f64 = months.server_months[..ahead].iter().sum();
            // New tenants cannot be predicted; those that no longer exist need not be.
            if server_months < 0.5 * ahead as f64 || months.server_months[ahead] <= 0.0 {
                continue;
            }
            let (seen, expected) = (f64::from(seen), (rate * server_months).max(1e-3));
            let ratio = if seen > 0.0 {
                seen * (seen / expected).ln()
            } else {
                0.0
            };
            deviance += 2.0 * (ratio - (seen - expected));
            error += (seen - expected).abs();
            all += server_months;
            pairs.push((*rate, seen / server_months));
        }
        self.deviance += deviance / all;
        self.error += error / all;
        self.rank += rank_correlation(&pairs);
        self.runs += 1.0;
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args()
        .nth(1)
        .ok_or("name the directory of the traces")?;
    let histories: Vec<History> = (0..10)
        .map(|number| common::load(Path::new(&directory), number))
        .collect::<Result<_, _>>()?;
    for (ahead, what) in [(1, "next month"), (12, "next year")] {
        println!("{what}: half-life, prior months: deviance, error, rank correlation");
        // Counting is what takes time: once for each time and datacentre.
        let mut counted = Vec::new();
        for history in &histories {
            for end in (12..=36 - ahead as u32).step_by(3) {
                let now_s = BEGIN_S + end * MONTH_S;
                let past = Months::count(history, now_s);
                let next = Months::count(history, now_s + ahead as u32 * MONTH_S);
                counted.push((past, next));
            }
        }
        for half_life_months in [1.0, 2.0, 3.0, 6.0, 12.0, 24.0, f64::INFINITY] {
            for prior_months in [0.0, 0.25, 0.5, 1.0, 2.0, 4.0] {
                let estimator = Estimator {
                    half_life_months,
                    prior_months,
                };
                let mut score = Score::default();
                for (past, next) in &counted {
                    score.add(&rates(past, &estimator), next, ahead);
                }
                println!(
                    "{half_life_months:>4} {prior_months:>5}: {:.4} {:.4} {:.4}",
                    score.deviance / score.runs,
                    score.error / score.runs,
                    score.rank / score.runs
                );
            }
        }
    }
    Ok(())
}
