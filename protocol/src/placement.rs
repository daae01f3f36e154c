//! Requests of operators about the placement of replicas, and changes to it.

use serde::{Deserialize, Serialize};

use crate::history::TenantName;
use crate::ids::{BlockId, StorageId};
use crate::node::ServerDescription;
use crate::types::StorageClass;

/// Requests about placement and repair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementRequest {
    /// Describes the policy, its grid, diversity, and the given blocks. Reply: [`PlacementReply::Report`].
    Report {
        /// Blocks to explain, at most [`crate::limits::BLOCKS_PER_REPORT_MAX`].
        blocks: Vec<BlockId>,
        /// A file whose blocks are to be explained, as an absolute path in the file system.
        file: Option<String>,
    },
    /// Replaces the policy until the configuration names another one. Reply: [`PlacementReply::Done`].
    SetPolicy(String),
    /// Changes the budgets of repair until the configuration changes; `None` leaves a budget as it is. Reply:
    /// [`PlacementReply::Repair`].
    Repair(RepairChange),
    /// Predicts the impact on data if these servers were reimaged now. Reply: [`PlacementReply::Impact`].
    Impact {
        /// Names of servers.
        servers: Vec<String>,
        /// Also copy their replicas elsewhere, and give them no new ones, until [`PlacementRequest::Release`], or
        /// until they are reimaged.
        hold: bool,
    },
    /// Ends what `Impact` with `hold` began. Reply: [`PlacementReply::Done`].
    Release {
        /// Names of servers.
        servers: Vec<String>,
    },
    /// Predicts the impact on data if these servers were reimaged together, until it is repaired. Reply:
    /// [`PlacementReply::Wave`].
    Wave {
        /// Names of servers.
        servers: Vec<String>,
    },
    /// Allows servers to be down for a while without their blocks being repaired; they get no new blocks meanwhile.
    /// Reply: [`PlacementReply::Maintenance`].
    StartMaintenance {
        /// Names of servers.
        servers: Vec<String>,
        /// Duration in milliseconds, at most [`crate::limits::MAINTENANCE_MAX`].
        for_ms: u64,
        /// Start even if blocks could not be read while the servers are down.
        force: bool,
    },
    /// Ends what `StartMaintenance` began. Reply: [`PlacementReply::Done`].
    EndMaintenance {
        /// Names of servers.
        servers: Vec<String>,
    },
    /// Limits the usage of a server's volumes to a quota, by a deadline. Reply: [`PlacementReply::Done`]; the
    /// heartbeats of the server show when it is in force.
    SetQuota {
        /// Name of the server.
        server: String,
        /// The volume; if `None`, all volumes share the new quota in proportion to their present ones.
        storage: Option<StorageId>,
        /// The quota in bytes.
        quota_bytes: u64,
        /// The deadline in milliseconds from now.
        deadline_ms: u64,
    },
    /// Reports how evenly servers are filled. A change is applied first, and holds until the configuration changes.
    /// Reply: [`PlacementReply::Balance`].
    Balance(Option<BalanceChange>),
}

/// Replies to [`PlacementRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementReply {
    /// Success without further data.
    Done,
    /// The policy, its grid, diversity, and blocks.
    Report(PlacementReport),
    /// The budgets of repair.
    Repair(RepairLimits),
    /// The predicted impact on data.
    Impact(ReimageImpact),
    /// Whether maintenance began, and which blocks cannot be read meanwhile: the `lost` ones.
    Maintenance {
        /// Whether it began.
        started: bool,
        /// The impact as if all servers in maintenance were reimaged.
        impact: ReimageImpact,
    },
    /// How evenly servers are filled.
    Balance(BalanceReport),
    /// The predicted outcome of a wave of reimages.
    Wave(WaveOutlook),
}

/// Where replicas are placed, and how well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementReport {
    /// Name of the policy.
    pub policy: String,
    /// The nine cells of the grid, row by row; then the tenants outside the grid.
    pub cells: Vec<CellReport>,
    /// Tenants that have servers, at most [`crate::limits::TENANTS_PER_REPLY_MAX`].
    pub tenants: Vec<TenantReport>,
    /// Sealed blocks by the number of the five constraints that hold among their replicas.
    pub blocks_by_score: Vec<u64>,
    /// Sealed blocks that violate a constraint that they were promised.
    pub misplaced_blocks: u64,
    /// Blocks that have a replica waiting to be moved.
    pub moves_waiting: u64,
    /// For each kind of failure domain, the one whose loss would leave the least space free. Empty without live
    /// servers.
    pub losses: Vec<DomainLoss>,
    /// The expected losses.
    pub risk: LossRisk,
    /// The requested blocks.
    pub blocks: Vec<BlockPlace>,
}

/// The kinds of failure domains.
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

    /// Its name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Rack => "rack",
            Self::Environment => "environment",
        }
    }

    /// Returns the name of the domain of this kind that contains a server.
    #[must_use]
    pub fn of(self, server: &ServerDescription) -> &str {
        match self {
            Self::Server => &server.name,
            Self::Rack => &server.rack,
            Self::Environment => &server.environment,
        }
    }
}

/// What the loss of a failure domain would cost: the bytes in use there have to be free elsewhere to repair
/// everything. It is not taken into account that placement constraints may make less of this free space usable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainLoss {
    /// The kind of the domain.
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

/// An upper bound on the expected number of lost blocks; for a single block, on the probability of its loss. Based on
/// history; see `docs/CYCLES.md`.
#[derive(Clone, Copy, Debug, Default, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpectedLosses(pub f64);

// Messages are compared with each other: equal means having the same bits.
impl PartialEq for ExpectedLosses {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for ExpectedLosses {}

/// The expected losses in a year from blocks whose replicas are all reimaged before one of them is repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossRisk {
    /// Blocks that are not empty.
    pub blocks: u64,
    /// Blocks that were examined, evenly spread over all; none before history was analysed.
    pub looked_at: u64,
    /// The bound for all blocks, extrapolated from those that were examined.
    pub in_a_year: ExpectedLosses,
    /// The examined blocks at most risk, the worst first.
    pub worst: Vec<(BlockId, ExpectedLosses)>,
}

/// A cell of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GridCell {
    /// 0 to 2; row 0 has the lowest peaks of CPU utilisation.
    pub row: u8,
    /// 0 to 2; column 0 is reimaged least often.
    pub column: u8,
}

/// The content of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellReport {
    /// The cell; `None` for the tenants outside the grid.
    pub cell: Option<GridCell>,
    /// Number of tenants.
    pub tenants: u32,
    /// Number of servers.
    pub servers: u32,
    /// Space in bytes, in whole blocks.
    pub capacity_bytes: u64,
    /// Free space in bytes, in whole blocks.
    pub free_bytes: u64,
}

/// A tenant and its place in the grid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// The tenant.
    pub tenant: TenantName,
    /// Its cell, unless it is outside the grid.
    pub cell: Option<GridCell>,
    /// Number of its servers.
    pub servers: u32,
    /// Whether there is history for it; if not, the next two values are those of the average server.
    pub has_history: bool,
    /// Reimages per 1,000 servers and month.
    pub reimages_per_1000: u32,
    /// Peak CPU utilisation of its average server, in thousandths of all cores.
    pub peak_cpu_permille: u16,
    /// Free space in bytes, in whole blocks.
    pub free_bytes: u64,
}

/// The placement of a block, and how good it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockPlace {
    /// The block.
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
    /// Number of replicas that the servers of the cluster can hold; fewer than requested when there are few servers.
    pub possible: u8,
    /// An upper bound on the probability that it is lost within a year; unknown before history was analysed.
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
    /// Its state: `sealed`, `open`, `short`, `corrupt`, `excess`, `deleting`, `gone`, `awaited`.
    pub state: String,
    /// Whether it is to leave this server once another replica exists.
    pub leaving: bool,
    /// What it shares with other good replicas: the name of the constraint, and the other server.
    pub shares: Vec<(String, String)>,
}

/// The budgets of repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairLimits {
    /// Length in milliseconds of the window in which the next four are counted.
    pub window_ms: u64,
    /// Repairs per node, counted separately as source and as target.
    pub per_node: u32,
    /// The same for blocks that are down to their last replica.
    pub urgent_per_node: u32,
    /// The same for replicas that are misplaced.
    pub moves_per_node: u32,
    /// Repairs that one volume serves.
    pub per_volume: u32,
    /// Simultaneous repairs per node, counted separately as source and as target.
    pub at_once: u32,
}

/// A change of [`RepairLimits`]; `None` leaves a limit as it is.
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
    /// Returns the limits after the change.
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

/// The impact on data if servers were reimaged now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReimageImpact {
    /// Replicas on the servers.
    pub replicas: u64,
    /// Blocks that would have no replica left.
    pub lost: u64,
    /// Blocks with several replicas that would have one left.
    pub exposed: u64,
    /// Blocks with fewer replicas on other servers than they want.
    pub waiting: u64,
    /// The first of the lost blocks.
    pub lost_blocks: Vec<BlockId>,
    /// The first of the exposed blocks.
    pub exposed_blocks: Vec<BlockId>,
    /// The first of the waiting blocks, while the servers are held.
    pub waiting_blocks: Vec<WaitingBlock>,
}

/// A block that is not yet complete without the servers in question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingBlock {
    /// The block.
    pub block: BlockId,
    /// Number of its replicas on other servers.
    pub elsewhere: u32,
    /// Replicas wanted.
    pub wanted: u32,
    /// The reason why it waits.
    pub why: String,
}

impl ReimageImpact {
    /// Whether nothing would be lost, and no block would be down to its last replica.
    #[must_use]
    pub fn is_safe(&self) -> bool {
        self.lost == 0 && self.exposed == 0
    }
}

/// The impact on data if servers were reimaged together, until everything is repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaveOutlook {
    /// The data that would be gone.
    pub impact: ReimageImpact,
    /// Live servers that would remain.
    pub servers_left: u32,
    /// Bytes in use on the reimaged servers.
    pub used_bytes: u64,
    /// Free bytes on the remaining servers.
    pub free_elsewhere_bytes: u64,
    /// How long repair takes, in seconds, if all remaining servers use their full budgets; none if no repair is
    /// possible.
    pub repair_s: Option<u64>,
    /// An upper bound on the expected losses until then; unknown before history was analysed, or if there is no repair.
    pub lost: Option<ExpectedLosses>,
}

/// Why a wave of reimages must not proceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaveObstacle {
    /// Blocks would be lost.
    Lost(u64),
    /// Blocks would be down to their last replica.
    LastReplica(u64),
    /// This many more bytes must be free.
    NoSpace(u64),
    /// It cannot be repaired within the given time.
    TooSlow,
    /// The expected losses exceed the limit.
    Risk(ExpectedLosses),
    /// History was not analysed yet.
    NoHistory,
}

impl WaveOutlook {
    /// Returns the obstacles to a wave that has to be repaired within `within_s` seconds and may lose at most
    /// `lost_max` blocks on average.
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
                // This also catches NaN.
                Some(lost) if lost.0 <= lost_max => None,
                Some(lost) => Some(WaveObstacle::Risk(lost)),
            },
        ];
        counted.into_iter().flatten().collect()
    }
}

/// How much fuller than a server a volume may be before replicas move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BalanceChange {
    /// The configured spread; refused when balancing is off in the configuration.
    Configured,
    /// This difference in thousandths of their quotas, at most 1,000; 0 turns balancing off.
    Spread(u32),
}

/// How evenly volumes are filled, which replicas move for that, and what prevents more moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalanceReport {
    /// Replicas move when a volume is fuller than a server by more than this, in thousandths of their quotas; 0 means
    /// never.
    pub spread_permille: u32,
    /// Why no replica is moved at present.
    pub pause: Option<BalancePause>,
    /// The budgets of repair, one of which is for moves.
    pub limits: RepairLimits,
    /// Moves of replicas in progress.
    pub moves_under_way: u64,
    /// Replicas moved since the namenode started.
    pub moves_done: u64,
    /// Moves that failed since then.
    pub moves_failed: u64,
    /// One entry per class of volumes; classes without volumes are left out.
    pub classes: Vec<ClassBalance>,
}

/// Why balancing moves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BalancePause {
    /// It is off.
    Off,
    /// The budget of moves is zero.
    NoBudget,
    /// The namenode has started, and is still learning the locations of blocks.
    Starting,
    /// Many datanodes fell silent together.
    Storm,
    /// Blocks wait for repair or for a better place: these have priority.
    Repairs,
}

/// How evenly the volumes of a class are filled. What is too full and what is too empty is judged by the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassBalance {
    /// The class.
    pub class: StorageClass,
    /// Live servers with volumes of the class.
    pub servers: u64,
    /// Utilisation of the emptiest server's quotas, in thousandths.
    pub least_permille: u64,
    /// Utilisation of the median server.
    pub median_permille: u64,
    /// Utilisation of the fullest server.
    pub most_permille: u64,
    /// Volumes that were too full when replicas to move were last searched for.
    pub volumes_too_full: u64,
    /// The fullest of these volumes.
    pub too_full: Vec<VolumeBalance>,
    /// Servers that are too empty.
    pub servers_too_empty: u64,
    /// The emptiest of these servers.
    pub too_empty: Vec<ServerFill>,
}

/// How full a server, or a volume of it, is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFill {
    /// Name of the server.
    pub server: String,
    /// The cell of its tenant, unless that is outside the grid.
    pub cell: Option<GridCell>,
    /// Usage of the quota in thousandths.
    pub fill_permille: u64,
}

/// A volume that is too full, and what balancing does about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeBalance {
    /// Its server, and how full it is.
    pub server: ServerFill,
    /// The volume.
    pub storage: StorageId,
    /// The outcome of the search for a replica to move.
    pub outcome: BalanceOutcome,
}

/// The outcome of the search for a replica of a volume to move. Of several, the last one in this order is reported:
/// it came closest to a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BalanceOutcome {
    /// Its server is busy or silent.
    Unavailable,
    /// The examined blocks are being written, repaired or moved.
    Unsettled,
    /// The emptier servers are busy, take part in enough repairs, have no space, or already have a replica.
    NoTarget,
    /// Elsewhere, the block would violate a placement constraint, or be with a tenant that is reimaged more often.
    Constraints,
    /// A server that would take part has used up the budget of moves.
    Budget,
    /// The move of a replica began.
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
