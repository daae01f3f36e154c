//! The generator: a structure, and three years of history of its tenants.
//!
//! How often a tenant redeploys is drawn once and drifts; how it redeploys (everything at once or
//! in slices, within the hour or rolling through the day) is a habit. On top come redeployments
//! of whole environments, servers that change hands, tests of resilience and single disks.

use std::collections::BTreeMap;

use rand::RngExt;
use rand::rngs::SmallRng;

use super::profile::Profile;
use super::structure::{self, Structure};
use super::{
    DAY_S, DAYS_PER_MONTH, Datacentre, EnvironmentKind, LoadModel, MONTH_S, MONTHS, Reimage,
    ReimageKind, Tenant, facts,
};
use crate::random::{exponential, lognormal, normal, sample, stream};

/// The number of draws after which the generator gives up on a profile.
const DRAWS_MAX: u64 = 10;
/// The weight of the environment's unrest in that of a tenant.
const ENVIRONMENT_WEIGHT: f64 = 0.5;
/// The highest rate of any tenant, and of one that owns more than `LARGE_SHARE` of the servers.
const RATE_MAX: f64 = 4.0;
const LARGE_RATE_MAX: f64 = 0.7;
const LARGE_SHARE: f64 = 0.005;
/// Drift of the logarithm of the rate: standard deviation, and correlation between months.
const DRIFT_SIGMA: f64 = 0.25;
const DRIFT_MEMORY: f64 = 0.85;
/// Months in which a tenant changes its habits: their probability, and by how much its rate jumps.
const JUMP_PROBABILITY: f64 = 0.008;
const JUMP_SIGMA: f64 = 0.8;
/// From this rate on, a tenant redeploys every month; below, it does so in spells.
const STEADY_RATE: f64 = 0.5;
/// Length of a spell in months per unit of rate: tenants that are seldom active are active for short spells.
const SPELL_MONTHS_PER_RATE: f64 = 24.0;
const SPELL_LEVEL_SIGMA: f64 = 0.3;
/// Share of redeployments that start in working hours.
const OFFICE_SHARE: f64 = 0.85;
/// Median length of a rolling redeployment.
const ROLLING_HOURS: f64 = 12.0;
/// Share of its tenants that a redeployment of an environment reaches, and over how many hours.
const ENVIRONMENT_REACH: f64 = 0.85;
const ENVIRONMENT_SPREAD_HOURS: f64 = 4.0;
/// Servers that change hands: the probability that a whole tenant is given up, the probability that the receiver is
/// new, the largest move as a share of all servers, and its median length.
const RETIRE_PROBABILITY: f64 = 0.15;
const NEW_TENANT_PROBABILITY: f64 = 0.4;
const MOVE_SHARE_MAX: f64 = 0.01;
const MOVE_HOURS: f64 = 3.0;
/// Maintenance of disks, per server and month.
const DISK_RATE: f64 = 0.0012;
/// Tests of resilience: share of the larger production tenants, size, and median rate.
const TESTED_SHARE: f64 = 0.4;
const TESTED_SIZE_MIN: u32 = 10;
const TEST_RATE: f64 = 0.08;
/// For this long after it was reimaged, a server is not reimaged again.
const WIPE_S: u64 = 1_800;

/// No draw of a profile agrees with the paper.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no draw of {name} agrees with what the paper states; the last missed: {missed}")]
pub struct GenerateError {
    /// The datacentre.
    pub name: String,
    /// Which statements the last draw missed.
    pub missed: String,
}

/// Generates a datacentre. The same profile always gives the same one.
///
/// # Errors
/// When no draw has as many servers and tenants that are seldom reimaged, and tenants that keep to their reimage
/// frequency, as the paper states ([`facts::Facts::misses`]). All built-in profiles have such a draw.
pub fn generate(profile: &Profile) -> Result<Datacentre, GenerateError> {
    let mut missed = String::new();
    for draw in 0..DRAWS_MAX {
        let datacentre = generate_once(profile, profile.seed + 1_000 * draw);
        let facts = facts::measure(&datacentre);
        let misses = facts.misses();
        if misses.is_empty() {
            return Ok(datacentre);
        }
        missed = misses.join(", ");
    }
    Err(GenerateError {
        name: profile.name.to_owned(),
        missed,
    })
}

fn generate_once(profile: &Profile, seed: u64) -> Datacentre {
    let structure = structure::build(profile, &mut stream(seed, "structure"));
    let mut history = History::new(profile, structure, seed);
    for month in 0..MONTHS {
        history.month(month);
    }
    history.finish()
}

/// What the generator remembers of a tenant from month to month.
struct Habit {
    /// Its present servers.
    servers: Vec<u32>,
    /// The logarithm of its rate, without drift.
    base: f64,
    drift: f64,
    /// Whether it redeploys slice by slice.
    sliced: bool,
    /// The remaining months of the spell, and the redeployments per month in it.
    spell_months: u32,
    spell_level: f64,
    /// The part of a redeployment that was due in the months so far and has not happened.
    owed: f64,
    /// Share of its servers that tests of resilience wipe in a month.
    tested: f64,
}

struct History<'a> {
    profile: &'a Profile,
    structure: Structure,
    rng: SmallRng,
    habits: Vec<Habit>,
    reimages: Vec<Reimage>,
    bursts: u32,
}

impl<'a> History<'a> {
    fn new(profile: &'a Profile, structure: Structure, seed: u64) -> Self {
        let mut sizes: Vec<u32> = structure.tenants.iter().map(|t| t.size_at_start).collect();
        sizes.sort_unstable();
        let median_size = f64::from(sizes.get(sizes.len() / 2).copied().unwrap_or(1));
        let mut rng = stream(seed, "reimages");
        let mut habits: Vec<Habit> = structure
            .tenants
            .iter()
            .map(|tenant| {
                let shared = structure.environments[tenant.environment as usize].unrest;
                let own = (1.0 - ENVIRONMENT_WEIGHT * ENVIRONMENT_WEIGHT).sqrt() * normal(&mut rng);
                let size = f64::from(tenant.size_at_start) / median_size;
                let base = profile.median_rate.ln()
                    + profile.rate_sigma * (ENVIRONMENT_WEIGHT * shared + own)
                    + shift(tenant.environment_kind)
                    - profile.size_slope * size.ln();
                let tested = tenant.environment_kind == EnvironmentKind::Production
                    && tenant.size_at_start >= TESTED_SIZE_MIN
                    && rng.random_bool(TESTED_SHARE);
                let tested = if tested {
                    lognormal(&mut rng, TEST_RATE, 0.6).min(0.5)
                } else {
                    0.0
                };
                Habit::new(&mut rng, base, profile.sliced_share, tested)
            })
            .collect();
        for (number, server) in structure.servers.iter().enumerate() {
            for &(_, tenant) in &server.owners {
                habits[tenant as usize].servers.push(number as u32);
            }
        }
        Self {
            profile,
            structure,
            rng,
            habits,
            reimages: Vec::new(),
            bursts: 0,
        }
    }

    fn month(&mut self, month: u32) {
        for tenant in 0..self.habits.len() {
            if !self.habits[tenant].servers.is_empty() {
                self.singles(tenant, month);
                self.redeploys(tenant, month);
            }
        }
        self.environments(month);
        self.moves(month);
    }

    /// Maintenance of disks, and tests of resilience.
    fn singles(&mut self, tenant: usize, month: u32) {
        let servers = self.habits[tenant].servers.clone();
        for &server in &servers {
            if self.rng.random_bool(DISK_RATE) {
                self.single(tenant, server, month, ReimageKind::Disk);
            }
        }
        let tested = self.habits[tenant].tested;
        if tested > 0.0 {
            let factor = self.rng.random_range(0.8..1.2);
            let count = (tested * servers.len() as f64 * factor).round().max(1.0);
            for server in sample(&mut self.rng, &servers, count as usize) {
                self.single(tenant, server, month, ReimageKind::Test);
            }
        }
    }

    fn single(&mut self, tenant: usize, server: u32, month: u32, kind: ReimageKind) {
        let at = (f64::from(month) + self.rng.random::<f64>()) * MONTH_S as f64;
        self.wipe(at, server, tenant, kind, 0);
    }

    fn wipe(&mut self, at_s: f64, server: u32, tenant: usize, kind: ReimageKind, burst: u32) {
        self.reimages.push(Reimage {
            at_s: at_s as u64,
            server,
            tenant: tenant as u32,
            kind,
            burst,
        });
    }

    /// The redeployments of a tenant in a month.
    fn redeploys(&mut self, tenant: usize, month: u32) {
        let level = self.level(tenant);
        if level <= 0.0 {
            return;
        }
        let servers = self.habits[tenant].servers.len() as f64;
        let habit = &mut self.habits[tenant];
        let due = habit.owed.clamp(-0.4, 0.4) + level;
        let count = if habit.sliced {
            (6.0 * due).round().clamp(2.0, 8.0)
        } else {
            due.round().max(1.0)
        };
        let share = (due / count).clamp(1.0 / servers, 1.0);
        // An owner that reimages nearly everything reimages everything.
        let share = if share > 0.75 { 1.0 } else { share };
        habit.owed = due - count * share;
        for _ in 0..count as u32 {
            let start = self.office_time(month);
            self.redeploy(tenant, share, start, None);
        }
    }

    /// The number of redeployments of all its servers that a tenant makes this month.
    fn level(&mut self, tenant: usize) -> f64 {
        let many = LARGE_SHARE * self.structure.servers.len() as f64;
        let habit = &mut self.habits[tenant];
        let rng = &mut self.rng;
        habit.drift = DRIFT_MEMORY * habit.drift
            + (1.0 - DRIFT_MEMORY * DRIFT_MEMORY).sqrt() * DRIFT_SIGMA * normal(rng);
        if rng.random_bool(JUMP_PROBABILITY) {
            habit.base = (habit.base + JUMP_SIGMA * normal(rng)).min(RATE_MAX.ln());
        }
        let highest = if habit.servers.len() as f64 > many {
            LARGE_RATE_MAX
        } else {
            RATE_MAX
        };
        let rate = (habit.base + habit.drift).exp().min(highest);
        if rate >= STEADY_RATE {
            habit.spell_months = 0;
            return rate;
        }
        if habit.spell_months == 0 {
            // Spells and the quiet months between them average to the rate.
            let mean_months = (SPELL_MONTHS_PER_RATE * rate).max(1.0);
            let active_share = rate.min(0.9);
            let starts = active_share / (mean_months * (1.0 - active_share));
            if !rng.random_bool(starts.min(1.0)) {
                return 0.0;
            }
            habit.spell_months = 1 + exponential(rng, mean_months - 1.0).round() as u32;
            habit.spell_level = lognormal(rng, 1.0, SPELL_LEVEL_SIGMA);
        }
        habit.spell_months -= 1;
        habit.spell_level
    }

    /// A time in a month at which people start something.
    fn office_time(&mut self, month: u32) -> f64 {
        let first_day = u64::from(month) * DAYS_PER_MONTH;
        if !self.rng.random_bool(OFFICE_SHARE) {
            return (first_day * DAY_S) as f64
                + self.rng.random::<f64>() * (DAYS_PER_MONTH * DAY_S) as f64;
        }
        let mut day = first_day + self.rng.random_range(0..DAYS_PER_MONTH);
        while day % 7 >= 5 {
            day = first_day + self.rng.random_range(0..DAYS_PER_MONTH);
        }
        (day * DAY_S) as f64 + self.rng.random_range(8.0..18.0) * 3_600.0
    }

    /// Reimages a share of a tenant's servers.
    fn redeploy(&mut self, tenant: usize, share: f64, start_s: f64, kind: Option<ReimageKind>) {
        let servers = &self.habits[tenant].servers;
        let count = (share * servers.len() as f64).round().max(1.0) as usize;
        let chosen = sample(&mut self.rng, servers, count);
        let rolling = self.rng.random_bool(self.profile.rolling_share);
        let length_s = if rolling {
            lognormal(&mut self.rng, ROLLING_HOURS, 0.7) * 3_600.0
        } else {
            lognormal(&mut self.rng, self.profile.burst_minutes, 0.6) * 60.0
        };
        let kind = kind.unwrap_or(if rolling {
            ReimageKind::Rolling
        } else {
            ReimageKind::Burst
        });
        self.bursts += 1;
        let burst = self.bursts;
        for (at_s, server) in self.spread(start_s, length_s, &chosen) {
            self.wipe(at_s, server, tenant, kind, burst);
        }
    }

    /// Draws a time for each server: one after another, evenly spaced with some jitter.
    fn spread(&mut self, start_s: f64, length_s: f64, servers: &[u32]) -> Vec<(f64, u32)> {
        let step_s = length_s / servers.len().max(1) as f64;
        let mut times = Vec::with_capacity(servers.len());
        for (place, &server) in servers.iter().enumerate() {
            let at_s = start_s + step_s * (place as f64 + self.rng.random::<f64>());
            times.push((at_s, server));
        }
        times
    }

    /// Redeployments of whole environments.
    fn environments(&mut self, month: u32) {
        for environment in 0..self.structure.environments.len() {
            let liking = match self.structure.environments[environment].kind {
                EnvironmentKind::Production => 1.0,
                EnvironmentKind::Development => 1.5,
                EnvironmentKind::Test => 2.0,
            };
            let probability = self.profile.environment_redeploys_per_year * liking / 12.0;
            if !self.rng.random_bool(probability.min(1.0)) {
                continue;
            }
            let start_s = self.office_time(month);
            for tenant in 0..self.habits.len() {
                let in_it = self.structure.tenants[tenant].environment as usize == environment;
                let alive = !self.habits[tenant].servers.is_empty();
                if in_it && alive && self.rng.random_bool(ENVIRONMENT_REACH) {
                    let half = self.rng.random_bool(1.0 / 3.0);
                    let share = if half { 0.5 } else { 1.0 };
                    let later_s = self.rng.random::<f64>() * ENVIRONMENT_SPREAD_HOURS * 3_600.0;
                    let kind = Some(ReimageKind::Environment);
                    self.redeploy(tenant, share, start_s + later_s, kind);
                }
            }
        }
    }

    /// Moves servers between tenants this month.
    fn moves(&mut self, month: u32) {
        let servers = self.structure.servers.len() as f64;
        let amount = self.profile.repurposed_share * servers * 2.0 * self.rng.random::<f64>();
        let mut moved = 0;
        while f64::from(moved) < amount {
            let owners: Vec<usize> = (0..self.habits.len())
                .filter(|&tenant| self.habits[tenant].servers.len() > 3)
                .collect();
            let Some(&from) = owners.get(self.rng.random_range(0..owners.len().max(1))) else {
                return;
            };
            moved += self.move_servers(from, &owners, month);
        }
    }

    /// Moves servers of a tenant to another one, which may be new. Returns how many.
    fn move_servers(&mut self, from: usize, owners: &[usize], month: u32) -> u32 {
        let size = self.habits[from].servers.len();
        let all = self.structure.tenants[from].first_month < month
            && self.rng.random_bool(RETIRE_PROBABILITY);
        let part = self.rng.random_range(0.05..0.5);
        let wanted = if all {
            size as f64
        } else {
            (size as f64 * part).round()
        };
        let largest = (MOVE_SHARE_MAX * self.structure.servers.len() as f64).max(8.0);
        let count = wanted.clamp(1.0, largest) as usize;
        let to = if self.rng.random_bool(NEW_TENANT_PROBABILITY) {
            self.new_tenant(from, count as u32, month)
        } else {
            let to = owners[self.rng.random_range(0..owners.len())];
            if to == from {
                return 0;
            }
            to
        };
        let chosen = sample(&mut self.rng, &self.habits[from].servers, count);
        let end_s = (u64::from(month) + 1) * MONTH_S;
        let start_s = self.office_time(month).min(end_s as f64 - 1.0);
        let length_s = lognormal(&mut self.rng, MOVE_HOURS, 0.6) * 3_600.0;
        self.bursts += 1;
        let burst = self.bursts;
        for (at_s, server) in self.spread(start_s, length_s, &chosen) {
            let owners = &mut self.structure.servers[server as usize].owners;
            let since_s = owners.last().map_or(0, |&(from_s, _)| from_s);
            let at_s = (at_s as u64).max(since_s + 1);
            owners.push((at_s, to as u32));
            self.wipe(at_s as f64, server, from, ReimageKind::Repurpose, burst);
        }
        self.habits[from]
            .servers
            .retain(|server| !chosen.contains(server));
        if self.habits[from].servers.is_empty() {
            self.structure.tenants[from].end_month = month + 1;
        }
        self.habits[to].servers.extend(&chosen);
        chosen.len() as u32
    }

    fn new_tenant(&mut self, from: usize, size: u32, month: u32) -> usize {
        let environment = self.rng.random_range(0..self.structure.environments.len());
        let kind = self.structure.environments[environment].kind;
        let key = self
            .structure
            .functions
            .key(&mut self.rng, environment as u32);
        let pattern = self.structure.tenants[from].pattern;
        self.structure.tenants.push(Tenant {
            key,
            environment: environment as u32,
            environment_kind: kind,
            pattern,
            first_month: month,
            end_month: MONTHS,
            size_at_start: size,
            load: LoadModel::draw(&mut self.rng, pattern),
        });
        let base = self.profile.median_rate.ln()
            + self.profile.rate_sigma * normal(&mut self.rng)
            + shift(EnvironmentKind::Development);
        let habit = Habit::new(&mut self.rng, base, self.profile.sliced_share, 0.0);
        self.habits.push(habit);
        self.habits.len() - 1
    }

    /// Sorts the reimages and removes impossible ones.
    fn finish(mut self) -> Datacentre {
        let end_s = u64::from(MONTHS) * MONTH_S;
        // A stable sort: coinciding reimages stay in the order in which they were drawn.
        self.reimages.sort_by_key(|it| (it.at_s, it.server));
        let mut wiped_s: BTreeMap<u32, u64> = BTreeMap::new();
        let mut reimages = Vec::with_capacity(self.reimages.len());
        for mut reimage in self.reimages {
            let server = &self.structure.servers[reimage.server as usize];
            let again = wiped_s
                .get(&reimage.server)
                .is_some_and(|&at_s| reimage.at_s < at_s + WIPE_S);
            let moves = reimage.kind == ReimageKind::Repurpose;
            if reimage.at_s >= end_s || (again && !moves) {
                continue;
            }
            if !moves {
                // A redeployment may continue after the end of its month, when the server may have another owner.
                reimage.tenant = server.owner_at(reimage.at_s);
            }
            wiped_s.insert(reimage.server, reimage.at_s);
            reimages.push(reimage);
        }
        for server in &mut self.structure.servers {
            server.owners.retain(|&(from_s, _)| from_s < end_s);
        }
        Datacentre {
            name: self.profile.name.to_owned(),
            tenants: self.structure.tenants,
            servers: self.structure.servers,
            reimages,
        }
    }
}

impl Habit {
    fn new(rng: &mut SmallRng, base: f64, sliced_share: f64, tested: f64) -> Self {
        Self {
            servers: Vec::new(),
            base: base.min(RATE_MAX.ln()),
            drift: DRIFT_SIGMA * normal(rng),
            sliced: rng.random_bool(sliced_share),
            spell_months: 0,
            spell_level: 0.0,
            owed: 0.0,
            tested,
        }
    }
}

/// The logarithm of the factor by which environments of a kind are reimaged more often.
fn shift(kind: EnvironmentKind) -> f64 {
    match kind {
        EnvironmentKind::Production => -0.27,
        EnvironmentKind::Development => 0.4,
        EnvironmentKind::Test => 0.8,
    }
}
