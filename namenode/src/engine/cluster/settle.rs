//! What follows from the state of a block's replicas: whether it must be repaired, has too many
//! replicas, or is lost.

use smallvec::SmallVec;

use super::queue::{LEAVING, MISPLACED};
use super::table::{Block, Health, LEFT_MAX, NodeIx, ReplicaState, Slot};
use super::{Cluster, Happening};
use crate::engine::count::Count;

/// Counts of the replicas of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Nodes with good replicas, on usable volumes and with all the bytes, including those that a
    /// writer vouches for.
    pub(super) holders: SmallVec<[NodeIx; 8]>,
    /// Unconfirmed, short or corrupt.
    pub(super) bad: usize,
    /// Chosen for removal, the command not sent yet.
    pub(super) excess: usize,
    /// Corrupt, and so of some use when no good one is left.
    pub(super) corrupt: usize,
    /// Those for which the command to remove them was sent.
    pub(super) deleting: usize,
    /// Good ones that are to leave their server.
    pub(super) leaving: usize,
}

impl Tally {
    /// Good replicas and those chosen for removal: the latter exist until the command is sent, which
    /// happens only if they are still in excess.
    pub(super) fn present(&self) -> usize {
        self.holders.len() + self.excess
    }

    /// Whether no replica is of any use as it is.
    pub(super) fn is_lost(&self) -> bool {
        self.present() + self.corrupt + self.deleting == 0
    }

    /// Whether no replica has all committed bytes, not even one that is being removed and may still
    /// exist.
    pub(super) fn is_incomplete(&self) -> bool {
        self.present() + self.deleting == 0
    }
}

/// Counters over all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) relevant: Count,
    pub(super) under_replicated: Count,
    pub(super) lost: Count,
    /// Under-replicated blocks, by how many replicas are left.
    pub(super) missing: [Count; LEFT_MAX + 1],
    pub(super) misplaced: Count,
    pub(super) curtailed: Count,
    /// Sealed blocks by the number of constraints that hold.
    pub(super) scores: [Count; SCORES],
}

/// The number of scores: no constraint holds, one does, and so on up to all five.
pub(super) const SCORES: usize = 6;

impl Totals {
    /// Relevant blocks that are not lost; every lost block is relevant.
    pub(super) fn not_lost(&self) -> u64 {
        let mut rest = self.relevant;
        rest -= self.lost.get();
        rest.get()
    }

    fn add(&mut self, health: Health) {
        self.relevant += u64::from(health.relevant);
        self.under_replicated += u64::from(health.under_replicated);
        self.lost += u64::from(health.lost);
        self.misplaced += u64::from(health.misplaced);
        self.curtailed += u64::from(health.curtailed);
        if let Some(score) = health.score() {
            self.scores[usize::from(score)] += 1;
        }
        self.missing[usize::from(health.left)] += u64::from(health.under_replicated);
        let missing: u64 = self.missing.iter().map(|it| it.get()).sum();
        assert!(
            self.under_replicated == missing && self.lost.get() <= self.relevant.get(),
            "too few replicas, by how many are left, and lost: {self:?}"
        );
    }

    fn subtract(&mut self, health: Health) {
        self.relevant -= u64::from(health.relevant);
        self.under_replicated -= u64::from(health.under_replicated);
        self.lost -= u64::from(health.lost);
        self.misplaced -= u64::from(health.misplaced);
        self.curtailed -= u64::from(health.curtailed);
        if let Some(score) = health.score() {
            self.scores[usize::from(score)] -= 1;
        }
        self.missing[usize::from(health.left)] -= u64::from(health.under_replicated);
    }
}

impl Cluster {
    /// Nodes with good replicas of a block, including those that its writer vouches for.
    pub(super) fn holders(&self, slot: Slot, block: &Block) -> SmallVec<[NodeIx; 8]> {
        self.tally(slot, block).holders
    }

    /// Counts the replicas of a block.
    pub(super) fn tally(&self, slot: Slot, block: &Block) -> Tally {
        let mut tally = Tally::default();
        for replica in &block.replicas {
            let storage = self.table.home(replica.storage);
            if !storage.usable {
                continue;
            }
            match replica.state {
                ReplicaState::Sealed | ReplicaState::Open => {
                    tally.holders.push(storage.node);
                    tally.leaving += usize::from(self.is_leaving(slot, storage.node));
                }
                ReplicaState::Unconfirmed | ReplicaState::Short => tally.bad += 1,
                ReplicaState::Corrupt => {
                    tally.bad += 1;
                    tally.corrupt += 1;
                }
                ReplicaState::Excess => tally.excess += 1,
                ReplicaState::Deleting => tally.deleting += 1,
            }
        }
        for &node in self.pipeline(slot) {
            if self.nodes[node as usize].is_alive() && self.table.replica_on(slot, node).is_none() {
                tally.holders.push(node);
            }
        }
        tally
    }

    /// Brings counters and queues in line with a block's replicas; to be called after each change.
    pub(super) fn settle(&mut self, slot: Slot) {
        self.end_idle_move(slot);
        let Some(block) = self.table.get(slot) else {
            return;
        };
        let tally = self.tally(slot, block);
        let diversity = self.diversity(block, &tally.holders);
        let due = self.due(block);
        let Some(block) = self.table.get_mut(slot) else {
            return;
        };
        let good = tally.present();
        assert!(
            tally.leaving <= tally.holders.len(),
            "more replicas of block {} are to leave than there are: {tally:?}",
            block.id
        );
        let relevant = block.required_bytes > 0;
        let wanted = block.wanted();
        let under_replicated = relevant && block.sealed && good < due;
        let misplaced = diversity.misplaced;
        let health = Health {
            relevant,
            under_replicated,
            lost: relevant && tally.is_lost(),
            left: if under_replicated {
                good.min(LEFT_MAX) as u8
            } else {
                0
            },
            misplaced,
            curtailed: relevant
                && block.sealed
                && ((due..wanted).contains(&good) || diversity.curtailed),
            score_and_one: Health::score_and_one(diversity.score),
        };
        if relevant && !block.sealed && good == 1 && due > 1 {
            self.exposed.insert(block.id);
        } else if !self.exposed.is_empty() {
            self.exposed.remove(&block.id);
        }
        let before = std::mem::replace(&mut block.health, health);
        if health != before {
            self.totals.subtract(before);
            self.totals.add(health);
        }
        if self.safe_mode {
            return;
        }
        if health.lost && !before.lost && slot < self.unnoted_from {
            self.happenings.note(Happening::Lost { block: block.id });
        }
        let may_be_salvaged = relevant && block.sealed && tally.is_incomplete();
        let enough = relevant && block.sealed && !under_replicated;
        if enough && tally.holders.len() > wanted && !block.excess_queued {
            block.excess_queued = true;
            if tally.leaving > 0 {
                // It is in excess on purpose, and the owner of its server waits for the removal.
                self.excess.push_front((self.now_ms, block.id));
            } else {
                let due_ms = self.now_ms + self.options.excess_grace_ms;
                self.excess.push_back((due_ms, block.id));
            }
        }
        if enough && tally.bad > 0 {
            self.remove_bad(slot);
        }
        if may_be_salvaged {
            self.await_salvage(slot);
        }
        let rank = if under_replicated && self.waits_for_maintenance(good, due) {
            None
        } else if under_replicated {
            (!health.lost).then(|| self.repair_rank(&tally.holders, good))
        } else if enough && good - tally.leaving < due {
            Some(LEAVING)
        } else if enough && misplaced && (due..=wanted).contains(&good) {
            Some(MISPLACED)
        } else {
            None
        };
        self.queue_repair(slot, rank);
    }

    /// Notes the loss of a block that was known in safe mode: after a start, all blocks look lost until
    /// their datanodes report.
    pub(super) fn note_earlier_loss(&mut self, slot: Slot) {
        if slot < self.unnoted_from {
            return;
        }
        self.unnoted_from = slot + 1;
        if let Some(block) = self.table.get(slot)
            && block.health.lost
        {
            self.happenings.note(Happening::Lost { block: block.id });
        }
    }

    fn queue_repair(&mut self, slot: Slot, rank: Option<usize>) {
        let Some(rank) = rank.filter(|_| !self.in_flight.contains_key(&slot)) else {
            self.queue.remove(slot);
            return;
        };
        let due_ms = self.now_ms + self.options.repair_delay_ms;
        self.queue.set_rank(self.now_ms, slot, rank, due_ms);
    }

    /// Forgets what the counters and queues know of a block that is about to be removed.
    pub(super) fn unsettle(&mut self, slot: Slot) {
        let block = self.table.known_mut(slot);
        self.exposed.remove(&block.id);
        self.totals.subtract(std::mem::take(&mut block.health));
        self.queue.remove(slot);
        self.balance.moving.remove(&slot);
        self.salvage.forget(slot);
        if !self.victims.is_empty() {
            self.victims.retain(|&(victim, _)| victim != slot);
        }
    }
}
