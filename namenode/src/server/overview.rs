//! What the namenode shows of itself, to Prometheus and on its page.

use std::net::SocketAddr;

use harvestfs_protocol::admin::{ClusterStatus, NodeStatus};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::node::PrimaryLoad;
use harvestfs_protocol::outlook::WriteTrouble;
use harvestfs_protocol::placement::{
    BalanceOutcome, BlockPlace, CellReport, GridCell, TenantReport,
};
use serde::Serialize;

use super::activity::{LoadPoint, NumberedHappening};
use super::harvest::{HarvestTotals, WatchedScheduler};
use crate::engine::cluster::BlockAtRisk;

/// The role of a namenode in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupPart {
    /// It leads and serves.
    Leader,
    /// It was elected, and takes over.
    TakingOver,
    /// Another one leads.
    Standby,
    /// Nobody leads, as far as it knows.
    NobodyLeads,
}

/// The members of the group, as one of them sees them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupOverview {
    /// The role of this namenode.
    pub part: GroupPart,
    /// The last term that it knows of.
    pub term: u64,
    /// Number of records committed by the leader that it lacks.
    pub behind_records: u64,
    /// All members, by number.
    pub members: Vec<GroupMember>,
}

/// A namenode of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupMember {
    /// Its number, in hexadecimal digits.
    pub number: String,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Whether it is the namenode that answers.
    pub is_this: bool,
    /// Whether it leads.
    pub leads: bool,
    /// Number of records it lacks; about other members, only the leader knows.
    pub behind_records: Option<u64>,
}

/// The cluster in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overview {
    /// What `harvestfs admin status` shows.
    #[serde(flatten)]
    pub status: ClusterStatus,
    /// The group of namenodes.
    pub group: GroupOverview,
    /// What is wrong with writes, and what to do.
    pub write_trouble: Option<WriteTrouble>,
    /// Name of the policy that places replicas.
    pub policy: String,
    /// Bytes of records written to the journal since the start.
    pub journal_bytes: u64,
    /// Live datanodes whose primary tenants need the server.
    pub nodes_busy: u64,
    /// How full the fullest and the emptiest server are, in thousandths of their quotas.
    pub fill_permille: Option<(u64, u64)>,
    /// Replicas moved to emptier servers since the start.
    pub balance_moves_done: u64,
    /// Volumes that are too full, by the outcome of the search for a replica to move.
    pub too_full_volumes: [u64; BalanceOutcome::ALL.len()],
    /// Known servers that came back with an empty disk since the start.
    pub reimages: u64,
    /// Sealed blocks with fewer replicas than wanted, by how many are left: 0, 1, 2, more.
    pub missing_by_left: [u64; 4],
    /// Sealed blocks that violate a constraint that was promised for them.
    pub misplaced_blocks: u64,
    /// Sealed blocks by how many of the five constraints hold among their replicas.
    pub blocks_by_score: [u64; 6],
    /// Repair.
    pub repair: RepairOverview,
    /// The nine cells of the grid, row by row; then everything outside it.
    pub cells: Vec<CellReport>,
    /// What schedulers do with harvested resources.
    pub harvest: HarvestTotals,
}

/// Repair in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RepairOverview {
    /// Blocks that have too few replicas and wait.
    pub waiting: u64,
    /// Blocks that wait for the move of a replica.
    pub moves_waiting: u64,
    /// How long the first of the blocks with too few replicas has waited, in milliseconds.
    pub oldest_ms: Option<u64>,
    /// How much longer repair waits at most because many datanodes fell silent together, in
    /// milliseconds; `None` if it does not.
    pub held_ms: Option<u64>,
    /// Replicas moved since the start.
    pub moves_done: u64,
    /// Repairs and moves that failed since the start.
    pub failed: u64,
}

/// Everything that the page shows of the cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Watched {
    /// The cluster in numbers.
    #[serde(flatten)]
    pub overview: Overview,
    /// Tenants that have servers; a limited number.
    pub tenants: Vec<TenantReport>,
    /// Datanodes by name, a limited number.
    pub nodes: Vec<WatchedNode>,
    /// Schedulers whose controllers report, by name.
    pub schedulers: Vec<WatchedScheduler>,
    /// The blocks with too few replicas that are nearest to being lost.
    pub at_risk: Vec<BlockAtRisk>,
    /// Recent happenings, oldest first.
    pub happenings: Vec<NumberedHappening>,
}

/// One datanode.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WatchedNode {
    /// What `harvestfs admin nodes` shows.
    #[serde(flatten)]
    pub status: NodeStatus,
    /// The cell of its tenant, unless the tenant is outside the grid.
    pub cell: Option<GridCell>,
    /// What its primary tenant uses, as last reported.
    pub primary: Option<PrimaryLoad>,
    /// What it used over time, oldest first.
    pub loads: Vec<LoadPoint>,
    /// Accesses that it denied since it started.
    pub denials: u64,
    /// Repairs that it serves now.
    pub repairs_from: u32,
    /// Repairs that it receives now.
    pub repairs_to: u32,
}

/// A file that uses a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockUser {
    /// The block.
    pub block: BlockId,
    /// A path of the file.
    pub path: String,
}

/// A page of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// Its entries, by name.
    pub entries: Vec<ListedEntry>,
    /// Whether there are more entries after the last one.
    pub more: bool,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ListedEntry {
    /// Its name, with what is not UTF-8 replaced.
    pub name: String,
    /// Its name, percent-encoded, for requests.
    pub link: String,
    /// `file`, `directory` or `other`.
    pub kind: &'static str,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// A file and where its blocks are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FilePlaces {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Its first blocks in the order of its content, each once.
    pub blocks: Vec<BlockPlace>,
}
