//! `harvestfs cycles`: what the spare cycles of a cluster are good for.

mod admit;
mod classes;
mod size;

use clap::{Args, Subcommand};

/// Arguments of `harvestfs cycles`.
#[derive(Debug, Args)]
pub struct CyclesArgs {
    #[command(subcommand)]
    command: CyclesCommand,
}

#[derive(Debug, Subcommand)]
enum CyclesCommand {
    /// Which jobs fit with the backups that they need to survive failures.
    Admit(admit::AdmitArgs),
    /// Which servers are used alike, and how much their owners leave to jobs.
    Classes(classes::ClassesArgs),
    /// How many volunteers a job should use beside dedicated nodes, simulated over series of their owners' use.
    Size(size::SizeArgs),
}

/// Runs `harvestfs cycles`.
pub fn run(args: &CyclesArgs) -> anyhow::Result<()> {
    match &args.command {
        CyclesCommand::Admit(args) => admit::run(args),
        CyclesCommand::Classes(args) => classes::run(args),
        CyclesCommand::Size(args) => size::run(args),
    }
}
