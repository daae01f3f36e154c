//! Measures which pairs of servers would have lost a block with two replicas in a year of reimages, and how
//! many of these losses placement could have avoided: by keeping apart tenants that history shows to be
//! reimaged together, or by refusing the pairs with the highest risk (a bound like the T-safe bags of
//! "Practical Web-Scale Job Scheduling", section 4).
//!
//! `cargo run --release -p harvestfs-chaos --example coincidences -- [TRACES [DATACENTRE...]]`
//!
//! Blocks are assumed to be spread as `harvest` draws them: over the servers in its grid, weighted by the inverse
//! reimage rate, never twice in an environment. Rows, columns, functions and racks are ignored, and
//! a block counts as lost when both servers are reimaged within ten minutes. So the number of losses is
//! an upper bound; the shares are what matters.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::error::Error;
use std::path::{Path, PathBuf};

use harvestfs_chaos::datacentre::profile::PROFILES;
use harvestfs_chaos::datacentre::{Datacentre, MONTH_S, read};
use harvestfs_chaos::simulate::durability::HISTORY_MONTHS;
use harvestfs_chaos::simulate::history::History;
use harvestfs_placement::{Harvest, Location, Policy, View};
use harvestfs_protocol::ids::NodeId;
use harvestfs_telemetry::profile::TenantKey;

const BLOCKS: f64 = 4e6;
/// Two replicas that are wiped within this time are assumed to be lost.
const WINDOW_S: u64 = 600;
/// The shares of all choices of two servers, riskiest first, that a bound would refuse.
const REFUSED: [f64; 4] = [0.01, 0.05, 0.1, 0.2];

/// The servers of a tenant in the grid.
struct Pool {
    environment: u32,
    servers: f64,
    /// Reimages per server and month, as predicted from history.
    rate: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let traces = PathBuf::from(arguments.next().unwrap_or("../shared/traces".to_owned()));
    let mut names: Vec<String> = arguments.collect();
    if names.is_empty() {
        names.extend(PROFILES.iter().map(|it| it.name.to_owned()));
    }
    println!(
        "      pairs  choices %   lost   in pairs %   in the riskiest {REFUSED:?} of choices, %"
    );
    for name in names {
        measure(&traces, &name)?;
    }
    Ok(())
}

fn measure(traces: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let start_s = u64::from(HISTORY_MONTHS) * MONTH_S;
    let end_s = start_s + 12 * MONTH_S;
    let datacentre = read(traces, name, end_s, true)?;
    let history = History::new(&datacentre, HISTORY_MONTHS);
    let pools = pools(&datacentre, &history, start_s);
    let together = together(&datacentre, &history)?;

    let mut choices = Vec::new();
    for (&a, of_a) in &pools {
        for (&b, of_b) in pools.range(..a) {
            if of_a.environment != of_b.environment {
                let weight = of_a.servers / of_a.rate * of_b.servers / of_b.rate;
                choices.push((of_a.rate * of_b.rate, weight, together.contains(&(b, a))));
            }
        }
    }
    let all: f64 = choices.iter().map(|it| it.1).sum();
    let chosen_together: f64 = choices.iter().filter(|it| it.2).map(|it| it.1).sum();
    choices.sort_by(|a, b| b.0.total_cmp(&a.0));
    let bounds = REFUSED.map(|share| {
        let mut sum = 0.0;
        let refused = choices.iter().take_while(|it| {
            sum += it.1;
            sum <= share * all
        });
        refused.last().map_or(f64::INFINITY, |it| it.0)
    });

    let mut windows: BTreeMap<u64, BTreeMap<u32, f64>> = BTreeMap::new();
    for reimage in &datacentre.reimages {
        if (start_s..end_s).contains(&reimage.at_s) && pools.contains_key(&reimage.tenant) {
            let window = windows.entry(reimage.at_s / WINDOW_S).or_default();
            *window.entry(reimage.tenant).or_default() += 1.0;
        }
    }
    let (mut lost, mut lost_together, mut lost_refused) = (0.0, 0.0, [0.0; REFUSED.len()]);
    for wiped in windows.values() {
        for (&a, wiped_of_a) in wiped {
            for (&b, wiped_of_b) in wiped.range(..a) {
                let (of_a, of_b) = (&pools[&a], &pools[&b]);
                if of_a.environment == of_b.environment {
                    continue;
                }
                let share = wiped_of_a / of_a.rate * wiped_of_b / of_b.rate / all;
                lost += share;
                if together.contains(&(b, a)) {
                    lost_together += share;
                }
                for (sum, bound) in lost_refused.iter_mut().zip(bounds) {
                    if of_a.rate * of_b.rate >= bound {
                        *sum += share;
                    }
                }
            }
        }
    }
    let refused = lost_refused.map(|it| format!("{:.1}", 100.0 * it / lost));
    println!(
        "{name} {:>6} {:>10.2} {:>6.0} {:>12.1}   {}",
        together.len(),
        100.0 * chosen_together / all,
        BLOCKS * lost,
        100.0 * lost_together / lost,
        refused.join(", "),
    );
    Ok(())
}

/// The tenants that `harvest` has in its grid.
fn pools(datacentre: &Datacentre, history: &History<'_>, at_s: u64) -> BTreeMap<u32, Pool> {
    let mut view = View::new();
    for (number, server) in datacentre.servers.iter().enumerate() {
        let key = &datacentre.tenants[server.owner_at(at_s) as usize].key;
        let location = Location {
            rack: &format!("r{}", server.rack),
            environment: &key.environment,
            machine_function: &key.machine_function,
            host: std::net::Ipv4Addr::LOCALHOST.into(),
        };
        view.insert(NodeId(number as u32), &location);
        view.set_capacity(NodeId(number as u32), 1);
    }
    let profiles = datacentre
        .tenants
        .iter()
        .zip(history.profiles(HISTORY_MONTHS));
    for (tenant, profile) in profiles {
        if let Some(profile) = profile {
            view.set_tenant_profile(&tenant.key, profile);
        }
    }
    view.rebuild_grid(Harvest::default().scope());
    let mut pools: BTreeMap<u32, Pool> = BTreeMap::new();
    for (server, seen) in datacentre.servers.iter().zip(view.servers()) {
        if view.cell_of(seen).is_some() {
            let tenant = server.owner_at(at_s);
            let pool = pools.entry(tenant).or_insert(Pool {
                environment: datacentre.tenants[tenant as usize].environment,
                servers: 0.0,
                rate: view.reimage_rate(seen),
            });
            pool.servers += 1.0;
        }
    }
    pools
}

/// The pairs of tenants that history shows to be reimaged together, the lower number first.
fn together(
    datacentre: &Datacentre,
    history: &History<'_>,
) -> Result<HashSet<(u32, u32)>, Box<dyn Error>> {
    let tenants = datacentre.tenants.iter().enumerate();
    let numbers: HashMap<&TenantKey, u32> = tenants
        .map(|(number, it)| (&it.key, number as u32))
        .collect();
    let pairs = history.pairs(HISTORY_MONTHS)?;
    let numbered = pairs.iter().map(|(first, second)| {
        let (first, second) = (numbers[first], numbers[second]);
        (first.min(second), first.max(second))
    });
    Ok(numbered.collect())
}
