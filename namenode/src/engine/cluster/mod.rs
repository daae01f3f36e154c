//! The soft state of the namenode: which nodes are alive, which replicas they hold, and what has to be
//! repaired or removed. None of it is journaled; after a start it is rebuilt from registrations and
//! block reports.
//!
//! Pure: time is passed in as `now_ms` (monotonic milliseconds), randomness as a generator, and work is
//! handed out as commands for heartbeat replies. The same calls give the same state.
//!
//! - `membership`: registration, heartbeats, liveness, safe mode, storms;
//! - `grid`: the policy and when its grid is rebuilt;
//! - `blocks`: changes of blocks in the namespace, placement, locations for readers;
//! - `outlook`: which of the replicas and constraints that blocks ask for they can get;
//! - `reports`: what datanodes report about their replicas;
//! - `doubts`: what clients complain about;
//! - `settle`: what follows for a block from the state of its replicas;
//! - `owners`: moving data off servers whose owners reimage them or want space back;
//! - `maintenance`: servers that may be away for a while;
//! - `places`: where blocks are and why, for operators;
//! - `moves`: diversity, and replicas that have to leave their server or are misplaced;
//! - `balance`: evening out how full servers are;
//! - `repair`: re-creating lost replicas within the budgets;
//! - `prefetch`: prefetching memory before it is needed;
//! - `happenings`: events for observers;
//! - `risk`: which blocks are at risk of being lost, and why they are not repaired yet;
//! - `safety`: an upper bound on the number of blocks lost by chance;
//! - `salvage`: blocks whose end is lost;
//! - `quarantine`: replicas of unknown blocks that may be in use on another timeline;
//! - `removal`: removing excess, bad and unknown replicas; commands.
//!
//! Invariants:
//! - A replica counts only while its volume is registered, healthy and on a live node, and only if
//!   it has all committed bytes.
//! - A good replica is chosen for removal only while the wanted number of others remains, each reported
//!   since its node registered, by a node heard from within [`ClusterOptions::stale_after_ms`]. The
//!   same is checked again when the command is sent. When an owner takes space back by a deadline, one
//!   such other replica is enough.
//! - Once a command to remove a replica has been sent, the replica never counts again, even if it is
//!   reported; but it is read from and copied when nothing better is left. It may count again once its
//!   datanode has registered again, and so dropped the command, unless the replica was bad.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use harvestfs_placement::{Policy, View};
use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use rand::Rng;
use rustc_hash::{FxHashMap, FxHashSet};

mod balance;
mod blocks;
mod budget;
mod doubts;
mod faults;
mod grid;
mod happenings;
mod maintenance;
mod membership;
mod moves;
mod node;
mod options;
mod outlook;
mod owners;
mod places;
mod prefetch;
mod quarantine;
mod queue;
mod removal;
mod repair;
mod reports;
mod risk;
mod safety;
mod salvage;
mod settle;
mod status;
mod table;
mod takeover;
#[cfg(test)]
mod tests;

pub use faults::{BlockFault, FaultReason, OrphanReplica};
pub use happenings::{Happening, RepairEnd};
pub use options::{ClusterOptions, MIN_WRITE_REPLICAS};
pub use quarantine::Quarantined;
pub use repair::Repair;
pub use risk::BlockAtRisk;
pub use status::{ClusterSummary, FsckCounts, NodeActivity};

use balance::Balance;
use blocks::Writing;
use grid::GridState;
use happenings::Happenings;
use maintenance::Maintenance;
use membership::Storm;
use node::Node;
use outlook::Demands;
use quarantine::{Allocated, Quarantine};
use queue::RepairQueue;
use repair::InFlight;
use safety::Foretold;
use salvage::Salvage;
pub use salvage::ShortenedBlock;
use settle::Totals;
use table::{NodeIx, Slot, StorageIx, Table};
use takeover::Takeover;

/// Why an event of a datanode was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The node has not registered since the namenode started, or was declared dead since; it must
    /// register (again).
    #[error("node {0} is not registered")]
    NotRegistered(NodeId),
    /// The volume was not named at registration; the node must register again.
    #[error("volume {0} was not registered")]
    UnknownStorage(StorageId),
    /// A part of a block report is missing; a new report has been requested.
    #[error("part {got} of a block report came, part {expected} was expected")]
    ReportOutOfOrder {
        /// The number of the part that was expected.
        expected: u32,
        /// The number of the part that arrived.
        got: u32,
    },
}

/// The cluster engine: nodes, replicas, liveness and repair.
pub struct Cluster {
    options: ClusterOptions,
    policy: Box<dyn Policy>,
    view: View,
    /// How reimages coincide; `None` until history has been analysed.
    foretold: Option<Foretold>,
    grid: GridState,
    demands: Demands,
    /// The latest time of any call.
    now_ms: u64,
    started_ms: u64,

    /// In the same order as the servers of `view`.
    nodes: Vec<Node>,
    storage_indexes: FxHashMap<StorageId, StorageIx>,
    table: Table,
    totals: Totals,

    /// Blocks whose replicas their writer vouches for, until the nodes have reported them.
    writing: FxHashMap<Slot, Writing>,
    /// Sealed blocks that may have unsealed or unreported replicas: (when to look, block).
    seals: VecDeque<(u64, BlockId)>,
    seals_queued: FxHashSet<Slot>,
    /// Unsealed blocks that have one replica left of several: see [`Cluster::exposed`].
    exposed: BTreeSet<BlockId>,

    queue: RepairQueue,
    in_flight: FxHashMap<Slot, InFlight>,
    /// When repairs under way time out, in order: (when, block, target).
    deadlines: VecDeque<(u64, Slot, NodeIx)>,
    repairs_done: u64,
    repairs_failed: u64,
    moves_done: u64,

    /// Nodes for which there are new commands.
    commanded: Vec<NodeIx>,
    /// Nodes whose replicas are to be copied elsewhere, and that get no new ones.
    draining: FxHashSet<NodeIx>,
    /// Nodes that may be away, and until when.
    maintenance: FxHashMap<NodeIx, Maintenance>,
    balance: Balance,
    /// Replicas that were chosen to leave their volume because its owner wants the space back.
    victims: FxHashSet<(Slot, NodeIx)>,
    /// When nodes whose budget for repairs is used up can take part again: (when, node).
    reopening: BinaryHeap<Reverse<(u64, NodeIx)>>,

    /// Blocks with too many replicas: (when to look, block).
    excess: VecDeque<(u64, BlockId)>,
    /// Lost volumes whose replicas have not all been taken out of the tables yet.
    gone: VecDeque<StorageIx>,

    allocated: Allocated,
    quarantine: Quarantine,
    salvage: Salvage,
    /// While set, nothing is repaired, moved or removed, and no commands are given.
    recovering: bool,
    takeover: Takeover,

    safe_mode: bool,
    /// The next block to settle while all blocks are settled again: after safe mode, or when what they
    /// are due has changed.
    settle_from: Option<Slot>,
    /// Losses that were known in safe mode, and have not been noted since, are of blocks in slots from
    /// here on; the highest number when there are none.
    unnoted_from: Slot,
    storm: Storm,
    next_scan_ms: u64,
    happenings: Happenings,
}

impl Cluster {
    /// Creates an empty cluster in safe mode, whose time limit counts from `now_ms`.
    #[must_use]
    pub fn new(options: ClusterOptions, policy: Box<dyn Policy>, now_ms: u64) -> Self {
        Self {
            options,
            policy,
            view: View::new(),
            foretold: None,
            grid: GridState::default(),
            demands: Demands::default(),
            now_ms,
            started_ms: now_ms,
            nodes: Vec::new(),
            storage_indexes: FxHashMap::default(),
            table: Table::default(),
            totals: Totals::default(),
            writing: FxHashMap::default(),
            seals: VecDeque::new(),
            seals_queued: FxHashSet::default(),
            exposed: BTreeSet::new(),
            queue: RepairQueue::default(),
            in_flight: FxHashMap::default(),
            deadlines: VecDeque::new(),
            repairs_done: 0,
            repairs_failed: 0,
            moves_done: 0,
            commanded: Vec::new(),
            draining: FxHashSet::default(),
            maintenance: FxHashMap::default(),
            balance: Balance::default(),
            victims: FxHashSet::default(),
            reopening: BinaryHeap::new(),
            excess: VecDeque::new(),
            gone: VecDeque::new(),
            allocated: Allocated::default(),
            quarantine: Quarantine::default(),
            salvage: Salvage::default(),
            recovering: false,
            takeover: Takeover::default(),
            safe_mode: true,
            settle_from: None,
            unnoted_from: 0,
            storm: Storm::default(),
            next_scan_ms: now_ms,
            happenings: Happenings::default(),
        }
    }

    /// Runs the periodic work: liveness, safe mode, repair, removal of excess replicas. To be called
    /// about every 100 ms; does a bounded amount of work.
    pub fn tick(&mut self, now_ms: u64, rng: &mut dyn Rng) {
        self.advance(now_ms);
        self.expire_maintenance();
        self.scan_nodes();
        self.place_new_tenants();
        self.check_grid();
        self.refresh_demands();
        self.work_off_gone_storages();
        self.update_safe_mode();
        self.settle_after_safe_mode();
        self.check_seals();
        self.forget_freed();
        self.expire_repairs();
        self.reopen_nodes();
        if !self.safe_mode && !self.is_storm() && !self.recovering {
            self.end_quarantine();
            self.salvage_lost();
            self.choose_excess();
            self.schedule_repairs(rng);
            self.balance(rng);
        }
        let (repairs, deadlines) = (self.in_flight.len(), self.deadlines.len());
        assert!(
            repairs <= deadlines,
            "{repairs} repairs are under way, {deadlines} have a deadline"
        );
        let (queued, seals) = (self.seals_queued.len(), self.seals.len());
        assert!(
            queued <= seals,
            "{queued} blocks wait to be sealed, {seals} times to look at them"
        );
    }

    /// Advances the time, which never runs backwards here, even if a caller's clock does.
    fn advance(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// Milliseconds since an event of the engine, which cannot lie in the future.
    #[track_caller]
    fn ms_since(&self, at_ms: u64) -> u64 {
        match self.now_ms.checked_sub(at_ms) {
            Some(ms) => ms,
            None => panic!("it happened at {at_ms} ms, but now are {} ms", self.now_ms),
        }
    }

    /// Nodes and the servers of the view have the same indexes.
    fn node_index(&self, node: NodeId) -> Option<NodeIx> {
        Some(self.view.index_of(node)? as NodeIx)
    }
}
