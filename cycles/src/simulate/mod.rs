//! A month of jobs on servers whose owners come first (OSDI'16, sections 6.1, 6.3 and 6.4; figures 11, 13 and 14).
//!
//! Jobs are queries that arrive by chance (Poisson). Their tasks run in containers of one core. Every server follows the
//! load of its tenant's average server, sample by sample. What is simulated: Algorithm 1, the reserve and the order
//! in which containers go, both the code that schedulers would use, and jobs waiting for cores in their order of arrival. What is
//! not: memory (traces have none), disks and network, failures, the seconds between a sample and a kill, and how
//! much owners slow down the jobs of `stock`.

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

/// Servers of the paper's testbed, for which the lengths of its queries hold.
pub const TESTBED_SERVERS: usize = 102;

/// How tasks are given to servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// YARN that does not know of owners: all cores are given away, nothing is killed.
    Stock,
    /// YARN that keeps the reserve and kills the youngest containers; any server with room (YARN-PT).
    Pt,
    /// The same with Algorithm 1, and servers drawn by their room (YARN-H and Tez-H).
    History,
    /// `history` that suspends containers instead of killing them where that costs less.
    Checkpoint,
}

impl PolicyKind {
    /// All.
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

    /// Whether it knows of owners.
    fn keeps_reserve(self) -> bool {
        self != Self::Stock
    }

    /// Whether it knows of classes.
    fn chooses_classes(self) -> bool {
        matches!(self, Self::History | Self::Checkpoint)
    }
}

/// A policy of another name was asked for.
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

/// One run.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// The policy.
    pub policy: PolicyKind,
    /// When `checkpoint` suspends, and what that costs.
    pub rule: &'a dyn PreemptionRule,
    /// Memory of a container that a checkpoint stores, in bytes.
    pub container_bytes: f64,
    /// Decides arrivals, lengths of tasks and all choices of the policy. Jobs arrive the same for every policy.
    pub seed: u64,
    /// Days in which jobs arrive.
    pub days: u32,
    /// What jobs compute on average, as a share of all cores; above 0.
    pub demand: f64,
    /// How many times as long as on the testbed tasks take; thresholds between the types of jobs grow with it. None:
    /// the root of how many times as many servers there are, so that jobs are as many times as wide.
    pub stretch: Option<f64>,
}

/// Why a run has no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimulationError {
    /// An option makes no sense.
    #[error("{name}: {value} is not {expected}")]
    Option {
        /// Which.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What is accepted.
        expected: &'static str,
    },
    /// The caller ended it.
    #[error("interrupted")]
    Interrupted,
}

impl Options<'_> {
    /// Whether the options make sense.
    ///
    /// # Errors
    /// [`SimulationError::Option`] names the one that does not.
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
    /// Its servers.
    pub servers: u64,
    /// Its utilisation classes.
    pub classes: u64,
    /// The policy.
    pub policy: String,
    /// `linear` or `root`.
    pub scaling: String,
    /// The seed.
    pub seed: u64,
    /// Days in which jobs arrived.
    pub days: u32,
    /// The mean CPU use of owners that was asked for, 0 to 1.
    pub target_utilisation: f64,
    /// The mean CPU use of owners, 0 to 1.
    pub owner_utilisation: f64,
    /// The mean CPU use of owners and jobs while jobs arrived, 0 to 1.
    pub utilisation: f64,
    /// What jobs would compute on average, as a share of all cores.
    pub demand: f64,
    /// Jobs that arrived.
    pub jobs: u64,
    /// Jobs that had not ended when as much time again had passed: they count with their length so far.
    pub unfinished_jobs: u64,
    /// Mean length of a job, from its arrival to its end.
    pub job_mean_s: f64,
    /// Half of the jobs took no longer.
    pub job_median_s: f64,
    /// All but one in twenty took no longer.
    pub job_p95_s: f64,
    /// Jobs of each type as they were when they arrived: short, medium, long.
    pub job_types: [u64; 3],
    /// Jobs that Algorithm 1 found one class for.
    pub jobs_in_one_class: u64,
    /// Jobs that it found several for. The others may run anywhere.
    pub jobs_in_several_classes: u64,
    /// Containers that ran, each until it ended, was killed or suspended.
    pub containers: u64,
    /// Tasks that were killed.
    pub killed_tasks: u64,
    /// Tasks that were suspended.
    pub suspended_tasks: u64,
    /// Core-hours of killed tasks that were computed in vain.
    pub wasted_core_hours: f64,
    /// Core-hours that storing and restoring of suspended tasks took.
    pub suspension_core_hours: f64,
    /// Both, as a share of all core-hours of jobs, 0 to 1.
    pub wasted_share: f64,
    /// Share of the samples of all servers in which a part of the owner's reserve was taken, 0 to 1.
    pub reserve_taken_share: f64,
    /// Share of the samples of all servers in which owner and jobs together wanted more than all cores, 0 to 1.
    pub owner_short_share: f64,
}

/// Runs one simulation. `progress` gets the share that is done, 0 to 1, and may end the run.
///
/// # Errors
/// When an option makes no sense, or `progress` ends the run.
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
