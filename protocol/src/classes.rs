//! Utilisation classes: which servers are used alike, and how much their owners leave to jobs (OSDI'16, section 4.1).

use serde::{Deserialize, Serialize};

use crate::history::{TenantName, TenantPattern};

/// Of the format of [`Classes`]: it changes when a field goes or means something else, and not when one is added.
pub const CLASSES_VERSION: u32 = 1;

/// The utilisation classes of a cluster now; what `/classes` of the namenode's page is, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Classes {
    /// [`CLASSES_VERSION`].
    pub version: u32,
    /// When history was analysed, in seconds since 1970; none before that was done for the first time.
    pub analysed_unix_s: Option<u64>,
    /// Those of one pattern together, in the order of their averages. None without an analysis, or when no tenant has been
    /// sampled for long enough.
    pub classes: Vec<UtilisationClass>,
    /// Live servers whose tenants are in no class, by name: too little is known of them.
    pub without_class: Vec<ClassedServer>,
}

/// Tenants that use the CPU alike, and their servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UtilisationClass {
    /// Its number, which the next analysis may give to another one.
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
    /// What owners use of those servers now, on average over those that say so, in thousandths of all cores; none when no
    /// server says so.
    pub cpu_permille: Option<u16>,
    /// What is left to jobs; none when no server says what its owner uses.
    pub headroom: Option<Headroom>,
}

/// A live server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassedServer {
    /// Its name.
    pub name: String,
    /// What its owner used at the last heartbeat, in thousandths of all cores; none when that is not known.
    pub cpu_permille: Option<u16>,
    /// The same of its memory.
    #[serde(default)]
    pub memory_permille: Option<u16>,
    /// Its cores; none when it does not say.
    #[serde(default)]
    pub cores: Option<u32>,
    /// Its memory.
    #[serde(default)]
    pub memory_mib: Option<u64>,
}

/// The share of a class that is expected to stay free of its owners while a job runs, in thousandths of all cores: `Headroom`
/// of Algorithm 1. A third of each server belongs to its owner's bursts all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Headroom {
    /// For short jobs: without what owners use now.
    pub short_permille: u16,
    /// For medium jobs: without the average, or what owners use now if that is more.
    pub medium_permille: u16,
    /// For long jobs: without the peak, or what owners use now if that is more.
    pub long_permille: u16,
}
