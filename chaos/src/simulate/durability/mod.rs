//! Durability (the paper's figure 15): how many blocks a year of reimages destroys.
//!
//! The cluster engine of the namenode and its placement policy run in virtual time. All servers of a datacentre
//! register, blocks are written until the cluster is as full as requested, and then the reimages of the simulated years
//! happen. A reimaged server registers with a new storage id; the engine notices what is gone, starts repairs within
//! its budgets, and simulated datanodes carry them out.
//!
//! Exercised: placement of blocks and of repairs, the tables of replicas, ranking, budgets of sources and targets, the
//! urgent lane. Not exercised: heartbeats and liveness (silent nodes never die here; a heartbeat is simulated when a
//! server's free space has changed), safe mode, storms, moves of replicas that changes of the grid left misplaced, busy
//! primaries, the network and disks, namespace and journal.
//!
//! Time advances in steps of [`STEP_MS`]; steps in which nothing can happen are skipped.

use std::ops::ControlFlow;
use std::time::Instant;

use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_telemetry::history::HistoryError;
use serde::Serialize;

mod world;

use super::history::History;
use crate::datacentre::MONTHS;
use world::World;

/// Length of a step of virtual time. A repair takes this long: 256 MiB at 9 MB/s.
pub const STEP_MS: u64 = 30_000;
/// Months of history that policies know when the simulated time starts.
pub const HISTORY_MONTHS: u32 = 12;
/// How long a server is silent before HDFS considers it dead: 10 minutes and 30 seconds.
pub const MISSED_HEARTBEATS_MS: u64 = 630_000;

/// The options of one run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The policy.
    pub policy: PolicyKind,
    /// Further options of the policy.
    pub policy_options: PolicyOptions,
    /// Replicas of each block.
    pub replication: u8,
    /// Number of blocks.
    pub blocks: u32,
    /// Number of years, of 12 months of 30 days.
    pub years: u32,
    /// Decides the writer of each block and all choices of the policy.
    pub seed: u64,
    /// Share of the space of all servers that the replicas take, above 0 and at most 1.
    pub fill: f64,
    /// Repairs per hour that each server takes part in as source, and as many again as target.
    pub repairs_per_hour: u32,
    /// The same for blocks with one replica left.
    pub urgent_repairs_per_hour: u32,
    /// Time from a reimage until the namenode knows of it; `None`: the default of the policy,
    /// [`detection_ms`].
    pub detection_ms: Option<u64>,
}

/// The result of one run. Everything but `placement_us_per_block` and `wall_s` is decided by the
/// options and the datacentre.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Record {
    /// The datacentre.
    pub datacentre: String,
    /// The policy.
    pub policy: String,
    /// Replicas of each block.
    pub replication: u8,
    /// The seed.
    pub seed: u64,
    /// Blocks.
    pub blocks: u64,
    /// Servers.
    pub servers: u64,
    /// Years simulated.
    pub years: u32,
    /// Share of the space taken at the start.
    pub fill: f64,
    /// Repairs per server and hour.
    pub repairs_per_hour: u32,
    /// Repairs per server and hour of blocks with one replica left.
    pub urgent_repairs_per_hour: u32,
    /// Seconds from a reimage until the namenode knew of it.
    pub detection_s: u64,
    /// Blocks of which every replica was wiped.
    pub lost_blocks: u64,
    /// Upper bound of the lost blocks that the namenode predicted when all blocks had been written.
    pub lost_blocks_bound: f64,
    /// Repairs completed.
    pub repairs: u64,
    /// Reimages.
    pub reimages: u64,
    /// Hours that blocks had one replica left, summed over blocks, as far as the namenode knew.
    pub single_replica_block_hours: f64,
    /// Blocks that the policy refused at first and placed when its constraints were relaxed.
    pub relaxed_blocks: u64,
    /// The most blocks that were waiting for repair at any one time.
    pub repairs_waiting_max: u64,
    /// Time to choose the servers of a new block, in microseconds. Differs from run to run.
    pub placement_us_per_block: f64,
    /// How long the run took, in seconds. Differs from run to run.
    pub wall_s: f64,
}

/// How long after a reimage the namenode knows of it, in milliseconds: the systems that the other policies
/// come from detect it by missing heartbeats, `harvest` when the server registers.
#[must_use]
pub fn detection_ms(policy: PolicyKind) -> u64 {
    match policy {
        PolicyKind::Stock | PolicyKind::Greedy | PolicyKind::History => MISSED_HEARTBEATS_MS,
        PolicyKind::Harvest => 0,
    }
}

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulationError {
    /// An option does not make sense.
    #[error("{0}")]
    Option(String),
    /// A block fits on no server.
    #[error("block {block} of {blocks} fits on no server: {reason}")]
    Full {
        /// Number of the block, from 0.
        block: u32,
        /// Number of all blocks.
        blocks: u32,
        /// The error of the engine.
        reason: String,
    },
    /// The datacentre is larger than what the namenode keeps history of.
    #[error("the namenode could not keep the history of this datacentre: {0}")]
    History(#[from] HistoryError),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Options {
    /// Whether the options make sense.
    ///
    /// # Errors
    /// [`SimulationError::Option`] names the one that does not.
    pub fn check(&self) -> Result<(), SimulationError> {
        let bad = |text: String| Err(SimulationError::Option(text));
        let months = HISTORY_MONTHS.saturating_add(self.years.saturating_mul(12));
        if self.years == 0 || months > MONTHS {
            let most = (MONTHS - HISTORY_MONTHS) / 12;
            return bad(format!("years: {} is not from 1 to {most}", self.years));
        }
        if self.repairs_per_hour == 0 || self.urgent_repairs_per_hour == 0 {
            return bad("repairs per hour must be above 0".to_owned());
        }
        check_blocks(self.blocks, self.replication, self.fill)
    }
}

/// Checks the options that say how many blocks are placed.
pub(super) fn check_blocks(blocks: u32, replication: u8, fill: f64) -> Result<(), SimulationError> {
    let most = harvestfs_protocol::limits::REPLICATION_MAX;
    let text = if !(fill > 0.0 && fill <= 1.0) {
        format!("fill: {fill} is not above 0 and up to 1")
    } else if replication == 0 || replication > most {
        format!("replication: {replication} is not from 1 to {most}")
    } else if blocks == 0 {
        "blocks: must be above 0".to_owned()
    } else {
        return Ok(());
    };
    Err(SimulationError::Option(text))
}

/// Runs one simulation. `progress` receives the share that is done, 0 to 1, many times a second, and
/// may end the run.
///
/// # Errors
/// When an option is out of its range, a block fits nowhere even with relaxed constraints, or
/// `progress` ends the run.
pub fn run(
    history: &History<'_>,
    options: &Options,
    progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
) -> Result<Record, SimulationError> {
    options.check()?;
    let started = Instant::now();
    let mut world = World::new(history, options)?;
    world.fill(progress)?;
    world.foretell();
    world.years(progress)?;
    let mut record = world.record();
    record.wall_s = started.elapsed().as_secs_f64();
    Ok(record)
}
