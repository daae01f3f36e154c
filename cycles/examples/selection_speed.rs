//! Measures how long the choice of classes takes in a cluster of 10,000 servers and 23 classes (as many as the paper
//! found in DC-9): updating the usage of every server, and Algorithm 1.
//!
//! `cargo run --release -p harvestfs-cycles --example selection_speed`

use std::error::Error;
use std::hint::black_box;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Instant;

use harvestfs_cycles::job::JobType;
use harvestfs_cycles::select::{ClassHistory, ClassId, Headrooms, RESERVE_SHARE, Server, Weights};
use harvestfs_telemetry::profile::Pattern;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const SERVERS: usize = 10_000;
const ROUNDS: u32 = 2_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut rng = SmallRng::seed_from_u64(1);
    let patterns = [
        (Pattern::Periodic, 13),
        (Pattern::Constant, 5),
        (Pattern::Unpredictable, 5),
    ];
    let mut classes = Vec::new();
    for (pattern, count) in patterns {
        classes.extend((0..count).map(|_| {
            let average_cpu_share = rng.random_range(0.05..0.5);
            ClassHistory {
                pattern,
                average_cpu_share,
                peak_cpu_share: average_cpu_share + rng.random_range(0.0..0.4),
            }
        }));
    }
    let cores = NonZeroU32::new(12).ok_or("no core")?;
    let servers: Vec<Server> = (0..SERVERS)
        .map(|number| Server {
            class: ClassId((number % classes.len()) as u32),
            cores,
        })
        .collect();
    let mut rooms = Headrooms::new(&classes, &servers, RESERVE_SHARE)?;
    let (mut telling_us, mut choosing_us) = (0.0, 0.0);
    for round in 0..ROUNDS {
        let used: Vec<u32> = (0..SERVERS).map(|_| rng.random_range(0..9_000)).collect();
        let started = Instant::now();
        for (server, &millicores) in used.iter().enumerate() {
            rooms.uses(server, millicores);
        }
        telling_us += started.elapsed().as_secs_f64() * 1e6;
        let job_type = JobType::ALL[round as usize % 3];
        let need = NonZeroU64::new(rng.random_range(1..20_000)).ok_or("no core")?;
        let started = Instant::now();
        black_box(rooms.select(job_type, need, &Weights::default(), &mut rng)?);
        choosing_us += started.elapsed().as_secs_f64() * 1e6;
    }
    let mean = |us: f64| us / f64::from(ROUNDS);
    println!(
        "{SERVERS} servers, {} classes: choosing {:.2} us; telling the use of every server {:.1} us",
        classes.len(),
        mean(choosing_us),
        mean(telling_us)
    );
    Ok(())
}
