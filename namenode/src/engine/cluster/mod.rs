//! The soft state of the namenode: which nodes live, which replicas they hold, what has to be
//! repaired or removed. Nothing of it is journaled; after a start it is learned again from
//! registrations and block reports.
//!
//! Pure: time comes in as `now_ms` (monotonic milliseconds), randomness as a generator, and what
//! has to be done goes out as commands for heartbeat replies. The same calls give the same state.

use std::net::IpAddr;

use harvestfs_placement::Policy;
use harvestfs_protocol::{
    error::FsError,
    ids::{BlockId, NodeId, StorageId},
    node::{BlockReport, Heartbeat, IncrementalReport, NodeCommand, ServerDescription},
    token::BlockToken,
    types::{NodeInfo, PlacementRules, VolumeStatus},
};
use rand::Rng;

use super::namespace::BlockChange;

mod options;
mod status;

pub use options::ClusterOptions;
pub use status::{ClusterSummary, FsckCounts};

/// Why an event of a datanode was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The node has not registered since the namenode started; it must register first.
    #[error("node {0} is not registered")]
    NotRegistered(NodeId),
    /// The volume was not named at registration.
    #[error("volume {0} was not registered")]
    UnknownStorage(StorageId),
    /// A part of a block report is missing; a new report has been asked for.
    #[error("part {got} of a block report came, part {expected} was expected")]
    ReportOutOfOrder {
        /// The part that was due.
        expected: u32,
        /// The part that came.
        got: u32,
    },
}

/// Nodes, replicas, liveness and repair.
pub struct Cluster {}

#[allow(unused_variables)]
impl Cluster {
    /// An empty cluster in safe mode. `now_ms` is when safe mode starts to run out.
    pub fn new(options: ClusterOptions, policy: Box<dyn Policy>, now_ms: u64) -> Self {
        unimplemented!()
    }
    /// A server that the journal knows. It is not alive before it registers.
    pub fn add_server(&mut self, node: NodeId, server: &ServerDescription, storages: &[StorageId]) {
        unimplemented!()
    }
    /// A datanode registered: its volumes, and no others, are there. Replicas on volumes of it
    /// that are not named are gone. A full report of each volume is expected next.
    pub fn register(
        &mut self,
        now_ms: u64,
        node: NodeId,
        server: &ServerDescription,
        volumes: &[VolumeStatus],
    ) {
        unimplemented!()
    }
    /// The connection to a datanode ended. It counts as stale, not as dead.
    pub fn disconnected(&mut self, now_ms: u64, node: NodeId) {
        unimplemented!()
    }
    /// A heartbeat. The reply's commands come from [`Cluster::next_commands`].
    pub fn heartbeat(
        &mut self,
        now_ms: u64,
        node: NodeId,
        heartbeat: &Heartbeat,
    ) -> Result<(), ClusterError> {
        unimplemented!()
    }
    /// A part of a full report of one volume.
    pub fn block_report(
        &mut self,
        now_ms: u64,
        node: NodeId,
        report: &BlockReport,
    ) -> Result<(), ClusterError> {
        unimplemented!()
    }
    /// Changes on a datanode's volumes.
    pub fn incremental_report(
        &mut self,
        now_ms: u64,
        node: NodeId,
        report: &IncrementalReport,
    ) -> Result<(), ClusterError> {
        unimplemented!()
    }
    /// A change of a block in the namespace; at the start `Allocated`, then `Grew` or `Sealed` for
    /// every block. `Freed` must be told only when the journal record that frees the block is
    /// durable: its replicas are removed at once. All others are told as they are applied.
    pub fn apply_change(&mut self, now_ms: u64, change: &BlockChange) {
        unimplemented!()
    }
    /// Chooses pipelines for `count` new blocks, each with at least one node.
    ///
    /// # Errors
    /// With `durability=strict`: [`FsError::InsufficientDiversity`] when fewer servers than wanted
    /// can take a replica. Always: [`FsError::NoSpace`], or [`FsError::Busy`], when none can.
    pub fn place(
        &mut self,
        now_ms: u64,
        count: u32,
        rules: &PlacementRules,
        exclude: &[NodeId],
        writer: Option<IpAddr>,
        rng: &mut dyn Rng,
    ) -> Result<Vec<Vec<NodeId>>, FsError> {
        unimplemented!()
    }
    /// Where a new block is being written: these nodes count as holding it before they report.
    pub fn set_pipeline(&mut self, block: BlockId, nodes: &[NodeId]) {
        unimplemented!()
    }
    /// The writer says that these nodes hold all of a block that it sealed (`SealBlocks`); to be
    /// called beside the `Sealed` change, before or after it.
    pub fn sealed_by_client(&mut self, now_ms: u64, block: BlockId, nodes: &[NodeId]) {
        unimplemented!()
    }
    /// A client could not use a replica.
    pub fn report_bad_replica(&mut self, now_ms: u64, block: BlockId, node: NodeId, corrupt: bool) {
        unimplemented!()
    }
    /// Nodes that hold all committed bytes of a block, best first for the reader; stale ones, then
    /// busy ones last.
    pub fn replicas(&self, block: BlockId, reader: Option<IpAddr>) -> Vec<NodeId> {
        unimplemented!()
    }
    /// How to reach a node.
    pub fn node_info(&self, node: NodeId) -> Option<NodeInfo> {
        unimplemented!()
    }
    /// Liveness, safe mode, repair, removal of excess. To be called every 100 ms or so; bounded.
    pub fn tick(&mut self, now_ms: u64, rng: &mut dyn Rng) {
        unimplemented!()
    }
    /// Commands for a heartbeat's reply, at most `max`. `token` signs the right to read a block.
    pub fn next_commands(
        &mut self,
        now_ms: u64,
        node: NodeId,
        max: usize,
        token: &mut dyn FnMut(BlockId) -> BlockToken,
    ) -> Vec<NodeCommand> {
        unimplemented!()
    }
    /// The cluster at a glance.
    pub fn summary(&self, now_ms: u64) -> ClusterSummary {
        unimplemented!()
    }
    /// Every node ever registered.
    pub fn nodes(&self, now_ms: u64) -> Vec<harvestfs_protocol::admin::NodeStatus> {
        unimplemented!()
    }
    /// Counts over all blocks; O(blocks).
    pub fn fsck(&self) -> FsckCounts {
        unimplemented!()
    }
}
