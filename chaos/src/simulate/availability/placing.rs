//! Places blocks in a cluster of which only the servers and their free space matter.

use harvestfs_namenode::engine::cluster::Cluster;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::Durability;
use rand::RngExt;
use rand::rngs::SmallRng;

use super::Options;
use crate::random::stream;
use crate::simulate::durability::{HISTORY_MONTHS, SimulationError};
use crate::simulate::fleet::{self, Fleet};
use crate::simulate::history::History;

pub(super) struct Placing {
    cluster: Cluster,
    fleet: Fleet,
    rng: SmallRng,
    writers: SmallRng,
    replication: u8,
    blocks: u32,
    relaxed_blocks: u64,
}

impl Placing {
    pub(super) fn new(history: &History<'_>, options: &Options) -> Result<Self, SimulationError> {
        let datacentre = history.datacentre();
        let quota_blocks = fleet::quota_blocks(
            options.blocks,
            options.replication,
            datacentre.servers.len(),
            options.fill,
        );
        let policy = options.policy.build(&options.policy_options);
        let mut placing = Self {
            cluster: Cluster::new(fleet::engine_options(), policy, 0),
            fleet: Fleet::new(datacentre.servers.len(), quota_blocks),
            rng: stream(options.seed, "engine"),
            writers: stream(options.seed, "writers"),
            replication: options.replication,
            blocks: options.blocks,
            relaxed_blocks: 0,
        };
        let start_s = u64::from(HISTORY_MONTHS) * crate::datacentre::MONTH_S;
        for number in 0..datacentre.servers.len() as u32 {
            let description = fleet::describe(datacentre, number, start_s);
            placing
                .fleet
                .register(&mut placing.cluster, 0, number, &description);
        }
        history.tell(&mut placing.cluster, HISTORY_MONTHS)?;
        placing.cluster.rebuild_grid(0);
        placing.cluster.tick(0, &mut placing.rng);
        Ok(placing)
    }

    /// Places one more block and returns its servers.
    pub(super) fn place(&mut self, block: u32) -> Result<Vec<u32>, SimulationError> {
        let writer = self.writers.random_range(0..self.fleet.servers());
        let host = Some(fleet::host(writer));
        let strict = fleet::rules(self.replication, Durability::Strict);
        let relaxed = fleet::rules(self.replication, Durability::Space);
        let (cluster, rng) = (&mut self.cluster, &mut self.rng);
        let placed = cluster.place(0, 1, &strict, &[], host, rng).or_else(|_| {
            self.relaxed_blocks += 1;
            cluster.place(0, 1, &relaxed, &[], host, rng)
        });
        let placed = placed.map_err(|error| SimulationError::Full {
            block,
            blocks: self.blocks,
            reason: error.to_string(),
        })?;
        let servers: Vec<u32> = placed.iter().flatten().map(|&NodeId(node)| node).collect();
        for &server in &servers {
            self.fleet.store(&mut self.cluster, 0, server);
        }
        Ok(servers)
    }

    /// Blocks that were refused at first.
    pub(super) fn relaxed_blocks(&self) -> u64 {
        self.relaxed_blocks
    }
}
