//! Evens out how full servers are. Replicas move from the fullest volumes to the emptiest servers that
//! can have them without a block being spread worse, within the budget for moves, and only while no
//! other repair or move is due.
//!
//! A move is a repair whose source gives its replica up afterwards. No move is begun that would leave
//! the target fuller than the source, so the differences only become smaller.

mod report;

use harvestfs_placement::Lane;
use harvestfs_protocol::placement::{BalanceOutcome, BalancePause};
use harvestfs_protocol::types::StorageClass;
use rand::{Rng, RngExt};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::repair::Waited;
use super::table::{NodeIx, ReplicaState, Slot, Storage, StorageIx};
use super::{Cluster, RepairEnd};

/// Blocks of a volume that one round looks at to find one that may move.
const BLOCKS_TRIED: usize = 32;
/// Servers that are tried for one block, the emptiest first.
const TARGETS_TRIED: usize = 16;

const CLASSES: [StorageClass; 3] = [StorageClass::Disk, StorageClass::Ssd, StorageClass::Memory];

/// The state of balancing, and its results.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// Replicas on their way to emptier servers: block, and the node that gives its replica up.
    pub(super) moving: FxHashMap<Slot, NodeIx>,
    next_ms: u64,
    /// The volumes that were too full in the last round, by class and the fullest first, and the
    /// outcome for each; empty while balancing pauses.
    last_round: Vec<(StorageIx, BalanceOutcome)>,
    pub(super) moves_done: u64,
    moves_failed: u64,
}

impl Balance {
    /// The number of volumes of the last round with each outcome.
    pub(super) fn too_full(&self) -> [u64; BalanceOutcome::ALL.len()] {
        let mut counts = [0; BalanceOutcome::ALL.len()];
        for (_, outcome) in &self.last_round {
            counts[*outcome as usize] += 1;
        }
        counts
    }
}

/// How full something is, as reported by datanodes, which may report any numbers.
#[derive(Clone, Copy, Debug, Default)]
struct Fill {
    used_bytes: u64,
    quota_bytes: u64,
}

impl Fill {
    fn of(volume: &Storage) -> Self {
        Self {
            used_bytes: volume.status.used_bytes,
            quota_bytes: volume.status.quota_bytes,
        }
    }

    fn add(&mut self, other: Self) {
        self.used_bytes = self.used_bytes.saturating_add(other.used_bytes);
        self.quota_bytes = self.quota_bytes.saturating_add(other.quota_bytes);
    }

    /// The used share in thousandths; full if there is no quota.
    fn permille(self) -> u64 {
        let used = u128::from(self.used_bytes) * 1_000;
        let permille = used.checked_div(u128::from(self.quota_bytes));
        permille.map_or(1_000, |it| u64::try_from(it).unwrap_or(u64::MAX))
    }

    fn with(self, bytes: u64) -> Self {
        Self {
            used_bytes: self.used_bytes.saturating_add(bytes),
            ..self
        }
    }

    fn without(self, bytes: u64) -> Self {
        Self {
            used_bytes: self.used_bytes.saturating_sub(bytes),
            ..self
        }
    }
}

impl Cluster {
    /// How full the fullest and the emptiest server are, in thousandths; `None` without servers that
    /// take part.
    pub(super) fn fill_permille(&self) -> Option<(u64, u64)> {
        let mut nodes: FxHashMap<NodeIx, Fill> = FxHashMap::default();
        for (home, storage) in self.table.storages_with_homes() {
            if home.usable {
                nodes.entry(home.node).or_default().add(Fill::of(storage));
            }
        }
        let fills = || nodes.values().map(|fill| fill.permille());
        Some((fills().max()?, fills().min()?))
    }

    /// Sets when replicas move from now on: when a volume is fuller than a server by more than this, in
    /// thousandths of their quotas; 0 for never.
    pub fn set_balance_spread(&mut self, now_ms: u64, permille: u32) {
        self.advance(now_ms);
        self.options.balance_spread_permille = permille;
        self.balance.next_ms = self.now_ms;
    }

    /// Begins the moves of a round, when one is due.
    pub(super) fn balance(&mut self, rng: &mut dyn Rng) {
        if self.now_ms < self.balance.next_ms {
            return;
        }
        self.balance.last_round.clear();
        if self.balance_pause().is_some() {
            return;
        }
        self.balance.next_ms = self.now_ms + self.options.balance_interval_ms;
        for class in CLASSES {
            self.balance_class(class, rng);
        }
    }

    /// Why balancing pauses; `None` if it does not.
    fn balance_pause(&self) -> Option<BalancePause> {
        if self.options.balance_spread_permille == 0 {
            Some(BalancePause::Off)
        } else if self.options.moves_per_window == 0 {
            Some(BalancePause::NoBudget)
        } else if self.safe_mode {
            Some(BalancePause::Starting)
        } else if self.is_storm() {
            Some(BalancePause::Storm)
        } else if self.queue.has_due() {
            Some(BalancePause::Repairs)
        } else {
            None
        }
    }

    /// Begins moves from the volumes of a class. They are compared with servers by the volumes of that
    /// class.
    fn balance_class(&mut self, class: StorageClass, rng: &mut dyn Rng) {
        let spread_permille = u64::from(self.options.balance_spread_permille);
        let mut volumes: Vec<(StorageIx, Fill)> = Vec::new();
        let mut nodes: FxHashMap<NodeIx, Fill> = FxHashMap::default();
        for (index, (home, storage)) in self.table.storages_with_homes().enumerate() {
            if !home.usable || !home.inventoried || storage.class() != class {
                continue;
            }
            let fill = Fill::of(storage);
            volumes.push((index as StorageIx, fill));
            nodes.entry(home.node).or_default().add(fill);
        }
        self.count_moves(&mut volumes, &mut nodes);
        volumes.sort_by_key(|&(storage, fill)| (std::cmp::Reverse(fill.permille()), storage));
        for (volume, fill) in volumes {
            let mut targets: Vec<(u64, NodeIx)> = nodes
                .iter()
                .map(|(&node, fill)| (fill.permille(), node))
                .collect();
            targets.sort_unstable();
            let gap = |&(emptiest, _): &(u64, NodeIx)| fill.permille().saturating_sub(emptiest);
            if targets.first().is_none_or(|it| gap(it) <= spread_permille) {
                // The volumes that follow are emptier.
                return;
            }
            targets.retain(|it| gap(it) > spread_permille);
            let outcome = self.move_one(volume, fill, &targets, &mut nodes, rng);
            self.balance.last_round.push((volume, outcome));
        }
    }

    /// Counts replicas on their way as if they had arrived, and those that are to leave as if they had
    /// left.
    fn count_moves(&self, volumes: &mut [(StorageIx, Fill)], nodes: &mut FxHashMap<NodeIx, Fill>) {
        for (&slot, &from) in &self.balance.moving {
            let bytes = u64::from(self.table.known(slot).required_bytes);
            if let Some(fill) = nodes.get_mut(&from) {
                *fill = fill.without(bytes);
            }
            for (volume, fill) in volumes.iter_mut() {
                if self.table.home(*volume).node == from
                    && self.table.replica_in(slot, *volume).is_some()
                {
                    *fill = fill.without(bytes);
                }
            }
            if let Some(coming) = self.in_flight.get(&slot)
                && let Some(fill) = nodes.get_mut(&coming.target)
            {
                *fill = fill.with(bytes);
            }
        }
    }

    /// Begins the move of one block from a volume, if one can move. Returns the outcome that came
    /// nearest to a move, of all that was tried.
    fn move_one(
        &mut self,
        volume: StorageIx,
        fill: Fill,
        targets: &[(u64, NodeIx)],
        nodes: &mut FxHashMap<NodeIx, Fill>,
        rng: &mut dyn Rng,
    ) -> BalanceOutcome {
        let storage = &self.table.storages[volume as usize];
        let from = self.table.home(volume).node;
        let blocks = storage.blocks();
        if !self.nodes[from as usize].is_available() {
            return BalanceOutcome::Unavailable;
        }
        if blocks.is_empty() {
            return BalanceOutcome::Unsettled;
        }
        let first = rng.random_range(0..blocks.len());
        let candidates: SmallVec<[Slot; BLOCKS_TRIED]> = (0..blocks.len().min(BLOCKS_TRIED))
            .map(|step| blocks[(first + step) % blocks.len()])
            .collect();
        let mut nearest = BalanceOutcome::Unsettled;
        for slot in candidates {
            let Some((holders, bytes)) = self.movable(slot, volume) else {
                continue;
            };
            for &(_, target) in targets.iter().take(TARGETS_TRIED) {
                let target_fill = nodes[&target];
                let levels = fill.without(bytes).permille() >= target_fill.with(bytes).permille();
                let outcome = if levels {
                    self.try_move(slot, &holders, from, target)
                } else {
                    BalanceOutcome::NoTarget
                };
                nearest = nearest.max(outcome);
                if outcome == BalanceOutcome::Begun {
                    nodes.insert(target, target_fill.with(bytes));
                    return outcome;
                }
            }
        }
        nearest
    }

    /// The holders of a block and its length in bytes, if it has a sealed replica on the volume and
    /// needs no repair or removal.
    fn movable(&self, slot: Slot, volume: StorageIx) -> Option<(SmallVec<[NodeIx; 8]>, u64)> {
        let block = self.table.get(slot)?;
        let index = self.table.replica_in(slot, volume)?;
        let sealed = block
            .replicas
            .iter()
            .all(|it| it.state == ReplicaState::Sealed);
        let tally = self.tally(slot, block);
        let is_whole = block.sealed
            && sealed
            && tally.holders.len() == block.wanted()
            && tally.leaving == 0
            && block.replicas.len() == block.wanted();
        let is_free = !self.in_flight.contains_key(&slot) && self.queue.get(slot).is_none();
        let is_here = block.replicas[index].state == ReplicaState::Sealed;
        (is_whole && is_free && is_here && block.required_bytes > 0)
            .then(|| (tally.holders, u64::from(block.required_bytes)))
    }

    /// Begins a move if the target can have the replica instead of `from`, without breaking a
    /// constraint that holds and on no tenant that is reimaged more often, and if the budgets have
    /// room.
    fn try_move(
        &mut self,
        slot: Slot,
        holders: &[NodeIx],
        from: NodeIx,
        target: NodeIx,
    ) -> BalanceOutcome {
        let class = self.table.known(slot).rules.class;
        let is_open = |server| self.view.is_open(server, Lane::Repair, class);
        if holders.contains(&target) || !self.view.server_at(target as usize).is_some_and(is_open) {
            return BalanceOutcome::NoTarget;
        }
        let moved = |&node: &NodeIx| if node == from { target } else { node };
        let before = self.ids(holders.iter().copied());
        let after = self.ids(holders.iter().map(moved));
        if !self.policy.keeps(&self.view, &before, &after) {
            return BalanceOutcome::Constraints;
        }
        let limit = self.options.moves_per_window;
        if self.nodes[target as usize].as_target.used(self.now_ms) >= limit {
            return BalanceOutcome::Budget;
        }
        let volume_limit = self.options.repairs_per_volume(Lane::Repair);
        let Some(source) = self.choose_source(slot, limit, volume_limit) else {
            return BalanceOutcome::Budget;
        };
        let other = self.balance.moving.insert(slot, from);
        assert!(
            other.is_none(),
            "slot {slot} moves twice, from {other:?} and {from}"
        );
        assert!(
            holders.contains(&from),
            "slot {slot} moves from {from}, not from {holders:?}"
        );
        let waited = Waited {
            since_ms: self.now_ms,
            attempts: 0,
        };
        self.start_repair(slot, source, target, waited, true);
        BalanceOutcome::Begun
    }

    /// A repair or move ended; counts it if it was for balance.
    pub(super) fn count_balance_move(&mut self, slot: Slot, end: RepairEnd) {
        if self.balance.moving.contains_key(&slot) {
            match end {
                RepairEnd::Done => self.balance.moves_done += 1,
                RepairEnd::Failed => self.balance.moves_failed += 1,
            }
        }
    }

    /// Ends a move that failed, or whose source has given up its replica or has to keep it.
    pub(super) fn end_idle_move(&mut self, slot: Slot) {
        if self.balance.moving.is_empty()
            || self.in_flight.contains_key(&slot)
            || !self.balance.moving.contains_key(&slot)
        {
            return;
        }
        let is_over = self
            .table
            .get(slot)
            .is_none_or(|block| self.holders(slot, block).len() <= block.wanted());
        if is_over {
            self.balance.moving.remove(&slot);
        }
    }
}
