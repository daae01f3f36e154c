//! `harvestfs simulate`: years of a datacentre with the production engine.

mod availability;
mod characterise;
mod durability;

use std::{
    fmt,
    ops::ControlFlow,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Context;
use clap::{Args, Subcommand};
use harvestfs_chaos::{
    datacentre::{Datacentre, generate, profile, read},
    report::{Statement, Table, statements_table},
};
use indicatif::{ProgressBar, ProgressStyle};

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
}

/// Runs `harvestfs simulate`.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    match &args.command {
        SimulateCommand::Durability(args) => durability::run(args),
        SimulateCommand::Availability(args) => availability::run(args),
        SimulateCommand::Characterise(args) => characterise::run(args),
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

impl OutputArgs {
    fn write<R: serde::Serialize>(
        &self,
        records: &[R],
        table: &Table,
        plot: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if let Some(file) = &self.json {
            write_file(file, &records_json(records)?)?;
        }
        if let Some(file) = &self.csv {
            write_file(file, &table.to_csv())?;
        }
        if let Some(file) = &self.svg {
            write_file(file, &plot())?;
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

fn go_on(interrupted: &AtomicBool) -> ControlFlow<()> {
    if interrupted.load(Ordering::Relaxed) {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// The bar that shows how far all runs are, in thousandths of a run; hidden when nobody looks.
fn progress_bar(runs: usize) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::new(runs as u64 * 1_000);
    let style = "{elapsed_precise} {bar:30} {percent:>3} % {msg} (about {eta} left)";
    bar.set_style(ProgressStyle::with_template(style)?);
    Ok(bar)
}
