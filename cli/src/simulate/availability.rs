//! `harvestfs simulate availability`.

use std::{sync::atomic::Ordering, time::Instant};

use clap::Args;
use harvestfs_chaos::{
    datacentre::MONTH_S,
    report::availability::{plot, statements, table},
    simulate::{
        availability::{Load, Options, Scaling, run as run_one},
        durability::{HISTORY_MONTHS, SimulationError},
    },
};
use harvestfs_placement::{PolicyKind, PolicyOptions};

use super::{
    DatacentreArgs, OutputArgs, bad_argument, choose, go_on, interrupts, numbers, print_statements,
    progress_bar,
};

#[derive(Debug, Args)]
pub struct AvailabilityArgs {
    #[command(flatten)]
    datacentres: DatacentreArgs,
    /// Policies: `all`, or some of stock, greedy, history, harvest, separated by commas.
    #[arg(long, default_value = "stock,history,harvest", value_name = "NAMES")]
    policy: String,
    /// Replicas per block: numbers separated by commas.
    #[arg(long, default_value = "3,4", value_name = "NUMBERS")]
    replication: String,
    /// How load is scaled: `all`, linear or root.
    #[arg(long, default_value = "all", value_name = "HOW")]
    scaling: String,
    /// Average utilisations in percent, separated by commas.
    #[arg(
        long,
        default_value = "20,30,40,50,60,70,80,90",
        value_name = "PERCENTS"
    )]
    utilisation: String,
    /// How unlike the servers of a tenant are: standard deviation of the logarithm of their load.
    /// 0: all follow the average server.
    #[arg(long, default_value_t = 0.0, value_name = "DEVIATION")]
    server_spread: f64,
    /// Blocks.
    #[arg(long, default_value_t = 200_000)]
    blocks: u32,
    /// Share of the space that the replicas take: 0.5 is half full.
    #[arg(long, default_value_t = 0.5, value_name = "SHARE")]
    fill: f64,
    /// How many runs of each, with the seeds 1, 2, 3 and so on.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    seeds: u64,
    #[command(flatten)]
    output: OutputArgs,
}

impl AvailabilityArgs {
    fn runs(&self) -> anyhow::Result<Vec<Options>> {
        let names = PolicyKind::ALL.map(PolicyKind::name);
        let policies: Vec<PolicyKind> =
            choose("policy", &self.policy, &names, |name| name.parse().ok())?;
        let replications: Vec<u8> = numbers("replication", &self.replication)?;
        let mut runs = Vec::new();
        for &policy in &policies {
            for &replication in &replications {
                for seed in 1..=self.seeds.max(1) {
                    runs.push(Options {
                        policy,
                        policy_options: PolicyOptions::default(),
                        replication,
                        blocks: self.blocks,
                        seed,
                        fill: self.fill,
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

    fn targets(&self) -> anyhow::Result<Vec<f64>> {
        let percents: Vec<f64> = numbers("utilisation", &self.utilisation)?;
        for percent in &percents {
            if !(*percent > 0.0 && *percent < 100.0) {
                let text = format!("--utilisation: {percent} is not between 0 and 100 percent");
                return Err(bad_argument(text));
            }
        }
        Ok(percents.into_iter().map(|it| it / 100.0).collect())
    }
}

pub fn run(args: &AvailabilityArgs) -> anyhow::Result<()> {
    let names = args.datacentres.names()?;
    let runs = args.runs()?;
    let targets = args.targets()?;
    let scaling_names = Scaling::ALL.map(Scaling::name);
    let scalings: Vec<Scaling> = choose("scaling", &args.scaling, &scaling_names, |name| {
        name.parse().ok()
    })?;
    if !(0.0..10.0).contains(&args.server_spread) {
        return Err(bad_argument("--server-spread: not from 0 to 10".to_owned()));
    }
    let interrupted = interrupts()?;
    let bar = progress_bar(names.len() * scalings.len() * targets.len() * runs.len())?;
    let started = Instant::now();
    let until_s = u64::from(HISTORY_MONTHS + 1) * MONTH_S;
    let mut records = Vec::new();
    'all: for name in &names {
        bar.set_message(format!("{name}: reading its history"));
        let datacentre = args.datacentres.load(name, until_s)?;
        for &scaling in &scalings {
            for &target in &targets {
                let load = Load::new(&datacentre, scaling, target, args.server_spread, 1);
                for options in &runs {
                    let percent = 100.0 * target;
                    let policy = options.policy;
                    bar.set_message(format!("{name}: {policy}, {scaling}, {percent:.0} %"));
                    match run_one(&load, options, &mut |_| go_on(&interrupted)) {
                        Ok(record) => records.push(record),
                        Err(SimulationError::Interrupted) => break 'all,
                        Err(error) => return Err(error.into()),
                    }
                    bar.inc(1_000);
                }
            }
        }
    }
    bar.finish_and_clear();
    println!("{}", table(&records));
    print_statements(&statements(&records));
    let plotted = scalings.first().map_or("linear", |scaling| scaling.name());
    args.output.write(&records, &table(&records), || {
        plot(&records, plotted).to_svg()
    })?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{} runs in {seconds:.1} s", records.len());
    if interrupted.load(Ordering::Relaxed) {
        anyhow::bail!("interrupted; the runs that were complete are above");
    }
    Ok(())
}
