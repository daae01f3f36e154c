//! How reimages coincide: at which hours of the week they happen, and how many of a tenant's servers are reimaged
//! together.
//!
//! A product of rates shows neither. Redeployments begin in working hours: three servers that have nothing in common
//! but the hour are reimaged together ten times as often as their rates suggest. And most reimages of a server are
//! reimages of its tenant.

use std::collections::BTreeMap;

use crate::history::{History, TenantId};
use crate::profile::TenantKey;
use crate::reimages::{MONTH_S, MONTHS, TOGETHER_S};

/// Length of a part of the week in seconds. A block is assumed to wait no longer than this for its repair. Two
/// reimages no further apart than this are in the same two consecutive parts, whose length is [`TOGETHER_S`].
pub const PART_S: u32 = TOGETHER_S / 2;
/// Number of parts in a week.
pub const PARTS: usize = (WEEK_S / PART_S) as usize;
const WEEK_S: u32 = 7 * 86_400;
/// Reimages that are added to those of each part of the week, so that no part counts as never having one.
const PRIOR_PER_PART: f64 = 1.0;
/// Weight of the prior, in reimages: these count as reimages of all of a tenant's servers together, in addition to
/// the actual ones, so that without history the worst is expected.
const PRIOR_TOGETHER: f64 = 1.0;

/// The share of a week's reimages in each of its parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Week {
    shares: [f64; PARTS],
}

impl Default for Week {
    /// All parts have equal shares.
    fn default() -> Self {
        Self {
            shares: [1.0 / PARTS as f64; PARTS],
        }
    }
}

impl Week {
    /// Computes the shares from the number of reimages in each part.
    #[must_use]
    pub fn of(counts: &[u32; PARTS]) -> Self {
        let weights = counts.map(|count| f64::from(count) + PRIOR_PER_PART);
        let sum: f64 = weights.iter().sum();
        Self {
            shares: weights.map(|weight| weight / sum),
        }
    }

    /// Returns, for every two consecutive parts, the mean number of reimages of a server that has one per month.
    pub fn pairs(&self) -> impl Iterator<Item = f64> + '_ {
        let next = self.shares.iter().cycle().skip(1);
        let pairs = self.shares.iter().zip(next);
        pairs.map(|(one, next)| (one + next) * weeks_per_month())
    }

    /// Returns the same for the worst consecutive parts of the week with this total length.
    #[must_use]
    pub fn worst(&self, length_s: u64) -> f64 {
        let weeks = length_s / u64::from(WEEK_S);
        let parts = (length_s % u64::from(WEEK_S)).div_ceil(u64::from(PART_S)) as usize;
        let from = |first: usize| {
            let parts = self.shares.iter().cycle().skip(first).take(parts);
            parts.sum::<f64>()
        };
        let most = (0..PARTS).map(from).fold(0.0, f64::max);
        (weeks as f64 + most) * weeks_per_month()
    }
}

fn weeks_per_month() -> f64 {
    f64::from(WEEK_S) / f64::from(MONTH_S)
}

/// How reimages coincide, in time and within tenants.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Coincidence {
    /// When reimages happen.
    pub week: Week,
    /// For each tenant, the probability, 0 to 1, that another one of its servers is reimaged within the same window
    /// as one of them.
    pub together: BTreeMap<TenantKey, f64>,
}

impl Coincidence {
    /// Analyses the last three years before a time (in seconds since 1970).
    #[must_use]
    pub fn of(history: &History, now_s: u32) -> Self {
        let begin_s = now_s.saturating_sub(MONTH_S * MONTHS as u32);
        let mut counts = [0; PARTS];
        let mut servers = vec![0_u32; history.tenants().len()];
        let mut events: Vec<(TenantId, u32)> = Vec::new();
        for server in history.servers() {
            let mut owned: Vec<TenantId> = server.owner().into_iter().collect();
            for &at_s in server.reimages() {
                if let Some(owner) = server.owner_before(at_s)
                    && (begin_s..=now_s).contains(&at_s)
                {
                    counts[(at_s % WEEK_S / PART_S) as usize] += 1;
                    events.push((owner, at_s / TOGETHER_S));
                    owned.push(owner);
                }
            }
            owned.sort_unstable();
            owned.dedup();
            for tenant in owned {
                servers[tenant.0 as usize] += 1;
            }
        }
        events.sort_unstable();
        let mut sums = vec![(0.0, 0.0); servers.len()];
        for window in events.chunk_by(|a, b| a == b) {
            let tenant = window[0].0.0 as usize;
            let gone = window.len() as f64;
            let others = f64::from(servers[tenant].saturating_sub(1));
            // If a tenant has one server, no other one can be reimaged, and what another one would do is unknown.
            let share = if others > 0.0 {
                ((gone - 1.0) / others).min(1.0)
            } else {
                1.0
            };
            sums[tenant].0 += gone * share;
            sums[tenant].1 += gone;
        }
        let together = history.tenants().map(|(id, key)| {
            let (sum, count) = sums[id.0 as usize];
            let share = (sum + PRIOR_TOGETHER) / (count + PRIOR_TOGETHER);
            (key.clone(), share)
        });
        Self {
            week: Week::of(&counts),
            together: together.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_S: u32 = 40 * MONTH_S;

    #[test]
    fn a_week_has_a_weeks_reimages() {
        let even = Week::default();
        let per_pair = 2.0 / 84.0 * 7.0 / 30.0;
        assert_eq!(even.pairs().count(), 84);
        assert!(even.pairs().all(|it| (it - per_pair).abs() < 1e-12));
        let mut counts = [0; PARTS];
        counts[5] = 916;
        let uneven = Week::of(&counts);
        let all: f64 = uneven.pairs().sum();
        assert!((all - 2.0 * 7.0 / 30.0).abs() < 1e-9, "{all}");
        let worst = uneven.worst(1);
        assert!((worst - 0.917 * 7.0 / 30.0).abs() < 1e-9, "{worst}");
        // One part; and a whole week and one part.
        assert!((uneven.worst(7 * 86_400 + 1) - worst - 7.0 / 30.0).abs() < 1e-9);
        assert!(even.worst(7_200) < even.worst(7_201));
        assert!(even.worst(0).abs() < f64::EPSILON);
    }

    #[test]
    fn what_goes_at_once_is_told_from_what_goes_alone() {
        let mut history = History::default();
        let keys = ["all", "single", "new"].map(|function| TenantKey {
            environment: "e".to_owned(),
            machine_function: function.to_owned(),
        });
        for key in &keys {
            for number in 0..10 {
                let name = format!("{}-{number}", key.machine_function);
                history.owns(&name, key, 0).unwrap();
            }
        }
        for number in 0..10 {
            for month in 1..=20 {
                let at_s = (NOW_S - month * MONTH_S) / TOGETHER_S * TOGETHER_S;
                history.reimaged(&format!("all-{number}"), at_s).unwrap();
                let alone_s = at_s + number * TOGETHER_S;
                history
                    .reimaged(&format!("single-{number}"), alone_s)
                    .unwrap();
            }
        }
        let found = Coincidence::of(&history, NOW_S);
        let [all, single, new] = keys.map(|key| found.together[&key]);
        assert!(all > 0.99 && all <= 1.0, "{all}");
        assert!(single < 0.01, "{single}");
        // The worst is expected of tenants without history.
        assert!((new - 1.0).abs() < 1e-9, "{new}");
        assert_ne!(found.week, Week::default());
        assert_eq!(
            Coincidence::of(&History::default(), 0),
            Coincidence::default()
        );
    }
}
