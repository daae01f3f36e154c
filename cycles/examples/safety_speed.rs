//! How long the distribution of losses takes for a bag of 2,000 tasks over 200 racks, and admission of such a bag.
//!
//! `cargo run --release -p harvestfs-cycles --example safety_speed`

use std::error::Error;
use std::hint::black_box;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Instant;

use harvestfs_cycles::safety::{
    Cluster, Domain, FailureRates, Losses, Packing, Probability, RackSpec, TaskGroup,
};

const RACKS: u32 = 200;
const ROUNDS: u32 = 50;

fn main() -> Result<(), Box<dyn Error>> {
    let probability = |value| Probability::new(value).ok_or("no probability");
    let rates = FailureRates {
        server: probability(0.01)?,
        rack: probability(0.001)?,
        environment: probability(0.0001)?,
    };
    // Ten tasks in each rack: six servers with one, two with two.
    let servers = [1, 1, 1, 1, 1, 1, 2, 2].map(|losses| Domain {
        fails: rates.server,
        losses,
        parts: Vec::new(),
    });
    let rack = Domain {
        fails: rates.rack,
        losses: 0,
        parts: servers.to_vec(),
    };
    let environment = Domain {
        fails: rates.environment,
        losses: 0,
        parts: vec![rack; 4],
    };
    let cluster = Domain {
        fails: Probability::NEVER,
        losses: 0,
        parts: vec![environment; RACKS as usize / 4],
    };
    let started = Instant::now();
    for _ in 0..ROUNDS {
        black_box(Losses::of(black_box(&cluster)));
    }
    let ms = started.elapsed().as_secs_f64() * 1e3 / f64::from(ROUNDS);
    let losses = Losses::of(&cluster);
    println!("{} tasks over {RACKS} racks: {ms:.2} ms", losses.most());
    let racks: Vec<RackSpec> = (0..RACKS)
        .map(|number| RackSpec {
            environment: number / 4,
            servers: 20,
            cores: 12,
            memory_mib: 32 << 10,
        })
        .collect();
    let group = TaskGroup {
        tasks: NonZeroU32::new(2_000).ok_or("no task")?,
        cores: NonZeroU32::MIN,
        memory_mib: NonZeroU64::MIN,
    };
    for packing in [Packing::FirstFit, Packing::Spread] {
        let mut cluster = Cluster::new(&racks, rates, 1e-6, packing)?;
        let started = Instant::now();
        let admitted = cluster.admit(&[group])?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        println!(
            "{packing:?}: {} backups, admitted in {ms:.0} ms",
            admitted[0].backups
        );
    }
    Ok(())
}
