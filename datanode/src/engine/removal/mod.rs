//! The destruction of data: deletions that the namenode commands, which of them are still valid, and at what rate, so
//! that the primary tenant is not disturbed.
//!
//! A file system that notifies its disk of freed space at each commit (ext4 with `discard`) makes every sync wait
//! behind that, including the primary tenant's (docs/PERFORMANCE.md has figures). So a datanode reports with each
//! heartbeat how much it can delete, and spreads those deletions over the time to the next one. Replicas whose
//! deletion has not been commanded yet remain available to the namenode, which may need them. While space is short,
//! nothing waits.

pub mod sealing;
mod steps;
#[cfg(test)]
mod tests;

use std::time::Instant;

use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;
use harvestfs_protocol::timeline::Position;

pub use self::steps::{Step, Steps};
use crate::engine::budget::Budget;
use crate::engine::link::LinkId;
use crate::engine::link::obedience::Obedience;

/// All deletions that were commanded.
#[derive(Debug)]
pub struct Removals {
    budget: Budget,
    /// Bytes that are to be deleted and still exist.
    left_bytes: u64,
    /// By link: the number of the last registration. Commands that the namenode gave before it are void.
    registrations: Vec<u64>,
}

/// A command to delete replicas. It has to be [ended](Removals::end), whether the replicas are deleted or not.
#[derive(Debug)]
#[must_use = "what is not deleted counts as left until the order is ended"]
pub struct Order {
    link: LinkId,
    registration: u64,
    /// The obeyed position of the namenode that gave it.
    obeyed: Position,
    left_bytes: u64,
}

/// Why a replica is not deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Withheld {
    /// The obeyed position is not durable, so an older copy of the namenode could not learn that a later one was
    /// obeyed.
    #[error("the namenode that was obeyed is not written down")]
    NotWritten,
    /// A command that was not started is void: the namenode may decide differently once this datanode has registered
    /// again.
    #[error("the datanode has registered again since it was commanded")]
    RegisteredAgain,
    /// Another namenode has become leader since, and knows nothing of this command.
    #[error("another namenode is obeyed since it was commanded")]
    AnotherIsObeyed,
}

impl Removals {
    /// With a budget of so many bytes per second; 0 means no limit. Namenodes on up to `links_max` links may give
    /// commands.
    pub fn new(bytes_per_second: u64, links_max: usize) -> Self {
        Self {
            budget: Budget::new(bytes_per_second),
            left_bytes: 0,
            registrations: vec![0; links_max],
        }
    }

    /// Bytes of replicas whose deletion may be commanded, if `pressure_bytes` should be deleted beyond the rate.
    pub fn removable_bytes(&self, pressure_bytes: u64, now: Instant) -> u64 {
        let payable_bytes = self.budget.left_within(HEARTBEAT_INTERVAL, now);
        let wanted_bytes = payable_bytes.max(pressure_bytes);
        wanted_bytes.saturating_sub(self.left_bytes)
    }

    /// Records that the datanode is about to register on a link. Commands of the namenodes on other links remain
    /// valid.
    pub fn registering(&mut self, LinkId(link): LinkId) {
        self.registrations[link] += 1;
    }

    /// Records that the namenode on a link, obeyed at the position `obeyed`, commands the deletion of so many bytes.
    pub fn ordered(&mut self, link: LinkId, bytes: u64, obeyed: Position) -> Order {
        self.left_bytes += bytes;
        Order {
            link,
            registration: self.registrations[link.0],
            obeyed,
            left_bytes: bytes,
        }
    }

    /// Checks whether a replica may be deleted now, given the positions obeyed in memory and on the disks.
    ///
    /// # Errors
    /// Why it may not be deleted.
    pub fn may_delete(&self, order: &Order, obedience: &Obedience) -> Result<(), Withheld> {
        assert!(
            order.registration <= self.registrations[order.link.0],
            "commanded after registration {}, and the last one was {}: {order:?}",
            order.registration,
            self.registrations[order.link.0]
        );
        let place = |position: Position| (position.epoch, position.record);
        if Some(place(order.obeyed)) > obedience.written().map(place) {
            return Err(Withheld::NotWritten);
        }
        if order.registration != self.registrations[order.link.0] {
            return Err(Withheld::RegisteredAgain);
        }
        if !obedience.holds(order.obeyed.epoch) {
            return Err(Withheld::AnotherIsObeyed);
        }
        Ok(())
    }

    /// Records that so many bytes are deleted. Returns when they are paid for: immediately if space is short
    /// (`is_pressed`).
    pub fn deleted(
        &mut self,
        order: &mut Order,
        bytes: u64,
        is_pressed: bool,
        now: Instant,
    ) -> Instant {
        // A replica takes slightly more space than its data.
        self.less(order, bytes.min(order.left_bytes));
        if is_pressed {
            now
        } else {
            self.budget.spend(bytes, now)
        }
    }

    /// Ends an order: nothing more is deleted for it.
    pub fn end(&mut self, mut order: Order) {
        let left_bytes = order.left_bytes;
        self.less(&mut order, left_bytes);
    }

    fn less(&mut self, order: &mut Order, bytes: u64) {
        assert!(
            self.left_bytes >= order.left_bytes,
            "{} bytes are left to delete among {} in all",
            order.left_bytes,
            self.left_bytes
        );
        self.left_bytes -= bytes;
        order.left_bytes -= bytes;
    }
}
