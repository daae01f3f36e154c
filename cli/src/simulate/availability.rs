//! `harvestfs simulate availability`.

use clap::Args;
use harvestfs_chaos::datacentre::MONTH_S;
use harvestfs_chaos::report::availability::{plot, statements, table};
use harvestfs_chaos::simulate::availability::{Load, Options, run as run_one};
use harvestfs_chaos::simulate::durability::{HISTORY_MONTHS, SimulationError};
use harvestfs_placement::PolicyOptions;
use harvestfs_telemetry::scaling::Scaling;

use super::{Campaign, DatacentreArgs, OutputArgs, SetupArgs, bad_argument, choose, numbers};

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs simulate availability --datacentre dc9 --scaling linear --utilisation 40,60")]
pub struct AvailabilityArgs {
    #[command(flatten)]
    datacentres: DatacentreArgs,
    #[command(flatten)]
    setups: SetupArgs,
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
    #[command(flatten)]
    output: OutputArgs,
}

impl AvailabilityArgs {
    fn runs(&self) -> anyhow::Result<Vec<Options>> {
        let setups = self.setups.setups()?.into_iter();
        let options = setups.map(|setup| Options {
            policy: setup.policy,
            policy_options: PolicyOptions::default(),
            replication: setup.replication,
            blocks: self.blocks,
            seed: setup.seed,
            fill: self.fill,
        });
        let runs: Vec<Options> = options.collect();
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
    let campaign = Campaign::begin(names.len() * scalings.len() * targets.len() * runs.len())?;
    let bar = &campaign.bar;
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
                    let setup = format!("{name}: {policy}, {scaling}, {percent:.0} %");
                    bar.set_message(setup.clone());
                    match run_one(&load, options, &mut |_| campaign.go_on()) {
                        Ok(record) => {
                            let failed = 100.0 * record.failed_share;
                            campaign.completed(format_args!("{setup}: {failed:.6} % failed"));
                            records.push(record);
                        }
                        Err(SimulationError::Interrupted) => break 'all,
                        Err(error) => return Err(error.into()),
                    }
                    bar.inc(1_000);
                }
            }
        }
    }
    let plotted = scalings.first().map_or("linear", |scaling| scaling.name());
    campaign.finish(
        &args.output,
        &records,
        &table(&records),
        &statements(&records),
        || plot(&records, plotted).to_svg(),
    )
}
