//! A month of jobs on servers whose owners have priority (OSDI'16, sections 6.1, 6.3 and 6.4; figures 11, 13 and 14).
//!
//! Jobs are queries that arrive at random (Poisson). Their tasks run in containers of one core. Every server follows
//! the load of its tenant's average server, sample by sample. The simulation covers Algorithm 1, the reserve and the
//! order of evictions, both with the code that schedulers would use, and jobs waiting for cores in their order of
//! arrival. It does not cover memory (traces have none), disks and network, failures, the seconds between a sample
//! and a kill, and how much owners slow down the jobs of `stock`.

mod fleet;
mod jobs;
mod queries;
mod servers;
mod world;

use std::fmt;
use std::ops::ControlFlow;
use std::str::FromStr;

use serde::Serialize;

use crate::job::Thresholds;
use crate::reserve::PreemptionRule;
pub use fleet::{CORES, Datacentre, Fleet, FleetError, TenantLoad};
pub use queries::{ARRIVAL_MEAN_S, QUERIES};
use world::World;

/// Number of servers of the paper's testbed, to which the lengths of its queries apply.
pub const TESTBED_SERVERS: usize = 102;

/// The assignment of tasks to servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// YARN without knowledge of owners: all cores are given away, and nothing is killed.
    Stock,
    /// YARN that keeps the reserve and kills the youngest containers; it uses any server with room (YARN-PT).
    Pt,
    /// The same with Algorithm 1, and with servers drawn by their room (YARN-H and Tez-H).
    History,
    /// `history`, but containers are suspended instead of killed where that costs less.
    Checkpoint,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Stock, Self::Pt, Self::History, Self::Checkpoint];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Pt => "pt",
            Self::History => "history",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// Whether it knows about owners.
    fn keeps_reserve(self) -> bool {
        self != Self::Stock
    }

    /// Whether it knows about classes.
    fn chooses_classes(self) -> bool {
        matches!(self, Self::History | Self::Checkpoint)
    }
}

/// A policy of an unknown name was requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy `{0}`; accepted: stock, pt, history, checkpoint")]
pub struct UnknownPolicy(String);

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let known = Self::ALL.into_iter().find(|it| it.name() == name);
        known.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The options of one run.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// The policy.
    pub policy: PolicyKind,
    /// Decides when `checkpoint` suspends, and what that costs.
    pub rule: &'a dyn PreemptionRule,
    /// Memory of a container that a checkpoint stores, in bytes.
    pub container_bytes: f64,
    /// Determines arrivals, lengths of tasks and all choices of the policy. Jobs arrive identically for every policy.
    pub seed: u64,
    /// Number of days in which jobs arrive.
    pub days: u32,
    /// The mean demand of jobs, as a share of all cores; above 0.
    pub demand: f64,
    /// How many times as long as on the testbed tasks take; the thresholds between the types of jobs scale with it.
    /// None: the square root of the ratio of the numbers of servers, so that jobs become wider by the same factor.
    pub stretch: Option<f64>,
}

/// The reason why a run has no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimulationError {
    /// An option is invalid.
    #[error("{name}: {value} is not {expected}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The accepted values.
        expected: &'static str,
    },
    /// The caller ended the run.
    #[error("interrupted")]
    Interrupted,
}

impl Options<'_> {
    /// Checks the options.
    ///
    /// # Errors
    /// [`SimulationError::Option`] names the invalid one.
    pub fn check(&self) -> Result<(), SimulationError> {
        let error = |name, value, expected| {
            Err(SimulationError::Option {
                name,
                value,
                expected,
            })
        };
        if !(1..=3_650).contains(&self.days) {
            return error("days", f64::from(self.days), "from 1 to 3650");
        }
        if !(self.demand > 0.0 && self.demand <= 10.0) {
            return error("demand", self.demand, "a share above 0 and at most 10");
        }
        if let Some(stretch) = self.stretch
            && !(0.01..=1_000.0).contains(&stretch)
        {
            return error("stretch", stretch, "from 0.01 to 1000");
        }
        if !(0.0..=1e15).contains(&self.container_bytes) {
            return error("container_bytes", self.container_bytes, "from 0 to 1e15");
        }
        Ok(())
    }
}

/// The result of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Record {
    /// The datacentre.
    pub datacentre: String,
    /// Number of its servers.
    pub servers: u64,
    /// Number of its utilisation classes.
    pub classes: u64,
    /// The policy.
    pub policy: String,
    /// `linear` or `root`.
    pub scaling: String,
    /// The seed.
    pub seed: u64,
    /// Number of days in which jobs arrived.
    pub days: u32,
    /// The requested mean CPU utilisation by owners, 0 to 1.
    pub target_utilisation: f64,
    /// The mean CPU utilisation by owners, 0 to 1.
    pub owner_utilisation: f64,
    /// The mean CPU utilisation by owners and jobs while jobs arrived, 0 to 1.
    pub utilisation: f64,
    /// The mean demand of jobs, as a share of all cores.
    pub demand: f64,
    /// Number of jobs that arrived.
    pub jobs: u64,
    /// Jobs that had not ended after twice the time in which jobs arrived: they count with their length so far.
    pub unfinished_jobs: u64,
    /// Mean length of a job, from its arrival to its end.
    pub job_mean_s: f64,
    /// Median length of a job.
    pub job_median_s: f64,
    /// 95th percentile of the length of a job.
    pub job_p95_s: f64,
    /// Number of jobs of each type at their arrival: short, medium, long.
    pub job_types: [u64; 3],
    /// Jobs for which Algorithm 1 found one class.
    pub jobs_in_one_class: u64,
    /// Jobs for which it found several. The others may run anywhere.
    pub jobs_in_several_classes: u64,
    /// Containers that ran, each until it ended or was killed or suspended.
    pub containers: u64,
    /// Number of tasks that were killed.
    pub killed_tasks: u64,
    /// Number of tasks that were suspended.
    pub suspended_tasks: u64,
    /// Core-hours of lost work of killed tasks.
    pub wasted_core_hours: f64,
    /// Core-hours spent on storing and restoring suspended tasks.
    pub suspension_core_hours: f64,
    /// The sum of both, as a share of all core-hours of jobs, 0 to 1.
    pub wasted_share: f64,
    /// Share of the samples of all servers in which a part of the owner's reserve was used, 0 to 1.
    pub reserve_taken_share: f64,
    /// Share of the samples of all servers in which owner and jobs together wanted more than all cores, 0 to 1.
    pub owner_short_share: f64,
}

/// Runs one simulation. `progress` receives the completed share, 0 to 1, and may end the run.
///
/// # Errors
/// If an option is invalid, or `progress` ends the run.
pub fn run(
    fleet: &Fleet,
    options: &Options<'_>,
    progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
) -> Result<Record, SimulationError> {
    options.check()?;
    let larger = fleet.servers() as f64 / TESTBED_SERVERS as f64;
    let stretch = options.stretch.unwrap_or_else(|| larger.sqrt().max(1.0));
    let thresholds = Thresholds::PAPER.times(stretch);
    let thresholds = thresholds.expect("a stretch from 0.01 to 1000 keeps their order");
    let record = World::new(fleet, *options, stretch, thresholds).run(progress)?;
    let placed = record.jobs_in_one_class + record.jobs_in_several_classes;
    assert!(
        placed <= record.jobs && record.unfinished_jobs <= record.jobs,
        "more jobs than there are: {record:?}"
    );
    assert!(
        record.killed_tasks + record.suspended_tasks <= record.containers,
        "more tasks go than there are containers: {record:?}"
    );
    Ok(record)
}
