//! Measures what the paper states about its datacentres.

use serde::Serialize;

use super::{Datacentre, MONTH_S, MONTHS};

/// The quantities that sections 3.2 and 3.3 of the paper state.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    /// Number of servers.
    pub servers: usize,
    /// Number of tenants that ever owned a server.
    pub tenants: usize,
    /// Number of reimages.
    pub reimages: usize,
    /// Reimages per server and month.
    pub rate_mean: f64,
    /// Share of servers that are reimaged at most once a month on average. The paper: at least 0.9.
    pub calm_servers_share: f64,
    /// Share of tenants that are reimaged at most once per server and month. The paper: at least 0.8.
    pub calm_tenants_share: f64,
    /// Reimages per server and month of tenants: 10th, 50th and 90th percentile.
    pub tenant_rate_p10_p50_p90: [f64; 3],
    /// Share of the tenants existing throughout that change their group (infrequent, intermediate,
    /// frequent) at most 8 times in 35. The paper: at least 0.8.
    pub steady_tenants_share: f64,
    /// Share of reimages, in tenants with 8 servers or more, that belong to batches: at least half of
    /// the tenant's servers, with pauses of at most a day. The Wikimedia log: 0.44.
    pub batch_share: f64,
    /// Share of tenants that did not exist throughout.
    pub short_lived_share: f64,
    /// The most servers that were reimaged in one window of four hours.
    pub most_in_4_hours: usize,
}

impl Facts {
    /// The statements of the paper that a generated history must meet but does not.
    #[must_use]
    pub fn misses(&self) -> Vec<&'static str> {
        let mut misses = Vec::new();
        if self.calm_servers_share < 0.9 {
            misses.push("90 % of servers are reimaged at most once a month");
        }
        if self.calm_tenants_share < 0.8 {
            misses.push("80 % of tenants are reimaged at most once per server and month");
        }
        if self.steady_tenants_share < 0.8 {
            misses.push("80 % of tenants change their group at most 8 times in 35");
        }
        misses
    }
}

/// Reimages and servers of each tenant, month by month.
pub struct Monthly {
    /// Reimages: `[tenant][month]`.
    pub reimages: Vec<[u32; MONTHS as usize]>,
    /// Servers on average: `[tenant][month]`.
    pub servers: Vec<[f64; MONTHS as usize]>,
}

impl Monthly {
    /// Counts a datacentre's history.
    #[must_use]
    pub fn count(datacentre: &Datacentre) -> Self {
        let tenants = datacentre.tenants.len();
        let mut monthly = Self {
            reimages: vec![[0; MONTHS as usize]; tenants],
            servers: vec![[0.0; MONTHS as usize]; tenants],
        };
        for reimage in &datacentre.reimages {
            let month = (reimage.at_s / MONTH_S) as usize;
            monthly.reimages[reimage.tenant as usize][month] += 1;
        }
        let end_s = u64::from(MONTHS) * MONTH_S;
        for server in &datacentre.servers {
            for (period, &(from_s, tenant)) in server.owners.iter().enumerate() {
                let until_s = server.owners.get(period + 1).map_or(end_s, |next| next.0);
                let mut at_s = from_s;
                while at_s < until_s {
                    let month = at_s / MONTH_S;
                    let next_s = until_s.min((month + 1) * MONTH_S);
                    monthly.servers[tenant as usize][month as usize] +=
                        (next_s - at_s) as f64 / MONTH_S as f64;
                    at_s = next_s;
                }
            }
        }
        monthly
    }

    /// Reimages per server and month of a tenant in the months before `end`; `None` if it had no
    /// server.
    #[must_use]
    pub fn rate(&self, tenant: usize, end: u32) -> Option<f64> {
        let servers: f64 = self.servers[tenant][..end as usize].iter().sum();
        let reimages: u32 = self.reimages[tenant][..end as usize].iter().sum();
        (servers > 0.0).then(|| f64::from(reimages) / servers)
    }

    /// How often each tenant that existed throughout changes its group of reimage frequency from one
    /// month to the next. Ties are broken by the past average.
    #[must_use]
    pub fn group_changes(&self) -> Vec<u32> {
        let alive: Vec<usize> = (0..self.servers.len())
            .filter(|&tenant| self.servers[tenant].iter().all(|&servers| servers > 0.0))
            .collect();
        let mut changes = vec![0; alive.len()];
        let mut past = vec![0.0_f64; alive.len()];
        let mut groups: Vec<usize> = Vec::new();
        for month in 0..MONTHS as usize {
            let rates: Vec<f64> = alive
                .iter()
                .map(|&t| f64::from(self.reimages[t][month]) / self.servers[t][month])
                .collect();
            let mut order: Vec<usize> = (0..alive.len()).collect();
            order.sort_by(|&a, &b| {
                let by_rate = rates[a].total_cmp(&rates[b]);
                by_rate.then(past[a].total_cmp(&past[b])).then(a.cmp(&b))
            });
            let mut now = vec![0; alive.len()];
            for (place, &member) in order.iter().enumerate() {
                now[member] = 3 * place / alive.len();
                past[member] += rates[member];
            }
            for (member, change) in changes.iter_mut().enumerate() {
                *change += u32::from(groups.get(member).is_some_and(|&was| was != now[member]));
            }
            groups = now;
        }
        changes
    }
}

/// Measures a datacentre.
#[must_use]
pub fn measure(datacentre: &Datacentre) -> Facts {
    let monthly = Monthly::count(datacentre);
    let server_rates = server_rates(datacentre);
    let mut tenant_rates: Vec<f64> = (0..datacentre.tenants.len())
        .filter_map(|tenant| monthly.rate(tenant, MONTHS))
        .collect();
    tenant_rates.sort_by(f64::total_cmp);
    let changes = monthly.group_changes();
    let short_lived = monthly
        .servers
        .iter()
        .filter(|months| months.iter().any(|&servers| servers > 0.0) && months.contains(&0.0));
    let at_most_one =
        |rates: &[f64]| share(rates.iter().filter(|&&r| r <= 1.0).count(), rates.len());
    Facts {
        servers: datacentre.servers.len(),
        tenants: tenant_rates.len(),
        reimages: datacentre.reimages.len(),
        rate_mean: server_rates.iter().sum::<f64>() / server_rates.len().max(1) as f64,
        calm_servers_share: at_most_one(&server_rates),
        calm_tenants_share: at_most_one(&tenant_rates),
        tenant_rate_p10_p50_p90: [0.1, 0.5, 0.9].map(|part| percentile(&tenant_rates, part)),
        steady_tenants_share: share(
            changes.iter().filter(|&&count| count <= 8).count(),
            changes.len(),
        ),
        batch_share: batch_share(datacentre, &monthly),
        short_lived_share: share(short_lived.count(), tenant_rates.len()),
        most_in_4_hours: most_in_window(datacentre, 4 * 3_600),
    }
}

/// Reimages per month of each server, in ascending order.
#[must_use]
pub fn server_rates(datacentre: &Datacentre) -> Vec<f64> {
    let mut counts = vec![0_u32; datacentre.servers.len()];
    for reimage in &datacentre.reimages {
        counts[reimage.server as usize] += 1;
    }
    let mut rates: Vec<f64> = counts
        .iter()
        .map(|&count| f64::from(count) / f64::from(MONTHS))
        .collect();
    rates.sort_by(f64::total_cmp);
    rates
}

/// The value below which a share of the sorted values lies; 0 if there are no values.
#[must_use]
pub fn percentile(sorted: &[f64], part: f64) -> f64 {
    let place = (sorted.len() as f64 * part) as usize;
    let last = sorted.len().saturating_sub(1);
    sorted.get(place.min(last)).copied().unwrap_or(0.0)
}

fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn batch_share(datacentre: &Datacentre, monthly: &Monthly) -> f64 {
    let mut by_tenant: Vec<Vec<(u64, u32)>> = vec![Vec::new(); datacentre.tenants.len()];
    for reimage in &datacentre.reimages {
        by_tenant[reimage.tenant as usize].push((reimage.at_s, reimage.server));
    }
    let (mut all, mut in_batches) = (0, 0);
    for (tenant, events) in by_tenant.iter().enumerate() {
        for group in events.chunk_by(|a, b| b.0 - a.0 <= super::DAY_S) {
            let month = (group[0].0 / MONTH_S) as usize;
            let size = monthly.servers[tenant][month];
            if size < 8.0 {
                continue;
            }
            let mut servers: Vec<u32> = group.iter().map(|event| event.1).collect();
            servers.sort_unstable();
            servers.dedup();
            all += group.len();
            if servers.len() as f64 >= 0.5 * size {
                in_batches += group.len();
            }
        }
    }
    share(in_batches, all)
}

fn most_in_window(datacentre: &Datacentre, window_s: u64) -> usize {
    let windows = datacentre
        .reimages
        .chunk_by(|a, b| a.at_s / window_s == b.at_s / window_s);
    let distinct = windows.map(|events| {
        let mut servers: Vec<u32> = events.iter().map(|event| event.server).collect();
        servers.sort_unstable();
        servers.dedup();
        servers.len()
    });
    distinct.max().unwrap_or(0)
}
