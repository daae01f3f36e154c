//! What operators ask about where replicas are, and what they change of it.

use serde::{Deserialize, Serialize};

use crate::history::TenantName;
use crate::ids::{BlockId, StorageId};
use crate::node::ServerDescription;
use crate::types::StorageClass;

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
    /// What would become of data if these servers were reimaged together, until that is repaired. Reply:
    /// [`PlacementReply::Wave`].
    Wave {
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
    /// How evenly servers are filled; and first changes, until the configuration does, how evenly they
    /// are to be. Reply: [`PlacementReply::Balance`].
    Balance(Option<BalanceChange>),
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
    /// How evenly servers are filled.
    Balance(BalanceReport),
    /// What would become of data.
    Wave(WaveOutlook),
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
    /// Of each kind of failure domain, the one whose loss would leave the least space free. None without live servers.
    pub losses: Vec<DomainLoss>,
    /// What is lost by chance.
    pub risk: LossRisk,
    /// The blocks asked for.
    pub blocks: Vec<BlockPlace>,
}

/// What is lost together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DomainKind {
    /// One server.
    Server,
    /// The servers of a rack.
    Rack,
    /// The servers of an environment.
    Environment,
}

impl DomainKind {
    /// All of them, smallest first.
    pub const ALL: [Self; 3] = [Self::Server, Self::Rack, Self::Environment];

    /// As people call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Rack => "rack",
            Self::Environment => "environment",
        }
    }

    /// The name of the domain of this kind that a server is in.
    #[must_use]
    pub fn of(self, server: &ServerDescription) -> &str {
        match self {
            Self::Server => &server.name,
            Self::Rack => &server.rack,
            Self::Environment => &server.environment,
        }
    }
}

/// What the loss of a failure domain would take: as many bytes have to be free elsewhere to repair all that it has. That
/// constraints of placement may leave less of them usable is not counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainLoss {
    /// What kind of domain.
    pub kind: DomainKind,
    /// Its name.
    pub name: String,
    /// Its live servers.
    pub servers: u32,
    /// Bytes that they use.
    pub used_bytes: u64,
    /// Bytes that other live servers have free.
    pub free_elsewhere_bytes: u64,
}

/// How many blocks are lost on average, at most: of one block, how probable it is. By what history foretells; see `docs/CYCLES.md`.
#[derive(Clone, Copy, Debug, Default, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpectedLosses(pub f64);

// Messages are compared with each other: the same bits are the same.
impl PartialEq for ExpectedLosses {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for ExpectedLosses {}

/// What is lost in a year because all replicas of a block go before one of them is made again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossRisk {
    /// Blocks that have bytes.
    pub blocks: u64,
    /// Blocks that were looked at, spread over all; none before history was analysed.
    pub looked_at: u64,
    /// Of all blocks, as those that were looked at.
    pub in_a_year: ExpectedLosses,
    /// Those at most risk of those that were looked at, the worst first.
    pub worst: Vec<(BlockId, ExpectedLosses)>,
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
    /// Whether there is history of it; if not, the next two are the average server's.
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
    /// Constraints that do not hold and that the servers of the cluster cannot keep.
    pub given_up: Vec<String>,
    /// Replicas that the servers of the cluster can hold; fewer than it asks for when they are few.
    pub possible: u8,
    /// How probable it is at most that it is lost within a year; unknown before history was analysed.
    pub lost_in_a_year: Option<ExpectedLosses>,
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
    /// The first of the waiting ones, while the servers are held.
    pub waiting_blocks: Vec<WaitingBlock>,
}

/// A block that is not complete without some servers yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingBlock {
    /// Which.
    pub block: BlockId,
    /// Its replicas on other servers.
    pub elsewhere: u32,
    /// Replicas wanted.
    pub wanted: u32,
    /// What it waits for.
    pub why: String,
}

impl ReimageImpact {
    /// Whether nothing would be lost and no block left with its last replica.
    #[must_use]
    pub fn is_safe(&self) -> bool {
        self.lost == 0 && self.exposed == 0
    }
}

/// What would become of data if servers were reimaged together, until all of it is repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaveOutlook {
    /// What would be gone.
    pub impact: ReimageImpact,
    /// Live servers that stay.
    pub servers_left: u32,
    /// Bytes that the servers use.
    pub used_bytes: u64,
    /// Bytes that the servers that stay have free.
    pub free_elsewhere_bytes: u64,
    /// How long repair takes if all servers that stay do what their budgets allow, in seconds; never without any.
    pub repair_s: Option<u64>,
    /// What is lost on average until then, at most; unknown before history was analysed.
    pub lost: Option<ExpectedLosses>,
}

/// Why a wave of reimages is not to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaveObstacle {
    /// Blocks would be lost.
    Lost(u64),
    /// Blocks would be left with their last replica.
    LastReplica(u64),
    /// So many bytes more must be free.
    NoSpace(u64),
    /// It cannot be repaired within a day.
    TooSlow,
    /// More is lost on average than may be.
    Risk(ExpectedLosses),
    /// History was not analysed yet.
    NoHistory,
}

impl WaveOutlook {
    /// What is in the way of a wave that is to be repaired within a time and to lose no more than so many blocks on average.
    #[must_use]
    pub fn obstacles(&self, within_s: u64, lost_max: f64) -> Vec<WaveObstacle> {
        let missing_bytes = self.used_bytes.saturating_sub(self.free_elsewhere_bytes);
        let counted = [
            (self.impact.lost > 0).then_some(WaveObstacle::Lost(self.impact.lost)),
            (self.impact.exposed > 0).then_some(WaveObstacle::LastReplica(self.impact.exposed)),
            (missing_bytes > 0).then_some(WaveObstacle::NoSpace(missing_bytes)),
            self.repair_s
                .is_none_or(|it| it > within_s)
                .then_some(WaveObstacle::TooSlow),
            match self.lost {
                None => Some(WaveObstacle::NoHistory),
                // Also when it is no number.
                Some(lost) if lost.0 <= lost_max => None,
                Some(lost) => Some(WaveObstacle::Risk(lost)),
            },
        ];
        counted.into_iter().flatten().collect()
    }
}

/// How far apart the fills of a volume and a server may be before replicas move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BalanceChange {
    /// As the configuration has it; refused when that has it off.
    Configured,
    /// By this much of their quotas in thousandths, at most 1,000; 0 turns balancing off.
    Spread(u32),
}

/// How evenly volumes are filled, what moves for that, and what is in the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalanceReport {
    /// Replicas move when a volume is fuller than a server by more than this, in thousandths of their
    /// quotas; 0 for never.
    pub spread_permille: u32,
    /// Why none is moved at all just now.
    pub pause: Option<BalancePause>,
    /// The budgets of repair; moves have one of them.
    pub limits: RepairLimits,
    /// Moves of replicas in progress.
    pub moves_under_way: u64,
    /// Replicas moved since the namenode started.
    pub moves_done: u64,
    /// Moves that failed since then.
    pub moves_failed: u64,
    /// By class of volumes; classes without volumes are left out.
    pub classes: Vec<ClassBalance>,
}

/// Why balancing moves nothing at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BalancePause {
    /// It is off.
    Off,
    /// The budget of moves is zero.
    NoBudget,
    /// The namenode started, and is still learning where blocks are.
    Starting,
    /// Many datanodes fell silent together.
    Storm,
    /// Blocks wait for repair or for a better place: they go first.
    Repairs,
}

/// How evenly the volumes of a class are filled; what is too full and too empty is compared with the
/// other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassBalance {
    /// Which.
    pub class: StorageClass,
    /// Live servers with volumes of the class.
    pub servers: u64,
    /// What the emptiest of them uses of its quotas, in thousandths.
    pub least_permille: u64,
    /// What the one in the middle uses.
    pub median_permille: u64,
    /// What the fullest uses.
    pub most_permille: u64,
    /// Volumes that were too full when replicas to move were last looked for.
    pub volumes_too_full: u64,
    /// The fullest of them.
    pub too_full: Vec<VolumeBalance>,
    /// Servers that are too empty.
    pub servers_too_empty: u64,
    /// The emptiest of them.
    pub too_empty: Vec<ServerFill>,
}

/// How full a server, or a volume of it, is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFill {
    /// Name of the server.
    pub server: String,
    /// The cell of its tenant, unless that is outside the grid.
    pub cell: Option<GridCell>,
    /// What is used of the quota, in thousandths.
    pub fill_permille: u64,
}

/// A volume that is too full, and what is done about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeBalance {
    /// Its server, and how full it is.
    pub server: ServerFill,
    /// Which volume of it.
    pub storage: StorageId,
    /// What came of looking for a replica to move.
    pub outcome: BalanceOutcome,
}

/// What came of looking for a replica of a volume to move. Of several, the last in this order is
/// reported: it came nearest to a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BalanceOutcome {
    /// Its server is busy or silent.
    Unavailable,
    /// The blocks that were looked at are being written, repaired or moved.
    Unsettled,
    /// The emptier servers are busy, take part in enough repairs, have no room or have a replica.
    NoTarget,
    /// Elsewhere, the block would break a constraint of placement or be with a tenant that is reimaged
    /// more often.
    Constraints,
    /// A server that would take part has used up the budget of moves.
    Budget,
    /// The move of one began.
    Begun,
}

impl BalanceOutcome {
    /// All, in their order.
    pub const ALL: [Self; 6] = [
        Self::Unavailable,
        Self::Unsettled,
        Self::NoTarget,
        Self::Constraints,
        Self::Budget,
        Self::Begun,
    ];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Unsettled => "unsettled",
            Self::NoTarget => "no_target",
            Self::Constraints => "constraints",
            Self::Budget => "budget",
            Self::Begun => "begun",
        }
    }
}
