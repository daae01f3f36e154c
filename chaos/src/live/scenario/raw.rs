//! A scenario as it is written in a file, before it is checked.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::{ClientSpec, MountSpec, Pattern, Priority};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawScenario {
    pub name: String,
    #[serde(default)]
    pub finds: String,
    #[serde(default)]
    pub seed: u64,
    pub duration_s: Spanned<f64>,
    #[serde(default = "default_heal_s")]
    pub heal_s: Spanned<f64>,
    pub cluster: RawCluster,
    #[serde(default)]
    pub tenant: Vec<Spanned<RawTenant>>,
    #[serde(default)]
    pub clients: ClientSpec,
    #[serde(default)]
    pub mounts: MountSpec,
    #[serde(default)]
    pub fault: Vec<Spanned<RawFault>>,
    #[serde(default)]
    pub variant: Vec<RawVariant>,
}

fn default_heal_s() -> Spanned<f64> {
    Spanned::new(0..0, 120.0)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCluster {
    #[serde(default = "default_namenodes")]
    pub namenodes: Spanned<usize>,
    pub servers: Option<Spanned<usize>>,
    #[serde(default = "default_replication")]
    pub replication: Spanned<u8>,
    #[serde(default = "default_block_mib")]
    pub block_mib: Spanned<u64>,
    #[serde(default = "default_quota_mib")]
    pub quota_mib: Spanned<u64>,
    #[serde(default = "default_repairs")]
    pub repairs_per_hour: u32,
    pub policy: Option<Spanned<String>>,
    #[serde(default = "default_day_s")]
    pub day_s: Spanned<f64>,
    pub racks: Option<Spanned<usize>>,
    #[serde(default)]
    pub priority: Priority,
    pub trace: Option<Spanned<PathBuf>>,
    pub trace_speed: Option<Spanned<f64>>,
}

fn default_namenodes() -> Spanned<usize> {
    Spanned::new(0..0, 1)
}

fn default_replication() -> Spanned<u8> {
    Spanned::new(0..0, 3)
}

fn default_block_mib() -> Spanned<u64> {
    Spanned::new(0..0, 1)
}

fn default_quota_mib() -> Spanned<u64> {
    Spanned::new(0..0, 1_024)
}

/// A live run lasts minutes: with the usual 30, no repair would finish within it.
fn default_repairs() -> u32 {
    20_000
}

fn default_day_s() -> Spanned<f64> {
    Spanned::new(0..0, 60.0)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTenant {
    pub environment: String,
    pub machine_function: String,
    pub servers: usize,
    #[serde(default = "default_pattern")]
    pub pattern: Spanned<Pattern>,
}

fn default_pattern() -> Spanned<Pattern> {
    Spanned::new(0..0, Pattern::default())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawVariant {
    pub name: String,
    pub policy: Spanned<String>,
    #[serde(default = "yes")]
    pub denial: bool,
    #[serde(default)]
    pub may_lose: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFault {
    pub kind: Spanned<String>,
    pub at_s: Spanned<f64>,
    pub jitter_s: Option<Spanned<f64>>,
    pub for_s: Option<Spanned<f64>>,
    pub rolling_s: Option<Spanned<f64>>,
    pub repeat: Option<Spanned<u32>>,
    pub every_s: Option<Spanned<f64>>,
    pub servers: Option<Vec<Spanned<String>>>,
    pub tenant: Option<Spanned<String>>,
    pub environment: Option<Spanned<String>>,
    pub random: Option<Spanned<usize>>,
    pub mounts: Option<Spanned<usize>>,
    pub part: Option<Spanned<String>>,
    pub blocks: Option<Spanned<u32>>,
    pub loss_percent: Option<Spanned<u32>>,
    pub delay_ms: Option<Spanned<u32>>,
}
