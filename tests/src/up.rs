//! Clusters of `harvestfs up`.

use std::path::Path;
use std::process::{Command, Output};

use crate::harvestfs;

/// Runs a command of `harvestfs` on the directory of a cluster.
///
/// # Panics
/// When there is no binary.
pub fn run_on(data: &Path, arguments: &[&str]) -> Output {
    Command::new(harvestfs())
        .args(arguments)
        .arg("--data")
        .arg(data)
        .output()
        .expect("the binary runs")
}

/// Ends what a failed test would leave.
pub struct DownOnDrop<'a>(pub &'a Path);

impl Drop for DownOnDrop<'_> {
    fn drop(&mut self) {
        // Fails when the cluster is down, which is the aim.
        let _ = run_on(self.0, &["down"]);
    }
}
