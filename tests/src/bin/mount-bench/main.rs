//! Benchmark of mounted file systems: the same work on every target, side by side.
//!
//! A target is a directory (`--dir`), a FUSE file system in memory (`--fuse`), a MooseFS cluster
//! (`--moosefs`) or a HarvestFS cluster (`--harvestfs`); the clusters are started by this command,
//! nine storage servers and three replicas each, and ended by it. Every run starts every target
//! from scratch, one at a time, so that no target is measured while another one still cleans up.
//!
//! `--fuse` shows the kernel's share of a row: the cost on this machine of a FUSE file system with
//! HarvestFS's mount options that does nothing but answer.
//!
//! ```text
//! cargo run --release -p harvestfs-tests --bin mount-bench -- --dir /var/tmp=ext4 --fuse --moosefs --harvestfs
//! ```
//!
//! The result is a table in Markdown (medians, smallest and largest value, ratio to MooseFS) and,
//! with `--json`, every single sample. Rows that start with cold caches need root.

#![forbid(unsafe_code)]

mod cpu;
mod fuse_alone;
mod harvestfs;
mod interrupt;
mod moosefs;
mod report;
mod rows;
mod source_tree;
mod suite;
mod target;
mod work;

use std::env;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Parser;

use crate::report::{Report, Sample};
use crate::rows::Row;
use crate::source_tree::Tarball;
use crate::suite::Plan;
use crate::target::Target;

/// Measure the same file system work on several mounts.
#[derive(Parser, Debug)]
#[command(name = "mount-bench", version)]
struct Options {
    /// Measure in this directory, under this name; may be given more than once
    #[arg(long = "dir", value_name = "DIR[=LABEL]")]
    dirs: Vec<String>,

    /// Command that empties the caches of the --dir target LABEL, run whenever a row needs them cold
    #[arg(long = "remount", value_name = "LABEL=CMD")]
    remounts: Vec<String>,

    /// Measure a FUSE file system with HarvestFS's mount options that answers from memory at once; in
    /// rows with cold caches only the kernel's caches are cold
    #[arg(long)]
    fuse: bool,

    /// Be the server of --fuse on this directory, until it is unmounted
    #[arg(long = fuse_alone::SERVE_OPTION, value_name = "DIR", hide = true)]
    serve_fuse: Option<PathBuf>,

    /// Start a MooseFS cluster (one master, nine chunk servers, goal 3) and measure its mount
    #[arg(long)]
    moosefs: bool,

    /// Start a HarvestFS cluster (nine datanodes, replication 3) and measure its mount
    #[arg(long)]
    harvestfs: bool,

    /// How many namenodes the HarvestFS cluster has: each of these numbers is measured
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    namenodes: Vec<u32>,

    /// The harvestfs program for --harvestfs [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    harvestfs_binary: Option<PathBuf>,

    /// Where the clusters keep their data; use the disk that a --dir target is on
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    scratch: PathBuf,

    /// Measure only these rows; may be given more than once (see --list)
    #[arg(long = "only", value_name = "ROW", value_delimiter = ',')]
    only: Vec<Row>,

    /// List the rows and end
    #[arg(long)]
    list: bool,

    /// How often everything is repeated
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,

    /// Size in MiB of the file that is written and read
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..))]
    size_mib: u64,

    /// Number of files in every row of small files
    #[arg(long, value_name = "N", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(8..))]
    files: u64,

    /// Number of 4 KiB reads per thread in the rows of random reads
    #[arg(long, value_name = "N", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..))]
    random_reads: u64,

    /// Unpack a copy of this source tree instead of the synthetic one
    #[arg(long, value_name = "DIR")]
    tree: Option<PathBuf>,

    /// Write every sample to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.list {
        for row in Row::ALL {
            println!("{:14} {}", row.id(), row.title());
        }
        return Ok(());
    }
    if let Some(directory) = &options.serve_fuse {
        return fuse_alone::serve(directory);
    }
    interrupt::install()?;

    let rows = if options.only.is_empty() {
        Row::ALL.to_vec()
    } else {
        options.only.clone()
    };
    let mut targets = targets(&options)?;
    let labels: Vec<String> = targets.iter().map(|t| t.label().to_owned()).collect();
    let tarball = rows
        .iter()
        .any(Row::needs_tarball)
        .then(|| Tarball::build(options.tree.as_deref(), &options.scratch))
        .transpose()?;
    let plan = Plan {
        rows,
        size_bytes: options.size_mib << 20,
        files: options.files,
        random_reads_per_thread: options.random_reads,
        tarball,
    };

    let mut samples: Vec<Sample> = Vec::new();
    for run in 1..=options.runs {
        for target in &mut targets {
            eprintln!("run {run} of {}: {}", options.runs, target.label());
            let label = target.label().to_owned();
            samples.extend(
                suite::run(&plan, target.as_mut(), run)
                    .with_context(|| format!("target {label}, run {run}"))?,
            );
        }
    }

    let started = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let report = Report::new(started.as_secs(), &plan, labels, samples);
    print!("{}", report.to_markdown());
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The targets that the options name, in the order directories, FUSE, MooseFS, HarvestFS.
fn targets(options: &Options) -> Result<Vec<Box<dyn Target>>> {
    let mut remounts: Vec<(&str, &str)> = Vec::new();
    for text in &options.remounts {
        let Some(pair) = text.split_once('=') else {
            bail!("--remount {text}: expected LABEL=CMD");
        };
        remounts.push(pair);
    }

    let mut targets: Vec<Box<dyn Target>> = Vec::new();
    for text in &options.dirs {
        let (dir, label) = text.split_once('=').unwrap_or((text, text));
        let remount = remounts
            .iter()
            .position(|(name, _)| *name == label)
            .map(|index| remounts.swap_remove(index).1.to_owned());
        targets.push(Box::new(target::Directory::new(dir, label, remount)?));
    }
    if let Some((label, _)) = remounts.first() {
        bail!("--remount {label}=...: no --dir has this label");
    }
    if options.fuse {
        targets.push(Box::new(fuse_alone::FuseAlone::new(&options.scratch)));
    }
    if options.moosefs {
        targets.push(Box::new(moosefs::Moosefs::new(&options.scratch)?));
    }
    if options.harvestfs {
        let binary = match &options.harvestfs_binary {
            Some(binary) => binary.clone(),
            // Not the binary in the working directory, which may be another build.
            None => env::current_exe()?.with_file_name("harvestfs"),
        };
        for &namenodes in &options.namenodes {
            let target = harvestfs::Harvestfs::new(&binary, namenodes, &options.scratch)?;
            targets.push(Box::new(target));
        }
    }
    if targets.is_empty() {
        bail!("nothing to measure: give --dir, --fuse, --moosefs or --harvestfs (see --help)");
    }
    Ok(targets)
}
