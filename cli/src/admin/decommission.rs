//! `harvestfs admin decommission`: takes servers or racks out of use without losing redundancy.
//!
//! This is the hold of `admin safe-to-reimage`, in terms of machines and racks: the servers' replicas are
//! copied elsewhere within the limits of repair, and the servers get no new ones.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, Subcommand};
use harvestfs_protocol::admin::{AdminReply, AdminRequest, NodeStatus};
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::placement::PlacementRequest;

use super::link::{self, AdminLink};
use super::{DEADLINE, placement};

/// `harvestfs admin decommission`
#[derive(Debug, Subcommand)]
pub enum DecommissionCommand {
    /// Copy elsewhere what servers have, and give them nothing new; exit status 1 while blocks
    /// would lack replicas without them.
    #[command(after_help = "Examples:\n  \
        harvestfs admin decommission start dn3 dn4\n  \
        harvestfs admin decommission start --rack r7 --wait --timeout 2h")]
    Start {
        #[command(flatten)]
        which: Which,
        /// Wait until every block has all its replicas elsewhere.
        #[arg(long)]
        wait: bool,
        /// With --wait: give up waiting after this time, such as `30m` (the copying goes on).
        #[arg(long, value_parser = placement::duration, requires = "wait")]
        timeout: Option<Duration>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show how much is still to be copied; exit status 1 while blocks would lack replicas.
    #[command(after_help = "Example:\n  \
        harvestfs admin decommission status --rack r7")]
    Status {
        #[command(flatten)]
        which: Which,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Use the servers again.
    #[command(after_help = "Example:\n  \
        harvestfs admin decommission stop dn3 dn4")]
    Stop {
        #[command(flatten)]
        which: Which,
    },
}

/// Which servers.
#[derive(Debug, Args)]
pub struct Which {
    /// Names of servers.
    #[arg(required_unless_present = "racks")]
    servers: Vec<String>,
    /// All servers of a rack; may be repeated.
    #[arg(long = "rack", value_name = "RACK")]
    racks: Vec<String>,
}

/// Runs one of the commands.
///
/// # Errors
/// When the cluster cannot be reached or refuses, or blocks would lack replicas.
pub async fn execute(link: &AdminLink, command: &DecommissionCommand) -> anyhow::Result<()> {
    let (which, hold, timeout, json) = match command {
        DecommissionCommand::Start {
            which,
            wait,
            timeout,
            json,
        } => {
            let once = (!wait).then_some(Duration::ZERO);
            (which, true, timeout.or(once), *json)
        }
        DecommissionCommand::Status { which, json } => (which, false, None, *json),
        DecommissionCommand::Stop { which } => {
            let servers = servers(link, which).await?;
            placement::ask(link, PlacementRequest::Release { servers }).await?;
            return Ok(());
        }
    };
    let servers = servers(link, which).await?;
    let impact = placement::wait_until_safe(link, &servers, hold, timeout).await?;
    if json {
        let shown = serde_json::json!({ "servers": servers, "impact": impact });
        println!("{}", serde_json::to_string_pretty(&shown)?);
    } else {
        println!("{}", servers.join(" "));
        placement::print_impact(&impact);
    }
    if impact.waiting > 0 {
        let need = if impact.waiting == 1 { "needs" } else { "need" };
        bail!(
            "{} still {need} these servers; `harvestfs admin placement --block ID` shows where a block is",
            count(impact.waiting, "block")
        );
    }
    if !json {
        println!("Nothing needs these servers any more: they can be stopped.");
    }
    Ok(())
}

/// Names of these servers.
///
/// # Errors
/// When the cluster cannot be reached, or a rack has no server.
pub(super) async fn servers(link: &AdminLink, which: &Which) -> anyhow::Result<Vec<String>> {
    let AdminReply::Nodes(nodes) = link.ask(AdminRequest::Nodes, DEADLINE).await? else {
        return Err(link::unexpected());
    };
    select(&nodes, which)
}

fn select(nodes: &[NodeStatus], which: &Which) -> anyhow::Result<Vec<String>> {
    let mut selected: BTreeSet<&str> = which.servers.iter().map(String::as_str).collect();
    for rack in &which.racks {
        let before = selected.len();
        let there = nodes.iter().filter(|node| node.server.rack == *rack);
        selected.extend(there.map(|node| node.server.name.as_str()));
        if selected.len() == before {
            bail!("no further server is in rack {rack}; `harvestfs admin nodes` shows the racks");
        }
    }
    Ok(selected.into_iter().map(str::to_owned).collect())
}
