//! How much HarvestFS slows down a primary tenant on the same machine, compared with the same primary
//! alone, in alternating turns within one run.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::cluster::Cluster;
use super::mounted::Doubt;
use super::plan::Part;
use super::probe::{Probe, slowdown_percent};
use super::workload::{Access, Counters, Worker};
use super::{LiveError, Plan, Scenario};

/// The cluster and its clients. No access is denied: only priorities protect the primary.
const SCENARIO: &str = r#"
name = "slowdown"
duration_s = 0

[cluster]
servers = 5
replication = 3
policy = "stock"
block_mib = 16
quota_mib = 4096
priority = "idle"

[clients]
count = 4
file_kib_max = 4096
pause_ms = 0
unreachable_timeout_ms = 60000
"#;

/// How long the primary has the machine to itself, and then shares it. This is shorter than the time after which
/// clients and namenode give up on stopped parts.
const TURN: Duration = Duration::from_millis(2_500);
/// The pause after everything was stopped or continued, before the measurement.
const SETTLE: Duration = Duration::from_millis(300);
/// How long clients may take until each has completed something. They only use what others leave over.
const FIRST_OPERATIONS: Duration = Duration::from_secs(60);

/// The slowdown of a primary in one pair of turns.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// The CPU that it was bound to; with several threads, that of the first.
    pub cpu: usize,
    /// By how many percent it was slower than alone; negative is noise.
    pub percent: f64,
}

/// The slowdown of a primary.
#[derive(Clone, Debug)]
pub struct Slowdown {
    /// The slowdown in each pair of turns.
    pub losses: Vec<Loss>,
    /// Operations of clients per second while it shared the machine.
    pub operations_per_s: f64,
}

impl Slowdown {
    /// The median of all pairs, in percent.
    #[must_use]
    pub fn median_percent(&self) -> f64 {
        median(self.losses.iter().map(|loss| loss.percent).collect())
    }

    /// The median of the pairs on each CPU, in percent.
    #[must_use]
    pub fn median_percent_by_cpu(&self) -> BTreeMap<usize, f64> {
        let mut by_cpu: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for loss in &self.losses {
            by_cpu.entry(loss.cpu).or_default().push(loss.percent);
        }
        let medians = by_cpu.into_iter().map(|(cpu, all)| (cpu, median(all)));
        medians.collect()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len() % 2) {
        (Some(&upper), 0) => f64::midpoint(values[middle - 1], upper),
        (Some(&only), _) => only,
        (None, _) => 0.0,
    }
}

/// The options of a measurement.
pub struct SlowdownOptions<'a> {
    /// The binary whose parts make the cluster.
    pub binary: &'a Path,
    /// The disk of the server that the primary owns. Nothing on it is removed.
    pub disk: &'a Path,
    /// A directory for everything that is on other servers in production: best in memory, so that only one server's
    /// accesses are on the disk. Nothing in it is removed.
    pub elsewhere: &'a Path,
    /// Number of threads of the primary.
    pub threads: usize,
    /// Number of pairs of turns.
    pub pairs: usize,
    /// Lowers the priority of this thread: in production, neither namenode nor clients are on the
    /// owner's server.
    pub yield_to_others: &'a dyn Fn(),
    /// Set by Ctrl-C.
    pub interrupted: &'a AtomicBool,
}

/// Measures the slowdown, in five seconds for each pair of turns. `progress` receives the result of each. The primary
/// is bound to one CPU after another, since the loss on the CPU that serves the disk's interrupts differs from that on
/// the others.
///
/// # Errors
/// When the cluster cannot be run, when its clients complete nothing (the figures would be those of
/// an idle cluster), or when the measurement is interrupted.
pub fn measure(
    options: &SlowdownOptions<'_>,
    progress: &mut dyn FnMut(Loss),
) -> Result<Slowdown, LiveError> {
    // Before the priority is lowered: threads inherit it.
    let probe = Probe::start(options.threads, Duration::ZERO)?;
    let allowed = sched_getaffinity(None).map_err(LiveError::io("ask for the CPUs"))?;
    let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let cpus: Vec<_> = cpus.collect();
    (options.yield_to_others)();
    let scenario = Scenario::parse(Path::new("slowdown"), SCENARIO)
        .map_err(|error| LiveError::Cluster(error.to_string()))?;
    let plan = Plan::new(&scenario, scenario.seed);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(LiveError::io("start the runtime"))?;
    let variant = &scenario.variants[0];
    let mut cluster = Cluster::make(
        &scenario,
        variant,
        options.binary,
        options.elsewhere,
        None,
        &plan,
    )?;
    let volume = options.disk.join("volume");
    fs::create_dir(&volume).map_err(LiveError::io(format!("make {}", volume.display())))?;
    let link = cluster.volume(0);
    unix::fs::symlink(&volume, &link).map_err(LiveError::io(format!("make {}", link.display())))?;
    runtime.block_on(async {
        let go_on = || !options.interrupted.load(Ordering::Relaxed);
        cluster.start_all(&go_on).await?;
        let access = Access {
            identity: options.elsewhere.join("client/identity"),
            namenodes: cluster.namenodes.clone(),
            spec: scenario.clients.clone(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let counters = Arc::new(Counters::new(Arc::default()));
        // The namenode is never rolled back here.
        let doubt = Arc::new(Doubt::default());
        let workers: Vec<_> = (1..=scenario.clients.count)
            .map(|number| {
                let counters = Arc::clone(&counters);
                let worker = Worker::new(access.clone(), number, plan.seed, &counters, &doubt);
                tokio::spawn(worker.run(Arc::clone(&stop)))
            })
            .collect();
        // Gives clients time to write something to read.
        tokio::time::sleep(TURN).await;
        let began = tokio::time::Instant::now();
        while counters.succeeded() < u64::from(scenario.clients.count) {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            if began.elapsed() > FIRST_OPERATIONS {
                let nothing = "its clients did next to nothing within a minute";
                return Err(LiveError::Machine(nothing.into()));
            }
            tokio::time::sleep(SETTLE).await;
        }
        let mut result = Slowdown {
            losses: Vec::new(),
            operations_per_s: 0.0,
        };
        let mut shared = Duration::ZERO;
        let mut operations = 0;
        for pair in 0..options.pairs {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            // There is at least the CPU on which this thread runs.
            let first = pair % cpus.len();
            let cpu = cpus[first];
            probe.bind(cpus.iter().copied().cycle().skip(first))?;
            set_all_hung(&mut cluster, &scenario, true);
            let alone = turn(&probe).await?;
            set_all_hung(&mut cluster, &scenario, false);
            let (before, began) = (counters.succeeded(), tokio::time::Instant::now());
            let loaded = turn(&probe).await?;
            operations += counters.succeeded() - before;
            shared += began.elapsed();
            let percent = slowdown_percent(alone, loaded);
            result.losses.push(Loss { cpu, percent });
            progress(Loss { cpu, percent });
        }
        if operations == 0 {
            let nothing = "no client got anything done beside the primary: nothing was measured";
            return Err(LiveError::Machine(nothing.into()));
        }
        result.operations_per_s = operations as f64 / shared.as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            // Nothing is compared here, so there is no need to wait for operations that do not end.
            let _ = tokio::time::timeout(TURN, worker).await;
        }
        Ok(result)
    })
}

fn set_all_hung(cluster: &mut Cluster<'_>, scenario: &Scenario, hung: bool) {
    let servers = (0..scenario.cluster.servers.len()).map(Part::Server);
    for part in std::iter::once(Part::Namenode(0)).chain(servers) {
        cluster.set_hung(part, hung);
    }
}

/// The speed of the primary in one turn.
async fn turn(probe: &Probe) -> Result<f64, LiveError> {
    tokio::time::sleep(SETTLE).await;
    let before = probe.read();
    tokio::time::sleep(TURN - SETTLE).await;
    let rate = before.rate_until(probe.read());
    rate.ok_or_else(|| LiveError::Machine("the primary did not get to compute at all".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scenario_is_right_and_medians_are_the_middle() {
        Scenario::parse(Path::new("slowdown"), SCENARIO).unwrap();
        let slowdown = |losses: &[(usize, f64)]| Slowdown {
            losses: losses
                .iter()
                .map(|&(cpu, percent)| Loss { cpu, percent })
                .collect(),
            operations_per_s: 0.0,
        };
        let three = slowdown(&[(0, 3.0), (1, 1.0), (0, 9.0)]);
        assert_eq!(three.median_percent(), 3.0);
        let by_cpu: Vec<_> = three.median_percent_by_cpu().into_iter().collect();
        assert_eq!(by_cpu, [(0, 6.0), (1, 1.0)]);
        assert_eq!(slowdown(&[(0, 3.0), (1, 1.0)]).median_percent(), 2.0);
    }
}
