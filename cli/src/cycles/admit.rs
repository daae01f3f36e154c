//! `harvestfs cycles admit`.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use harvestfs_chaos::report::Table;
use harvestfs_cycles::safety::{
    Admitted, Cluster, FailureRates, Packing, Probability, RackSpec, TaskGroup,
};
use serde::{Deserialize, Serialize};

/// Most servers of a file, so that a slip of the finger is no hour of work.
const SERVERS_MAX: u64 = 100_000;
/// Most tasks of a group.
const TASKS_MAX: u32 = 100_000;

#[derive(Debug, Args)]
#[command(after_help = "The file names racks, how often things fail, and jobs:

  threshold = 1e-6          # a bag loses more tasks than it has backups with less than this probability

  [failures]                # while the domain around it does not fail
  server = 0.01
  rack = 0.001
  environment = 1e-7

  [[racks]]
  count = 20                # racks that are alike
  environment = \"search\"
  servers = 40
  cores = 12
  memory = \"32 GiB\"

  [[jobs]]
  name = \"front\"
  groups = [{ tasks = 100, cores = 2, memory = \"4 GiB\" }]

Example:
  harvestfs cycles admit jobs.toml")]
pub struct AdmitArgs {
    /// Racks and jobs.
    file: PathBuf,
    /// Which servers tasks and backups go to.
    #[arg(long, default_value = "spread", value_name = "HOW")]
    packing: PackingArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PackingArg {
    /// Where the fewest tasks of the bag are.
    Spread,
    /// The first servers with room; backups to racks that are not used yet.
    FirstFit,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    threshold: f64,
    failures: Failures,
    racks: Vec<Racks>,
    #[serde(default)]
    jobs: Vec<Job>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Failures {
    server: f64,
    rack: f64,
    #[serde(default)]
    environment: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Racks {
    #[serde(default = "one")]
    count: u32,
    environment: String,
    servers: u32,
    cores: u32,
    memory: bytesize::ByteSize,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Job {
    name: String,
    groups: Vec<Group>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    tasks: NonZeroU32,
    cores: NonZeroU32,
    memory: bytesize::ByteSize,
}

/// What became of a job.
#[derive(Debug, Serialize)]
struct Outcome {
    job: String,
    admitted: bool,
    /// Why it was denied.
    reason: Option<String>,
    groups: Vec<GroupOutcome>,
}

#[derive(Debug, Serialize)]
struct GroupOutcome {
    bag: usize,
    bag_tasks: usize,
    bag_backups: usize,
    loss_probability: f64,
}

#[derive(Debug, Serialize)]
struct Answer {
    jobs: Vec<Outcome>,
    reserved_cores: u64,
    reserved_memory_bytes: u64,
}

impl Plan {
    fn cluster(&self, packing: PackingArg) -> anyhow::Result<Cluster> {
        let probability = |name: &str, value: f64| {
            let probability = Probability::new(value);
            probability.with_context(|| format!("failures.{name} = {value} is not from 0 to 1"))
        };
        let rates = FailureRates {
            server: probability("server", self.failures.server)?,
            rack: probability("rack", self.failures.rack)?,
            environment: probability("environment", self.failures.environment)?,
        };
        let servers = |it: &Racks| u64::from(it.count) * u64::from(it.servers);
        let all: u64 = self.racks.iter().map(servers).sum();
        ensure!(
            all <= SERVERS_MAX,
            "{all} servers: at most {SERVERS_MAX} are looked at"
        );
        let mut environments: BTreeMap<&str, u32> = BTreeMap::new();
        let mut racks = Vec::new();
        for it in &self.racks {
            let next = environments.len() as u32;
            let rack = RackSpec {
                environment: *environments.entry(&it.environment).or_insert(next),
                servers: it.servers,
                cores: it.cores,
                memory_mib: it.memory.as_u64() >> 20,
            };
            racks.extend((0..it.count).filter(|_| it.servers > 0).map(|_| rack));
        }
        let packing = match packing {
            PackingArg::Spread => Packing::Spread,
            PackingArg::FirstFit => Packing::FirstFit,
        };
        Ok(Cluster::new(&racks, rates, self.threshold, packing)?)
    }
}

impl Job {
    fn groups(&self) -> anyhow::Result<Vec<TaskGroup>> {
        let groups = self.groups.iter().map(|it| {
            let name = &self.name;
            ensure!(
                it.tasks.get() <= TASKS_MAX,
                "job {name}: more than {TASKS_MAX} tasks in a group"
            );
            let memory_mib = NonZeroU64::new(it.memory.as_u64().div_ceil(1 << 20));
            Ok(TaskGroup {
                tasks: it.tasks,
                cores: it.cores,
                memory_mib: memory_mib
                    .with_context(|| format!("job {name}: tasks without memory"))?,
            })
        });
        groups.collect()
    }
}

impl From<Admitted> for GroupOutcome {
    fn from(it: Admitted) -> Self {
        Self {
            bag: it.bag,
            bag_tasks: it.tasks,
            bag_backups: it.backups,
            loss_probability: it.probability,
        }
    }
}

fn admit(plan: &Plan, packing: PackingArg) -> anyhow::Result<Answer> {
    let mut cluster = plan.cluster(packing)?;
    let mut jobs = Vec::new();
    for job in &plan.jobs {
        let (reason, groups) = match cluster.admit(&job.groups()?) {
            Ok(admitted) => (None, admitted.into_iter().map(GroupOutcome::from).collect()),
            Err(denied) => (Some(denied.to_string()), Vec::new()),
        };
        jobs.push(Outcome {
            job: job.name.clone(),
            admitted: reason.is_none(),
            reason,
            groups,
        });
    }
    let (reserved_cores, reserved_mib) = cluster.reserved();
    Ok(Answer {
        jobs,
        reserved_cores,
        reserved_memory_bytes: reserved_mib << 20,
    })
}

fn table(answer: &Answer) -> Table {
    let mut table = Table::new(&["job", "bag", "tasks", "backups", "loses more", ""]);
    for outcome in &answer.jobs {
        for group in &outcome.groups {
            table.row(&[
                outcome.job.clone(),
                group.bag.to_string(),
                group.bag_tasks.to_string(),
                group.bag_backups.to_string(),
                format!("{:.1e}", group.loss_probability),
                "admitted".to_owned(),
            ]);
        }
        if let Some(reason) = &outcome.reason {
            let denied = format!("denied: {reason}");
            table.row(&[outcome.job.as_str(), "", "", "", "", denied.as_str()]);
        }
    }
    table
}

pub fn run(args: &AdmitArgs) -> anyhow::Result<()> {
    let file = args.file.display();
    let text =
        std::fs::read_to_string(&args.file).with_context(|| format!("cannot read {file}"))?;
    let plan: Plan = toml::from_str(&text).with_context(|| format!("{file} is not understood"))?;
    let answer = admit(&plan, args.packing).with_context(|| file.to_string())?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answer)?);
        return Ok(());
    }
    println!("{}", table(&answer));
    println!(
        "backups reserve {} cores and {}",
        answer.reserved_cores,
        bytesize::ByteSize::b(answer.reserved_memory_bytes)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = r#"
        threshold = 1e-6
        failures = { server = 0.01, rack = 0.001 }
        racks = [{ count = 20, environment = "search", servers = 10, cores = 12, memory = "32 GiB" }]
        [[jobs]]
        name = "front"
        groups = [{ tasks = 100, cores = 2, memory = "4 GiB" }, { tasks = 10, cores = 1, memory = "100 MiB" }]
        [[jobs]]
        name = "giant"
        groups = [{ tasks = 1, cores = 13, memory = "1 MiB" }]
    "#;

    fn plan(text: &str) -> Plan {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn jobs_are_admitted_or_denied_with_the_reason() {
        let answer = admit(&plan(PLAN), PackingArg::Spread).unwrap();
        let [front, giant] = &answer.jobs[..] else {
            panic!("{answer:?}")
        };
        assert!(front.admitted && front.groups.len() == 2);
        assert!(front.groups.iter().all(|it| it.loss_probability < 1e-6));
        assert_eq!(
            giant.reason.as_deref(),
            Some("1 tasks of 13 cores and 1 MiB do not fit")
        );
        // Losing one rack of two costs much more than losing one of twenty.
        let rarely = plan(&PLAN.replace("1e-6", "1e-5"));
        let cores = |packing| admit(&rarely, packing).unwrap().reserved_cores;
        let (first_fit, spread) = (cores(PackingArg::FirstFit), cores(PackingArg::Spread));
        assert!(first_fit > 2 * spread, "{first_fit} {spread}");
        let text = table(&answer).to_string();
        assert!(text.contains("denied: 1 tasks of 13 cores"), "{text}");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = |from: &str, to: &str| {
            let error = admit(&plan(&PLAN.replace(from, to)), PackingArg::Spread).unwrap_err();
            error.to_string()
        };
        assert!(
            error("rack = 0.001", "rack = 2.0").contains("failures.rack = 2 is not from 0 to 1")
        );
        assert!(error("count = 20", "count = 20000000").contains("at most 100000"));
        assert!(error("\"1 MiB\"", "\"0\"").contains("job giant: tasks without memory"));
        assert!(error("threshold = 1e-6", "threshold = 0.0").contains("threshold 0"));
    }
}
