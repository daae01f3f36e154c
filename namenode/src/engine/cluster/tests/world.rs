//! An obvious model of everything around the engine: which disk really holds what.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use harvestfs_placement::Stock;
use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use harvestfs_protocol::limits::COMMANDS_PER_HEARTBEAT_MAX;
use harvestfs_protocol::node::{
    BlockReport, Heartbeat, IncrementalReport, NodeCommand, ReplicaChange, ReplicaReport,
    ServerDescription,
};
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenSigner};
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass, VolumeStatus};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::super::{Cluster, ClusterError, ClusterOptions};
use super::datanode::{Datanode, DiskReplica};

pub(super) const CHUNK: u64 = 4096;
pub(super) const BLOCK_BYTES: u64 = 64 * CHUNK;

/// Production's times divided by ten, budgets as they are; nothing is balanced unless a test is about
/// that.
pub(super) fn options() -> ClusterOptions {
    ClusterOptions {
        block_bytes: BLOCK_BYTES,
        stale_after_ms: 1_000,
        dead_after_ms: 3_000,
        safe_mode_max_ms: 3_000,
        storm_window_ms: 6_000,
        storm_hold_ms: 20_000,
        repair_window_ms: 360_000,
        repair_timeout_ms: 5_000,
        repair_retry_ms: 500,
        report_timeout_ms: 3_000,
        full_report_interval_ms: 200_000,
        awaited_report_ms: 3_000,
        seal_grace_ms: 500,
        salvage_delay_ms: 3_000,
        excess_grace_ms: 2_000,
        balance_spread_permille: 0,
        balance_interval_ms: 1_000,
        command_retry_ms: 1_500,
        ..ClusterOptions::default()
    }
}

pub(super) fn rules(replication: u8) -> PlacementRules {
    PlacementRules {
        replication,
        durability: Durability::Space,
        class: None,
    }
}

/// A block of the namespace.
#[derive(Clone, Debug)]
pub(super) struct FileBlock {
    pub(super) rules: PlacementRules,
    /// Those that must not be lost.
    pub(super) committed_bytes: u64,
    /// Those that were committed too, and that no server had stored when all lost their power.
    pub(super) lost_bytes: u64,
    pub(super) sealed: bool,
    /// Where it is written while it is not sealed.
    pub(super) pipeline: Vec<NodeId>,
}

pub(super) struct World {
    pub(super) cluster: Cluster,
    pub(super) options: ClusterOptions,
    pub(super) now_ms: u64,
    pub(super) rng: SmallRng,
    pub(super) nodes: Vec<Datanode>,
    pub(super) blocks: BTreeMap<BlockId, FileBlock>,
    pub(super) next_block: u64,
    next_storage: u128,
    pub(super) racks: u32,
    pub(super) environments: u32,
    /// What each node may be commanded to delete with a heartbeat, in bytes.
    pub(super) removable_bytes: u64,
    /// Repairs that nodes were commanded: when, and how often as source and as target.
    pub(super) commanded: Vec<(u64, NodeId, NodeId)>,
    /// Verifications that nodes were commanded: when, which node, and of what.
    pub(super) verifications: Vec<(u64, NodeId, BlockId)>,
}

impl World {
    pub(super) fn new(nodes: u32, racks: u32, options: ClusterOptions, seed: u64) -> Self {
        let mut world = Self {
            cluster: Cluster::new(options.clone(), Box::new(Stock), 0),
            options,
            now_ms: 0,
            rng: SmallRng::seed_from_u64(seed),
            nodes: Vec::new(),
            blocks: BTreeMap::new(),
            next_block: 1,
            next_storage: 1,
            racks,
            environments: if racks == nodes { nodes } else { 4 },
            removable_bytes: u64::MAX,
            commanded: Vec::new(),
            verifications: Vec::new(),
        };
        for id in 0..nodes {
            let mut node = Datanode {
                id: NodeId(id),
                disks: BTreeMap::new(),
                sick: BTreeSet::new(),
                up: true,
                connected: false,
                busy: false,
                silent_since_ms: 0,
                changes: VecDeque::new(),
                parts: VecDeque::new(),
                commands: VecDeque::new(),
                quotas: BTreeMap::new(),
            };
            for _ in 0..1 + id % 2 {
                node.disks
                    .insert(StorageId(world.next_storage), BTreeMap::new());
                world.next_storage += 1;
            }
            world.nodes.push(node);
        }
        for id in 0..nodes {
            world.connect(id as usize);
            world.drain(id as usize);
        }
        // Out of safe mode.
        world.pass(200);
        world
    }

    pub(super) fn server(&self, node: usize) -> ServerDescription {
        let id = self.nodes[node].id.0;
        ServerDescription {
            name: format!("server-{id}"),
            rack: format!("rack-{}", id % self.racks),
            environment: format!("environment-{}", id % self.environments),
            machine_function: format!("function-{}", id % (self.environments + 1)),
            data_addr: ([10, 0, 0, id as u8 + 1], 7000).into(),
        }
    }

    pub(super) fn volumes(&self, node: usize) -> Vec<VolumeStatus> {
        let disks = self.nodes[node].disks.iter();
        disks
            .map(|(storage, disk)| {
                let usual = (1_000 * BLOCK_BYTES, 0);
                let quota = self.nodes[node].quotas.get(storage);
                let (quota_bytes, deadline_ms) = *quota.unwrap_or(&usual);
                let used_bytes = disk.len() as u64 * BLOCK_BYTES;
                let is_over = used_bytes > quota_bytes;
                VolumeStatus {
                    storage: *storage,
                    class: StorageClass::Disk,
                    quota_bytes,
                    used_bytes,
                    healthy: !self.nodes[node].sick.contains(storage),
                    shrinks_in_ms: is_over.then(|| deadline_ms.saturating_sub(self.now_ms)),
                }
            })
            .collect()
    }

    // --- datanodes ---

    /// A running datanode registers and prepares full reports. What it was commanded before is done by
    /// then.
    pub(super) fn connect(&mut self, node: usize) {
        while !self.nodes[node].commands.is_empty() {
            self.execute(node);
        }
        let (server, volumes) = (self.server(node), self.volumes(node));
        let it = &mut self.nodes[node];
        self.cluster.register(self.now_ms, it.id, &server, &volumes);
        it.connected = true;
        it.parts.clear();
        // What changed before is in the reports that follow.
        it.changes.clear();
        for storage in it.disks.keys().copied().collect::<Vec<_>>() {
            self.prepare_report(node, storage);
        }
    }

    fn prepare_report(&mut self, node: usize, storage: StorageId) {
        const PART: usize = 3;
        self.send_changes(node);
        let it = &mut self.nodes[node];
        let Some(disk) = it.disks.get(&storage) else {
            return;
        };
        // Full reports leave out what is known to be corrupt; it is reported besides.
        for (block, _) in disk.iter().filter(|(_, replica)| replica.corrupt) {
            let change = ReplicaChange::Corrupt(*block);
            it.changes.push_back((storage, change));
        }
        let all: Vec<ReplicaReport> = disk
            .iter()
            .filter(|(_, replica)| !replica.corrupt)
            .map(|(block, replica)| ReplicaReport {
                block: *block,
                length_bytes: replica.length_bytes.next_multiple_of(CHUNK),
                sealed: replica.sealed,
            })
            .collect();
        let count = all.len().div_ceil(PART).max(1);
        for part in 0..count {
            let end = all.len().min((part + 1) * PART);
            it.parts.push_back(BlockReport {
                storage,
                part: part as u32,
                last: part + 1 == count,
                replicas: all[(part * PART).min(end)..end].to_vec(),
            });
        }
    }

    pub(super) fn send_changes(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        if !it.connected || it.changes.is_empty() {
            return;
        }
        let report = IncrementalReport {
            changes: it.changes.drain(..).collect(),
        };
        let result = self.cluster.incremental_report(self.now_ms, it.id, &report);
        self.heed(node, result);
    }

    pub(super) fn send_part(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        if it.connected
            && let Some(part) = it.parts.pop_front()
        {
            let result = self.cluster.block_report(self.now_ms, it.id, &part);
            self.heed(node, result);
        }
    }

    /// A heartbeat and, unless it is lost, its reply.
    pub(super) fn heartbeat(&mut self, node: usize, reply_arrives: bool) {
        if !self.nodes[node].connected {
            return;
        }
        let heartbeat = Heartbeat {
            volumes: self.volumes(node),
            busy: self.nodes[node].busy,
            primary: None,
            active_streams: 0,
            unix_ms: 0,
            denials: 0,
            removable_bytes: self.removable_bytes,
        };
        let id = self.nodes[node].id;
        let result = self.cluster.heartbeat(self.now_ms, id, &heartbeat);
        let refused = result.is_err();
        self.heed(node, result);
        self.nodes[node].silent_since_ms = self.now_ms;
        if refused {
            return;
        }
        let commands =
            self.cluster
                .next_commands(self.now_ms, id, COMMANDS_PER_HEARTBEAT_MAX, &mut token);
        for command in &commands {
            self.check_command(node, command);
        }
        if reply_arrives {
            self.nodes[node].commands.extend(commands);
        }
    }

    /// A datanode that the namenode does not know registers again.
    fn heed(&mut self, node: usize, result: Result<(), ClusterError>) {
        match result {
            Ok(()) | Err(ClusterError::ReportOutOfOrder { .. }) => {}
            Err(ClusterError::NotRegistered(_) | ClusterError::UnknownStorage(_)) => {
                self.connect(node);
            }
        }
    }

    pub(super) fn disconnect(&mut self, node: usize, namenode_notices: bool) {
        let it = &mut self.nodes[node];
        if std::mem::take(&mut it.connected) {
            it.silent_since_ms = self.now_ms;
            if namenode_notices {
                self.cluster.disconnected(self.now_ms, it.id);
            }
        }
    }

    /// The process ends; what it was commanded is forgotten, what is on disk stays.
    pub(super) fn stop(&mut self, node: usize) {
        self.disconnect(node, true);
        let it = &mut self.nodes[node];
        it.up = false;
        it.commands.clear();
        it.changes.clear();
        it.parts.clear();
    }

    pub(super) fn start(&mut self, node: usize) {
        if !self.nodes[node].up {
            self.nodes[node].up = true;
            self.connect(node);
        }
    }

    /// A disk of a stopped server is formatted.
    pub(super) fn reimage(&mut self, node: usize, storage: StorageId) {
        self.nodes[node].disks.remove(&storage);
        self.nodes[node].sick.remove(&storage);
        let disks = &mut self.nodes[node].disks;
        disks.insert(StorageId(self.next_storage), BTreeMap::new());
        self.next_storage += 1;
    }

    /// A disk fails, or works again. A replica that is on another disk by then is dropped.
    pub(super) fn set_sick(&mut self, node: usize, storage: StorageId, sick: bool) {
        let it = &mut self.nodes[node];
        if sick {
            it.sick.insert(storage);
        } else if it.sick.remove(&storage)
            && let Some(mut disk) = it.disks.remove(&storage)
        {
            disk.retain(|block, _| it.replica(*block).is_none());
            it.disks.insert(storage, disk);
        }
    }

    pub(super) fn reimage_all(&mut self, node: usize) {
        for storage in self.nodes[node].disks.keys().copied().collect::<Vec<_>>() {
            self.reimage(node, storage);
        }
    }

    /// Executes the next command of a node.
    pub(super) fn execute(&mut self, node: usize) {
        let Some(command) = self.nodes[node].commands.pop_front() else {
            return;
        };
        match command {
            NodeCommand::Replicate {
                block,
                length_bytes,
                sources,
                ..
            } => {
                let holds = |source: &Datanode| {
                    let replica = source.replica(block);
                    source.up
                        && replica.is_some_and(|it| !it.corrupt && it.length_bytes >= length_bytes)
                };
                let copied = sources
                    .iter()
                    .any(|source| holds(&self.nodes[source.node.0 as usize]));
                let it = &mut self.nodes[node];
                if it.replica(block).is_some() {
                    return;
                }
                let storage = *it.disks.keys().next().expect("a node has a disk");
                let has_disk = it.sick.len() < it.disks.len();
                if copied && has_disk {
                    self.put(node, block, length_bytes, true);
                } else {
                    it.changes
                        .push_back((storage, ReplicaChange::RepairFailed(block)));
                }
            }
            NodeCommand::Delete { blocks } => {
                for block in blocks {
                    self.nodes[node].remove(block);
                }
            }
            NodeCommand::Seal {
                block,
                length_bytes,
            } => {
                if let Some(replica) = self.nodes[node].replica(block).copied() {
                    let length_bytes = replica.length_bytes.min(length_bytes);
                    self.put(node, block, length_bytes, true);
                }
            }
            NodeCommand::ReportBlocks { storage } => self.prepare_report(node, storage),
            NodeCommand::Verify { storage, block } => self.verify(node, storage, block),
            NodeCommand::Namenodes { .. } => {}
            NodeCommand::SetQuota {
                storage,
                quota_bytes,
                deadline_ms,
            } => {
                let quota = (quota_bytes, self.now_ms + deadline_ms);
                self.nodes[node].quotas.insert(storage, quota);
            }
        }
    }

    /// Reports what is there.
    fn verify(&mut self, node: usize, storage: StorageId, block: BlockId) {
        let it = &mut self.nodes[node];
        if it.sick.contains(&storage) {
            return;
        }
        let replica = it.disks.get(&storage).and_then(|disk| disk.get(&block));
        let change = match replica {
            None => ReplicaChange::Deleted(block),
            Some(replica) if replica.corrupt => ReplicaChange::Corrupt(block),
            Some(replica) => ReplicaChange::Have(ReplicaReport {
                block,
                length_bytes: replica.length_bytes,
                sealed: replica.sealed,
            }),
        };
        it.changes.push_back((storage, change));
    }

    /// Creates or changes a replica on disk, and has it reported.
    pub(super) fn put(&mut self, node: usize, block: BlockId, length_bytes: u64, sealed: bool) {
        let it = &mut self.nodes[node];
        let healthy = it
            .disks
            .iter_mut()
            .filter(|(storage, _)| !it.sick.contains(storage));
        let best = healthy.min_by_key(|(_, disk)| (!disk.contains_key(&block), disk.len()));
        let Some((storage, disk)) = best else {
            return;
        };
        let corrupt = disk.get(&block).is_some_and(|replica| replica.corrupt);
        let is_new = !disk.contains_key(&block);
        disk.insert(
            block,
            DiskReplica {
                length_bytes,
                sealed,
                corrupt,
            },
        );
        if is_new || sealed {
            it.changes.push_back((
                *storage,
                ReplicaChange::Have(ReplicaReport {
                    block,
                    length_bytes: length_bytes.next_multiple_of(CHUNK),
                    sealed,
                }),
            ));
        }
    }

    /// Everything that a node has to say and to do.
    pub(super) fn drain(&mut self, node: usize) {
        for _ in 0..1_000 {
            while !self.nodes[node].commands.is_empty() {
                self.execute(node);
            }
            self.send_changes(node);
            if self.nodes[node].parts.is_empty() && self.nodes[node].commands.is_empty() {
                return;
            }
            self.send_part(node);
        }
        panic!("node {node} never comes to an end");
    }

    /// Time passes without faults: heartbeats every 300 ms, everything is delivered and done.
    pub(super) fn pass(&mut self, duration_ms: u64) {
        for step in 0..duration_ms.div_ceil(100) {
            self.now_ms += 100;
            if step.is_multiple_of(3) {
                for node in 0..self.nodes.len() {
                    if self.nodes[node].connected {
                        self.drain(node);
                        self.heartbeat(node, true);
                        self.drain(node);
                    }
                }
            }
            self.cluster.tick(self.now_ms, &mut self.rng);
        }
    }

    // --- the truth ---

    /// Nodes whose disks hold a good replica, reachable or not.
    pub(super) fn holders(&self, block: BlockId) -> BTreeSet<NodeId> {
        let needed = self.blocks.get(&block).map_or(0, |it| it.committed_bytes);
        self.nodes
            .iter()
            .filter(|node| {
                let replica = node.replica(block);
                replica.is_some_and(|it| !it.corrupt && it.length_bytes >= needed)
            })
            .map(|node| node.id)
            .collect()
    }

    /// Holders that were not commanded to delete it.
    pub(super) fn lasting_holders(&self, block: BlockId) -> BTreeSet<NodeId> {
        let mut holders = self.holders(block);
        holders.retain(|node| !self.nodes[node.0 as usize].will_delete(block));
        holders
    }

    /// What no command may ever do.
    fn check_command(&mut self, node: usize, command: &NodeCommand) {
        let id = self.nodes[node].id;
        match command {
            NodeCommand::Delete { blocks } => {
                for block in blocks
                    .iter()
                    .filter(|block| self.blocks.contains_key(block))
                {
                    let mut left = self.lasting_holders(*block);
                    left.remove(&id);
                    assert!(
                        !left.is_empty() || !self.holders(*block).contains(&id),
                        "node {id} is commanded to delete the last good replica of {block}"
                    );
                }
            }
            NodeCommand::Replicate { sources, .. } => {
                let source = sources.first().expect("a repair has a source");
                assert_ne!(source.node, id);
                self.commanded.push((self.now_ms, source.node, id));
                self.check_budgets(source.node, id);
            }
            NodeCommand::Seal { block, .. } => {
                assert!(self.blocks.get(block).is_none_or(|it| it.sealed));
            }
            NodeCommand::Verify { block, .. } => self.verifications.push((self.now_ms, id, *block)),
            NodeCommand::ReportBlocks { .. }
            | NodeCommand::SetQuota { .. }
            | NodeCommand::Namenodes { .. } => {}
        }
    }

    fn check_budgets(&self, source: NodeId, target: NodeId) {
        let since_ms = self.now_ms.saturating_sub(self.options.repair_window_ms);
        // Commanded at most one heartbeat's time after they were charged.
        let recent = self
            .commanded
            .iter()
            .filter(|(at, _, _)| *at > since_ms + 5_000);
        let (mut sent, mut received) = (0, 0);
        for (_, from, to) in recent {
            sent += u32::from(*from == source);
            received += u32::from(*to == target);
        }
        let limit = self.options.urgent_repairs_per_window;
        assert!(sent <= limit, "{source} serves {sent} repairs");
        assert!(received <= limit, "{target} receives {received} repairs");
    }
}

pub(super) fn token(block: BlockId) -> BlockToken {
    let key = TokenKey {
        key_id: 1,
        secret: [1; 32],
    };
    TokenSigner::new(&key).sign(block, Right::Read, 0)
}
