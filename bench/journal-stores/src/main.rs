//! Compares candidate stores for the namenode's journal, and prints one table.
//!
//! ```text
//! cargo run --release -- [--dir DIR] [--runs 3] [--seconds 3] [--unit 200000] [--rounds 200]
//!                        [--cuts 50] [--only STORE]
//! ```
//!
//! A value of 0 skips the corresponding part. `--unit` is a fifth of the records inserted for the measurement of
//! space; 1000000 makes it 5M inserts, 5M overwrites, 2.5M deletes (and sled 0.34.7 then takes 20 GB of memory).

#![forbid(unsafe_code)]

mod child;
mod kill;
mod power;
mod space;
mod speed;
mod store;
mod strace;
mod workload;

use std::path::{Path, PathBuf};
use std::time::Duration;

use store::{Kind, Result};

struct Options {
    dir: PathBuf,
    runs: u64,
    seconds: u64,
    unit: u64,
    rounds: u64,
    cuts: u64,
    only: Option<Kind>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self> {
        let mut options = Self {
            dir: std::env::temp_dir(),
            runs: 3,
            seconds: 3,
            unit: 200_000,
            rounds: 200,
            cuts: 50,
            only: None,
        };
        for pair in args.chunks(2) {
            let [flag, value] = pair else {
                return Err(format!("{} needs a value", pair[0]).into());
            };
            match flag.as_str() {
                "--dir" => options.dir = value.into(),
                "--runs" => options.runs = value.parse()?,
                "--seconds" => options.seconds = value.parse()?,
                "--unit" => options.unit = value.parse()?,
                "--rounds" => options.rounds = value.parse()?,
                "--cuts" => options.cuts = value.parse()?,
                "--only" => {
                    let kind = Kind::from_key(value).ok_or("--only: no such store")?;
                    options.only = Some(kind);
                }
                _ => return Err(format!("{flag} is not an option").into()),
            }
        }
        Ok(options)
    }

    fn kinds(&self) -> impl Iterator<Item = Kind> {
        let only = self.only;
        let chosen = move |kind: &Kind| only.is_none_or(|only| only == *kind);
        Kind::ALL.into_iter().filter(chosen)
    }
}

/// The cells of one store.
struct Row {
    kind: Kind,
    alone: Vec<f64>,
    grouped: Vec<f64>,
    by_100: Vec<f64>,
    cells: Vec<String>,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(("child", rest)) = args
        .split_first()
        .map(|(first, rest)| (first.as_str(), rest))
    {
        return child::run(rest);
    }
    let options = Options::parse(&args)?;
    let mut rows: Vec<Row> = options.kinds().map(Row::new).collect();
    // The stores take turns, so that other load on the machine affects all of them.
    for run in 0..options.runs {
        for row in &mut rows {
            eprintln!("speed, run {}: {}", run + 1, row.kind.name());
            row.measure_speed(&options)?;
        }
    }
    for row in &mut rows {
        eprintln!("space, kill -9, power loss: {}", row.kind.name());
        row.measure_the_rest(&options)?;
    }
    print_table(&rows);
    Ok(())
}

/// Runs `measure` with a fresh directory that is removed afterwards.
fn in_fresh_dir<T>(options: &Options, measure: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let dir = tempfile::tempdir_in(&options.dir)?;
    measure(&dir.path().join("store"))
}

impl Row {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            alone: Vec::new(),
            grouped: Vec::new(),
            by_100: Vec::new(),
            cells: Vec::new(),
        }
    }

    fn measure_speed(&mut self, options: &Options) -> Result<()> {
        let (kind, time) = (self.kind, Duration::from_secs(options.seconds));
        let alone = in_fresh_dir(options, |dir| speed::alone(kind, dir, 1, time))?;
        let grouped = in_fresh_dir(options, |dir| speed::grouped(kind, dir, time))?;
        let by_100 = in_fresh_dir(options, |dir| speed::alone(kind, dir, 100, time))?;
        eprintln!("  {alone:.0} alone, {grouped:.0} grouped, {by_100:.0} by 100, per second");
        self.alone.push(alone);
        self.grouped.push(grouped);
        self.by_100.push(by_100);
        Ok(())
    }

    fn measure_the_rest(&mut self, options: &Options) -> Result<()> {
        let left_out = || "-".to_owned();
        let (mut space, mut memory, mut recovery) = (left_out(), left_out(), left_out());
        if options.unit > 0 {
            let measured =
                in_fresh_dir(options, |dir| space::measure(self.kind, dir, options.unit))?;
            space = format!(
                "{:.1}x ({:.1}x)",
                measured.factor, measured.compacted_factor
            );
            memory = format!("{} MiB", measured.memory_mib_max);
            recovery = format!("{} / {} ms", measured.open_ms, measured.open_and_read_ms);
        }
        eprintln!("  {space}, {memory}, {recovery}");
        let kills = match options.rounds {
            0 => left_out(),
            _ => kills(self.kind, options)?,
        };
        eprintln!("  {kills}");
        let (syncs, power) = match options.cuts {
            0 => (left_out(), left_out()),
            _ => power_loss(self.kind, options)?,
        };
        eprintln!("  {syncs}: {power}");
        self.cells = vec![syncs, space, memory, recovery, kills, power];
        Ok(())
    }
}

/// The cell for kill -9.
fn kills(kind: Kind, options: &Options) -> Result<String> {
    let kills = in_fresh_dir(options, |dir| kill::rounds(kind, dir, options.rounds))?;
    let outcome = match &kills.failure {
        None => "none lost",
        Some(failure) => {
            eprintln!("{}: after kill -9: {failure}", kind.name());
            "LOST"
        }
    };
    Ok(format!(
        "{} rounds, {} records: {outcome}",
        kills.rounds, kills.acknowledged
    ))
}

/// The cells for sync calls and for images of a power loss.
fn power_loss(kind: Kind, options: &Options) -> Result<(String, String)> {
    const COMMITS: u64 = 200;
    if !strace::is_installed() {
        let missing = "needs strace: apt install strace".to_owned();
        return Ok((missing.clone(), missing));
    }
    let trace_dir = tempfile::tempdir_in(&options.dir)?;
    let recording = in_fresh_dir(options, |dir| {
        strace::record(kind, dir, trace_dir.path(), COMMITS)
    })?;
    let made = recording.sync_calls.iter().filter(|(_, count)| *count > 0);
    let syncs: Vec<String> = made
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    let outcome = in_fresh_dir(options, |dir| {
        power::check(kind, &recording, dir, options.cuts)
    })?;
    if let Some(failure) = outcome.first_failure {
        eprintln!("{}: after a power loss: {failure}", kind.name());
    }
    let images = format!("{} of {} images fail", outcome.failed, outcome.images);
    Ok((syncs.join(", "), images))
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn thousands(per_second: f64) -> String {
    format!("{:.1}k/s", per_second / 1000.0)
}

fn print_table(rows: &[Row]) {
    println!(
        "| store | alone | 16 writers, grouped | 100 per commit | syncs of 200 commits | space \
         (compacted) | memory | open / and read all | kill -9 | power loss |"
    );
    println!("|{}", "---|".repeat(10));
    for row in rows {
        println!(
            "| {} | {} | {} | {} | {} |",
            row.kind.name(),
            thousands(median(&row.alone)),
            thousands(median(&row.grouped)),
            thousands(median(&row.by_100)),
            row.cells.join(" | ")
        );
    }
}
