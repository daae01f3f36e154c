//! A datacentre: the owners of servers over time, their load, and when servers are reimaged.
//!
//! Ten datacentres, `dc0` to `dc9`, are built in as [`profile::PROFILES`] and [`generate()`]d. No public data has the
//! tenants and reimages of a datacentre, so they are synthetic, made to agree with everything that Zhang et al.
//! (OSDI'16, sections 3 and 6.4) state about theirs. [`facts`] measures that, and the tests of this crate check the
//! generator against it.
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

/// Seconds in a day.
pub const DAY_S: u64 = 86_400;
/// Days in a month.
pub const DAYS_PER_MONTH: u64 = 30;
/// Seconds in a month.
pub const MONTH_S: u64 = DAYS_PER_MONTH * DAY_S;
/// Months in the history of a datacentre.
pub const MONTHS: u32 = 36;

/// A primary tenant.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its environment and machine function.
    pub key: TenantKey,
    /// The number of its environment.
    pub environment: u32,
    /// What its environment is used for.
    pub environment_kind: EnvironmentKind,
    /// The pattern of its load over time.
    pub pattern: Pattern,
    /// The month in which it received its first server.
    pub first_month: u32,
    /// The month before which it gave up its last server, or [`MONTHS`].
    pub end_month: u32,
    /// The number of servers that it started with.
    pub size_at_start: u32,
    /// Its load.
    pub load: LoadModel,
}

/// A server.
#[derive(Clone, Debug)]
pub struct Server {
    /// The number of its rack.
    pub rack: u32,
    /// Its owners: (start in seconds, number of the tenant), in order, at least one.
    pub owners: Vec<(u64, u32)>,
}

impl Server {
    /// The number of the tenant that owns it at a time in seconds.
    #[must_use]
    pub fn owner_at(&self, at_s: u64) -> u32 {
        let later = self.owners.partition_point(|&(from_s, _)| from_s <= at_s);
        self.owners[later.max(1) - 1].1
    }
}

/// A reimage: a server's disks are wiped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reimage {
    /// The time, in seconds from the start of the history.
    pub at_s: u64,
    /// The number of the server.
    pub server: u32,
    /// The number of its tenant; for [`ReimageKind::Repurpose`], of the one that gives it away.
    pub tenant: u32,
    /// The reason.
    pub kind: ReimageKind,
    /// The number of the redeployment or move to which it belongs; 0 if there is none.
    pub burst: u32,
}

/// A datacentre with its history.
#[derive(Clone, Debug)]
pub struct Datacentre {
    /// The name, `dc0` to `dc9`.
    pub name: String,
    /// Its tenants.
    pub tenants: Vec<Tenant>,
    /// Its servers.
    pub servers: Vec<Server>,
    /// All reimages, ordered by time.
    pub reimages: Vec<Reimage>,
}
