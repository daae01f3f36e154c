//! How long the daily analysis takes: a month of two-minute samples of the 650 tenants of DC-9, three
//! years of reimages: `cargo run --release -p harvestfs-telemetry --example daily_analysis -- TRACES`.

mod common;

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use harvestfs_telemetry::analysis::analyse;
use harvestfs_telemetry::reimages::MONTH_S;
use harvestfs_telemetry::traces::{Series, SeriesReader, window};

use common::BEGIN_S;

const DATACENTRE: u32 = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args()
        .nth(1)
        .ok_or("name the directory of the traces")?;
    let directory = Path::new(&directory);
    let started = Instant::now();
    let mut history = common::load(directory, DATACENTRE)?;
    let now_s = BEGIN_S + 36 * MONTH_S;
    let mut series: HashMap<String, Series> = HashMap::new();
    for source in ["bitbrains_rnd", "jumpstarter"] {
        for one in SeriesReader::open(&directory.join(format!("cpu_{source}.csv.gz")))? {
            let one = one?;
            series.insert(one.name.clone(), one);
        }
    }
    let tenants = common::tenants(directory, DATACENTRE)?;
    for tenant in &tenants {
        let window = window(&tenant.cpu_window).ok_or("the data is sound")?;
        let part = series[&tenant.cpu_series].slice(window);
        let length = part.len() as i64;
        let shares: Vec<_> = (0..length)
            .map(|i| {
                part.share((i - i64::from(tenant.cpu_shift_samples)).rem_euclid(length) as usize)
            })
            .collect();
        let id = history.tenant(&common::key(&tenants, tenant.tenant))?;
        let start_s = now_s - part.len() as u32 * part.period_s;
        history.import_series(id, start_s, part.period_s, &shares, now_s)?;
    }
    println!(
        "{} tenants, {} servers, {} reimages: {:.1} MB of memory; read in {:.1} s",
        history.tenants().len(),
        history.servers().len(),
        history.reimages(),
        history.memory_bytes() as f64 / 1e6,
        started.elapsed().as_secs_f64()
    );
    let started = Instant::now();
    let analysis = analyse(&history, now_s, || false).ok_or("cancelled")?;
    println!(
        "analysed in {:.3} s on one core",
        started.elapsed().as_secs_f64()
    );
    let agree = tenants.iter().filter(|tenant| {
        let found = &analysis.tenants[&common::key(&tenants, tenant.tenant)];
        found.profile.pattern == tenant.pattern
    });
    println!(
        "the pattern of {} tenants is that of the data",
        agree.count()
    );
    for (number, class) in analysis.classes.iter().enumerate() {
        println!(
            "class {number:>2}: {:<13} average {:>4.1} %, peak {:>4.1} %, {} tenants",
            format!("{:?}", class.pattern),
            class.average_cpu_share * 100.0,
            class.peak_cpu_share * 100.0,
            class.members.len()
        );
    }
    for (a, b, pair) in analysis.pairs.iter().take(5) {
        println!(
            "tenants {} (environment {}) and {} (environment {}): {} times within hours, {:.0} times as often as by chance",
            a.machine_function,
            a.environment,
            b.machine_function,
            b.environment,
            pair.windows,
            pair.lift()
        );
    }
    let same = analysis
        .pairs
        .iter()
        .filter(|(a, b, _)| a.environment == b.environment)
        .count();
    println!(
        "{} pairs, {same} within one environment",
        analysis.pairs.len()
    );
    Ok(())
}
