//! The times and budgets of the cluster engine.

use harvestfs_placement::Lane;
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::placement::RepairLimits;

/// Replicas that a block must have to be written: a disk may fail before repair makes the others.
pub const MIN_WRITE_REPLICAS: u8 = 2;

/// Times, budgets and bounds; the defaults are for production. A cluster on one machine and tests
/// scale them down.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterOptions {
    /// Size of the largest block in bytes: what a server must have room for to be chosen.
    pub block_bytes: u64,
    /// Replicas that a block must have to be written while datanodes that could hold more of them are
    /// away.
    pub min_write_replicas: u8,
    /// A node is stale when it has been silent for this long: new blocks avoid it, readers try it last.
    pub stale_after_ms: u64,
    /// A node is dead when it has been silent for this long: its replicas count as lost. Reimages need
    /// no such wait: they show when the server registers.
    pub dead_after_ms: u64,
    /// How long repair waits for a node that announced that it stops; 0 to wait no longer than for any
    /// silent node.
    pub restart_wait_ms: u64,
    /// Safe mode (no repair, no deletion) ends when this share of the blocks has a replica.
    pub safe_mode_reported_share: f64,
    /// Safe mode ends at the latest this long after the start.
    pub safe_mode_max_ms: u64,
    /// Repair waits when more than this share of the nodes fell silent together.
    pub storm_share: f64,
    /// Nodes that died within this time of each other died together.
    pub storm_window_ms: u64,
    /// How long repair waits for the nodes of a storm before it considers them lost.
    pub storm_hold_ms: u64,
    /// Repairs that a node may take part in per `repair_window_ms`, as source and as target each.
    /// What was used of it is forgotten when the namenode restarts.
    pub repairs_per_window: u32,
    /// The same for blocks with one surviving replica. All repairs count against both budgets.
    pub urgent_repairs_per_window: u32,
    /// The same for replicas that are moved because they are misplaced. All repairs count against
    /// this budget, too, so that nothing is moved on a node that is busy with repairs.
    pub moves_per_window: u32,
    /// The same for all repairs that one volume serves as the source.
    pub repairs_per_volume_per_window: u32,
    /// Length of the window that budgets are counted in.
    pub repair_window_ms: u64,
    /// Repairs at a time per node, as source and as target each.
    pub repairs_in_flight_per_node: u32,
    /// A repair that takes this long has failed and is tried elsewhere.
    pub repair_timeout_ms: u64,
    /// Wait before the next attempt after a repair failed or no target was found.
    pub repair_retry_ms: u64,
    /// Whether diversity is watched: blocks below what they were promised are counted, and their
    /// replicas moved within the budget.
    pub watch_diversity: bool,
    /// Wait before the next attempt after no place was found for a misplaced replica; doubles with
    /// each attempt.
    pub move_retry_ms: u64,
    /// How long a strict block with two replicas or more waits for a server that keeps all
    /// constraints before it takes any: being one replica short for long is worse.
    pub strict_repair_wait_ms: u64,
    /// Replicas move to emptier servers when a volume is fuller than a server by more than this, in
    /// thousandths; 0 for never.
    pub balance_spread_permille: u32,
    /// How often such moves are looked for.
    pub balance_interval_ms: u64,
    /// How long before the deadline of a shrinking quota replicas are removed that could not be copied
    /// first. Several heartbeats, so that the datanode has time to delete them.
    pub shrink_margin_ms: u64,
    /// Wait before a block that lost a replica is repaired. The loss is certain by then; a wait
    /// only saves work when reimaged servers are expected to be refilled by other means.
    pub repair_delay_ms: u64,
    /// A full report that is not complete after this time is requested again.
    pub report_timeout_ms: u64,
    /// How often each volume is asked for a full report, so that no error in the tables lasts (as in
    /// HDFS).
    pub full_report_interval_ms: u64,
    /// How long a datanode may take to report a replica that its writer says is there.
    pub awaited_report_ms: u64,
    /// How long an unsealed replica of a sealed block may wait for its own seal to be reported
    /// before the namenode commands it.
    pub seal_grace_ms: u64,
    /// How long a lost block with incomplete replicas waits for a server that has all of it, before what the longest
    /// replica has counts as the block.
    pub salvage_delay_ms: u64,
    /// How long replicas beyond the wanted number stay, so that nodes that come and go, and repairs
    /// that overlap, can settle by themselves.
    pub excess_grace_ms: u64,
    /// How long replicas of unknown blocks are kept that a namenode which knew more may have allocated.
    pub quarantine_ms: u64,
    /// A command that is not confirmed within this time is sent again.
    pub command_retry_ms: u64,
    /// How often the namenode checks whether the grid has to be rebuilt.
    pub grid_interval_ms: u64,
    /// The same after a strict block found no place.
    pub grid_retry_ms: u64,
    /// Maximum number of blocks in one command to delete.
    pub deletes_per_command_max: usize,
    /// Replicas that one call of `tick` looks at in each of its tasks: bounds its time.
    pub work_per_tick: usize,
    /// Waiting blocks of each rank for which one call of `tick` tries to start a repair. They take
    /// turns, so that those whose sources are exhausted only cost time.
    pub repairs_tried_per_tick: usize,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            block_bytes: BLOCK_BYTES_MAX,
            min_write_replicas: MIN_WRITE_REPLICAS,
            stale_after_ms: 10_000,
            dead_after_ms: 30_000,
            restart_wait_ms: 120_000,
            safe_mode_reported_share: 0.999,
            safe_mode_max_ms: 30_000,
            storm_share: 0.3,
            storm_window_ms: 60_000,
            storm_hold_ms: 600_000,
            repairs_per_window: 30,
            urgent_repairs_per_window: 300,
            moves_per_window: 10,
            repairs_per_volume_per_window: 30,
            repair_window_ms: 3_600_000,
            repairs_in_flight_per_node: 2,
            repair_timeout_ms: 300_000,
            repair_retry_ms: 10_000,
            watch_diversity: true,
            move_retry_ms: 600_000,
            strict_repair_wait_ms: 600_000,
            balance_spread_permille: 100,
            balance_interval_ms: 10_000,
            shrink_margin_ms: 15_000,
            repair_delay_ms: 0,
            report_timeout_ms: 30_000,
            full_report_interval_ms: 6 * 3_600_000,
            awaited_report_ms: 30_000,
            seal_grace_ms: 5_000,
            salvage_delay_ms: 300_000,
            excess_grace_ms: 60_000,
            quarantine_ms: 7 * 24 * 3_600_000,
            command_retry_ms: 30_000,
            grid_interval_ms: 24 * 3_600_000,
            grid_retry_ms: 60_000,
            deletes_per_command_max: 1_000,
            work_per_tick: 10_000,
            repairs_tried_per_tick: 1_000,
        }
    }
}

impl ClusterOptions {
    /// The budgets of repair among these options.
    #[must_use]
    pub fn repair_limits(&self) -> RepairLimits {
        RepairLimits {
            window_ms: self.repair_window_ms,
            per_node: self.repairs_per_window,
            urgent_per_node: self.urgent_repairs_per_window,
            moves_per_node: self.moves_per_window,
            per_volume: self.repairs_per_volume_per_window,
            at_once: self.repairs_in_flight_per_node,
        }
    }

    /// Repairs per window that one volume serves as the source. Urgent repairs may exceed the normal
    /// budget of a volume by the same factor as that of a node, rounded down.
    pub(super) fn repairs_per_volume(&self, lane: Lane) -> u32 {
        let times = match lane {
            Lane::Urgent => self.urgent_repairs_per_window / self.repairs_per_window.max(1),
            Lane::Write | Lane::Repair => 1,
        };
        self.repairs_per_volume_per_window
            .saturating_mul(times.max(1))
    }

    pub(super) fn set_repair_limits(&mut self, limits: &RepairLimits) {
        let RepairLimits {
            window_ms,
            per_node,
            urgent_per_node,
            moves_per_node,
            per_volume,
            at_once,
        } = *limits;
        self.repair_window_ms = window_ms;
        self.repairs_per_window = per_node;
        self.urgent_repairs_per_window = urgent_per_node;
        self.moves_per_window = moves_per_node;
        self.repairs_per_volume_per_window = per_volume;
        self.repairs_in_flight_per_node = at_once;
    }
}
