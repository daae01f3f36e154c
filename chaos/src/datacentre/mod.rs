//! A datacentre: the owners of servers over time, how loaded they are, and when they wipe disks.
//!
//! Ten datacentres, `dc0` to `dc9`, are built in as [`profile::PROFILES`], and [`generate()`]d: no
//! public data has the tenants and reimages of a datacentre, so they are synthetic, made to
//! agree with everything that Zhang et al. (OSDI'16, sections 3 and 6.4) say of theirs.
//! [`facts`] measures that, and the tests of this crate hold the generator to it.
//!
//! Months have 30 days; the history of a datacentre is [`MONTHS`] long.

use harvestfs_telemetry::profile::{Pattern, TenantKey};
pub use harvestfs_telemetry::traces::{EnvironmentKind, ReimageKind};

pub mod facts;
mod generate;
mod load;
pub mod profile;
mod structure;
mod traces;

pub use generate::{GenerateError, generate};
pub use load::{LoadModel, SLOT_S, SLOTS_PER_DAY};
pub use traces::{ReadError, read};

/// Seconds of a day.
pub const DAY_S: u64 = 86_400;
/// Days of a month.
pub const DAYS_PER_MONTH: u64 = 30;
/// Seconds of a month.
pub const MONTH_S: u64 = DAYS_PER_MONTH * DAY_S;
/// Months of history that a datacentre has.
pub const MONTHS: u32 = 36;

/// A primary tenant.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its environment and machine function.
    pub key: TenantKey,
    /// Number of its environment.
    pub environment: u32,
    /// What its environment is used for.
    pub environment_kind: EnvironmentKind,
    /// How its load goes over time.
    pub pattern: Pattern,
    /// The month in which it got its first server.
    pub first_month: u32,
    /// The month before which it gave its last server away, or [`MONTHS`].
    pub end_month: u32,
    /// Servers that it started with.
    pub size_at_start: u32,
    /// Its load.
    pub load: LoadModel,
}

/// A server.
#[derive(Clone, Debug)]
pub struct Server {
    /// Number of its rack.
    pub rack: u32,
    /// Its owners: (from when in seconds, number of the tenant), in order, at least one.
    pub owners: Vec<(u64, u32)>,
}

impl Server {
    /// The tenant that owns it at a time in seconds.
    #[must_use]
    pub fn owner_at(&self, at_s: u64) -> u32 {
        let later = self.owners.partition_point(|&(from_s, _)| from_s <= at_s);
        self.owners[later.max(1) - 1].1
    }
}

/// A server's disks are wiped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reimage {
    /// When, in seconds from the start of the history.
    pub at_s: u64,
    /// Number of the server.
    pub server: u32,
    /// Number of its tenant; for [`ReimageKind::Repurpose`] the one that gives it away.
    pub tenant: u32,
    /// Why.
    pub kind: ReimageKind,
    /// Number of the redeployment or move that it is part of; 0: none.
    pub burst: u32,
}

/// A datacentre with its history.
#[derive(Clone, Debug)]
pub struct Datacentre {
    /// `dc0` to `dc9`.
    pub name: String,
    /// Its tenants.
    pub tenants: Vec<Tenant>,
    /// Its servers.
    pub servers: Vec<Server>,
    /// All reimages in order of time.
    pub reimages: Vec<Reimage>,
}
