//! Re-creating lost replicas, within the budgets.

use harvestfs_placement::{Lane, Request};
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::types::Durability;
use rand::Rng;
use smallvec::SmallVec;

use super::happenings::RepairEnd;
use super::prefetch::PREFETCHED;
use super::queue::{Entry, LEAVING, MISPLACED, RANKS, URGENT_RANKS};
use super::table::{NodeIx, ReplicaState, Slot, StorageIx};
use super::{Cluster, Happening};

/// After a failure the wait doubles, up to this many times.
const BACKOFF_DOUBLINGS_MAX: u8 = 6;
/// The same for a misplaced replica that finds no better place.
const MOVE_DOUBLINGS_MAX: u8 = 3;
/// Sources in a command to a target: the one that the repair is charged to, and fallbacks for when that
/// one fails.
const SOURCES_MAX: usize = 3;

/// A repair under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) source: NodeIx,
    pub(super) target: NodeIx,
    deadline_ms: u64,
    /// When the block began to wait.
    pub(super) since_ms: u64,
    attempts: u8,
    /// The block had enough replicas, but not in the right places.
    pub(super) is_move: bool,
}

/// How long a block waited for its repair, and how often it was tried.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waited {
    /// When it began to wait.
    pub(super) since_ms: u64,
    /// Attempts that failed.
    pub(super) attempts: u8,
}

/// A repair that a datanode is to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The block.
    pub block: BlockId,
    /// Its committed length in bytes.
    pub length_bytes: u64,
    /// Where to copy it from, best first.
    pub sources: SmallVec<[NodeId; SOURCES_MAX]>,
}

impl Cluster {
    /// Starts repairs: blocks with the fewest survivors first, and among these the ones whose survivors
    /// are most at risk; then blocks with replicas that have to leave their server; then blocks with
    /// misplaced ones. Within a rank blocks take turns, so that one whose sources are exhausted does
    /// not stop the others.
    pub(super) fn schedule_repairs(&mut self, rng: &mut dyn Rng) {
        self.queue.wake(self.now_ms, self.options.work_per_tick);
        let without_moves = self.options.moves_per_window == 0;
        for rank in 0..if without_moves { MISPLACED } else { RANKS } {
            let lane = if rank < URGENT_RANKS {
                Lane::Urgent
            } else {
                Lane::Repair
            };
            let turns = self.queue.due_len(rank);
            for turn in 0..turns.min(self.options.repairs_tried_per_tick) {
                if self.view.open_servers(lane, None) == 0 {
                    break;
                }
                if turn % PREFETCHED == 0 {
                    self.prefetch_turns(rank);
                }
                let Some(entry) = self.queue.next(rank) else {
                    break;
                };
                self.try_repair(&entry, rank, lane, rng);
            }
        }
    }

    fn try_repair(&mut self, entry: &Entry, rank: usize, lane: Lane, rng: &mut dyn Rng) {
        let slot = entry.slot;
        let misfit = if rank == MISPLACED {
            let Some(misfit) = self.misfit(slot, entry.attempts) else {
                self.settle(slot);
                return;
            };
            Some(misfit)
        } else {
            None
        };
        let limit = match lane {
            Lane::Urgent => self.options.urgent_repairs_per_window,
            _ if rank == MISPLACED => self.options.moves_per_window,
            Lane::Write | Lane::Repair => self.options.repairs_per_window,
        };
        let volume_limit = self.options.repairs_per_volume(lane);
        let Some((source, volume)) = self.choose_source(slot, limit, volume_limit) else {
            self.wait_for_sources(slot, limit, volume_limit);
            return;
        };
        let Some(target) = self.find_target(entry, rank, misfit, lane, rng) else {
            // Servers that merely have enough repairs in flight will be open again soon.
            let hopeless = rank == MISPLACED
                && self
                    .find_target(entry, rank, misfit, Lane::Write, rng)
                    .is_none();
            self.note_no_target(entry, rank, hopeless);
            return;
        };
        if rank == MISPLACED && self.waits_for_target(slot, target) {
            return;
        }
        self.start_repair(
            slot,
            (source, volume),
            target,
            Waited {
                since_ms: entry.since_ms,
                attempts: entry.attempts,
            },
            rank >= LEAVING,
        );
    }

    /// Starts to copy a block, and charges the budgets of its nodes and of the source volume.
    pub(super) fn start_repair(
        &mut self,
        slot: Slot,
        (source, volume): (NodeIx, StorageIx),
        target: NodeIx,
        waited: Waited,
        is_move: bool,
    ) {
        // The target is accessed last.
        self.prefetch_target(target);
        assert_ne!(
            source, target,
            "the node of a block that is copied to itself"
        );
        let in_flight = InFlight {
            source,
            target,
            deadline_ms: self.now_ms + self.options.repair_timeout_ms,
            since_ms: waited.since_ms,
            attempts: waited.attempts,
            is_move,
        };
        self.deadlines
            .push_back((in_flight.deadline_ms, slot, target));
        let other = self.in_flight.insert(slot, in_flight);
        assert!(
            other.is_none(),
            "slot {slot} is repaired twice: {other:?}, {in_flight:?}"
        );
        self.queue.remove(slot);
        let from = &mut self.nodes[source as usize];
        from.outgoing += 1;
        from.as_source.charge(self.now_ms);
        let volume = &mut self.table.storages[volume as usize];
        volume.as_source.charge(self.now_ms);
        let to = &mut self.nodes[target as usize];
        to.incoming.push(slot);
        to.replicate.push(slot);
        to.as_target.charge(self.now_ms);
        self.command(target);
        self.refresh_offer(target);
    }

    /// Nodes to copy a block from, and their volumes: those with good replicas; when there is none,
    /// those with replicas that may be good.
    pub(super) fn sources(&self, slot: Slot) -> SmallVec<[(NodeIx, StorageIx); 8]> {
        let (mut good, mut last_resort) = (SmallVec::new(), SmallVec::new());
        for replica in &self.table.known(slot).replicas {
            let storage = self.table.home(replica.storage);
            match replica.state {
                _ if !storage.usable => {}
                ReplicaState::Sealed | ReplicaState::Open | ReplicaState::Excess => {
                    good.push((storage.node, replica.storage));
                }
                ReplicaState::Corrupt | ReplicaState::Deleting => {
                    last_resort.push((storage.node, replica.storage));
                }
                ReplicaState::Unconfirmed | ReplicaState::Short => {}
            }
        }
        if good.is_empty() { last_resort } else { good }
    }

    /// The least loaded node, and its volume, that has room in its budgets to serve a block.
    pub(super) fn choose_source(
        &mut self,
        slot: Slot,
        limit: u32,
        volume_limit: u32,
    ) -> Option<(NodeIx, StorageIx)> {
        let now_ms = self.now_ms;
        let at_once = self.options.repairs_in_flight_per_node;
        let mut candidates: SmallVec<[_; 8]> = SmallVec::new();
        for (index, storage) in self.sources(slot) {
            let node = &mut self.nodes[index as usize];
            let used = node.as_source.used(now_ms);
            if node.is_available() && node.outgoing < at_once && used < limit {
                candidates.push((node.outgoing, used, index, storage));
            }
        }
        candidates.sort_unstable();
        // Volumes last: they are elsewhere in memory, and the first one nearly always qualifies.
        let found = candidates.into_iter().find(|&(_, _, _, storage)| {
            let volume = &mut self.table.storages[storage as usize];
            volume.as_source.used(now_ms) < volume_limit
        });
        found.map(|(_, _, index, storage)| (index, storage))
    }

    /// Delays a block that has no free source. When all available sources, or their volumes, have used
    /// up their budgets, the block need not be tried before one of them has room again.
    fn wait_for_sources(&mut self, slot: Slot, limit: u32, volume_limit: u32) {
        let now_ms = self.now_ms;
        // With a limit of zero, the count may have nothing to fall from; the block is tried again when
        // the limit is raised.
        let retry_ms = now_ms + self.options.repair_retry_ms;
        let mut first_ms = u64::MAX;
        let mut is_one_away = false;
        for (index, storage) in self.sources(slot) {
            let node = &mut self.nodes[index as usize];
            let volume = &mut self.table.storages[storage as usize];
            if !node.is_available() {
                is_one_away |= node.as_source.used(now_ms) < limit
                    && volume.as_source.used(now_ms) < volume_limit;
                continue;
            }
            let budgets = [
                (&mut node.as_source, limit),
                (&mut volume.as_source, volume_limit),
            ];
            let mut free_ms: Option<u64> = None;
            for (budget, limit) in budgets {
                if budget.used(now_ms) >= limit {
                    free_ms = free_ms.max(Some(budget.falls_at_ms().unwrap_or(retry_ms)));
                }
            }
            let Some(free_ms) = free_ms else {
                // It only serves enough repairs at the moment.
                return;
            };
            first_ms = first_ms.min(free_ms);
        }
        if first_ms < u64::MAX {
            if is_one_away {
                // It may be back soon, with room.
                first_ms = first_ms.min(retry_ms);
            }
            self.queue.delay(slot, first_ms, |_| {});
        }
    }

    /// Finds a server for another replica. Constraints are given up only when a block has a single
    /// replica left, or has waited for too long; a misplaced replica is not moved to where it would be
    /// misplaced again.
    fn find_target(
        &mut self,
        entry: &Entry,
        rank: usize,
        misfit: Option<NodeIx>,
        lane: Lane,
        rng: &mut dyn Rng,
    ) -> Option<NodeIx> {
        let rules = self.table.get(entry.slot)?.rules;
        let found = self.choose_target(entry, misfit, lane, rules.durability, rng);
        if rank == MISPLACED {
            return found;
        }
        let since_ms = entry.unplaced_since_ms.unwrap_or(self.now_ms);
        let waited_ms = self.ms_since(since_ms);
        if found.is_some()
            || rules.durability == Durability::Space
            || (lane != Lane::Urgent && waited_ms < self.options.strict_repair_wait_ms)
        {
            return found;
        }
        self.choose_target(entry, misfit, lane, Durability::Space, rng)
    }

    /// Whether the target of a move has used up its budget for moves; then the block waits until the
    /// target may receive again.
    fn waits_for_target(&mut self, slot: Slot, target: NodeIx) -> bool {
        let node = &mut self.nodes[target as usize];
        let used = node.as_target.used(self.now_ms);
        if used < self.options.moves_per_window {
            return false;
        }
        let Some(free_ms) = node.as_target.falls_at_ms() else {
            panic!(
                "node {} received {used} repairs, which never leave its budget",
                node.id
            );
        };
        self.queue.delay(slot, free_ms, |_| {});
        true
    }

    fn note_no_target(&mut self, entry: &Entry, rank: usize, hopeless: bool) {
        if rank < LEAVING {
            self.make_way(entry.slot);
        }
        let now_ms = self.now_ms;
        let move_retry_ms = self.options.move_retry_ms;
        let wait_ms = if hopeless {
            move_retry_ms << entry.attempts.min(MOVE_DOUBLINGS_MAX)
        } else {
            self.options.repair_retry_ms
        };
        self.queue.delay(entry.slot, now_ms + wait_ms, |entry| {
            entry.unplaced_since_ms.get_or_insert(now_ms);
            // Avoiding that target was only a preference.
            entry.avoid = None;
            entry.attempts = entry.attempts.saturating_add(u8::from(hopeless));
        });
    }

    fn choose_target(
        &self,
        entry: &Entry,
        misfit: Option<NodeIx>,
        lane: Lane,
        durability: Durability,
        rng: &mut dyn Rng,
    ) -> Option<NodeIx> {
        let block = self.table.get(entry.slot)?;
        let mut existing: SmallVec<[NodeId; 8]> = SmallVec::new();
        let mut exclude: SmallVec<[NodeId; 8]> = SmallVec::new();
        exclude.extend(entry.avoid.map(|node| self.nodes[node as usize].id));
        for replica in &block.replicas {
            let storage = self.table.home(replica.storage);
            if !storage.usable {
                continue;
            }
            let stays = replica.state.is_good()
                && misfit != Some(storage.node)
                && !self.is_leaving(entry.slot, storage.node);
            let node = self.nodes[storage.node as usize].id;
            if stays {
                existing.push(node);
            } else {
                exclude.push(node);
            }
        }
        for &node in self.pipeline(entry.slot) {
            exclude.push(self.nodes[node as usize].id);
        }
        let request = Request {
            wanted: 1,
            existing: &existing,
            exclude: &exclude,
            writer: None,
            class: block.rules.class,
            lane,
            durability,
            given_up: self.given_up(&block.rules),
        };
        let mut chosen = self.policy.choose(&self.view, &request, rng);
        if chosen.is_err() && request.class.is_some() {
            // A replica on another class of volume is better than none.
            let any_class = Request {
                class: None,
                ..request
            };
            chosen = self.policy.choose(&self.view, &any_class, rng);
        }
        let chosen = chosen.ok()?;
        self.node_index(*chosen.first()?)
    }

    /// Makes way for a replica that no server can take: one that holds a bad replica could, without it.
    fn make_way(&mut self, slot: Slot) {
        if !self.confirmed(slot).is_empty() {
            self.remove_bad(slot);
        }
    }

    /// Completes a repair: the target reported a good replica of the block.
    pub(super) fn complete_repair(&mut self, slot: Slot, target: NodeIx) {
        if self.is_in_flight(slot, target)
            && let Some(ended) = self.end_repair(slot)
        {
            self.repairs_done += u64::from(!ended.is_move);
            self.moves_done += u64::from(ended.is_move);
            self.note_repair(slot, &ended, RepairEnd::Done);
        }
    }

    /// A repair failed; the block waits before it is tried again, elsewhere if possible.
    pub(super) fn fail_repair(&mut self, slot: Slot, target: NodeIx) {
        if !self.is_in_flight(slot, target) {
            return;
        }
        let Some(failed) = self.end_repair(slot) else {
            return;
        };
        self.repairs_failed += 1;
        self.note_repair(slot, &failed, RepairEnd::Failed);
        self.settle(slot);
        let doublings = failed.attempts.min(BACKOFF_DOUBLINGS_MAX);
        let retry_ms = self.now_ms + (self.options.repair_retry_ms << doublings);
        self.queue.delay(slot, retry_ms, |entry| {
            entry.since_ms = failed.since_ms;
            entry.attempts = failed.attempts.saturating_add(1);
            entry.avoid = Some(target);
        });
    }

    /// Notes for observers that a repair ended.
    fn note_repair(&mut self, slot: Slot, repair: &InFlight, end: RepairEnd) {
        self.count_balance_move(slot, end);
        let block = self.table.known(slot);
        self.happenings.note(Happening::RepairEnded {
            block: block.id,
            source: self.nodes[repair.source as usize].id,
            target: self.nodes[repair.target as usize].id,
            is_move: repair.is_move,
            end,
        });
    }

    fn is_in_flight(&self, slot: Slot, target: NodeIx) -> bool {
        self.in_flight
            .get(&slot)
            .is_some_and(|it| it.target == target)
    }

    fn end_repair(&mut self, slot: Slot) -> Option<InFlight> {
        let ended = self.in_flight.remove(&slot)?;
        let from = &mut self.nodes[ended.source as usize];
        match from.outgoing.checked_sub(1) {
            Some(rest) => from.outgoing = rest,
            None => panic!(
                "node {} serves no repair, but one ended: {ended:?}",
                from.id
            ),
        }
        let to = &mut self.nodes[ended.target as usize];
        match to.incoming.iter().position(|&other| other == slot) {
            Some(place) => _ = to.incoming.remove(place),
            None => panic!("node {} does not receive slot {slot}, but it ended", to.id),
        }
        to.replicate.retain(|other| *other != slot);
        self.refresh_offer(ended.target);
        Some(ended)
    }

    /// Tries everything that waits for a budget again immediately, because the budgets changed.
    pub(super) fn retry_repairs(&mut self) {
        self.queue.wake_all();
    }

    /// Cancels the repair of a block that is freed, or that became longer.
    pub(super) fn cancel_repair_of(&mut self, slot: Slot) {
        self.end_repair(slot);
    }

    /// Cancels the repairs to a node that died or registered again: the blocks are to be repaired
    /// elsewhere.
    pub(super) fn cancel_repairs_to(&mut self, node: NodeIx) {
        self.nodes[node as usize].replicate.clear();
        for slot in self.nodes[node as usize].incoming.clone() {
            self.end_repair(slot);
            self.settle(slot);
        }
    }

    /// Fails repairs that took too long.
    pub(super) fn expire_repairs(&mut self) {
        for _ in 0..self.options.work_per_tick {
            let Some(&(deadline_ms, slot, target)) = self.deadlines.front() else {
                break;
            };
            if deadline_ms > self.now_ms {
                break;
            }
            self.deadlines.pop_front();
            // The slot may belong to another block by now; then that one has a deadline of its own.
            if self
                .in_flight
                .get(&slot)
                .is_some_and(|it| it.deadline_ms == deadline_ms)
            {
                self.fail_repair(slot, target);
            }
        }
    }

    /// Returns the next repair that a node is to be commanded; [`Cluster::next_commands`] turns it into
    /// a message.
    pub fn next_repair(&mut self, now_ms: u64, node: NodeId) -> Option<Repair> {
        self.advance(now_ms);
        let index = self.live_node(node).ok()?;
        self.next_repair_of(index)
    }

    fn next_repair_of(&mut self, node: NodeIx) -> Option<Repair> {
        while !self.nodes[node as usize].replicate.is_empty() {
            let slot = self.nodes[node as usize].replicate.remove(0);
            let Some(&in_flight) = self.in_flight.get(&slot) else {
                continue;
            };
            if in_flight.target != node {
                continue;
            }
            let sources = self.sources_to_send(slot, in_flight.source);
            match self.table.get(slot) {
                Some(block) if !sources.is_empty() => {
                    return Some(Repair {
                        block: block.id,
                        length_bytes: u64::from(block.required_bytes),
                        sources,
                    });
                }
                _ => self.fail_repair(slot, node),
            }
        }
        None
    }

    /// The command for the next repair of a node.
    pub(super) fn next_replicate(
        &mut self,
        node: NodeIx,
        token: &mut dyn FnMut(BlockId) -> BlockToken,
    ) -> Option<NodeCommand> {
        let repair = self.next_repair_of(node)?;
        let sources = repair.sources.iter();
        Some(NodeCommand::Replicate {
            block: repair.block,
            length_bytes: repair.length_bytes,
            sources: sources.filter_map(|&node| self.node_info(node)).collect(),
            token: token(repair.block),
        })
    }

    fn sources_to_send(&self, slot: Slot, charged: NodeIx) -> SmallVec<[NodeId; SOURCES_MAX]> {
        let mut sources = self.sources(slot);
        sources.retain(|(index, _)| self.nodes[*index as usize].is_available());
        sources.sort_by_key(|&(index, _)| index != charged);
        let sent = sources.iter().take(SOURCES_MAX);
        sent.map(|&(index, _)| self.nodes[index as usize].id)
            .collect()
    }
}

#[cfg(test)]
impl Cluster {
    /// Repairs under way from and to a node, counted.
    pub(super) fn repairs_of(&self, node: NodeIx) -> (usize, usize) {
        let all = self.in_flight.values();
        let outgoing = all.clone().filter(|it| it.source == node).count();
        (outgoing, all.filter(|it| it.target == node).count())
    }
}
