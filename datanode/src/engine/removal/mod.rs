//! What destroys data. Deletions that the namenode commands: which still hold, and no faster than the owner bears.
//!
//! A file system that tells its disk at each commit what became free (ext4 with `discard`) makes every
//! sync wait behind that, the owner's too (docs/PERFORMANCE.md has figures). So a datanode says with
//! each heartbeat how much it can delete, and spreads that over the time to the next one. What it has no
//! command for yet is still there for the namenode, which may need it. Where space is short, nothing
//! waits.

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
    /// What is to be deleted and is still there, in bytes.
    left_bytes: u64,
    /// Commands that a namenode gave before a registration with it hold no longer; by link, this is
    /// the number of the last one.
    registrations: Vec<u64>,
}

/// A command to delete replicas. It has to be [ended](Removals::end), whether they are deleted or not.
#[derive(Debug)]
#[must_use = "what is not deleted counts as left until the order is ended"]
pub struct Order {
    link: LinkId,
    registration: u64,
    /// How far the namenode was that gave it, and is obeyed.
    obeyed: Position,
    left_bytes: u64,
}

/// Why a replica is not deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Withheld {
    /// An older copy of the namenode could not learn that a later one was obeyed.
    #[error("the namenode that was obeyed is not written down")]
    NotWritten,
    /// What was commanded and not begun is not done: the namenode may want it otherwise when this
    /// datanode has registered again.
    #[error("the datanode has registered again since it was commanded")]
    RegisteredAgain,
    /// Another namenode leads since, which knows nothing of this command.
    #[error("another namenode is obeyed since it was commanded")]
    AnotherIsObeyed,
}

impl Removals {
    /// With a budget of so many bytes in a second; 0 means no limit. Namenodes
    /// on so many links may come to command.
    pub fn new(bytes_per_second: u64, links_max: usize) -> Self {
        Self {
            budget: Budget::new(bytes_per_second),
            left_bytes: 0,
            registrations: vec![0; links_max],
        }
    }

    /// Bytes of replicas that may be commanded to be deleted, where so many should be deleted beyond the
    /// rate.
    pub fn removable_bytes(&self, pressure_bytes: u64, now: Instant) -> u64 {
        let payable_bytes = self.budget.left_within(HEARTBEAT_INTERVAL, now);
        let wanted_bytes = payable_bytes.max(pressure_bytes);
        wanted_bytes.saturating_sub(self.left_bytes)
    }

    /// The datanode is about to register on a link. What the namenodes on others commanded holds as
    /// before.
    pub fn registering(&mut self, LinkId(link): LinkId) {
        self.registrations[link] += 1;
    }

    /// The namenode on a link, which is `obeyed` until there, commands to delete so many bytes.
    pub fn ordered(&mut self, link: LinkId, bytes: u64, obeyed: Position) -> Order {
        self.left_bytes += bytes;
        Order {
            link,
            registration: self.registrations[link.0],
            obeyed,
            left_bytes: bytes,
        }
    }

    /// Whether a replica may be deleted now, with what is obeyed, in memory and on the disks.
    ///
    /// # Errors
    /// Why not.
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

    /// So many bytes are deleted. Returns when that is paid for, at once where space is short
    /// (`is_pressed`).
    pub fn deleted(
        &mut self,
        order: &mut Order,
        bytes: u64,
        is_pressed: bool,
        now: Instant,
    ) -> Instant {
        // A replica is a little larger than the data in it.
        self.less(order, bytes.min(order.left_bytes));
        if is_pressed {
            now
        } else {
            self.budget.spend(bytes, now)
        }
    }

    /// Nothing more comes of an order.
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
