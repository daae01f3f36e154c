//! `harvestfs cycles`: harvests the spare cycles of a cluster.

mod admit;
mod classes;
mod follow;
mod kubernetes;
mod run;
mod size;
mod stored;
mod yarn;

pub use self::run::Ended;

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
    /// Have the nodes of a Kubernetes cluster offer what their owners leave, until Ctrl-C.
    Kubernetes(kubernetes::KubernetesArgs),
    /// Run a job's command with the class that suits it, and remember how long it takes.
    Run(run::RunArgs),
    /// How many volunteers a job should use beside dedicated nodes, simulated over series of their owners' use.
    Size(size::SizeArgs),
    /// Have the NodeManagers of a Hadoop cluster offer what their owners leave, until Ctrl-C.
    Yarn(yarn::YarnArgs),
}

impl CyclesArgs {
    /// Whether it does something that must not end half-way when what it prints has no reader.
    pub fn goes_on_without_reader(&self) -> bool {
        match self.command {
            CyclesCommand::Kubernetes(_) | CyclesCommand::Run(_) | CyclesCommand::Yarn(_) => true,
            CyclesCommand::Admit(_) | CyclesCommand::Classes(_) | CyclesCommand::Size(_) => false,
        }
    }
}

/// Runs `harvestfs cycles`.
pub fn run(args: &CyclesArgs) -> anyhow::Result<()> {
    match &args.command {
        CyclesCommand::Admit(args) => admit::run(args),
        CyclesCommand::Classes(args) => classes::run(args),
        CyclesCommand::Kubernetes(args) => kubernetes::run(args),
        CyclesCommand::Run(args) => run::run(args),
        CyclesCommand::Size(args) => size::run(args),
        CyclesCommand::Yarn(args) => yarn::run(args),
    }
}
