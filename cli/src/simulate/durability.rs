//! `harvestfs simulate durability`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use harvestfs_chaos::datacentre::MONTH_S;
use harvestfs_chaos::report::durability::Summary;
use harvestfs_chaos::simulate::durability::{
    self, HISTORY_MONTHS, MISSED_HEARTBEATS_MS, Options, Record, SimulationError,
};
use harvestfs_chaos::simulate::history::History;
use harvestfs_placement::{LeastReimaged, Locality, PolicyKind, PolicyOptions};
use parking_lot::Mutex;

use super::{Campaign, DatacentreArgs, OutputArgs, Setup, SetupArgs, bad_argument};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs simulate durability --datacentre dc3 --blocks 200000\n  \
    harvestfs simulate durability --policy all --replication 2,3 --json runs.json --svg lost.svg")]
pub struct DurabilityArgs {
    #[command(flatten)]
    datacentres: DatacentreArgs,
    #[command(flatten)]
    setups: SetupArgs,
    /// Blocks.
    #[arg(long, default_value_t = 4_000_000)]
    blocks: u32,
    /// Years; policies know the twelve months before, and what happens as it happens.
    #[arg(long, default_value_t = 1)]
    years: u32,
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
        let options = |setup: Setup| {
            let Setup {
                policy,
                replication,
                seed,
            } = setup;
            let factor = if policy == PolicyKind::Harvest { 10 } else { 1 };
            Options {
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
            }
        };
        let runs: Vec<Options> = self.setups.setups()?.into_iter().map(options).collect();
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
    let campaign = Campaign::begin(names.len() * runs.len())?;
    let until_s = u64::from(HISTORY_MONTHS + 12 * args.years) * MONTH_S;
    let mut records = Vec::new();
    for name in &names {
        campaign
            .bar
            .set_message(format!("{name}: reading its history"));
        let datacentre = args.datacentres.load(name, until_s)?;
        let history = History::new(&datacentre, HISTORY_MONTHS);
        records.extend(run_all(&history, &runs, args.jobs, &campaign)?);
        if campaign.go_on().is_break() {
            break;
        }
    }
    let summary = Summary::of(&records);
    campaign.finish(
        &args.output,
        &records,
        &summary.table(),
        &summary.statements(),
        || summary.plot().to_svg(),
    )
}

/// All runs on one datacentre, some at a time; those that an interrupt left complete.
fn run_all(
    history: &History<'_>,
    runs: &[Options],
    jobs: usize,
    campaign: &Campaign,
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
                    let result = run_one(history, options, campaign);
                    let mut results = results.lock();
                    results.insert(number, result);
                }
            });
        }
    });
    let results = results.into_inner();
    results
        .into_values()
        .filter(|result| *result != Err(SimulationError::Interrupted))
        .collect()
}

fn run_one(
    history: &History<'_>,
    options: &Options,
    campaign: &Campaign,
) -> Result<Record, SimulationError> {
    let bar = &campaign.bar;
    let setup = format!(
        "{}: {}, {} replicas, seed {}",
        history.datacentre().name,
        options.policy,
        options.replication,
        options.seed
    );
    bar.set_message(setup.clone());
    let mut shown = 0;
    let record = durability::run(history, options, &mut |share| {
        let thousandths = (share * 1_000.0) as u64;
        bar.inc(thousandths.saturating_sub(shown));
        shown = shown.max(thousandths);
        campaign.go_on()
    })?;
    bar.inc(1_000 - shown.min(1_000));
    campaign.completed(format_args!(
        "{setup}: {} blocks lost, {} repairs, {:.1} s",
        record.lost_blocks, record.repairs, record.wall_s
    ));
    Ok(record)
}
