//! Measures how long placement takes in the synthetic datacentres, and how good its grid is: choosing the
//! servers of a block and of a repair, updating the view after a change, rebuilding the grid.
//!
//! `cargo run --release -p harvestfs-placement --example placement_speed -- [DIRECTORY [DC...]]`
//!
//! The directory is that of the traces, by default `$HARVESTFS_TRACES` or `../shared/traces`. The
//! datacentres are DC-9 and, with more than 10,000 servers, DC-6.

use std::collections::HashMap;
use std::error::Error;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Instant;

use harvestfs_placement::{
    Constraints, Lane, Lanes, Location, Policy, PolicyKind, PolicyOptions, Request, Room, View,
};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::types::{Durability, StorageClass};
use harvestfs_telemetry::hours::WeekHours;
use harvestfs_telemetry::profile::{TenantKey, TenantProfile};
use harvestfs_telemetry::traces::{IndexEntry, Ownership, Records, ReimageEvent, Tenant};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const BLOCKS: u32 = 1_000_000;
const CAPACITY_BLOCKS: u32 = 400;
const MONTHS: f64 = 36.0;

/// A datacentre as it is at the start of its record; reimage rates are those of all of it.
struct Datacentre {
    /// Rack and tenant of each server.
    servers: Vec<(u32, u32)>,
    profiles: HashMap<u32, (TenantKey, TenantProfile)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let directory = args
        .next()
        .or_else(|| std::env::var("HARVESTFS_TRACES").ok())
        .map_or_else(|| PathBuf::from("../shared/traces"), PathBuf::from);
    let mut datacentres: Vec<String> = args.collect();
    if datacentres.is_empty() {
        datacentres = vec!["9".into(), "6".into()];
    }
    println!(
        "{:>5} {:>8} {:>8} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "",
        "servers",
        "tenants",
        "policy",
        "choose ns",
        "repair ns",
        "update ns",
        "rebuild ms",
        "spread %"
    );
    for name in datacentres {
        let datacentre = load(&directory, &name)?;
        for kind in PolicyKind::ALL {
            measure(&name, &datacentre, kind);
        }
    }
    Ok(())
}

fn load(directory: &Path, name: &str) -> Result<Datacentre, Box<dyn Error>> {
    let file = |what: &str| directory.join(format!("synthetic/dc{name}_{what}.csv.gz"));
    let mut peaks = HashMap::new();
    for entry in Records::<IndexEntry>::open(&directory.join("cpu_index.csv.gz"))? {
        let it = entry?;
        let shares = (it.p99_percent / 100.0, it.average_percent / 100.0);
        peaks.insert((it.source, it.series, it.window), shares);
    }
    let mut reimages: HashMap<u32, u32> = HashMap::new();
    for event in Records::<ReimageEvent>::open(&file("reimages"))? {
        *reimages.entry(event?.tenant).or_default() += 1;
    }
    let mut profiles = HashMap::new();
    for tenant in Records::<Tenant>::open(&file("tenants"))? {
        let it = tenant?;
        let key = TenantKey {
            environment: format!("e{}", it.environment),
            machine_function: format!("f{}", it.tenant),
        };
        let series = (it.cpu_source, it.cpu_series, it.cpu_window);
        let (peak, average) = peaks.get(&series).copied().unwrap_or_default();
        let events = f64::from(reimages.get(&it.tenant).copied().unwrap_or(0));
        let profile = TenantProfile {
            reimages_per_server_month: events / f64::from(it.servers_at_start.max(1)) / MONTHS,
            peak_cpu_share: peak,
            average_cpu_share: average,
            // The index of series does not contain it; placement is equally fast with any value.
            busy_share: 0.0,
            busy_hours: WeekHours::NONE,
            pattern: it.pattern,
        };
        profiles.insert(it.tenant, (key, profile));
    }
    let mut servers = Vec::new();
    for ownership in Records::<Ownership>::open(&file("servers"))? {
        let it = ownership?;
        if it.from_s == 0 {
            servers.push((it.rack, it.tenant));
        }
    }
    Ok(Datacentre { servers, profiles })
}

fn host(server: usize) -> IpAddr {
    Ipv4Addr::from_bits(server as u32).into()
}

fn room(blocks: u32) -> Room {
    let mut room = Room::default();
    room.add(StorageClass::Disk, blocks);
    room
}

fn view(datacentre: &Datacentre, policy: &dyn Policy) -> View {
    let mut view = View::new();
    for (number, (rack, tenant)) in datacentre.servers.iter().enumerate() {
        let (key, profile) = &datacentre.profiles[tenant];
        let location = Location {
            rack: &rack.to_string(),
            environment: &key.environment,
            machine_function: &key.machine_function,
            host: host(number),
        };
        let node = NodeId(number as u32);
        view.insert(node, &location);
        view.set_tenant_profile(key, *profile);
        view.set_capacity(node, CAPACITY_BLOCKS);
        // Half full, about.
        view.set_room(
            node,
            room(CAPACITY_BLOCKS / 2 + (number as u32 * 37) % 101 - 50),
        );
        view.set_lanes(node, Lanes::ALL);
    }
    view.rebuild_grid(policy.scope());
    view
}

fn nanoseconds(start: Instant) -> u128 {
    start.elapsed().as_nanos() / u128::from(BLOCKS)
}

fn measure(name: &str, datacentre: &Datacentre, kind: PolicyKind) {
    let policy = kind.build(&PolicyOptions::default());
    let mut view = view(datacentre, &*policy);
    let count = datacentre.servers.len();
    let mut rng = SmallRng::seed_from_u64(1);

    let start = Instant::now();
    const REBUILDS: u32 = 10;
    for _ in 0..REBUILDS {
        view.rebuild_grid(policy.scope());
    }
    let rebuild_ms = start.elapsed().as_secs_f64() * 1e3 / f64::from(REBUILDS);

    let in_grid = &view.cell_spaces()[..harvestfs_placement::CELLS];
    let free = in_grid.iter().map(|space| space.free_blocks);
    let (least, most) = (free.clone().min().unwrap_or(0), free.max().unwrap_or(0));
    let spread = 100.0 * (most - least) as f64 / most.max(1) as f64;

    let request = Request {
        wanted: 3,
        existing: &[],
        exclude: &[],
        writer: None,
        class: None,
        lane: Lane::Write,
        durability: Durability::Strict,
        given_up: Constraints::NONE,
    };
    let mut blocks = Vec::with_capacity(BLOCKS as usize);
    let start = Instant::now();
    for _ in 0..BLOCKS {
        let writer = Some(host(rng.random_range(0..count)));
        let chosen = policy.choose(&view, &Request { writer, ..request }, &mut rng);
        blocks.extend(black_box(chosen));
    }
    let choose = nanoseconds(start);

    let start = Instant::now();
    for nodes in &blocks {
        let repair = Request {
            wanted: 1,
            existing: &nodes[..2],
            exclude: &nodes[2..],
            lane: Lane::Repair,
            ..request
        };
        let _ = black_box(policy.choose(&view, &repair, &mut rng));
    }
    let repair = nanoseconds(start);

    let start = Instant::now();
    for step in 0..BLOCKS {
        let node = NodeId(rng.random_range(0..count as u32));
        view.set_room(node, room(100 + step % 200));
    }
    let update = nanoseconds(start);

    println!(
        "{:>5} {count:>8} {:>8} {:>9} {choose:>10} {repair:>10} {update:>10} {rebuild_ms:>10.2} {spread:>10.2}",
        format!("DC-{name}"),
        view.tenants().len(),
        kind.name(),
    );
}
