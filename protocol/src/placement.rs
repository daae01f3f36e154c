//! What operators ask about where replicas are, and what they change of it.

use serde::{Deserialize, Serialize};

use crate::{
    history::TenantName,
    ids::{BlockId, StorageId},
};

/// Requests about placement and repair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementRequest {
    /// The policy, its grid, diversity, and these blocks. Reply: [`PlacementReply::Report`].
    Report {
        /// Blocks to explain, at most [`crate::limits::BLOCKS_PER_REPORT_MAX`].
        blocks: Vec<BlockId>,
        /// A file whose blocks to explain, as an absolute path in the file system.
        file: Option<String>,
    },
    /// Replaces the policy until the configuration names another one. Reply: [`PlacementReply::Done`].
    SetPolicy(String),
    /// Changes the budgets of repair until the configuration changes; what is `None` stays. Reply:
    /// [`PlacementReply::Repair`].
    Repair(RepairChange),
    /// What would become of data if these servers were reimaged now. Reply:
    /// [`PlacementReply::Impact`].
    Impact {
        /// Names of servers.
        servers: Vec<String>,
        /// Also copy elsewhere what they have, and give them nothing new, until
        /// [`PlacementRequest::Release`], or until they are reimaged.
        hold: bool,
    },
    /// Ends what `Impact` with `hold` began. Reply: [`PlacementReply::Done`].
    Release {
        /// Names of servers.
        servers: Vec<String>,
    },
    /// Lets servers be away for a while without their blocks being repaired; they get nothing new
    /// meanwhile. Reply: [`PlacementReply::Maintenance`].
    StartMaintenance {
        /// Names of servers.
        servers: Vec<String>,
        /// Milliseconds from now, at most [`crate::limits::MAINTENANCE_MAX`].
        for_ms: u64,
        /// Also if blocks could not be read while they are away.
        force: bool,
    },
    /// Ends what `StartMaintenance` began. Reply: [`PlacementReply::Done`].
    EndMaintenance {
        /// Names of servers.
        servers: Vec<String>,
    },
    /// Has a server's volumes use no more than this by a deadline. Reply: [`PlacementReply::Done`];
    /// the heartbeats of the server show when it is in force.
    SetQuota {
        /// Name of the server.
        server: String,
        /// The volume; if `None`, all share the quota as they share the present one.
        storage: Option<StorageId>,
        /// Bytes.
        quota_bytes: u64,
        /// Milliseconds from now.
        deadline_ms: u64,
    },
}

/// Replies to [`PlacementRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementReply {
    /// Nothing to say.
    Done,
    /// The policy, its grid, diversity, and blocks.
    Report(PlacementReport),
    /// The budgets of repair.
    Repair(RepairLimits),
    /// What would become of data.
    Impact(ReimageImpact),
    /// Whether maintenance began, and what cannot be read meanwhile: the `lost` blocks.
    Maintenance {
        /// Whether.
        started: bool,
        /// As if all servers in maintenance were reimaged.
        impact: ReimageImpact,
    },
}

/// Where replicas go and are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementReport {
    /// Name of the policy.
    pub policy: String,
    /// The nine cells of the grid, row by row; then what is outside.
    pub cells: Vec<CellReport>,
    /// Tenants that have servers, at most [`crate::limits::TENANTS_PER_REPLY_MAX`].
    pub tenants: Vec<TenantReport>,
    /// Sealed blocks by the number of the five constraints that hold among their replicas.
    pub blocks_by_score: Vec<u64>,
    /// Sealed blocks that break a constraint that they were promised.
    pub misplaced_blocks: u64,
    /// Blocks that wait for the move of a replica.
    pub moves_waiting: u64,
    /// The blocks asked for.
    pub blocks: Vec<BlockPlace>,
}

/// A cell of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridCell {
    /// 0 to 2; 0 has the lowest peaks of CPU use.
    pub row: u8,
    /// 0 to 2; 0 is reimaged least.
    pub column: u8,
}

/// What a cell has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellReport {
    /// Which; `None` for outside the grid.
    pub cell: Option<GridCell>,
    /// Tenants.
    pub tenants: u32,
    /// Servers.
    pub servers: u32,
    /// Space in bytes, in whole blocks.
    pub capacity_bytes: u64,
    /// Free space in bytes, in whole blocks.
    pub free_bytes: u64,
}

/// A tenant and its place in the grid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// Which.
    pub tenant: TenantName,
    /// Its cell, unless it is outside the grid.
    pub cell: Option<GridCell>,
    /// Its servers.
    pub servers: u32,
    /// Whether there is history of it; if not, the next two are those of the average server.
    pub has_history: bool,
    /// Reimages per 1,000 servers and month.
    pub reimages_per_1000: u32,
    /// Peak CPU use of its average server, in thousandths of all cores.
    pub peak_cpu_permille: u16,
    /// Free space in bytes, in whole blocks.
    pub free_bytes: u64,
}

/// Where a block is, and how well that is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockPlace {
    /// Which.
    pub block: BlockId,
    /// Replicas wanted.
    pub replication: u8,
    /// Whether the constraints are hard.
    pub strict: bool,
    /// Constraints that hold among its good replicas.
    pub held: Vec<String>,
    /// Constraints that it was promised and that do not hold.
    pub broken: Vec<String>,
    /// Its replicas.
    pub replicas: Vec<ReplicaPlace>,
}

/// One replica of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaPlace {
    /// Name of the server.
    pub server: String,
    /// Its rack.
    pub rack: String,
    /// Its tenant.
    pub tenant: TenantName,
    /// The tenant's cell, unless it is outside the grid.
    pub cell: Option<GridCell>,
    /// Reimages per 1,000 servers of the tenant and month.
    pub reimages_per_1000: u32,
    /// What is known of it: `sealed`, `open`, `short`, `corrupt`, `excess`, `deleting`,
    /// `gone`, `awaited`.
    pub state: String,
    /// It is to leave this server once another one is made.
    pub leaving: bool,
    /// What it shares with other good replicas: the name of the constraint, and the other server.
    pub shares: Vec<(String, String)>,
}

/// The budgets of repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairLimits {
    /// Length of the window that the first four are counted in, in milliseconds.
    pub window_ms: u64,
    /// Repairs per node, as source and as target each.
    pub per_node: u32,
    /// The same for blocks whose last replica is left.
    pub urgent_per_node: u32,
    /// The same for replicas that are misplaced.
    pub moves_per_node: u32,
    /// Repairs that one volume serves.
    pub per_volume: u32,
    /// Repairs at a time per node, as source and as target each.
    pub at_once: u32,
}

/// A change of [`RepairLimits`]; what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairChange {
    /// See [`RepairLimits::per_node`].
    pub per_node: Option<u32>,
    /// See [`RepairLimits::urgent_per_node`].
    pub urgent_per_node: Option<u32>,
    /// See [`RepairLimits::moves_per_node`].
    pub moves_per_node: Option<u32>,
    /// See [`RepairLimits::per_volume`].
    pub per_volume: Option<u32>,
    /// See [`RepairLimits::at_once`].
    pub at_once: Option<u32>,
}

impl RepairChange {
    /// The limits after the change.
    #[must_use]
    pub fn applied_to(&self, limits: RepairLimits) -> RepairLimits {
        RepairLimits {
            window_ms: limits.window_ms,
            per_node: self.per_node.unwrap_or(limits.per_node),
            urgent_per_node: self.urgent_per_node.unwrap_or(limits.urgent_per_node),
            moves_per_node: self.moves_per_node.unwrap_or(limits.moves_per_node),
            per_volume: self.per_volume.unwrap_or(limits.per_volume),
            at_once: self.at_once.unwrap_or(limits.at_once),
        }
    }
}

/// What would become of data if servers were reimaged now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReimageImpact {
    /// Replicas on the servers.
    pub replicas: u64,
    /// Blocks of which no replica would be left.
    pub lost: u64,
    /// Blocks of several replicas of which one would be left.
    pub exposed: u64,
    /// Blocks that have fewer replicas elsewhere than they want.
    pub waiting: u64,
    /// The first of the lost ones.
    pub lost_blocks: Vec<BlockId>,
    /// The first of the exposed ones.
    pub exposed_blocks: Vec<BlockId>,
}

impl ReimageImpact {
    /// Whether nothing would be lost and no block left with its last replica.
    #[must_use]
    pub fn is_safe(&self) -> bool {
        self.lost == 0 && self.exposed == 0
    }
}
