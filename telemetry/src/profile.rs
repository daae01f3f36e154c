//! The profile of a primary tenant: its history in the form that placement needs.

use serde::{Deserialize, Serialize};

use crate::hours::WeekHours;

/// A primary tenant: the owner of servers, and their purpose.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantKey {
    /// The environment.
    pub environment: String,
    /// The machine function.
    pub machine_function: String,
}

/// How a tenant's CPU utilisation varies over time (OSDI'16, section 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pattern {
    /// It follows the hours of the day or the days of the week.
    Periodic,
    /// It is roughly the same at all times.
    Constant,
    /// Neither.
    Unpredictable,
}

/// CPU utilisation, as a share of all cores, above which history counts a primary as busy: a third is its owner's
/// reserve, unless a datanode is configured otherwise.
pub const BUSY_ABOVE: f64 = 0.66;

/// The history of one tenant, summarised.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantProfile {
    /// Reimages per server and month of 30 days; at least 0.
    pub reimages_per_server_month: f64,
    /// CPU utilisation that its average server exceeds in only one hundredth of the time, as a share of all cores, 0
    /// to 1. (The maximum is often a single odd sample.)
    pub peak_cpu_share: f64,
    /// Mean CPU utilisation of its average server, as a share of all cores, 0 to 1.
    pub average_cpu_share: f64,
    /// Share of the time in which its average server used more than [`BUSY_ABOVE`], 0 to 1.
    pub busy_share: f64,
    /// Hours of the week in which its average server ever used more than that.
    pub busy_hours: WeekHours,
    /// Its pattern.
    pub pattern: Pattern,
}
