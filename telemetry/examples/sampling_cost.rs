//! What sampling the primary costs: CPU time of this process for each source, as a share of one
//! core, at the interval that datanodes use.
//!
//! ```console
//! $ cargo run --release -p harvestfs-telemetry --example sampling_cost
//! ```

use std::path::Path;
use std::time::{Duration, Instant};

use harvestfs_telemetry::primary::{
    CGROUP_ROOT, Cgroup, DEFAULT_INTERVAL, Machine, Own, SampleError, Sampler,
};

/// Samples taken of each source, one right after the other.
const SAMPLES: u32 = 5_000;

fn main() -> Result<(), SampleError> {
    let processes = std::fs::read_dir("/proc").map_or(0, |entries| {
        let names = entries.flatten().map(|entry| entry.file_name());
        names
            .filter(|name| {
                name.to_str()
                    .is_some_and(|name| name.parse::<u32>().is_ok())
            })
            .count()
    });
    println!("{processes} processes on this machine");
    measure(
        "machine, own by executable",
        &mut Machine::open(Own::SameExecutable)?,
    )?;
    measure(
        "machine, own by cgroup",
        &mut Machine::open(Own::Cgroup("/".into()))?,
    )?;
    let machine = Machine::open(Own::SameExecutable)?;
    measure(
        "cgroup",
        &mut Cgroup::new(Path::new(CGROUP_ROOT), Path::new("/"), machine),
    )
}

fn measure(what: &str, sampler: &mut dyn Sampler) -> Result<(), SampleError> {
    let cpu_before = cpu_time();
    let mut now = Instant::now();
    for _ in 0..SAMPLES {
        // As if that much time had passed, so that work that is not done with every sample occurs as
        // often as in reality.
        now += DEFAULT_INTERVAL;
        sampler.sample(now)?;
    }
    let each = (cpu_time() - cpu_before) / SAMPLES;
    let share = each.as_secs_f64() / DEFAULT_INTERVAL.as_secs_f64();
    println!(
        "{what}: {} us each, every {} ms: {:.4} % of a core",
        each.as_micros(),
        DEFAULT_INTERVAL.as_millis(),
        share * 100.0
    );
    Ok(())
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanoseconds)
}
