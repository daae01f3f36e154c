//! `harvestfs simulate scheduling`.

mod report;

use std::path::PathBuf;

use clap::Args;
use harvestfs_chaos::datacentre::{Datacentre as Generated, MONTH_S, SLOT_S};
use harvestfs_chaos::simulate::durability::HISTORY_MONTHS;
use harvestfs_checkpoint::adaptive::{self, Bandwidth};
use harvestfs_checkpoint::simulate::STORAGE;
use harvestfs_cycles::reserve::{Preemption, PreemptionRule, SuspensionCosts, Victim};
use harvestfs_cycles::simulate::{
    Datacentre, Fleet, Options, PolicyKind, Record, SimulationError, TESTBED_SERVERS, TenantLoad,
    run as run_one,
};
use harvestfs_telemetry::profile::Pattern;
use harvestfs_telemetry::scaling::Scaling;

use super::{Campaign, DatacentreArgs, OutputArgs, bad_argument, choose, numbers, write_file};

/// Tenants of the paper's testbed by their pattern: periodic, constant, unpredictable.
const TESTBED_TENANTS: [(Pattern, usize); 3] = [
    (Pattern::Periodic, 13),
    (Pattern::Constant, 3),
    (Pattern::Unpredictable, 5),
];
/// Memory of a container: the paper's servers have 32 GB for 12 cores, of which about half is used.
const CONTAINER_BYTES: f64 = 1.3e9;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  harvestfs simulate scheduling --datacentre dc9 --utilisation 20,30,40,50,60 --svg dc9.svg
  harvestfs simulate scheduling --datacentre dc9 --testbed --utilisation 33 --demand 0.21 --policy all")]
pub struct SchedulingArgs {
    #[command(flatten)]
    datacentres: DatacentreArgs,
    /// Only this many servers of each datacentre, spread over all tenants; all by default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    servers: Option<u32>,
    /// The paper's testbed instead: 102 servers of 21 tenants of the datacentre, 13 of them periodic, 3 constant and 5
    /// unpredictable.
    #[arg(long, conflicts_with = "servers")]
    testbed: bool,
    /// Policies: `all`, or some of stock, pt, history, checkpoint, separated by commas.
    #[arg(long, default_value = "pt,history,checkpoint", value_name = "NAMES")]
    policy: String,
    /// How load is scaled: `all`, linear or root.
    #[arg(long, default_value = "all", value_name = "HOW")]
    scaling: String,
    /// Average utilisations by owners in percent, separated by commas.
    #[arg(long, default_value = "20,30,40,50,60", value_name = "PERCENTS")]
    utilisation: String,
    /// What jobs compute on average, as a share of all cores.
    #[arg(long, default_value_t = 0.06, value_name = "SHARE")]
    demand: f64,
    /// How many times as long as on the testbed tasks take. The default is the root of how many times as many servers
    /// there are.
    #[arg(long, value_name = "FACTOR")]
    stretch: Option<f64>,
    /// Days in which jobs arrive.
    #[arg(long, default_value_t = 30, value_name = "DAYS")]
    days: u32,
    /// Where `checkpoint` stores suspended tasks: disk, ssd or memory, as fast as Li et al. (Middleware'15) measured.
    #[arg(long, default_value = "ssd", value_name = "NAME")]
    storage: String,
    /// How many runs of each, with the seeds 1, 2, 3 and so on.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    seeds: u64,
    /// Run only this seed.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
    /// Write the plot of improvements, figure 14 of the paper, to this file.
    #[arg(long, value_name = "FILE")]
    improvements_svg: Option<PathBuf>,
}

/// Kill, or checkpoint and resume: the rule of `harvestfs checkpoint`.
struct Adaptive {
    bandwidth: Bandwidth,
}

impl PreemptionRule for Adaptive {
    fn preempt(&self, victim: &Victim, queue_s: f64) -> Preemption {
        // The second checkpoint of a task stores only changes.
        let changed = if victim.has_checkpoint {
            harvestfs_checkpoint::simulate::CHANGED_SHARE
        } else {
            1.0
        };
        let dump_bytes = victim.memory_bytes * changed;
        let known = adaptive::Victim {
            dump_bytes,
            restore_bytes: victim.memory_bytes,
            progress_s: victim.progress_s,
            has_checkpoint: victim.has_checkpoint,
        };
        match known.preempt(&self.bandwidth, queue_s) {
            adaptive::Preemption::Kill => Preemption::Kill,
            adaptive::Preemption::Checkpoint | adaptive::Preemption::Incremental => {
                Preemption::Suspend(SuspensionCosts {
                    dump_s: dump_bytes / self.bandwidth.write_bytes_per_s,
                    restore_s: victim.memory_bytes / self.bandwidth.read_bytes_per_s,
                })
            }
        }
    }
}

impl SchedulingArgs {
    fn targets(&self) -> anyhow::Result<Vec<f64>> {
        let percents: Vec<f64> = numbers("utilisation", &self.utilisation)?;
        if let Some(percent) = percents.iter().find(|it| !(**it > 0.0 && **it < 100.0)) {
            let text = format!("--utilisation: {percent} is not between 0 and 100 percent");
            return Err(bad_argument(text));
        }
        Ok(percents.into_iter().map(|it| it / 100.0).collect())
    }

    fn rule(&self) -> anyhow::Result<Adaptive> {
        let known = STORAGE.iter().find(|it| it.name == self.storage);
        let storage = known.ok_or_else(|| {
            let name = &self.storage;
            bad_argument(format!(
                "--storage: unknown storage `{name}`; accepted: disk, ssd, memory"
            ))
        })?;
        Ok(Adaptive {
            bandwidth: storage.bandwidth(),
        })
    }

    fn runs<'a>(&self, rule: &'a Adaptive) -> anyhow::Result<Vec<Options<'a>>> {
        let names = PolicyKind::ALL.map(PolicyKind::name);
        let policies: Vec<PolicyKind> =
            choose("policy", &self.policy, &names, |name| name.parse().ok())?;
        let seeds = match self.seed {
            Some(seed) => seed..=seed,
            None => 1..=self.seeds.max(1),
        };
        let mut runs = Vec::new();
        for policy in policies {
            runs.extend(seeds.clone().map(|seed| Options {
                policy,
                rule,
                container_bytes: CONTAINER_BYTES,
                seed,
                days: self.days,
                demand: self.demand,
                stretch: self.stretch,
            }));
        }
        for run in &runs {
            run.check()
                .map_err(|error| bad_argument(format!("--{error}")))?;
        }
        Ok(runs)
    }

    /// The month that durability begins with, and the one before.
    fn datacentre(&self, name: &str) -> anyhow::Result<Datacentre> {
        let until_s = u64::from(HISTORY_MONTHS + 1) * MONTH_S;
        let generated = self.datacentres.load(name, until_s)?;
        let start_s = u64::from(HISTORY_MONTHS) * MONTH_S;
        let owners: Vec<u32> = generated
            .servers
            .iter()
            .map(|server| server.owner_at(start_s))
            .collect();
        let owners = if self.testbed {
            testbed(&generated, &owners)
        } else {
            spread(owners, self.servers)
        };
        let loads = generated.tenants.iter().map(|tenant| TenantLoad {
            before: tenant.load.month(HISTORY_MONTHS - 1),
            now: tenant.load.month(HISTORY_MONTHS),
        });
        Ok(Datacentre {
            name: generated.name.clone(),
            slot_s: SLOT_S as u32,
            tenants: loads.collect(),
            owners,
        })
    }
}

/// So many servers, taken at equal distances when they are in order of their tenants.
fn spread(mut owners: Vec<u32>, count: Option<u32>) -> Vec<u32> {
    let Some(count) = count.map(|it| it as usize) else {
        return owners;
    };
    if count >= owners.len() {
        return owners;
    }
    owners.sort_unstable();
    let all = owners.len();
    (0..count)
        .map(|place| owners[place * all / count])
        .collect()
}

/// The largest tenants of each pattern in the numbers of the paper's testbed, with the same number of servers each as
/// nearly as can be.
fn testbed(datacentre: &Generated, owners: &[u32]) -> Vec<u32> {
    let mut sizes = vec![0_usize; datacentre.tenants.len()];
    for &owner in owners {
        sizes[owner as usize] += 1;
    }
    let mut by_size: Vec<usize> = (0..sizes.len()).collect();
    by_size.sort_by_key(|&tenant| std::cmp::Reverse(sizes[tenant]));
    let mut chosen = Vec::new();
    for (pattern, count) in TESTBED_TENANTS {
        let mut of_pattern = by_size.clone();
        of_pattern.retain(|&tenant| datacentre.tenants[tenant].pattern == pattern);
        chosen.extend(of_pattern.into_iter().take(count));
    }
    let servers = 0..TESTBED_SERVERS;
    servers
        .map(|server| chosen[server % chosen.len()] as u32)
        .collect()
}

pub fn run(args: &SchedulingArgs) -> anyhow::Result<()> {
    let names = args.datacentres.names()?;
    let rule = args.rule()?;
    let runs = args.runs(&rule)?;
    let targets = args.targets()?;
    let scaling_names = Scaling::ALL.map(Scaling::name);
    let scalings: Vec<Scaling> = choose("scaling", &args.scaling, &scaling_names, |name| {
        name.parse().ok()
    })?;
    let campaign = Campaign::begin(names.len() * scalings.len() * targets.len() * runs.len())?;
    let bar = &campaign.bar;
    let mut records: Vec<Record> = Vec::new();
    'all: for name in &names {
        bar.set_message(format!("{name}: reading its history"));
        let datacentre = args.datacentre(name)?;
        for &scaling in &scalings {
            for &target in &targets {
                let fleet = Fleet::new(&datacentre, scaling, target)?;
                for options in &runs {
                    let (policy, percent) = (options.policy, 100.0 * target);
                    let setup = format!("{name}: {policy}, {scaling}, {percent:.0} %");
                    bar.set_message(setup.clone());
                    match run_one(&fleet, options, &mut |_| campaign.go_on()) {
                        Ok(record) => {
                            let (mean_s, killed) = (record.job_mean_s, record.killed_tasks);
                            let line =
                                format!("{setup}: {mean_s:.0} s a job, {killed} tasks killed");
                            campaign.completed(line);
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
    campaign.finish(
        &args.output,
        &records,
        &report::table(&records),
        &report::statements(&records),
        || report::lengths(&records).to_svg(),
    )?;
    if let Some(file) = &args.improvements_svg {
        write_file(file, &report::improvements(&records).to_svg())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_go_as_the_rule_of_checkpoints_says() {
        let rule = Adaptive {
            bandwidth: Bandwidth {
                write_bytes_per_s: 100.0,
                read_bytes_per_s: 200.0,
                network_bytes_per_s: 50.0,
            },
        };
        let victim = |progress_s, has_checkpoint| Victim {
            progress_s,
            memory_bytes: 1_000.0,
            has_checkpoint,
        };
        // 10 s to store and 5 s to read; 1 s to store the changes.
        assert_eq!(rule.preempt(&victim(15.0, false), 0.0), Preemption::Kill);
        let costs = |dump_s| {
            Preemption::Suspend(SuspensionCosts {
                dump_s,
                restore_s: 5.0,
            })
        };
        assert_eq!(rule.preempt(&victim(15.1, false), 0.0), costs(10.0));
        assert_eq!(rule.preempt(&victim(15.1, false), 1.0), Preemption::Kill);
        assert_eq!(rule.preempt(&victim(6.1, true), 0.0), costs(1.0));
        assert_eq!(rule.cost_s(&victim(100.0, false), 2.0), 17.0);
    }

    #[test]
    fn servers_are_taken_from_all_tenants() {
        let owners = [[2].repeat(50), [0].repeat(30), [1].repeat(20)].concat();
        let some = spread(owners.clone(), Some(10));
        assert_eq!(some, [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]);
        assert_eq!(spread(owners.clone(), Some(1_000)), owners);
    }
}
