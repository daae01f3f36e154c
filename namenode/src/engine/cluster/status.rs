//! What the cluster engine tells operators.

/// The cluster at a glance. Counts of blocks lag behind while the replicas of a lost node are
/// worked off, a few thousand per tick.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSummary {
    /// False until safe mode has ended: block locations are still being learned.
    pub ready: bool,
    /// Repair waits because many nodes fell silent together; how long at most, in milliseconds.
    pub storm_remaining_ms: Option<u64>,
    /// Blocks known.
    pub blocks: u64,
    /// Sealed blocks with fewer replicas than wanted, lost ones included.
    pub under_replicated_blocks: u64,
    /// Committed blocks without any replica.
    pub lost_blocks: u64,
    /// Blocks that wait for repair.
    pub repairs_waiting: u64,
    /// Repairs under way.
    pub repairs_under_way: u64,
    /// Repairs finished since the start.
    pub repairs_done: u64,
    /// Repairs that failed or timed out since the start.
    pub repairs_failed: u64,
    /// Nodes that are alive.
    pub nodes_alive: u64,
    /// Nodes ever registered.
    pub nodes_known: u64,
    /// Quotas of the healthy volumes of live nodes, in bytes.
    pub quota_bytes: u64,
    /// How much of them is used, in bytes.
    pub used_bytes: u64,
    /// Memory that the engine's tables hold, in bytes, estimated from their capacity.
    pub engine_bytes: u64,
}

/// What `fsck` counts of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsckCounts {
    /// Replicas wanted of sealed blocks but not there, summed over blocks.
    pub missing_replicas: u64,
    /// Committed blocks of which no replica is there.
    pub lost_blocks: u64,
    /// Replicas on live nodes of blocks that do not exist (any more), not yet confirmed removed.
    pub orphan_replicas: u64,
    /// Replicas beyond the wanted number, summed over blocks; bad ones that are replaced and not
    /// yet removed included.
    pub excess_replicas: u64,
    /// Blocks that are being repaired or wait for it.
    pub under_repair: u64,
}
