//! `harvestfs chaos`: injects faults into a real cluster.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, available_parallelism};

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use harvestfs_chaos::live::failover::{self, FailoverOptions, FaultKind, Measured};
use harvestfs_chaos::live::{
    self, LiveError, Loss, Metrics, Options, Plan, Progress, Ran, Scenario, SlowdownOptions,
};
use harvestfs_chaos::simulate::cluster::replay::Replay;
use harvestfs_http::{Access, Endpoint, MetricsSite};
use indicatif::{ProgressBar, ProgressStyle};

use crate::config::Priority;
use crate::simulate::{interrupts, write_file};
use crate::{output, priority};

/// Twice what was seen to be used by the disks of the other servers.
const MEMORY_MIB: u64 = 2_560;

/// Arguments of `harvestfs chaos`.
#[derive(Debug, Args)]
pub struct ChaosArgs {
    #[command(subcommand)]
    command: ChaosCommand,
}

#[derive(Debug, Subcommand)]
enum ChaosCommand {
    /// Start a cluster, let clients work, inflict faults, heal, and compare every byte.
    Run(RunArgs),
    /// Show what a scenario would do, and do nothing.
    #[command(after_help = "Example:\n  \
        harvestfs chaos plan chaos/scenarios/smoke.toml --seed 17")]
    Plan {
        /// The scenario.
        #[arg(value_name = "SCENARIO.toml")]
        scenario: PathBuf,
        /// Decides everything that is left to chance [default: the scenario's].
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
    },
    /// Measure what HarvestFS costs a primary tenant that computes on the same machine: in turns,
    /// the primary is alone, and shares the machine with five datanodes at work. Its server's disk is
    /// in the temporary directory, those of the others in memory.
    #[command(after_help = "Example:\n  \
        harvestfs chaos slowdown --threads 2 --pairs 5")]
    Slowdown {
        /// Threads of the primary [default: half of the CPUs: with more it counts as busy, and
        /// accesses would be denied].
        #[arg(long, value_name = "N")]
        threads: Option<usize>,
        /// Pairs of turns; each takes five seconds.
        #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
        pairs: u32,
        /// A directory in memory, for what is on other servers in production.
        #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
        memory: PathBuf,
    },
    /// Hurt the namenode that leads, again and again, while a program works on a mount: how long it waits, whether it
    /// sees an error, and whether all is there that it was promised. Needs root.
    #[command(after_help = "Examples:\n  \
        harvestfs chaos failover\n  \
        harvestfs chaos failover --kind kill --kind partition --rounds 100 --json failover.json")]
    Failover {
        /// What is done to it: kill, hang, partition, disk or transfer; can be repeated [default: each].
        #[arg(long, value_name = "KIND")]
        kind: Vec<FaultKind>,
        /// How often each is done.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Decides when exactly.
        #[arg(long, value_name = "S", default_value_t = 1)]
        seed: u64,
        /// Write everything that was seen to this file.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Work on mounts as `chaos run` says on standard input.
    #[command(hide = true)]
    WorkOnMounts,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs chaos run chaos/scenarios/smoke.toml\n  \
    harvestfs chaos run chaos/scenarios/smoke.toml --seed 17 --keep /tmp/chaos --html report.html")]
struct RunArgs {
    /// The scenario.
    #[arg(value_name = "SCENARIO.toml")]
    scenario: PathBuf,
    /// Decides everything that is left to chance [default: the scenario's].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Write everything that was seen to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots to this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write what was done to the cluster, in the first run, to this file, for `harvestfs simulate cluster --replay`.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Tell metrics to Prometheus on this address of this machine while it runs.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// Keep the cluster's directories and logs here instead of removing them; must not exist.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// Runs `harvestfs chaos`.
///
/// # Errors
/// When the scenario is wrong, the cluster cannot be run, or something acknowledged is not there.
pub fn run(args: &ChaosArgs) -> anyhow::Result<()> {
    match &args.command {
        ChaosCommand::Run(args) => run_scenario(args),
        ChaosCommand::Slowdown {
            threads,
            pairs,
            memory,
        } => measure_slowdown(*threads, *pairs as usize, memory),
        ChaosCommand::Failover {
            kind,
            rounds,
            seed,
            json,
        } => measure_failover(kind, *rounds as usize, *seed, json.as_deref()),
        ChaosCommand::WorkOnMounts => Ok(live::work_on_mounts()?),
        ChaosCommand::Plan { scenario, seed } => {
            let scenario = Scenario::load(scenario)?;
            let plan = Plan::new(&scenario, seed.unwrap_or(scenario.seed));
            println!("seed {}", plan.seed);
            print!("{}", plan.describe(&scenario));
            Ok(())
        }
    }
}

fn measure_slowdown(threads: Option<usize>, pairs: usize, memory: &Path) -> anyhow::Result<()> {
    let interrupted = interrupts()?;
    let binary = std::env::current_exe().context("where is this program?")?;
    let disk = temporary_directory()?;
    let elsewhere = in_memory(memory)?;
    let threads = match threads {
        Some(threads) => threads,
        None => available_parallelism()?.get().div_ceil(2),
    };
    let options = SlowdownOptions {
        binary: &binary,
        disk: disk.path(),
        elsewhere: elsewhere.path(),
        threads,
        pairs,
        yield_to_others: &|| priority::apply(Priority::Idle),
        interrupted: &interrupted,
    };
    let slowdown = live::measure_slowdown(&options, &mut |Loss { cpu, percent }| {
        println!("on CPU {cpu}: slower by {percent:>5.1} %");
    })?;
    for (cpu, percent) in slowdown.median_percent_by_cpu() {
        println!("CPU {cpu}: median {percent:.1} %");
    }
    println!(
        "A primary of {threads} threads is slower by {:.1} % (median of {} pairs of turns) while \
         clients do {:.0} operations per second.",
        slowdown.median_percent(),
        slowdown.losses.len(),
        slowdown.operations_per_s
    );
    Ok(())
}

fn measure_failover(
    kinds: &[FaultKind],
    rounds: usize,
    seed: u64,
    json: Option<&Path>,
) -> anyhow::Result<()> {
    check_writable(&[json])?;
    let interrupted = interrupts()?;
    let binary = std::env::current_exe().context("where is this program?")?;
    let directory = temporary_directory()?;
    let options = FailoverOptions {
        binary: &binary,
        directory: directory.path(),
        kinds: if kinds.is_empty() {
            &FaultKind::ALL
        } else {
            kinds
        },
        rounds,
        seed,
        interrupted: &interrupted,
    };
    let measured = failover::measure(&options, &mut |kind, round| {
        println!(
            "{}: longest stat {:.0} ms, create {:.0} ms, write {:.0} ms, read {:.0} ms",
            kind.name(),
            round.stat_ms,
            round.create_ms,
            round.write_ms,
            round.read_ms
        );
    });
    let error = measured.as_ref().map_or_else(Some, |it| it.error.as_ref());
    // Ctrl-C is not a failure, but does not excuse one either.
    let is_as_wanted = matches!(error, None | Some(LiveError::Interrupted))
        && matches!(&measured, Ok(it) if it.report.faults_passed() && it.report.met_goals());
    // Before anything else can fail.
    if !is_as_wanted {
        keep_logs(directory);
    }
    let Measured { report, error } = measured?;
    if !report.faults.is_empty() {
        print!("\n{}", report.table());
    }
    all_of([
        check_passed(error, report.passed(), seed),
        write_result(json, || Ok(serde_json::to_string_pretty(&report)?)),
    ])
}

/// A directory in memory, with room for what four clients write.
fn in_memory(memory: &Path) -> anyhow::Result<tempfile::TempDir> {
    let directory = tempfile::Builder::new()
        .prefix("harvestfs-chaos-")
        .tempdir_in(memory)
        .with_context(|| {
            let memory = memory.display();
            format!("no directory in {memory}, where other servers' disks are to be: see --memory")
        })?;
    let space = rustix::fs::statvfs(directory.path())?;
    let free_mib = space.f_bavail.saturating_mul(space.f_frsize) >> 20;
    ensure!(
        free_mib >= MEMORY_MIB,
        "{} has {free_mib} MiB free, and other servers' disks need {MEMORY_MIB} MiB there: see --memory",
        memory.display()
    );
    Ok(directory)
}

fn temporary_directory() -> anyhow::Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("harvestfs-chaos-")
        .tempdir()
        .context("no temporary directory")
}

/// Keeps what is in a temporary directory, to find out why something failed. One in which nothing is goes.
fn keep_logs(directory: tempfile::TempDir) {
    let entries = std::fs::read_dir(directory.path());
    if entries.is_ok_and(|mut it| it.next().is_some()) {
        eprintln!("harvestfs: logs are kept in {}", directory.keep().display());
    }
}

/// Finds out before a long run whether its results can be written. A file that is there stays as it is until then, and
/// none is left that is not.
fn check_writable(files: &[Option<&Path>]) -> anyhow::Result<()> {
    for file in files.iter().flatten() {
        // A dangling symlink counts as existing, since it is not ours.
        let was_there = file.symlink_metadata().is_ok();
        let opened = File::options().create(true).append(true).open(file);
        opened.with_context(|| format!("cannot write {}", file.display()))?;
        if !was_there {
            std::fs::remove_file(file)
                .with_context(|| format!("cannot remove {}", file.display()))?;
        }
    }
    Ok(())
}

/// Fails when something did not run to its end, or did not pass.
fn check_passed(error: Option<LiveError>, passed: bool, seed: u64) -> anyhow::Result<()> {
    if let Some(error) = error {
        return Err(error.into());
    }
    ensure!(passed, "not everything is as it was promised; seed {seed}");
    Ok(())
}

/// Writes a result, if it was asked for.
fn write_result(
    file: Option<&Path>,
    text: impl FnOnce() -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    match file {
        Some(file) => write_file(file, &text()?),
        None => Ok(()),
    }
}

/// Fails when one of several things did, and says of each why, in their order.
fn all_of(results: impl IntoIterator<Item = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut last = Ok(());
    for error in results.into_iter().filter_map(Result::err) {
        // The caller reports the last error.
        if let Err(before) = std::mem::replace(&mut last, Err(error)) {
            output::complain(&before);
        }
    }
    last
}

fn run_scenario(args: &RunArgs) -> anyhow::Result<()> {
    let scenario = Scenario::load(&args.scenario)?;
    let plan = Plan::new(&scenario, args.seed.unwrap_or(scenario.seed));
    println!("{}, seed {}", scenario.name, plan.seed);
    print!("{}", plan.describe(&scenario));
    let metrics = Arc::new(Metrics::default());
    if let Some(address) = args.metrics {
        tell_metrics(address, Arc::clone(&metrics))?;
    }
    let interrupted = interrupts()?;
    let binary = std::env::current_exe().context("where is this program?")?;
    let mut temporary = None;
    let directory = match &args.keep {
        Some(directory) => {
            std::fs::create_dir(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
            std::path::absolute(directory)?
        }
        None => {
            let made = temporary_directory()?;
            let path = made.path().to_owned();
            temporary = Some(made);
            path
        }
    };
    let results = [&args.json, &args.html, &args.replay].map(|file| file.as_deref());
    if let Err(error) = check_writable(&results) {
        // It was created just now, and would be in the way of the next attempt.
        let _ = std::fs::remove_dir(&directory);
        return Err(error);
    }
    let bar = progress_bar(&scenario)?;
    let mut progress = |at: &Progress<'_>| {
        bar.set_position(at.done_ms);
        if !at.doing.is_empty() {
            bar.set_message(format!("{}: {}", at.variant, at.doing));
        }
    };
    let options = Options {
        binary: &binary,
        directory: &directory,
        interrupted: AsRef::<AtomicBool>::as_ref(&interrupted),
        metrics: &metrics,
    };
    let ran = live::run(&scenario, &plan, &options, &mut progress);
    bar.finish_and_clear();
    let error = ran.as_ref().map_or_else(Some, |it| it.error.as_ref());
    // Ctrl-C is not a failure, but does not excuse one either.
    let is_as_wanted = matches!(error, None | Some(LiveError::Interrupted))
        && matches!(&ran, Ok(it) if it.report.runs_passed());
    // Before anything else can fail.
    if !is_as_wanted && let Some(directory) = temporary.take() {
        keep_logs(directory);
    }
    let Ran {
        report,
        faults,
        error,
    } = ran?;
    if !report.runs.is_empty() {
        println!("\n{}", report.table());
        print!("{}", report.details());
    }
    let [json, html, replay] = results;
    all_of([
        check_passed(error, report.passed(), report.seed),
        write_result(json, || Ok(report.to_json()?)),
        write_result(html, || Ok(report.to_html())),
        write_result(replay, || {
            let shape = scenario.shape();
            Ok(Replay { shape, faults }.to_lines()?)
        }),
    ])
}

/// Serves metrics until the process ends, on a thread of its own: the harness may move itself to
/// another network, this stays.
fn tell_metrics(address: SocketAddr, metrics: Arc<Metrics>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let endpoint = runtime.block_on(Endpoint::bind(address, Access::Anyone))?;
    println!("{}metrics tells how it goes", endpoint.url());
    let site = MetricsSite(move || metrics.render());
    thread::Builder::new()
        .name("metrics".into())
        .spawn(move || runtime.block_on(endpoint.serve(site)))
        .context("cannot start a thread")?;
    Ok(())
}

/// The bar that shows how far all runs are; hidden without a terminal.
fn progress_bar(scenario: &Scenario) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::new(scenario.duration_ms * scenario.variants.len() as u64);
    let style = "{elapsed_precise} {bar:30} {percent:>3} % {msg}";
    bar.set_style(ProgressStyle::with_template(style)?);
    Ok(bar)
}
