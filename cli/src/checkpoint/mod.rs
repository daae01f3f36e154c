//! `harvestfs checkpoint`: suspends jobs with CRIU, stores their images as files, and resumes them
//! on any node.

mod bench;
mod dump;
mod fill;
mod list;
mod locations;
mod preempt;
mod restore;
mod resume;
mod simulate;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use harvestfs_checkpoint::criu::Criu;
use harvestfs_checkpoint::manifest::JobName;
use harvestfs_checkpoint::node::{Node, node_name};
use harvestfs_checkpoint::store::{Job, Store};

use crate::cluster::ClusterArgs;
use crate::config::CheckpointConfig;

/// Checkpoints of a job that are kept by default: the last good one, and one before it.
const KEEP: usize = 2;
/// Where a node keeps its queue and what it measured.
const NODE_DIRECTORY: &str = "/var/lib/harvestfs/checkpoint";

/// Arguments of `harvestfs checkpoint`.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Directory of the checkpoints, on a mount of HarvestFS; it is never made [default: `store` in
    /// `[checkpoint]` of the configuration].
    #[arg(
        long,
        env = "HARVESTFS_CHECKPOINT_STORE",
        global = true,
        value_name = "DIR"
    )]
    store: Option<PathBuf>,
    /// The CRIU to run [default: `criu` in `[checkpoint]` of the configuration, or the one in PATH].
    #[arg(long, env = "HARVESTFS_CRIU", global = true, value_name = "PATH")]
    criu: Option<PathBuf>,
    /// Where this node keeps the queue of its checkpoints and the bandwidths that it measured.
    #[arg(long, global = true, value_name = "DIR", default_value = NODE_DIRECTORY)]
    node_directory: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Suspend a job: store a process and all that it started, and end them.
    Dump(dump::DumpArgs),
    /// Resume a job from its newest checkpoint.
    Restore(restore::RestoreArgs),
    /// Show the checkpoints.
    List(list::ListArgs),
    /// Remove the checkpoints of a job, or one of them.
    Rm(list::RmArgs),
    /// Remove old checkpoints and what was given up half-way, and shorten chains.
    Gc(list::GcArgs),
    /// Free memory for others: kill or checkpoint jobs, whichever costs less.
    Preempt(preempt::PreemptArgs),
    /// Resume a job here, or say on which node that costs less.
    Resume(resume::ResumeArgs),
    /// Measure suspending and resuming (figure 2 of the paper).
    Bench(bench::BenchArgs),
    /// Simulate a cluster that preempts jobs (figures 3 to 6 and table 3 of the paper).
    Simulate(simulate::SimulateArgs),
    /// A process with memory to checkpoint, for measurements and tests.
    #[command(hide = true)]
    Fill(fill::FillArgs),
}

/// Runs `harvestfs checkpoint`.
pub fn run(args: &CheckpointArgs) -> anyhow::Result<()> {
    // Images contain the memory of processes, and are trusted only if no other user can write them.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    match &args.command {
        Command::Dump(command) => dump::run(args, command),
        Command::Restore(command) => restore::run(args, command),
        Command::List(command) => list::list(args, command),
        Command::Rm(command) => list::remove(args, command),
        Command::Gc(command) => list::collect(args, command),
        Command::Preempt(command) => preempt::run(args, command),
        Command::Resume(command) => resume::run(args, command),
        Command::Bench(command) => bench::run(args, command),
        Command::Simulate(command) => simulate::run(command),
        Command::Fill(command) => fill::run(command),
    }
}

impl CheckpointArgs {
    /// Whether it does more than show something.
    pub fn changes_jobs(&self) -> bool {
        !matches!(self.command, Command::List(_) | Command::Simulate(_))
    }

    /// The configuration, where there is one.
    fn config(&self) -> anyhow::Result<CheckpointConfig> {
        Ok(self
            .cluster
            .client_config()?
            .map(|config| config.checkpoint)
            .unwrap_or_default())
    }

    /// Where the checkpoints are.
    fn store(&self) -> anyhow::Result<Store> {
        let directory = match &self.store {
            Some(directory) => directory.clone(),
            None => self.config()?.store.context(
                "say where the checkpoints are: --store DIR, a directory on a mount of HarvestFS, \
                 or `store` in [checkpoint] of the configuration",
            )?,
        };
        Ok(Store::open(std::path::absolute(directory)?)?)
    }

    fn job(&self, name: &JobName) -> anyhow::Result<Job> {
        Ok(self.store()?.job(name.clone()))
    }

    fn keep(&self) -> anyhow::Result<usize> {
        Ok(self.config()?.keep.unwrap_or(KEEP))
    }

    /// What a command that runs CRIU needs.
    fn runner(&self) -> anyhow::Result<Runner> {
        if !rustix::process::geteuid().is_root() {
            anyhow::bail!("checkpoints need root, as CRIU does: use sudo");
        }
        let program = match &self.criu {
            Some(program) => program.clone(),
            None => self.config()?.criu.unwrap_or_else(|| "criu".into()),
        };
        Ok(Runner {
            criu: Criu::find(&program)?,
            node: Node::open(&self.node_directory)?,
            node_name: node_name(),
        })
    }
}

/// CRIU, and the node that it runs on.
#[derive(Debug)]
struct Runner {
    criu: Criu,
    node: Node,
    node_name: String,
}

impl Runner {
    /// A directory for CRIU's log and socket: local, and short enough for a socket's address.
    fn work_directory() -> anyhow::Result<tempfile::TempDir> {
        tempfile::Builder::new()
            .prefix("harvestfs-checkpoint-")
            .tempdir_in(Path::new("/tmp"))
            .context("cannot make a work directory in /tmp")
    }
}
