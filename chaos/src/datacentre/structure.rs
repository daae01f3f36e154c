//! The state at the start: tenants, environments, sizes, patterns, racks.

use std::collections::BTreeSet;

use harvestfs_telemetry::profile::{Pattern, TenantKey};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt};

use super::profile::Profile;
use super::{EnvironmentKind, LoadModel, MONTHS, Server, Tenant};
use crate::random::{geometric, lognormal, normal, shuffle, weighted_order};

/// Spread of the sizes of tenants: standard deviation of the logarithm.
const SIZE_SIGMA: f64 = 1.1;
/// The minimum number of servers that a tenant starts with.
const SIZE_MIN: u32 = 3;
/// The number of tenants of an environment: mean and maximum.
const ENVIRONMENT_TENANTS_MEAN: f64 = 4.0;
const ENVIRONMENT_TENANTS_MAX: u32 = 25;
/// Shares of environments for production and for development; the rest is for tests.
const PRODUCTION_SHARE: f64 = 0.7;
const DEVELOPMENT_SHARE: f64 = 0.15;
/// Periodic tenants are the large services of a datacentre: a minority of the tenants that owns two fifths of the
/// servers. The weight with which a tenant is drawn is this power of its size.
const PERIODIC_SIZE_POWER: f64 = 1.8;
const UNPREDICTABLE_SIZE_POWER: f64 = 0.8;
/// Number of servers in a rack.
const RACK_SERVERS: u32 = 40;
/// Racks are filled with pieces of tenants: median size and spread.
const PIECE_SERVERS: f64 = 12.0;
const PIECE_SIGMA: f64 = 0.5;
/// About this many tenants share each machine function.
const TENANTS_PER_FUNCTION: u32 = 6;

/// What does not change over time, and the owners at the start.
pub(super) struct Structure {
    pub(super) tenants: Vec<Tenant>,
    pub(super) environments: Vec<Environment>,
    pub(super) servers: Vec<Server>,
    pub(super) functions: FunctionNames,
}

/// An environment.
pub(super) struct Environment {
    pub(super) kind: EnvironmentKind,
    /// How often its tenants are reimaged compared with others: a standard normal deviate.
    pub(super) unrest: f64,
}

pub(super) fn build(profile: &Profile, rng: &mut SmallRng) -> Structure {
    let sizes = sizes(profile, rng);
    let count = sizes.len();
    let mut environments = Vec::new();
    let mut environment_of = Vec::with_capacity(count);
    while environment_of.len() < count {
        let number = environments.len() as u32;
        let tenants = geometric(rng, ENVIRONMENT_TENANTS_MEAN, ENVIRONMENT_TENANTS_MAX);
        let left = count - environment_of.len();
        environment_of.extend(std::iter::repeat_n(number, left.min(tenants as usize)));
        environments.push(Environment {
            kind: environment_kind(rng),
            unrest: normal(rng),
        });
    }
    let kinds: Vec<EnvironmentKind> = environment_of
        .iter()
        .map(|&number| environments[number as usize].kind)
        .collect();
    let patterns = patterns(profile, rng, &sizes, &kinds);
    let mut functions = FunctionNames::new(profile.tenants / TENANTS_PER_FUNCTION);
    let mut tenants: Vec<Tenant> = Vec::with_capacity(count);
    for (number, &size) in sizes.iter().enumerate() {
        let environment = environment_of[number];
        let key = functions.key(rng, environment);
        tenants.push(Tenant {
            key,
            environment,
            environment_kind: kinds[number],
            pattern: patterns[number],
            first_month: 0,
            end_month: MONTHS,
            size_at_start: size,
            load: LoadModel::draw(rng, patterns[number]),
        });
    }
    let servers = racks(rng, &sizes);
    Structure {
        tenants,
        environments,
        servers,
        functions,
    }
}

/// Lognormal sizes that add up to the servers, none above the largest share.
fn sizes(profile: &Profile, rng: &mut SmallRng) -> Vec<u32> {
    let mut shares: Vec<f64> = (0..profile.tenants)
        .map(|_| lognormal(rng, 1.0, SIZE_SIGMA))
        .collect();
    // Reducing one raises the shares of the others: a few rounds converge.
    for _ in 0..20 {
        let largest = profile.tenant_share_max * shares.iter().sum::<f64>();
        for share in &mut shares {
            *share = share.min(largest);
        }
    }
    let whole: f64 = shares.iter().sum();
    shares
        .iter()
        .map(|share| ((share / whole * f64::from(profile.servers)).round() as u32).max(SIZE_MIN))
        .collect()
}

fn environment_kind(rng: &mut SmallRng) -> EnvironmentKind {
    let draw: f64 = rng.random();
    if draw < PRODUCTION_SHARE {
        EnvironmentKind::Production
    } else if draw < PRODUCTION_SHARE + DEVELOPMENT_SHARE {
        EnvironmentKind::Development
    } else {
        EnvironmentKind::Test
    }
}

/// Draws periodic tenants among production, until they own their share of the servers; then
/// unpredictable ones, preferably among development and test; the rest is constant.
fn patterns(
    profile: &Profile,
    rng: &mut SmallRng,
    sizes: &[u32],
    kinds: &[EnvironmentKind],
) -> Vec<Pattern> {
    let mut patterns = vec![Pattern::Constant; sizes.len()];
    let all = f64::from(sizes.iter().sum::<u32>());
    let mut give = |pattern: Pattern, share: f64, weight: &dyn Fn(usize) -> f64| {
        let weights: Vec<f64> = (0..sizes.len())
            .map(|number| match patterns[number] {
                Pattern::Constant => weight(number),
                _ => 0.0,
            })
            .collect();
        let mut owned = 0.0;
        for number in weighted_order(rng, &weights) {
            if owned >= share * all {
                break;
            }
            patterns[number] = pattern;
            owned += f64::from(sizes[number]);
        }
    };
    give(
        Pattern::Periodic,
        profile.periodic_share,
        &|number| match kinds[number] {
            EnvironmentKind::Production => f64::from(sizes[number]).powf(PERIODIC_SIZE_POWER),
            EnvironmentKind::Development | EnvironmentKind::Test => 0.0,
        },
    );
    give(
        Pattern::Unpredictable,
        profile.unpredictable_share,
        &|number| {
            let liking = match kinds[number] {
                EnvironmentKind::Production => 1.0,
                EnvironmentKind::Development => 2.0,
                EnvironmentKind::Test => 4.0,
            };
            liking * f64::from(sizes[number]).powf(UNPREDICTABLE_SIZE_POWER)
        },
    );
    patterns
}

/// Fills one rack after another with pieces of tenants in random order.
fn racks(rng: &mut SmallRng, sizes: &[u32]) -> Vec<Server> {
    let mut pieces: Vec<(u32, u32)> = Vec::new();
    for (tenant, &size) in sizes.iter().enumerate() {
        let mut left = size;
        while left > 0 {
            let piece = lognormal(rng, PIECE_SERVERS, PIECE_SIGMA).round() as u32;
            let piece = piece.clamp(1, left);
            pieces.push((tenant as u32, piece));
            left -= piece;
        }
    }
    shuffle(rng, &mut pieces);
    let mut servers: Vec<Server> = Vec::new();
    for (tenant, piece) in pieces {
        for _ in 0..piece {
            servers.push(Server {
                rack: servers.len() as u32 / RACK_SERVERS,
                owners: vec![(0, tenant)],
            });
        }
    }
    servers
}

/// Assigns machine functions to tenants: distinct ones within an environment, but shared between
/// environments.
pub(super) struct FunctionNames {
    functions: u32,
    used: BTreeSet<(u32, u32)>,
}

impl FunctionNames {
    pub(super) fn new(functions: u32) -> Self {
        Self {
            functions: functions.max(ENVIRONMENT_TENANTS_MAX + 1),
            used: BTreeSet::new(),
        }
    }

    pub(super) fn key(&mut self, rng: &mut impl Rng, environment: u32) -> TenantKey {
        let mut function = rng.random_range(0..self.functions);
        while !self.used.insert((environment, function)) {
            // An environment that grew beyond all functions gets functions of its own.
            function += 1;
        }
        TenantKey {
            environment: format!("e{environment}"),
            machine_function: format!("f{function}"),
        }
    }
}
