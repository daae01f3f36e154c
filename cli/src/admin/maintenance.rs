//! `harvestfs admin maintenance`: lets servers or racks be offline for a while without repairing their
//! blocks.

use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::placement::{PlacementReply, PlacementRequest};

use super::decommission::{self, Which};
use super::link::{self, AdminLink};
use super::placement;

/// `harvestfs admin maintenance`
#[derive(Debug, Subcommand)]
pub enum MaintenanceCommand {
    /// Let servers be away: their blocks are not repaired, and they get nothing new. Exit status 1, and
    /// nothing done, when blocks could not be read meanwhile.
    #[command(after_help = "Examples:\n  \
        harvestfs admin maintenance start dn3 --for 30m\n  \
        harvestfs admin maintenance start --rack r7 --for 2h")]
    Start {
        #[command(flatten)]
        which: Which,
        /// For how long, such as `30m`, `2h` or `1d`; what is not back then is repaired.
        #[arg(long = "for", value_name = "TIME", value_parser = placement::duration, default_value = "1h")]
        duration: Duration,
        /// Also when blocks could not be read meanwhile.
        #[arg(long)]
        force: bool,
    },
    /// End it: servers that are still away are repaired, the others are used again.
    #[command(after_help = "Example:\n  \
        harvestfs admin maintenance stop --rack r7")]
    Stop {
        #[command(flatten)]
        which: Which,
    },
}

/// Runs one of the commands.
///
/// # Errors
/// When the cluster cannot be reached or refuses, or blocks could not be read.
pub async fn execute(link: &AdminLink, command: &MaintenanceCommand) -> anyhow::Result<()> {
    let (which, duration, force) = match command {
        MaintenanceCommand::Start {
            which,
            duration,
            force,
        } => (which, duration, *force),
        MaintenanceCommand::Stop { which } => {
            let servers = decommission::servers(link, which).await?;
            placement::ask(link, PlacementRequest::EndMaintenance { servers }).await?;
            return Ok(());
        }
    };
    let servers = decommission::servers(link, which).await?;
    println!("{}", servers.join(" "));
    let request = PlacementRequest::StartMaintenance {
        servers,
        for_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        force,
    };
    let PlacementReply::Maintenance { started, impact } = placement::ask(link, request).await?
    else {
        return Err(link::unexpected());
    };
    for block in &impact.lost_blocks {
        println!("block {block} cannot be read meanwhile");
    }
    println!(
        "{} cannot be read meanwhile, {} with one replica to read",
        count(impact.lost, "block"),
        count(impact.exposed, "block")
    );
    if !started {
        bail!(
            "not begun: copy the blocks elsewhere first (`harvestfs admin decommission start`), or \
             say --force"
        );
    }
    println!(
        "They may be away for {}.",
        humantime::format_duration(*duration)
    );
    Ok(())
}
