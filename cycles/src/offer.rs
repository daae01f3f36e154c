//! How much of a server is offered to jobs while its owner's usage fluctuates: never more than the owner leaves in
//! addition to the reserve, and no more changes than necessary.

use crate::reserve::{Capacity, MIB, OwnerUse, Resources};

/// What the owner must leave in addition before the offer grows, as a share of all cores and memory: smaller
/// fluctuations of the usage change nothing.
const MARGIN_SHARE: f64 = 0.05;
/// The offer grows by at most the resources of the server divided by this at a time.
const STEPS: u32 = 4;
/// Memory is offered in pieces; the memory of a server is divided into this many.
const MEMORY_PIECES: u64 = 32;

/// The owner's current usage of a server, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnerShare {
    /// Share of all cores.
    pub cpu: f64,
    /// Share of all memory; where it is unknown, the share of the cores is taken.
    pub memory: Option<f64>,
}

impl OwnerShare {
    /// Returns the usage on a server of this size, with a margin on top.
    fn used(self, total: Resources, margin: f64) -> OwnerUse {
        // NaN counts as everything.
        let share = |share: f64| {
            let share = share + margin;
            if share <= 1.0 { share.max(0.0) } else { 1.0 }
        };
        let memory = share(self.memory.unwrap_or(self.cpu));
        OwnerUse {
            // Subtract what rounding may have added: 0.3 of 10 cores are 3.
            cores: (share(self.cpu) * f64::from(total.cores) - 1e-9).max(0.0),
            memory_bytes: (memory * (total.memory_mib * MIB) as f64) as u64,
        }
    }

    /// Returns the most that may be offered of a server: everything except the reserve and what the owner uses.
    #[must_use]
    pub fn leaves(self, total: Resources) -> Resources {
        self.left(total, 0.0)
    }

    fn left(self, total: Resources, margin: f64) -> Resources {
        let mut left = Capacity::new(total).harvestable(self.used(total, margin));
        let piece_mib = (total.memory_mib / MEMORY_PIECES).max(1);
        left.memory_mib -= left.memory_mib % piece_mib;
        left
    }
}

/// The offer of a server.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    total: Resources,
    offered: Resources,
    /// The least that the owner has left, less the margin, since `since_ms`.
    lowest: Resources,
    since_ms: u64,
}

impl Offer {
    /// Creates the state for a server of this size of which `offered` is currently offered.
    #[must_use]
    pub fn new(total: Resources, offered: Resources, now_ms: u64) -> Self {
        Self {
            total,
            offered,
            lowest: total,
            since_ms: now_ms,
        }
    }

    /// Returns what is offered.
    #[must_use]
    pub fn offered(&self) -> Resources {
        self.offered
    }

    /// Follows the owner's current usage: the offer shrinks immediately, and grows by a step once the owner has left
    /// that much for `grow_after_ms`.
    pub fn follow(&mut self, owner: OwnerShare, now_ms: u64, grow_after_ms: u64) {
        let ceiling = owner.leaves(self.total);
        let room = owner.left(self.total, MARGIN_SHARE);
        self.lowest = self.lowest.min(room);
        let shrunk = self.offered.min(ceiling);
        if shrunk != self.offered {
            self.offered = shrunk;
        } else if now_ms.saturating_sub(self.since_ms) >= grow_after_ms {
            let step = Resources {
                cores: self.offered.cores + self.total.cores.div_ceil(STEPS),
                memory_mib: self.offered.memory_mib
                    + self.total.memory_mib.div_ceil(u64::from(STEPS)),
            };
            self.offered = self.offered.max(self.lowest.min(step));
        } else {
            return;
        }
        self.lowest = room;
        self.since_ms = now_ms;
        assert!(
            self.offered.min(ceiling) == self.offered,
            "{:?} are offered of {:?}, whose owner leaves {ceiling:?}",
            self.offered,
            self.total
        );
    }
}
