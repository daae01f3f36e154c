//! How often tenants are reimaged, and which are reimaged together.
//!
//! **Rate.** For each tenant, reimages and server-months are counted in each of the last 36 months (of 30 days,
//! counted back from now). The rate is
//!
//! ```text
//! (sum over months of weight x reimages + PRIOR_MONTHS x prior x servers)
//!     / (sum over months of weight x server-months + PRIOR_MONTHS x servers)
//! ```
//!
//! where a month's weight halves every [`HALF_LIFE_MONTHS`], `servers` is the tenant's mean number of servers, and
//! `prior` is the rate of all tenants together. (The rate of the tenant's environment was tried as well, and does not
//! predict better.) The prior counts as months of the tenant and not as reimages or server-months, because a tenant's
//! servers are mostly reimaged all together: ten thousand reimages in one day say as little about the next month as
//! ten. How well this predicts was measured (`cargo run --release -p harvestfs-telemetry --example reimage_rates`):
//! see `docs/OPERATIONS.md`.
//!
//! **Together.** Reimages are put into windows of [`TOGETHER_S`]. For two tenants, the sum over windows of the
//! product of the shares of their servers that were reimaged is how often a random server of one and a random server
//! of the other are reimaged in the same window.

use std::collections::HashMap;

use crate::history::{History, MONTH_DAYS, TenantId};

/// Number of months that are taken into account.
pub const MONTHS: usize = 36;
/// Length of a month in seconds.
pub const MONTH_S: u32 = MONTH_DAYS * 86_400;
/// A month has half the weight of one this many months later.
pub const HALF_LIFE_MONTHS: f64 = 6.0;
/// How many months of a tenant's own history the prior is worth.
pub const PRIOR_MONTHS: f64 = 1.0;
/// Length in seconds of the windows in which reimages count as being together: the time within which repair may not
/// have created another replica.
pub const TOGETHER_S: u32 = 4 * 3_600;
/// Most pairs of tenants that are reported, those most at risk first.
pub const PAIRS_MAX: usize = 4_096;
/// Most tenants that are examined in one window, those with the largest shares first: bounds the number of pairs.
const TENANTS_PER_WINDOW_MAX: usize = 256;
/// How many times more often than by chance a pair must be reimaged together. Redeployments begin in working hours,
/// which alone makes any two tenants coincide two or three times as often.
pub const LIFT_MIN: f64 = 5.0;
/// Fewest windows in which a pair must have been reimaged: one may be chance.
const WINDOWS_MIN: u32 = 2;

/// The parameters of the estimate; the defaults were measured to be best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimator {
    /// See [`HALF_LIFE_MONTHS`]; infinite to give all months the same weight.
    pub half_life_months: f64,
    /// See [`PRIOR_MONTHS`]; 0 for none.
    pub prior_months: f64,
}

impl Default for Estimator {
    fn default() -> Self {
        Estimator {
            half_life_months: HALF_LIFE_MONTHS,
            prior_months: PRIOR_MONTHS,
        }
    }
}

/// Reimages and server-months of one tenant by month, the newest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Months {
    /// Reimages.
    pub reimages: [u32; MONTHS],
    /// Servers times months.
    pub server_months: [f64; MONTHS],
}

impl Default for Months {
    fn default() -> Self {
        Months {
            reimages: [0; MONTHS],
            server_months: [0.0; MONTHS],
        }
    }
}

impl Months {
    /// Counts every tenant of a history, by number, in the time before `now_s` (in seconds since 1970); later events
    /// are left out.
    pub fn count(history: &History, now_s: u32) -> Vec<Months> {
        let mut months = vec![Months::default(); history.tenants().len()];
        let begin_s = now_s.saturating_sub(MONTH_S * MONTHS as u32);
        for server in history.servers() {
            let owners = server.owners();
            for (index, owner) in owners.iter().enumerate() {
                let until_s = owners
                    .get(index + 1)
                    .map_or(now_s, |next| next.from_s.min(now_s));
                let tenant = &mut months[owner.tenant.0 as usize];
                tenant.own(owner.from_s.max(begin_s), until_s, now_s);
            }
            for &at_s in server.reimages() {
                if let Some(owner) = server.owner_before(at_s)
                    && (begin_s..=now_s).contains(&at_s)
                {
                    let month = (now_s.saturating_sub(at_s.saturating_add(1)) / MONTH_S) as usize;
                    months[owner.0 as usize].reimages[month.min(MONTHS - 1)] += 1;
                }
            }
        }
        months
    }

    /// Adds the time for which a server was owned, from one time to another.
    fn own(&mut self, from_s: u32, until_s: u32, now_s: u32) {
        let mut until_s = until_s;
        while from_s < until_s {
            let month = ((now_s - until_s) / MONTH_S) as usize;
            let Some(server_months) = self.server_months.get_mut(month) else {
                return;
            };
            let begin_s = now_s.saturating_sub((month as u32 + 1).saturating_mul(MONTH_S));
            let begin_s = begin_s.max(from_s);
            *server_months += f64::from(until_s - begin_s) / f64::from(MONTH_S);
            until_s = begin_s;
        }
    }

    /// Returns weighted reimages and server-months, and the (weighted) months in which the tenant had servers.
    fn weighted(&self, estimator: &Estimator) -> Weighted {
        let mut sum = Weighted::default();
        for month in 0..MONTHS {
            if self.server_months[month] <= 0.0 {
                continue;
            }
            let weight = 0.5f64.powf(month as f64 / estimator.half_life_months);
            sum.reimages += weight * f64::from(self.reimages[month]);
            sum.server_months += weight * self.server_months[month];
            // A tenant with one server for a day has had it for a day, not for a month.
            sum.months += weight * self.server_months[month].min(1.0);
        }
        sum
    }
}

#[derive(Clone, Copy, Default)]
struct Weighted {
    reimages: f64,
    server_months: f64,
    months: f64,
}

impl Weighted {
    /// Returns the rate, drawn towards `prior` as if that had been observed for `prior_months`.
    fn rate(&self, prior: f64, prior_months: f64) -> f64 {
        let servers = if self.months > 0.0 {
            self.server_months / self.months
        } else {
            1.0
        };
        let weight = prior_months * servers;
        let months = self.server_months + weight;
        if months > 0.0 {
            (self.reimages + weight * prior) / months
        } else {
            prior
        }
    }
}

/// Returns the reimages per server and month of each tenant, by number. A tenant without any history gets the rate of
/// all tenants.
pub fn rates(months: &[Months], estimator: &Estimator) -> Vec<f64> {
    let weighted: Vec<Weighted> = months
        .iter()
        .map(|months| months.weighted(estimator))
        .collect();
    let mut all = Weighted::default();
    for sum in &weighted {
        all.reimages += sum.reimages;
        all.server_months += sum.server_months;
    }
    let prior = all.rate(0.0, 0.0);
    let rate = |sum: &Weighted| sum.rate(prior, estimator.prior_months).max(0.0);
    weighted.iter().map(rate).collect()
}

/// Two tenants that are reimaged together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The tenant with the lower number.
    pub first: TenantId,
    /// The other tenant.
    pub second: TenantId,
    /// Windows in which servers of both were reimaged.
    pub windows: u32,
    /// How often per month a random server of one and a random server of the other are reimaged in the same window.
    pub together_per_month: f64,
    /// The same if their reimages were independent.
    pub expected_per_month: f64,
}

impl Pair {
    /// Returns how many times more often than by chance they are reimaged together.
    pub fn lift(&self) -> f64 {
        self.together_per_month / self.expected_per_month.max(f64::MIN_POSITIVE)
    }
}

/// Returns the pairs of tenants that were reimaged together at least [`LIFT_MIN`] times as often as by chance in the
/// three years before a time (in seconds since 1970), in at least two windows; those most at risk first, at most
/// [`PAIRS_MAX`].
///
/// Reimages a few minutes apart may fall into two windows, so the result is a lower bound.
pub fn together(history: &History, now_s: u32) -> Vec<Pair> {
    let begin_s = now_s.saturating_sub(MONTH_S * MONTHS as u32);
    let mut events: Vec<(u32, TenantId)> = Vec::new();
    let mut servers = vec![0u32; history.tenants().len()];
    let mut earliest_s = now_s;
    for server in history.servers() {
        // The size of a tenant is the number of servers that it owns now, or owned at a reimage.
        let mut owned: Vec<TenantId> = server.owner().into_iter().collect();
        for &at_s in server.reimages() {
            if let Some(owner) = server.owner_before(at_s)
                && (begin_s..=now_s).contains(&at_s)
            {
                events.push((at_s / TOGETHER_S, owner));
                owned.push(owner);
                earliest_s = earliest_s.min(at_s);
            }
        }
        owned.sort_unstable();
        owned.dedup();
        for tenant in owned {
            servers[tenant.0 as usize] += 1;
        }
    }
    events.sort_unstable();
    let mut sums = vec![0.0f64; servers.len()];
    let mut pairs: HashMap<(TenantId, TenantId), (u32, f64)> = HashMap::new();
    for window in events.chunk_by(|a, b| a.0 == b.0) {
        let mut shares: Vec<(TenantId, f64)> = window
            .chunk_by(|a, b| a.1 == b.1)
            .map(|same| {
                let (_, tenant) = same[0];
                let wiped = same.len() as f64 / f64::from(servers[tenant.0 as usize].max(1));
                (tenant, wiped.min(1.0))
            })
            .collect();
        for (tenant, share) in &shares {
            sums[tenant.0 as usize] += share;
        }
        if shares.len() > TENANTS_PER_WINDOW_MAX {
            shares.sort_by(|a, b| b.1.total_cmp(&a.1));
            shares.truncate(TENANTS_PER_WINDOW_MAX);
            shares.sort_by_key(|(tenant, _)| *tenant);
        }
        for (index, (first, one)) in shares.iter().enumerate() {
            for (second, other) in &shares[index + 1..] {
                let pair = pairs.entry((*first, *second)).or_default();
                pair.0 += 1;
                pair.1 += one * other;
            }
        }
    }
    let span_s = f64::from((now_s - earliest_s).max(MONTH_S));
    let (months, windows) = (span_s / f64::from(MONTH_S), span_s / f64::from(TOGETHER_S));
    let mut found: Vec<Pair> = pairs
        .into_iter()
        .filter(|(_, (count, _))| *count >= WINDOWS_MIN)
        .map(|((first, second), (count, sum))| {
            let expected = sums[first.0 as usize] * sums[second.0 as usize] / windows;
            Pair {
                first,
                second,
                windows: count,
                together_per_month: sum / months,
                expected_per_month: expected / months,
            }
        })
        .filter(|pair| pair.lift() >= LIFT_MIN)
        .collect();
    let risk = |pair: &Pair| pair.together_per_month - pair.expected_per_month;
    found.sort_by(|a, b| {
        let by_risk = risk(b).total_cmp(&risk(a));
        by_risk.then((a.first, a.second).cmp(&(b.first, b.second)))
    });
    found.truncate(PAIRS_MAX);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::TenantKey;

    const NOW: u32 = 40 * MONTH_S;

    fn key(environment: &str, function: &str) -> TenantKey {
        TenantKey {
            environment: environment.to_owned(),
            machine_function: function.to_owned(),
        }
    }

    /// A tenant with `servers` servers, owned for `months` months.
    fn grow(history: &mut History, key: &TenantKey, servers: u32, months: u32) {
        for number in 0..servers {
            let name = format!("{}-{number}", key.machine_function);
            history.owns(&name, key, NOW - months * MONTH_S).unwrap();
        }
    }

    #[test]
    fn months_count_servers_and_reimages() {
        let mut history = History::default();
        let (a, b) = (key("e", "a"), key("e", "b"));
        history.owns("s", &a, 0).unwrap();
        history.owns("s", &b, NOW - MONTH_S * 3 / 2).unwrap();
        // The giver is reimaged; then the new owner; then something in the future.
        for at_s in [NOW - MONTH_S * 3 / 2, NOW, NOW + 1000, 5] {
            history.reimaged("s", at_s).unwrap();
        }
        let months = Months::count(&history, NOW);
        assert_eq!(months[0].server_months[..3], [0.0, 0.5, 1.0]);
        assert_eq!(months[1].server_months[..3], [1.0, 0.5, 0.0]);
        assert!((months[0].server_months.iter().sum::<f64>() - 34.5).abs() < 1e-9);
        assert_eq!(months[0].reimages[..3], [0, 1, 0]);
        assert_eq!(months[1].reimages[..3], [1, 0, 0]);
        // A clock at the beginning of time.
        assert_eq!(Months::count(&history, 0)[0], Months::default());
        assert_eq!(
            Months::count(&history, u32::MAX)[1]
                .reimages
                .iter()
                .sum::<u32>(),
            0
        );
    }

    #[test]
    fn little_history_is_drawn_to_that_of_others() {
        let mut history = History::default();
        let old = key("e", "old");
        grow(&mut history, &old, 10, 36);
        for month in 0..36 {
            for number in 0..10 {
                history
                    .reimaged(&format!("old-{number}"), NOW - month * MONTH_S - 100)
                    .unwrap();
            }
        }
        let new = key("e", "new");
        history.owns("new-0", &new, NOW - 86_400).unwrap();
        let quiet = key("f", "quiet");
        grow(&mut history, &quiet, 10, 36);
        history.tenant(&key("f", "nothing")).unwrap();
        let months = Months::count(&history, NOW);
        let rates = rates(&months, &Estimator::default());
        assert!((0.95..1.05).contains(&rates[0]), "{rates:?}");
        assert!((0.2..0.9).contains(&rates[1]), "{rates:?}");
        assert!((0.0..0.1).contains(&rates[2]), "{rates:?}");
        assert!((0.2..0.8).contains(&rates[3]), "{rates:?}");
        assert_eq!(super::rates(&[], &Estimator::default()), []);
    }

    #[test]
    fn tenants_that_go_together_are_found() {
        let mut history = History::default();
        let keys = ["a", "b", "c"].map(|function| key(function, function));
        for key in &keys {
            grow(&mut history, key, 10, 36);
        }
        for month in 0..30 {
            for number in 0..10 {
                let at_s = NOW - month * MONTH_S - 10_000;
                let at_s = at_s / TOGETHER_S * TOGETHER_S + number * 60;
                history.reimaged(&format!("a-{number}"), at_s).unwrap();
                history.reimaged(&format!("b-{number}"), at_s + 30).unwrap();
                let other_s = NOW - month * MONTH_S - MONTH_S / 2 - number * 70_000;
                history.reimaged(&format!("c-{number}"), other_s).unwrap();
            }
        }
        let pairs = together(&history, NOW);
        assert_eq!(
            (pairs[0].first, pairs[0].second),
            (TenantId(0), TenantId(1))
        );
        assert_eq!(pairs[0].windows, 30);
        assert!(
            (0.9..1.1).contains(&pairs[0].together_per_month),
            "{pairs:?}"
        );
        assert!(pairs[0].lift() > 50.0);
        assert!(pairs.len() == 1, "{pairs:?}");
        assert_eq!(together(&History::default(), NOW), []);
    }
}
