//! Utilisation classes: which servers have similar utilisation, and how much of them their owners leave to jobs
//! (OSDI'16, section 4.1).

use serde::{Deserialize, Serialize};

use crate::history::{TenantName, TenantPattern};

/// Version of the format of [`Classes`]. It changes when a field is removed or changes its meaning, and not
/// when one is added.
pub const CLASSES_VERSION: u32 = 1;

/// The current utilisation classes of a cluster: the JSON that `/classes` of the namenode's page serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Classes {
    /// [`CLASSES_VERSION`] of the release that wrote it.
    pub version: u32,
    /// When history was analysed, in seconds since 1970; none before the first analysis.
    pub analysed_unix_s: Option<u64>,
    /// The classes, grouped by pattern and in the order of their averages. Empty without an analysis, or when
    /// no tenant has been sampled for long enough.
    pub classes: Vec<UtilisationClass>,
    /// Live servers whose tenants belong to no class, by name: too little is known about them.
    pub without_class: Vec<ClassedServer>,
}

/// Tenants with similar CPU utilisation, and their servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UtilisationClass {
    /// Its number. The next analysis may give this number to another class.
    pub class: u32,
    /// The pattern of its tenants.
    pub pattern: TenantPattern,
    /// Mean of their averages over the last month, in thousandths of all cores.
    pub average_cpu_permille: u16,
    /// Mean of their peaks, in thousandths of all cores.
    pub peak_cpu_permille: u16,
    /// Its tenants, in order.
    pub tenants: Vec<TenantName>,
    /// Their servers that are alive, by name.
    pub servers: Vec<ClassedServer>,
    /// What owners currently use of those servers, averaged over the servers that report it, in thousandths of
    /// all cores; none when no server reports it.
    pub cpu_permille: Option<u16>,
    /// What is left to jobs; none when no server reports what its owner uses.
    pub headroom: Option<Headroom>,
}

/// A live server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassedServer {
    /// Its name.
    pub name: String,
    /// What its owner used at the last heartbeat, in thousandths of all cores; none when unknown.
    pub cpu_permille: Option<u16>,
    /// What its owner used of its memory at the last heartbeat, in thousandths; none when unknown.
    #[serde(default)]
    pub memory_permille: Option<u16>,
    /// Number of its cores; none when it does not report them.
    #[serde(default)]
    pub cores: Option<u32>,
    /// Size of its memory in MiB; none when it does not report it.
    #[serde(default)]
    pub memory_mib: Option<u64>,
}

/// The share of a class that is expected to stay free of its owners while a job runs, in thousandths of all
/// cores: `Headroom` of Algorithm 1. A third of each server is nevertheless reserved for its owner's bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Headroom {
    /// For short jobs: all but what owners use now.
    pub short_permille: u16,
    /// For medium jobs: all but the average, or what owners use now if that is more.
    pub medium_permille: u16,
    /// For long jobs: all but the peak, or what owners use now if that is more.
    pub long_permille: u16,
}
