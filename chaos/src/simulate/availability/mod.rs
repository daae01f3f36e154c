//! Availability (the paper's figure 16): how many accesses fail because all servers with a replica
//! are left to their busy primaries.
//!
//! Blocks are placed by the namenode's cluster engine, with what policies know from the month before. Then every block
//! is accessed once in each sample of a month: an access fails when, on every server that holds a replica, the primary
//! uses so much CPU that its reserve is not free. This is counted exactly, not sampled.
//!
//! Exercised: grid and placement. Not exercised: hysteresis of the busy gate, retries (an access that a client would
//! repeat a minute later counts as failed), repair, reimages. Blocks are written while no server is busy.

use std::ops::ControlFlow;

use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_telemetry::scaling::{Scaling, mean};
use serde::Serialize;

mod busy;
mod placing;

use super::durability::{HISTORY_MONTHS, SimulationError, check_blocks};
use super::history::History;
use crate::datacentre::{Datacentre, MONTH_S, SLOT_S};
use busy::Busy;

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
    /// Decides the writer of each block, all choices of the policy, and how servers differ.
    pub seed: u64,
    /// Share of the space of all servers that the replicas take, above 0 and at most 1.
    pub fill: f64,
}

impl Options {
    /// Whether the options make sense.
    ///
    /// # Errors
    /// [`SimulationError::Option`] names the one that does not.
    pub fn check(&self) -> Result<(), SimulationError> {
        check_blocks(self.blocks, self.replication, self.fill)
    }
}

/// The result of one run.
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
    /// `linear` or `root`.
    pub scaling: String,
    /// The requested mean CPU use of all servers, 0 to 1.
    pub target_utilisation: f64,
    /// The mean CPU use of all servers over the month, 0 to 1.
    pub utilisation: f64,
    /// Share of the time that servers were busy, 0 to 1.
    pub busy_share: f64,
    /// Accesses.
    pub accesses: u64,
    /// Accesses that failed.
    pub failed_accesses: u64,
    /// Share of the accesses that failed, 0 to 1.
    pub failed_share: f64,
    /// Blocks with at least one failed access.
    pub blocks_with_failures: u64,
    /// Blocks that the policy refused at first and placed when its constraints were relaxed.
    pub relaxed_blocks: u64,
}

/// The load of a datacentre, scaled to a mean utilisation: that of the simulated month and of the month
/// before it.
pub struct Load<'a> {
    history: History<'a>,
    busy: Busy,
    scaling: Scaling,
    target: f64,
    utilisation: f64,
}

impl<'a> Load<'a> {
    /// Scales the load of a datacentre such that the mean over all servers and the simulated month
    /// is `target`. Every server follows the average server of its tenant; with `server_spread`
    /// above 0, each server differs from it by a lognormal factor, with `server_spread` as the standard deviation
    /// of its logarithm.
    #[must_use]
    pub fn new(
        datacentre: &'a Datacentre,
        scaling: Scaling,
        target: f64,
        server_spread: f64,
        seed: u64,
    ) -> Self {
        let month = |month: u32| -> Vec<Vec<f32>> {
            let tenants = datacentre.tenants.iter();
            tenants.map(|tenant| tenant.load.month(month)).collect()
        };
        let start_s = u64::from(HISTORY_MONTHS) * MONTH_S;
        let owners: Vec<u32> = datacentre
            .servers
            .iter()
            .map(|server| server.owner_at(start_s))
            .collect();
        let mut servers = vec![0_u32; datacentre.tenants.len()];
        for &owner in &owners {
            servers[owner as usize] += 1;
        }
        let mut now = month(HISTORY_MONTHS);
        let mut before = month(HISTORY_MONTHS - 1);
        let strength = scaling.strength(weighted(&now, &servers), target);
        for samples in now.iter_mut().chain(&mut before) {
            scaling.apply(samples, strength);
        }
        let utilisation = mean(weighted(&now, &servers));
        Self {
            history: History::with_loads(datacentre, before),
            busy: Busy::new(&now, &owners, server_spread, seed),
            scaling,
            target,
            utilisation,
        }
    }
}

/// The load of each tenant, and how many servers follow it.
fn weighted<'a>(
    loads: &'a [Vec<f32>],
    servers: &'a [u32],
) -> impl Iterator<Item = (&'a [f32], u32)> {
    loads.iter().map(Vec::as_slice).zip(servers.iter().copied())
}

/// Runs one simulation. `progress` receives the share that is done, 0 to 1, and may end the run.
///
/// # Errors
/// When a block fits nowhere even with relaxed constraints, or `progress` ends the run.
pub fn run(
    load: &Load<'_>,
    options: &Options,
    progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
) -> Result<Record, SimulationError> {
    let mut placing = placing::Placing::new(&load.history, options)?;
    let mut record = Record {
        datacentre: load.history.datacentre().name.clone(),
        policy: options.policy.name().to_owned(),
        replication: options.replication,
        seed: options.seed,
        blocks: u64::from(options.blocks),
        scaling: load.scaling.name().to_owned(),
        target_utilisation: load.target,
        utilisation: load.utilisation,
        busy_share: load.busy.share(),
        accesses: u64::from(options.blocks) * (MONTH_S / SLOT_S),
        ..Record::default()
    };
    for block in 0..options.blocks {
        if block % 8_192 == 0 && progress(f64::from(block) / f64::from(options.blocks)).is_break() {
            return Err(SimulationError::Interrupted);
        }
        let failed = load.busy.all_busy(&placing.place(block)?);
        record.failed_accesses += failed;
        record.blocks_with_failures += u64::from(failed > 0);
    }
    record.relaxed_blocks = placing.relaxed_blocks();
    record.failed_share = record.failed_accesses as f64 / record.accesses as f64;
    Ok(record)
}
