//! `harvestfs simulate cluster`.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_chaos::simulate::cluster::replay::{Replay, Shape};
use harvestfs_chaos::simulate::cluster::{FaultKind, Options, Report, run as simulate, shrink};
use parking_lot::Mutex;

use super::{bad_argument, choose, interrupts, write_file};

/// Where the files of a simulation are by default, if it is there: they are synced all the time.
const IN_MEMORY: &str = "/dev/shm";
/// What is simulated when nothing is said.
const SHAPE: Shape = Shape {
    namenodes: 1,
    datanodes: 6,
    clients: 3,
    mounts: 2,
    length_ms: 60_000,
};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  harvestfs simulate cluster --seeds 100
  harvestfs simulate cluster --seed 101 --seeds 100
  harvestfs simulate cluster --seed 17 --faults crash,partition --trace seed-17.txt")]
pub struct ClusterArgs {
    /// How many simulations, each with the seed after that of the one before.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The seed of the first one.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    seed: u64,
    /// How long clients work and faults begin, in minutes of virtual time; then all faults end, and what was
    /// promised is compared [default: 1].
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<f64>,
    /// Namenodes: 1, or a group of 3 or 5 [default: 1].
    #[arg(long, value_name = "COUNT", value_parser = namenodes)]
    namenodes: Option<u8>,
    /// Datanodes, 1 to 250 [default: 6].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=250))]
    datanodes: Option<u8>,
    /// Clients, 1 to 250 [default: 3].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=250))]
    clients: Option<u8>,
    /// Mounts, 0 to 250, each driven by a model of the kernel [default: 2].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(0..=250))]
    mounts: Option<u8>,
    /// What happens to machines and the network: `all`, `none`, or some of crash, hang, suspend, partition, loss,
    /// delay, duplicate, power-loss, blackout, failed-sync, disk-error, disk-full, rot, reimage, slow-disk, busy, drift,
    /// jump, rollback, double, and, with several namenodes, transfer, outage, split, forget, wipe, leave, separated by commas.
    #[arg(long, default_value = "all", value_name = "LIST")]
    faults: String,
    /// Let happen what `harvestfs chaos run --replay FILE` wrote, to a cluster of the same size if nothing else is
    /// said, instead of faults that the seed decides. The seed still decides what clients do, how strong faults are and when datagrams come.
    #[arg(long, value_name = "FILE", conflicts_with = "faults")]
    replay: Option<PathBuf>,
    /// Leave out these faults, by their numbers in the trace, separated by commas.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    without: Vec<u32>,
    /// Simulations at the same time; the default is one for each processor.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Write what happened to this file: in the only simulation, or in one that broke a promise, which is made smaller first.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Where the files of the simulated machines are while it runs. The default is memory, where there is
    /// /dev/shm.
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

impl ClusterArgs {
    fn options(&self, interrupted: Arc<AtomicBool>) -> anyhow::Result<Options> {
        let all = FaultKind::ALL.map(FaultKind::name);
        let parse = |name: &str| FaultKind::ALL.into_iter().find(|kind| kind.name() == name);
        let faults = match self.faults.trim() {
            "none" => Vec::new(),
            list => choose("faults", list, &all, parse)?,
        };
        let replay = self.replay.as_deref().map(read_replay).transpose()?;
        let shape = replay.as_ref().map_or(SHAPE, |it| it.shape);
        let minutes = self.minutes.unwrap_or(shape.length_ms as f64 / 60e3);
        let length = Duration::try_from_secs_f64(minutes * 60.0)
            .map_err(|error| bad_argument(format!("--minutes {minutes}: {error}")))?;
        let count = |given: Option<u8>, of_shape: u16| match given {
            Some(count) => Ok(count),
            None => u8::try_from(of_shape)
                .map_err(|_| bad_argument(format!("{of_shape} parts of a kind are too many"))),
        };
        let in_memory = Path::new(IN_MEMORY);
        let directory = match &self.directory {
            Some(directory) => directory.clone(),
            None if in_memory.is_dir() => in_memory.to_owned(),
            None => std::env::temp_dir(),
        };
        Ok(Options {
            seed: 0,
            length,
            namenodes: count(self.namenodes, shape.namenodes)?,
            datanodes: count(self.datanodes, shape.datanodes)?,
            clients: count(self.clients, shape.clients)?,
            mounts: count(self.mounts, shape.mounts)?,
            faults,
            replay: replay.map(|it| it.faults),
            without: self.without.iter().copied().collect(),
            until_failure: false,
            until_calm: false,
            directory,
            interrupted,
        })
    }

    fn seed_range(&self) -> anyhow::Result<Range<u64>> {
        let (first, count) = (self.seed, self.seeds);
        let end = first.checked_add(count).ok_or_else(|| {
            bad_argument(format!(
                "--seed {first} --seeds {count}: there are no seeds above {}",
                u64::MAX - 1
            ))
        })?;
        Ok(first..end)
    }

    /// The command that runs a simulation again.
    fn again(&self, options: &Options) -> String {
        let Options {
            seed,
            length,
            namenodes,
            datanodes,
            clients,
            mounts,
            without,
            ..
        } = options;
        let faults = match &self.replay {
            Some(file) => format!("--replay {}", file.display()),
            None => format!("--faults {}", self.faults),
        };
        let minutes = length.as_secs_f64() / 60.0;
        let mut command = format!(
            "harvestfs simulate cluster --seed {seed} --minutes {minutes} --datanodes {datanodes} --clients {clients} \
             --mounts {mounts} {faults}"
        );
        if *namenodes > 1 {
            let _ = write!(command, " --namenodes {namenodes}");
        }
        if !without.is_empty() {
            let numbers: Vec<String> = without.iter().map(u32::to_string).collect();
            let _ = write!(command, " --without {}", numbers.join(","));
        }
        let _ = write!(command, " --trace seed-{seed}.txt");
        command
    }
}

/// Groups of an even number survive no more failures than those with one less.
fn namenodes(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(count @ (1 | 3 | 5)) => Ok(count),
        Ok(2 | 4) => Err(
            "a group of an even number survives no more failures than one of one less: 1, 3 or 5"
                .into(),
        ),
        _ => Err("1, 3 or 5".into()),
    }
}

fn read_replay(file: &Path) -> anyhow::Result<Replay> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()));
    let wrong = |error| bad_argument(format!("{}: {error}", file.display()));
    Replay::parse(&text?).map_err(wrong)
}

/// Runs `harvestfs simulate cluster`.
pub fn run(args: &ClusterArgs) -> anyhow::Result<()> {
    let interrupted = interrupts()?;
    let options = args.options(Arc::clone(&interrupted))?;
    let seeds = args.seed_range()?;
    let jobs = match args.jobs {
        Some(jobs) => usize::from(jobs),
        None => std::thread::available_parallelism()?.get(),
    };
    let next = AtomicU64::new(seeds.start);
    let failed = Mutex::new(Vec::new());
    // A panic of a part ends its simulation, and is reported like a broken promise.
    std::thread::scope(|scope| {
        let work = || -> anyhow::Result<()> {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if !seeds.contains(&seed) || interrupted.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let options = Options {
                    seed,
                    ..options.clone()
                };
                match keeps_promises(args, &options) {
                    Ok(true) => {}
                    Ok(false) => failed.lock().push(seed),
                    // The interruption is reported below.
                    Err(_) if interrupted.load(Ordering::Relaxed) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        };
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let results = workers.into_iter().map(|worker| match worker.join() {
            Ok(result) => result,
            Err(_) => bail!("a simulation panicked; its seed is above"),
        });
        results.collect::<anyhow::Result<()>>()
    })?;
    let mut failed = failed.into_inner();
    failed.sort_unstable();
    if !failed.is_empty() {
        bail!("promises were broken with the seeds {failed:?}");
    }
    if interrupted.load(Ordering::Relaxed) {
        bail!("interrupted before all seeds were simulated");
    }
    Ok(())
}

fn keeps_promises(args: &ClusterArgs, options: &Options) -> anyhow::Result<bool> {
    let seed = options.seed;
    let began = Instant::now();
    // Printed first, since a panic of a part ends the simulation.
    eprintln!("seed {seed}: to run it again: {}", args.again(options));
    let simulated = simulate(options).with_context(|| format!("seed {seed} cannot run"));
    let mut report = simulated?;
    print(seed, &report, began.elapsed());
    let kept = report.failures.is_empty();
    if !kept {
        match shrink(options, &report) {
            Ok((smaller, its_report)) => {
                println!("  a smaller one: {}", args.again(&smaller));
                print(seed, &its_report, began.elapsed());
                report = its_report;
            }
            // Broken promises have been printed above.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(file) = args.trace.as_ref().filter(|_| !kept || args.seeds == 1) {
        write_file(file, &report.trace.join("\n"))?;
    }
    Ok(kept)
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
