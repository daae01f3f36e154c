//! `harvestfs simulate durability`.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Args;
use harvestfs_chaos::{
    datacentre::MONTH_S,
    report::durability::Summary,
    simulate::{
        durability::{
            self, HISTORY_MONTHS, MISSED_HEARTBEATS_MS, Options, Record, SimulationError,
        },
        history::History,
    },
};
use harvestfs_placement::{LeastReimaged, Locality, PolicyKind, PolicyOptions};
use indicatif::ProgressBar;

use super::{
    DatacentreArgs, OutputArgs, bad_argument, choose, go_on, interrupts, numbers, print_statements,
    progress_bar,
};

/// Replications that `all` stands for.
const REPLICATIONS: [u8; 3] = [2, 3, 4];

#[derive(Debug, Args)]
pub struct DurabilityArgs {
    #[command(flatten)]
    datacentres: DatacentreArgs,
    /// Policies: `all`, or some of stock, greedy, history, harvest, separated by commas.
    #[arg(long, default_value = "stock,history,harvest", value_name = "NAMES")]
    policy: String,
    /// Replicas per block: `all` (2, 3 and 4), or numbers separated by commas.
    #[arg(long, default_value = "3", value_name = "NUMBERS")]
    replication: String,
    /// Blocks.
    #[arg(long, default_value_t = 4_000_000)]
    blocks: u32,
    /// Years; policies know the twelve months before, and what happens as it happens.
    #[arg(long, default_value_t = 1)]
    years: u32,
    /// How many runs of each, with the seeds 1, 2, 3 and so on.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    seeds: u64,
    /// Run only this seed.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Share of the space that the replicas take: 0.5 is half full.
    #[arg(long, default_value_t = 0.5, value_name = "SHARE")]
    fill: f64,
    /// Repairs that a server takes part in per hour, as source and as target each.
    #[arg(long, default_value_t = 30, value_name = "COUNT")]
    repairs_per_hour: u32,
    /// The same for blocks with one replica left. The default is ten times the normal rate for
    /// harvest, and the normal rate for the others.
    #[arg(long, value_name = "COUNT")]
    urgent_repairs_per_hour: Option<u32>,
    /// When the namenode knows of a reimage: `registration` (at once), `heartbeats` (10 min 30 s,
    /// as HDFS), or a time such as `5m`. The default is registration for harvest, heartbeats for
    /// the others.
    #[arg(long, value_name = "WHEN")]
    detection: Option<String>,
    /// Whether harvest puts the first replica on the writer's server: prefer, require or off.
    #[arg(long, default_value = "prefer", value_name = "HOW")]
    locality: String,
    /// Least share of all space that the grid of harvest covers, 0 to 1.
    #[arg(long, value_name = "SHARE")]
    grid_share: Option<f64>,
    /// Runs at a time; each takes up to 1 GiB for four million blocks.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    jobs: usize,
    #[command(flatten)]
    output: OutputArgs,
}

impl DurabilityArgs {
    /// All runs on one datacentre.
    fn runs(&self) -> anyhow::Result<Vec<Options>> {
        let names = PolicyKind::ALL.map(PolicyKind::name);
        let policies: Vec<PolicyKind> =
            choose("policy", &self.policy, &names, |name| name.parse().ok())?;
        let replications = if self.replication.trim() == "all" {
            REPLICATIONS.to_vec()
        } else {
            numbers("replication", &self.replication)?
        };
        let detection_ms = self.detection_ms()?;
        let policy_options = PolicyOptions {
            locality: self
                .locality
                .parse::<Locality>()
                .map_err(|error| bad_argument(format!("--locality: {error}")))?,
            grid: LeastReimaged {
                share_min: self.grid_share(),
                ..LeastReimaged::default()
            },
        };
        let seeds = match self.seed {
            Some(seed) => seed..=seed,
            None => 1..=self.seeds.max(1),
        };
        let mut runs = Vec::new();
        for &policy in &policies {
            let factor = if policy == PolicyKind::Harvest { 10 } else { 1 };
            for &replication in &replications {
                for seed in seeds.clone() {
                    runs.push(Options {
                        policy,
                        policy_options,
                        replication,
                        blocks: self.blocks,
                        years: self.years,
                        seed,
                        fill: self.fill,
                        repairs_per_hour: self.repairs_per_hour,
                        urgent_repairs_per_hour: self
                            .urgent_repairs_per_hour
                            .unwrap_or(self.repairs_per_hour.saturating_mul(factor)),
                        detection_ms,
                    });
                }
            }
        }
        for run in &runs {
            run.check()
                .map_err(|error| bad_argument(error.to_string()))?;
        }
        Ok(runs)
    }

    fn grid_share(&self) -> f64 {
        self.grid_share
            .unwrap_or_else(|| LeastReimaged::default().share_min)
    }

    fn detection_ms(&self) -> anyhow::Result<Option<u64>> {
        let Some(text) = &self.detection else {
            return Ok(None);
        };
        let milliseconds = match text.as_str() {
            "registration" => 0,
            "heartbeats" => MISSED_HEARTBEATS_MS,
            other => {
                let time: Duration = humantime::parse_duration(other).map_err(|error| {
                    bad_argument(format!(
                        "--detection: `{other}`: {error}; accepted: registration, heartbeats, \
                         or a time such as 5m"
                    ))
                })?;
                u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
            }
        };
        Ok(Some(milliseconds))
    }
}

pub fn run(args: &DurabilityArgs) -> anyhow::Result<()> {
    let names = args.datacentres.names()?;
    let runs = args.runs()?;
    let interrupted = interrupts()?;
    let bar = progress_bar(names.len() * runs.len())?;
    let started = Instant::now();
    let until_s = u64::from(HISTORY_MONTHS + 12 * args.years) * MONTH_S;
    let mut records = Vec::new();
    for name in &names {
        bar.set_message(format!("{name}: reading its history"));
        let datacentre = args.datacentres.load(name, until_s)?;
        let history = History::new(&datacentre, HISTORY_MONTHS);
        records.extend(run_all(&history, &runs, args.jobs, &bar, &interrupted)?);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    bar.finish_and_clear();
    let summary = Summary::of(&records);
    println!("{}", summary.table());
    print_statements(&summary.statements());
    args.output
        .write(&records, &summary.table(), || summary.plot().to_svg())?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{} runs in {seconds:.1} s", records.len());
    if interrupted.load(Ordering::Relaxed) {
        anyhow::bail!("interrupted; the runs that were complete are above");
    }
    Ok(())
}

/// All runs on one datacentre, some at a time; those that an interrupt left complete.
fn run_all(
    history: &History<'_>,
    runs: &[Options],
    jobs: usize,
    bar: &ProgressBar,
    interrupted: &AtomicBool,
) -> Result<Vec<Record>, SimulationError> {
    let next = AtomicUsize::new(0);
    let results: Mutex<BTreeMap<usize, Result<Record, SimulationError>>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, runs.len()) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(options) = runs.get(number) else {
                        return;
                    };
                    let result = run_one(history, options, bar, interrupted);
                    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                    results.insert(number, result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results
        .into_values()
        .filter(|result| *result != Err(SimulationError::Interrupted))
        .collect()
}

fn run_one(
    history: &History<'_>,
    options: &Options,
    bar: &ProgressBar,
    interrupted: &AtomicBool,
) -> Result<Record, SimulationError> {
    bar.set_message(format!(
        "{}: {}, {} replicas, seed {}",
        history.datacentre().name,
        options.policy,
        options.replication,
        options.seed
    ));
    let mut shown = 0;
    durability::run(history, options, &mut |share| {
        let thousandths = (share * 1_000.0) as u64;
        bar.inc(thousandths.saturating_sub(shown));
        shown = shown.max(thousandths);
        go_on(interrupted)
    })
    .inspect(|_| bar.inc(1_000 - shown.min(1_000)))
}
