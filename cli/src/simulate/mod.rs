//! `harvestfs simulate`: simulates years of a datacentre with the production engine, and minutes of a whole cluster.

mod availability;
mod characterise;
mod cluster;
mod durability;
mod scheduling;

use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use clap::{Args, Subcommand};
use harvestfs_chaos::datacentre::{Datacentre, generate, profile, read};
use harvestfs_chaos::report::{Statement, Table, statements_table};
use harvestfs_placement::PolicyKind;
use indicatif::{ProgressBar, ProgressStyle};

/// Replications that `all` means.
const REPLICATIONS: [u8; 3] = [2, 3, 4];

/// Arguments of `harvestfs simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    #[command(subcommand)]
    command: SimulateCommand,
}

#[derive(Debug, Subcommand)]
enum SimulateCommand {
    /// How many blocks a year of reimages destroys (figure 15 of the paper).
    Durability(durability::DurabilityArgs),
    /// How many accesses fail because all servers with a replica are busy (figure 16).
    Availability(availability::AvailabilityArgs),
    /// What the datacentres are like: patterns of load, reimages (figures 1 to 6).
    Characterise(characterise::CharacteriseArgs),
    /// How long jobs take on what owners leave, and what is killed (figures 11, 13 and 14).
    Scheduling(scheduling::SchedulingArgs),
    /// Whether a whole cluster keeps its promises under faults: namenode, datanodes and clients in virtual time.
    Cluster(cluster::ClusterArgs),
}

/// Runs `harvestfs simulate`.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    match &args.command {
        SimulateCommand::Durability(args) => durability::run(args),
        SimulateCommand::Availability(args) => availability::run(args),
        SimulateCommand::Characterise(args) => characterise::run(args),
        SimulateCommand::Scheduling(args) => scheduling::run(args),
        SimulateCommand::Cluster(args) => cluster::run(args),
    }
}

/// Which datacentres, and where they come from.
#[derive(Debug, Args)]
struct DatacentreArgs {
    /// Datacentres: `all`, or some of dc0 to dc9, separated by commas.
    #[arg(long, default_value = "all", value_name = "NAMES")]
    datacentre: String,
    /// Read the datacentres from the trace files in this directory (dcN_tenants, dcN_servers,
    /// dcN_reimages, cpu_*) instead of generating them.
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
}

impl DatacentreArgs {
    fn names(&self) -> anyhow::Result<Vec<String>> {
        let all: Vec<&str> = profile::PROFILES.iter().map(|it| it.name).collect();
        choose("datacentre", &self.datacentre, &all, |name| {
            let known = all.iter().find(|it| it.eq_ignore_ascii_case(name));
            known.map(|it| (*it).to_owned())
        })
    }

    /// Generates or reads one. Its history must reach to `until_s` seconds.
    fn load(&self, name: &str, until_s: u64) -> anyhow::Result<Datacentre> {
        if let Some(directory) = &self.traces {
            return Ok(read(directory, name, until_s, true)?);
        }
        let profile = profile::profile(name).context("not one of the built-in datacentres")?;
        Ok(generate(profile)?)
    }
}

/// Which policies, how many replicas, and how often.
#[derive(Debug, Args)]
struct SetupArgs {
    /// Policies: `all`, or some of stock, greedy, history, harvest, separated by commas.
    #[arg(long, default_value = "stock,history,harvest", value_name = "NAMES")]
    policy: String,
    /// Replicas per block: `all` (2, 3 and 4), or numbers separated by commas.
    #[arg(long, default_value = "3", value_name = "NUMBERS")]
    replication: String,
    /// How many runs of each, with the seeds 1, 2, 3 and so on.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    seeds: u64,
    /// Run only this seed.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
}

/// What tells one run on a datacentre from another.
struct Setup {
    policy: PolicyKind,
    replication: u8,
    seed: u64,
}

impl SetupArgs {
    /// All combinations.
    fn setups(&self) -> anyhow::Result<Vec<Setup>> {
        let names = PolicyKind::ALL.map(PolicyKind::name);
        let policies: Vec<PolicyKind> =
            choose("policy", &self.policy, &names, |name| name.parse().ok())?;
        let replications = if self.replication.trim() == "all" {
            REPLICATIONS.to_vec()
        } else {
            numbers("replication", &self.replication)?
        };
        let seeds = match self.seed {
            Some(seed) => seed..=seed,
            None => 1..=self.seeds.max(1),
        };
        let mut setups = Vec::new();
        for &policy in &policies {
            for &replication in &replications {
                setups.extend(seeds.clone().map(|seed| Setup {
                    policy,
                    replication,
                    seed,
                }));
            }
        }
        Ok(setups)
    }
}

/// Where results go beside the terminal.
#[derive(Debug, Args)]
struct OutputArgs {
    /// Write every record to this file, as one JSON array.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a plot to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// All runs of one command, under way.
struct Campaign {
    bar: ProgressBar,
    started: Instant,
    interrupted: Arc<AtomicBool>,
}

impl Campaign {
    fn begin(runs: usize) -> anyhow::Result<Self> {
        Ok(Self {
            bar: progress_bar(runs)?,
            started: Instant::now(),
            interrupted: interrupts()?,
        })
    }

    /// Whether the user wants the runs to go on.
    fn go_on(&self) -> ControlFlow<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    /// A run is complete: says so in a line where no bar is shown, such as in a log.
    fn completed(&self, run: impl fmt::Display) {
        if self.bar.is_hidden() {
            eprintln!("{:>6.0} s  {run}", self.started.elapsed().as_secs_f64());
        }
    }

    /// Shows and writes what the complete runs gave.
    ///
    /// # Errors
    /// When a file cannot be written, or an interrupt left runs out.
    fn finish<R: serde::Serialize>(
        &self,
        output: &OutputArgs,
        records: &[R],
        table: &Table,
        statements: &[Statement],
        plot: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        self.bar.finish_and_clear();
        println!("{table}");
        print_statements(statements);
        if let Some(file) = &output.json {
            write_file(file, &records_json(records)?)?;
        }
        if let Some(file) = &output.csv {
            write_file(file, &table.to_csv())?;
        }
        if let Some(file) = &output.svg {
            write_file(file, &plot())?;
        }
        let seconds = self.started.elapsed().as_secs_f64();
        println!("{} runs in {seconds:.1} s", records.len());
        if self.go_on().is_break() {
            anyhow::bail!("interrupted; the runs that were complete are above");
        }
        Ok(())
    }
}

/// An array with one record per line.
fn records_json<R: serde::Serialize>(records: &[R]) -> anyhow::Result<String> {
    let lines: Result<Vec<String>, _> = records.iter().map(serde_json::to_string).collect();
    Ok(format!("[\n{}\n]\n", lines?.join(",\n")))
}

/// Writes one result.
pub fn write_file(file: &Path, content: &str) -> anyhow::Result<()> {
    std::fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))
}

fn print_statements(statements: &[Statement]) {
    let table = statements_table(statements);
    if !table.is_empty() {
        println!("\n{table}");
    }
}

/// A list separated by commas, or `all`.
fn choose<T: Clone>(
    what: &'static str,
    text: &str,
    all: &[&str],
    parse: impl Fn(&str) -> Option<T>,
) -> anyhow::Result<Vec<T>> {
    let accepted = || format!("all, or some of {}", all.join(", "));
    let names: Vec<&str> = if text.trim() == "all" {
        all.to_vec()
    } else {
        text.split(',').map(str::trim).collect()
    };
    let mut chosen = Vec::new();
    for name in names {
        match parse(name) {
            Some(one) => chosen.push(one),
            None => {
                return Err(bad_argument(format!(
                    "--{what}: unknown {what} `{name}`; accepted: {}",
                    accepted()
                )));
            }
        }
    }
    Ok(chosen)
}

/// What was asked for cannot be understood.
#[derive(Debug)]
pub struct BadArgument(String);

impl fmt::Display for BadArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadArgument {}

fn bad_argument(text: String) -> anyhow::Error {
    BadArgument(text).into()
}

/// Numbers separated by commas.
fn numbers<T: FromStr>(what: &'static str, text: &str) -> anyhow::Result<Vec<T>> {
    let parse = |part: &str| {
        part.trim()
            .parse()
            .map_err(|_| bad_argument(format!("--{what}: `{part}` is not a number in its range")))
    };
    text.split(',').map(parse).collect()
}

/// Set by Ctrl-C and `kill`.
pub fn interrupts() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&flag))
            .context("cannot watch for signals")?;
    }
    Ok(flag)
}

/// The bar that shows how far all runs are, in thousandths of a run; hidden without a terminal.
fn progress_bar(runs: usize) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::new(runs as u64 * 1_000);
    let style = "{elapsed_precise} {bar:30} {percent:>3} % {msg} (about {eta} left)";
    bar.set_style(ProgressStyle::with_template(style)?);
    Ok(bar)
}
