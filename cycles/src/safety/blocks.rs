//! An upper bound on the probability that all replicas of a block are lost before one of them is repaired.
//!
//! The failure domains are environments (joined with those that history shows reimaged together) and servers. A
//! server is reimaged as often as its tenant's history shows, either alone or together with all other replicas of the
//! block in its environment: for two servers of a tenant, history gives the probability that one is reimaged together
//! with the other. Environments are assumed to be independent of each other except for the hour: most reimages happen
//! in working hours, so each part of the week is treated separately.
//!
//! A block is lost when its last replica is reimaged before a repair is complete, so all of them are reimaged within
//! [`REPAIRED_WITHIN_S`] of each other, and so in two consecutive parts of the week. The sum over all such pairs of
//! parts is at least the probability, whatever happens in one of them. Racks are no domain here: a rack that fails
//! comes back with its data.
//!
//! It is a bound for what history predicts: a tenant that is reimaged more often than before is not covered.

use harvestfs_telemetry::coincidence::{PART_S, Week};

/// The longest time in seconds that a block is assumed to wait until one of its replicas is repaired.
pub const REPAIRED_WITHIN_S: u32 = PART_S;
/// Number of weeks in a year.
const WEEKS_PER_YEAR: f64 = 365.25 / 7.0;

/// A replica of a block, as far as it matters for the risk of losing the block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockReplica {
    /// Replicas with the same number may be reimaged together.
    pub environment: u32,
    /// How often per month its server is reimaged.
    pub reimages_per_month: f64,
    /// The probability that a server of the same environment is reimaged together with it, 0 to 1.
    pub together: f64,
}

/// The replicas of a block, or those that are left.
#[derive(Clone, Copy, Debug)]
pub struct BlockRisk<'a> {
    replicas: &'a [BlockReplica],
}

impl<'a> BlockRisk<'a> {
    /// Creates the risk of these replicas.
    #[must_use]
    pub fn new(replicas: &'a [BlockReplica]) -> Self {
        Self { replicas }
    }

    /// Returns an upper bound on the probability that they are all lost within a year.
    #[must_use]
    pub fn in_a_year(&self, week: &Week) -> f64 {
        let in_a_week: f64 = week.pairs().map(|share| self.at_once(share)).sum();
        (WEEKS_PER_YEAR * in_a_week).min(1.0)
    }

    /// Returns an upper bound on the probability that they are all lost within this time, at the worst time of the
    /// week.
    #[must_use]
    pub fn within(&self, length_s: u64, week: &Week) -> f64 {
        self.at_once(week.worst(length_s))
    }

    /// Returns an upper bound on the probability that all are lost in a period in which a server that is reimaged
    /// once a month is reimaged `share` times on average. The probability of at least one reimage is at most this
    /// mean number.
    ///
    /// This is the probability that nothing is left of the tree of environments and servers, without computing the
    /// rest of its distribution ([`Losses`](super::Losses)): there are millions of blocks.
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
    /// Returns upper bounds on the probabilities that it is reimaged together with its environment, and by itself.
    fn split(&self, share: f64) -> (f64, f64) {
        let all = (self.reimages_per_month * share).max(0.0);
        let together = self.together.clamp(0.0, 1.0);
        ((all * together).min(1.0), (all * (1.0 - together)).min(1.0))
    }
}
