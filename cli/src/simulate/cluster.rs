//! `harvestfs simulate cluster`.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_chaos::simulate::cluster::{FaultKind, Options, Report, run as simulate};

use super::{bad_argument, choose, interrupts, write_file};

/// Where the files of a simulation are by default, if it is there: they are synced all the time.
const IN_MEMORY: &str = "/dev/shm";

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  harvestfs simulate cluster --seeds 100
  harvestfs simulate cluster --seed 17 --faults crash,partition --trace seed-17.txt")]
pub struct ClusterArgs {
    /// How many simulations, with the seeds 1, 2, 3 and so on.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    seeds: u64,
    /// Run only this seed.
    #[arg(long, conflicts_with = "seeds", value_name = "SEED")]
    seed: Option<u64>,
    /// How long clients work and faults begin, in minutes of virtual time; then all faults end, and what was
    /// promised is compared.
    #[arg(long, default_value_t = 1.0, value_name = "MINUTES")]
    minutes: f64,
    /// Datanodes, 1 to 250.
    #[arg(long, default_value_t = 6, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=250))]
    datanodes: u8,
    /// Clients, 1 to 250.
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=250))]
    clients: u8,
    /// Mounts, 0 to 250, each driven by a model of the kernel.
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(0..=250))]
    mounts: u8,
    /// What happens to machines and the network: `all`, `none`, or some of crash, hang, suspend, partition, loss,
    /// delay, duplicate, power-loss, blackout, failed-sync, disk-error, disk-full, rot, reimage, separated by commas.
    #[arg(long, default_value = "all", value_name = "LIST")]
    faults: String,
    /// Write what happened, the last simulation's, to this file.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Where the files of the simulated machines are while it runs. The default is memory, where there is
    /// /dev/shm.
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

impl ClusterArgs {
    fn options(&self) -> anyhow::Result<Options> {
        let all = FaultKind::ALL.map(FaultKind::name);
        let parse = |name: &str| FaultKind::ALL.into_iter().find(|kind| kind.name() == name);
        let faults = match self.faults.trim() {
            "none" => Vec::new(),
            list => choose("faults", list, &all, parse)?,
        };
        let length = Duration::try_from_secs_f64(self.minutes * 60.0)
            .map_err(|error| bad_argument(format!("--minutes {}: {error}", self.minutes)))?;
        let in_memory = Path::new(IN_MEMORY);
        let directory = match &self.directory {
            Some(directory) => directory.clone(),
            None if in_memory.is_dir() => in_memory.to_owned(),
            None => std::env::temp_dir(),
        };
        Ok(Options {
            seed: 0,
            length,
            datanodes: self.datanodes,
            clients: self.clients,
            mounts: self.mounts,
            faults,
            directory,
        })
    }

    /// The command that runs a seed again.
    fn again(&self, seed: u64) -> String {
        let Self {
            minutes,
            datanodes,
            clients,
            mounts,
            faults,
            ..
        } = self;
        format!(
            "harvestfs simulate cluster --seed {seed} --minutes {minutes} --datanodes {datanodes} \
             --clients {clients} --mounts {mounts} --faults {faults} --trace seed-{seed}.txt"
        )
    }
}

/// Runs `harvestfs simulate cluster`.
pub fn run(args: &ClusterArgs) -> anyhow::Result<()> {
    let options = args.options()?;
    let interrupted = interrupts()?;
    let seeds = match args.seed {
        Some(seed) => seed..=seed,
        None => 1..=args.seeds,
    };
    let mut failed = Vec::new();
    for seed in seeds {
        if interrupted.load(Ordering::Relaxed) {
            bail!("interrupted before seed {seed}");
        }
        let began = Instant::now();
        // First: a part that panics ends the process.
        eprintln!("seed {seed}: to run it again: {}", args.again(seed));
        let options = Options {
            seed,
            ..options.clone()
        };
        let report = simulate(&options).with_context(|| format!("seed {seed} cannot run"))?;
        print(seed, &report, began.elapsed());
        if let Some(file) = &args.trace {
            write_file(file, &report.trace.join("\n"))?;
        }
        if !report.failures.is_empty() {
            failed.push(seed);
        }
    }
    if !failed.is_empty() {
        bail!("promises were broken with the seeds {failed:?}");
    }
    Ok(())
}

fn print(seed: u64, report: &Report, wall: Duration) {
    let Report {
        operations,
        errors,
        datagrams,
        digest,
        took,
        failures,
        ..
    } = report;
    println!(
        "seed {seed}: {operations} operations, {errors} of them failed, {datagrams} datagrams, digest {digest:016x}, \
         {:.1} s of virtual time in {:.1} s",
        took.as_secs_f64(),
        wall.as_secs_f64()
    );
    for failure in failures {
        println!("  BROKEN: {failure}");
    }
}
