//! Patterns agree with those of the index, and the peak predicts next month's.

use std::collections::HashMap;

use harvestfs_telemetry::spectrum::Spectra;
use harvestfs_telemetry::traces::{IndexEntry, Records, SeriesReader, window};

#[test]
fn patterns_agree_with_the_index() {
    let Some(traces) = crate::traces() else {
        return;
    };
    let mut wanted: HashMap<(String, String), Vec<IndexEntry>> = HashMap::new();
    for entry in Records::<IndexEntry>::open(&traces.join("cpu_index.csv.gz")).unwrap() {
        let entry = entry.unwrap();
        let key = (entry.source.clone(), entry.series.clone());
        wanted.entry(key).or_default().push(entry);
    }
    let mut spectra = Spectra::default();
    let (mut agree, mut all, mut differ) = (0, 0, Vec::new());
    for (source, file) in [
        ("bitbrains_rnd", "cpu_bitbrains_rnd"),
        ("jumpstarter", "cpu_jumpstarter"),
        ("cluster_aggregate", "cpu_cluster_aggregates"),
    ] {
        for series in SeriesReader::open(&traces.join(format!("{file}.csv.gz"))).unwrap() {
            let series = series.unwrap();
            for entry in &wanted[&(source.to_owned(), series.name.clone())] {
                if entry.coverage < 0.8 {
                    continue;
                }
                let part = series.slice(window(&entry.window).unwrap());
                let shares = (0..part.len()).map(|index| part.share(index));
                let shape = spectra.shape(part.period_s, shares).unwrap();
                assert!(
                    (shape.average * 100.0 - entry.average_percent).abs() < 0.1,
                    "{entry:?}"
                );
                assert!(
                    (shape.peak * 100.0 - entry.p99_percent).abs() < 2.0,
                    "{entry:?}"
                );
                all += 1;
                if shape.pattern == entry.pattern {
                    agree += 1;
                } else {
                    differ.push(format!(
                        "{} {}: {:?} {:?}",
                        entry.series, entry.window, entry.pattern, shape
                    ));
                }
            }
        }
    }
    let share = f64::from(agree) / f64::from(all);
    println!(
        "the pattern agrees for {agree} of {all} windows: {:.2} %",
        share * 100.0
    );
    differ
        .iter()
        .take(10)
        .for_each(|line| println!("{}", &line[..line.len().min(260)]));
    assert_eq!(all, 1472);
    assert!(share >= 0.95);
}

#[test]
fn the_peak_foretells_that_of_the_next_month() {
    let Some(traces) = crate::traces() else {
        return;
    };
    let mut months: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut spectra = Spectra::default();
    for series in SeriesReader::open(&traces.join("cpu_bitbrains_rnd.csv.gz")).unwrap() {
        let series = series.unwrap();
        let both = ["2013-08", "2013-09"].map(|name| series.slice(window(name).unwrap()));
        if both.iter().any(|part| part.coverage() < 0.8) {
            continue;
        }
        months.push(
            both.iter()
                .map(|part| {
                    let shares = || (0..part.len()).map(|index| part.share(index));
                    let highest = shares().flatten().fold(0.0, f32::max);
                    (
                        spectra.shape(300, shares()).unwrap().peak,
                        f64::from(highest),
                    )
                })
                .collect(),
        );
    }
    let pairs = |pick: fn((f64, f64)) -> f64| -> Vec<(f64, f64)> {
        months
            .iter()
            .map(|both| (pick(both[0]), pick(both[1])))
            .collect()
    };
    let (quantile, highest) = (
        crate::rank_correlation(&pairs(|m| m.0)),
        crate::rank_correlation(&pairs(|m| m.1)),
    );
    println!("rank correlation of August and September: p99 {quantile:.3}, highest {highest:.3}");
    assert!(quantile > 0.85 && quantile > highest);
}
