//! Logs go to standard error, so that standard output is for results.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging; `HARVESTFS_LOG` sets the detail, `info` by default.
pub fn start() {
    let filter = EnvFilter::try_from_env("HARVESTFS_LOG")
        .unwrap_or_else(|_| EnvFilter::new("info,quinn=warn,fuser=warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}
