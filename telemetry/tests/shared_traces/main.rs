//! Tests that need the shared traces: `HARVESTFS_TRACES` names their directory; the default is
//! `../shared/traces` next to the repository. Without the traces, each test reports this and passes, even where
//! skipping is forbidden, since they are not part of the project. If the variable names a directory without
//! traces, the tests fail.

mod patterns;
mod reading;

use std::io::Write;
use std::path::PathBuf;

/// Returns the directory of the traces; if there is none, reports that and returns none.
fn traces() -> Option<PathBuf> {
    let default = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let named = std::env::var_os("HARVESTFS_TRACES").map(PathBuf::from);
    let is_named = named.is_some();
    let directory = named.unwrap_or_else(default);
    if directory.join("cpu_index.csv.gz").is_file() {
        return Some(directory);
    }
    assert!(!is_named, "no traces in {}", directory.display());
    // The output of `eprintln` would be captured and shown only for failing tests. A failed write has no reader anyway.
    let _ = writeln!(
        std::io::stderr().lock(),
        "\nSKIPPED: no traces in {}; set HARVESTFS_TRACES\n",
        directory.display()
    );
    None
}

/// Spearman's rank correlation of pairs.
fn rank_correlation(pairs: &[(f64, f64)]) -> f64 {
    let ranks = |pick: fn(&(f64, f64)) -> f64| {
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        order.sort_by(|&a, &b| pick(&pairs[a]).total_cmp(&pick(&pairs[b])));
        let mut ranks = vec![0.0; pairs.len()];
        let mut start = 0;
        while start < order.len() {
            let same = |&&index: &&usize| pick(&pairs[index]) == pick(&pairs[order[start]]);
            let end = start + order[start..].iter().take_while(same).count();
            for &index in &order[start..end] {
                ranks[index] = (start + end - 1) as f64 / 2.0;
            }
            start = end;
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
