//! How long a simulated month of jobs takes with each policy: 4,000 servers, one core.
//!
//! `cargo run --release -p harvestfs-cycles --example scheduling_speed`

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;
use std::ops::ControlFlow;
use std::time::Instant;

use harvestfs_cycles::reserve::Kills;
use harvestfs_cycles::simulate::{Fleet, Options, PolicyKind, run};
use harvestfs_telemetry::scaling::Scaling;

fn main() -> Result<(), Box<dyn Error>> {
    let started = Instant::now();
    let fleet = Fleet::new(&common::datacentre(4_000), Scaling::Linear, 0.33)?;
    println!("load and classes: {:.1} s", started.elapsed().as_secs_f64());
    for policy in PolicyKind::ALL {
        let options = Options {
            policy,
            rule: &Kills,
            container_bytes: 0.0,
            seed: 1,
            days: 30,
            demand: 0.21,
            stretch: None,
        };
        let started = Instant::now();
        let record = run(&fleet, &options, &mut |_| ControlFlow::Continue(()))?;
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "{policy}: {seconds:.1} s; {} jobs of {:.0} s, {} containers, {} killed, {:.1} % used",
            record.jobs,
            record.job_mean_s,
            record.containers,
            record.killed_tasks,
            100.0 * record.utilisation
        );
    }
    Ok(())
}
