//! How probable it is at most that all replicas of a block are lost before one of them is made again.
//!
//! The failure domains are environments (with those that history shows reimaged together) and servers. A server that is
//! reimaged as often as its tenant's history says goes alone, or with everything that the block has in its environment:
//! of two servers of a tenant, history says how probable it is that the one goes with the other. Environments are taken to be
//! independent of each other but for the hour: most reimages come in working hours, so each part of the week counts by itself.
//!
//! A block is lost when its last replica goes before a repair is complete, so all of them go within
//! [`REPAIRED_WITHIN_S`] of each other, and so in two parts of the week that follow each other. The sum over all such pairs of
//! parts is no less than the probability, whatever happens in one of them. Racks are no domain here: a rack that fails comes back
//! with what it has.
//!
//! It is a bound for what history foretells: a tenant that is reimaged more often than it was is beyond it.

use harvestfs_telemetry::coincidence::{PART_S, Week};

/// The longest that a block is taken to wait until one of its replicas is made again, in seconds.
pub const REPAIRED_WITHIN_S: u32 = PART_S;
/// Weeks of a year.
const WEEKS_PER_YEAR: f64 = 365.25 / 7.0;

/// A replica of a block, for the risk of losing it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockReplica {
    /// Those with the same number may go together.
    pub environment: u32,
    /// How often its server is reimaged in a month.
    pub reimages_per_month: f64,
    /// How probable it is that a server of the same environment goes with it, 0 to 1.
    pub together: f64,
}

/// The replicas of a block, or what is left of them.
#[derive(Clone, Copy, Debug)]
pub struct BlockRisk<'a> {
    replicas: &'a [BlockReplica],
}

impl<'a> BlockRisk<'a> {
    /// Of these replicas.
    #[must_use]
    pub fn new(replicas: &'a [BlockReplica]) -> Self {
        Self { replicas }
    }

    /// How probable it is at most that they are all lost within a year.
    #[must_use]
    pub fn in_a_year(&self, week: &Week) -> f64 {
        let in_a_week: f64 = week.pairs().map(|share| self.at_once(share)).sum();
        (WEEKS_PER_YEAR * in_a_week).min(1.0)
    }

    /// How probable it is at most that they are all lost within so many seconds, at the worst time of the week.
    #[must_use]
    pub fn within(&self, length_s: u64, week: &Week) -> f64 {
        self.at_once(week.worst(length_s))
    }

    /// How probable it is at most that all are lost in a time in which a server that is reimaged once a month is reimaged
    /// `share` times on average. No more often than that is at least once.
    ///
    /// The probability that nothing is left of the tree of environments and servers, without the rest of its distribution
    /// ([`Losses`](super::Losses)): there are millions of blocks.
    #[must_use]
    pub fn at_once(&self, share: f64) -> f64 {
        let mut product = 1.0;
        for (place, replica) in self.replicas.iter().enumerate() {
            let same = |it: &&BlockReplica| it.environment == replica.environment;
            if self.replicas[..place].iter().any(|it| same(&it)) {
                continue;
            }
            let (mut together, mut each) = (0.0_f64, 1.0);
            for it in self.replicas.iter().filter(same) {
                let (with_others, alone) = it.split(share);
                together = together.max(with_others);
                each *= alone;
            }
            product *= together + (1.0 - together) * each;
        }
        product
    }
}

impl BlockReplica {
    /// How probable it is at most that it goes with its environment, and by itself.
    fn split(&self, share: f64) -> (f64, f64) {
        let all = (self.reimages_per_month * share).max(0.0);
        let together = self.together.clamp(0.0, 1.0);
        ((all * together).min(1.0), (all * (1.0 - together)).min(1.0))
    }
}
