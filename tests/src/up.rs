//! Helpers for clusters started with `harvestfs up`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::harvestfs;

/// Runs a `harvestfs` command on the directory of a cluster.
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

/// The id of the process that supervises a cluster.
///
/// # Panics
/// When the cluster is not up.
#[must_use]
pub fn supervisor_of(data: &Path) -> u32 {
    let id = fs::read_to_string(data.join("up.pid")).expect("the supervisor's id");
    id.trim().parse().expect("a number")
}

/// Whether only its owner can enter the directory of a cluster, and read its logs.
///
/// # Panics
/// When it does not exist.
#[must_use]
pub fn is_closed_to_others(data: &Path) -> bool {
    [data, &data.join("log")].iter().all(|directory| {
        let metadata = fs::metadata(directory).expect("a directory");
        metadata.permissions().mode() & 0o7777 == 0o700
    })
}

/// Stops the cluster that a failed test would leave running.
pub struct DownOnDrop<'a>(pub &'a Path);

impl Drop for DownOnDrop<'_> {
    fn drop(&mut self) {
        // This fails if the cluster is already down, which is fine.
        let _ = run_on(self.0, &["down"]);
    }
}
