//! The simulated datanodes, as the cluster engine sees them.

use std::net::{IpAddr, Ipv4Addr};

use harvestfs_namenode::engine::cluster::{Cluster, ClusterOptions};
use harvestfs_protocol::ids::{NodeId, StorageId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::node::{BlockReport, Heartbeat, ServerDescription};
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass, VolumeStatus};

use crate::datacentre::Datacentre;

/// A timeout that no simulation reaches, so that silence never ends a node: ten thousand years.
const NEVER_MS: u64 = 10_000 * 365 * 86_400_000;
/// A heartbeat is simulated when a server's free space has shrunk by one part in this many since the
/// last one. Placement itself does not look closer.
const HEARTBEAT_CHANGE: u32 = 32;

/// Options of an engine whose nodes never time out, and that does everything that is due in one call.
pub(super) fn engine_options() -> ClusterOptions {
    ClusterOptions {
        stale_after_ms: NEVER_MS,
        dead_after_ms: NEVER_MS,
        full_report_interval_ms: NEVER_MS,
        report_timeout_ms: NEVER_MS,
        safe_mode_max_ms: 0,
        watch_diversity: false,
        balance_spread_permille: 0,
        work_per_tick: usize::MAX,
        repairs_tried_per_tick: usize::MAX,
        ..ClusterOptions::default()
    }
}

/// Blocks that each server may store, such that all replicas together take the share `fill` of the space.
pub(super) fn quota_blocks(blocks: u32, replication: u8, servers: usize, fill: f64) -> u32 {
    let replicas = f64::from(blocks) * f64::from(replication);
    (replicas / servers as f64 / fill).ceil() as u32
}

/// A server as its datanode would describe it at the given time.
pub(super) fn describe(datacentre: &Datacentre, number: u32, at_s: u64) -> ServerDescription {
    let server = &datacentre.servers[number as usize];
    let key = &datacentre.tenants[server.owner_at(at_s) as usize].key;
    ServerDescription {
        name: format!("s{number}"),
        rack: format!("r{}", server.rack),
        environment: key.environment.clone(),
        machine_function: key.machine_function.clone(),
        data_addr: (host(number), 7000).into(),
    }
}

/// The address of a server.
pub(super) fn host(number: u32) -> IpAddr {
    // 10.0.0.0/8 holds more servers than any datacentre has.
    Ipv4Addr::from_bits((10 << 24) + number).into()
}

/// How new blocks are to be placed.
pub(super) fn rules(replication: u8, durability: Durability) -> PlacementRules {
    PlacementRules {
        replication,
        durability,
        class: None,
    }
}

/// The volume of a server after `generation` reimages.
pub(super) fn storage(number: u32, generation: u32) -> StorageId {
    StorageId((u128::from(generation) << 32) | u128::from(number))
}

/// What the datanodes report to the namenode.
pub(super) struct Fleet {
    servers: Vec<Server>,
    quota_blocks: u32,
    /// Reused for each heartbeat.
    heartbeat: Heartbeat,
}

#[derive(Clone)]
struct Server {
    /// The number of its reimages that the namenode knows of.
    generation: u32,
    used_blocks: u32,
    /// Free space that was last reported to the namenode.
    heard_free_blocks: u32,
}

impl Fleet {
    /// Servers with empty disks.
    pub(super) fn new(servers: usize, quota_blocks: u32) -> Self {
        let server = Server {
            generation: 0,
            used_blocks: 0,
            heard_free_blocks: quota_blocks,
        };
        Self {
            servers: vec![server; servers],
            quota_blocks,
            heartbeat: Heartbeat {
                volumes: Vec::new(),
                busy: false,
                primary: None,
                active_streams: 0,
                unix_ms: 0,
                denials: 0,
                removable_bytes: u64::MAX,
            },
        }
    }

    pub(super) fn servers(&self) -> u32 {
        self.servers.len() as u32
    }

    /// The generation of a server's disk, as far as the namenode knows.
    pub(super) fn generation(&self, number: u32) -> u32 {
        self.servers[number as usize].generation
    }

    /// Gives a server an empty disk of a new generation.
    pub(super) fn wipe(&mut self, number: u32, generation: u32) {
        self.servers[number as usize] = Server {
            generation,
            used_blocks: 0,
            heard_free_blocks: self.quota_blocks,
        };
    }

    fn volume(&self, number: u32) -> VolumeStatus {
        let server = &self.servers[number as usize];
        VolumeStatus {
            storage: storage(number, self.generation(number)),
            class: StorageClass::Disk,
            quota_bytes: u64::from(self.quota_blocks) * BLOCK_BYTES_MAX,
            used_bytes: u64::from(server.used_blocks) * BLOCK_BYTES_MAX,
            healthy: true,
            shrinks_in_ms: None,
        }
    }

    /// Registers a datanode with an empty disk.
    pub(super) fn register(
        &self,
        cluster: &mut Cluster,
        now_ms: u64,
        number: u32,
        description: &ServerDescription,
    ) {
        let volume = self.volume(number);
        let node = NodeId(number);
        cluster.register(now_ms, node, description, &[volume]);
        let report = BlockReport {
            storage: volume.storage,
            part: 0,
            last: true,
            replicas: Vec::new(),
        };
        let taken = cluster.block_report(now_ms, node, &report);
        assert_eq!(taken, Ok(()), "the report of {node}");
    }

    /// Adds a replica to a server, which reports its free space once that has shrunk noticeably.
    pub(super) fn store(&mut self, cluster: &mut Cluster, now_ms: u64, number: u32) {
        let quota_blocks = self.quota_blocks;
        let server = &mut self.servers[number as usize];
        server.used_blocks += 1;
        let free = quota_blocks.saturating_sub(server.used_blocks);
        if free.saturating_add((free / HEARTBEAT_CHANGE).max(1)) > server.heard_free_blocks {
            return;
        }
        server.heard_free_blocks = free;
        let volume = self.volume(number);
        self.heartbeat.volumes.clear();
        self.heartbeat.volumes.push(volume);
        let heard = cluster.heartbeat(now_ms, NodeId(number), &self.heartbeat);
        assert_eq!(heard, Ok(()), "the heartbeat of server {number}");
    }
}
