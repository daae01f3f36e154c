//! Blocks at risk of being lost, and why they are not repaired yet.

use std::cmp::Reverse;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::placement::BlockPlace;
use serde::Serialize;

use super::Cluster;
use super::table::Slot;

/// Slots that are searched for lost blocks: takes some milliseconds.
const SEARCHED_MAX: u32 = 1_000_000;

/// A block with fewer replicas than it wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockAtRisk {
    /// The block.
    pub block: BlockId,
    /// Good replicas that are left.
    pub left: usize,
    /// Replicas wanted.
    pub wanted: usize,
    /// How long it has waited for repair, in milliseconds; `None` while it does not wait.
    pub waits_ms: Option<u64>,
    /// Why it is not repaired yet.
    pub why: String,
    /// Where its replicas are.
    pub place: BlockPlace,
}

impl Cluster {
    /// The blocks nearest to being lost, at most `max`: lost ones first, then those with the fewest
    /// replicas, and of these the ones that have waited longest. O(blocks that wait for repair or are
    /// repaired); while blocks are lost, also O(blocks), up to a bound.
    #[must_use]
    pub fn blocks_at_risk(&self, now_ms: u64, max: usize) -> Vec<BlockAtRisk> {
        let mut found = Vec::new();
        if self.safe_mode {
            // Nothing is known yet.
            return found;
        }
        if self.totals.lost > 0 {
            let slots = 0..self.table.slots_end().min(SEARCHED_MAX);
            let lost = slots.filter(|&slot| self.table.get(slot).is_some_and(|it| it.health.lost));
            let lost: Vec<Slot> = lost.take(max).collect();
            assert!(
                lost.len() as u64 <= self.totals.lost.get(),
                "{} blocks or more are lost, counted are {:?}",
                lost.len(),
                self.totals.lost
            );
            for slot in lost {
                let why = "no datanode that is alive has a replica".to_owned();
                found.push(self.at_risk(slot, None, why));
            }
        }
        let repairs = self.in_flight.iter().filter(|(_, it)| !it.is_move);
        let mut repairs: Vec<_> = repairs
            .map(|(&slot, repair)| {
                let block = self.table.known(slot);
                let left = self.tally(slot, block).present();
                ((left, repair.since_ms, block.id), slot, repair)
            })
            .collect();
        repairs.sort_unstable_by_key(|(order, ..)| *order);
        for (_, slot, repair) in repairs.into_iter().take(max) {
            let why = format!(
                "is being copied from {} to {}",
                self.node_name(repair.source),
                self.node_name(repair.target)
            );
            let waits_ms = Some(now_ms.saturating_sub(repair.since_ms));
            found.push(self.at_risk(slot, waits_ms, why));
        }
        for entry in self.queue.most_urgent(max) {
            assert!(
                !self.in_flight.contains_key(&entry.slot),
                "slot {} waits for repair, and is under repair: {:?}",
                entry.slot,
                self.in_flight.get(&entry.slot)
            );
            let waits_ms = Some(now_ms.saturating_sub(entry.since_ms));
            let why = self.why_not_repaired(now_ms, entry.slot).to_string();
            found.push(self.at_risk(entry.slot, waits_ms, why));
        }
        // Those that are lost do not wait.
        found.sort_by_key(|it| {
            (
                it.left,
                it.waits_ms.is_some(),
                Reverse(it.waits_ms),
                it.block,
            )
        });
        found.truncate(max);
        found
    }

    /// Describes a block that is lost, waits or is being repaired, and is in the table for that reason.
    fn at_risk(&self, slot: Slot, waits_ms: Option<u64>, why: String) -> BlockAtRisk {
        let block = self.table.known(slot);
        let tally = self.tally(slot, block);
        BlockAtRisk {
            block: block.id,
            left: tally.present(),
            wanted: block.wanted(),
            waits_ms,
            why,
            place: self.place_of(slot),
        }
    }
}
