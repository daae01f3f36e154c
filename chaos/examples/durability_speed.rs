//! Measures how long one run of the durability simulation takes.
//!
//! `cargo run --release -p harvestfs-chaos --example durability_speed [DATACENTRE] [POLICY] [REPLICATION] [BLOCKS] [TRACES]`

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;

use harvestfs_chaos::datacentre::profile::profile;
use harvestfs_chaos::datacentre::{MONTH_S, generate, read};
use harvestfs_chaos::simulate::durability::{HISTORY_MONTHS, Options, run};
use harvestfs_chaos::simulate::history::History;
use harvestfs_placement::PolicyOptions;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |default: &str| arguments.next().unwrap_or_else(|| default.to_owned());
    let name = next("dc3");
    let options = Options {
        policy: next("stock").parse()?,
        policy_options: PolicyOptions::default(),
        replication: next("3").parse()?,
        blocks: next("4000000").parse()?,
        years: 1,
        seed: 1,
        fill: 0.5,
        repairs_per_hour: 30,
        urgent_repairs_per_hour: 300,
        detection_ms: None,
    };
    let traces = next("");
    let datacentre = if traces.is_empty() {
        generate(profile(&name).ok_or("no such datacentre")?)?
    } else {
        read(&PathBuf::from(traces), &name, 24 * MONTH_S, true)?
    };
    let history = History::new(&datacentre, HISTORY_MONTHS);
    let record = run(&history, &options, &mut |_| ControlFlow::Continue(()))?;
    println!("{}", serde_json::to_string_pretty(&record)?);
    Ok(())
}
