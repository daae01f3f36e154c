//! `harvestfs admin`: commands for the operator.

mod backup;
mod balance;
mod decommission;
mod doctor;
pub mod history;
mod interrupt;
pub mod link;
mod maintenance;
mod namenodes;
mod no_leader;
mod placement;
mod quota;
mod recover_alone;
mod recovery;
mod upgrade;
mod wave;

use std::cmp::Ordering;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use harvestfs_protocol::admin::{AdminReply, AdminRequest, ClusterStatus, FsckReport, NodeStatus};
use harvestfs_protocol::outlook::count;

use self::interrupt::dropped_by_signal;
use self::link::AdminLink;
use crate::cluster::ClusterArgs;
use crate::fs::names;
use crate::units;

/// Most time for a question about the cluster.
const DEADLINE: Duration = Duration::from_secs(30);
/// Most time for a check of everything.
const FSCK_DEADLINE: Duration = Duration::from_secs(600);

/// What a namenode says of a replica that nothing uses. The test `rails` sees to it that it does.
const UNUSED: &str = "which no file uses";

/// `harvestfs admin`
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  harvestfs admin doctor\n  harvestfs admin nodes\n  harvestfs admin decommission start --rack r7 --wait\n  harvestfs admin fsck --json"
)]
pub struct AdminArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(subcommand)]
    command: AdminCommand,
}

#[derive(Debug, Subcommand)]
enum AdminCommand {
    /// Check everything that an operator can put right: clocks, versions, certificates, configuration,
    /// disks, quotas, mounts. Says what to do; exit status 1 when something is wrong.
    #[command(after_help = "Example:\n  \
        harvestfs admin doctor")]
    Doctor {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write what the namenode has to a file: one moment of it, while it serves.
    Backup(backup::BackupArgs),
    /// Make a namenode's directory from such a file, when all namenodes are lost. It runs on the machine of the
    /// namenode.
    Restore(backup::RestoreArgs),
    /// Show, add and remove namenodes, and hand leadership over.
    #[command(subcommand)]
    Namenode(GroupCommand),
    #[command(flatten)]
    OfNamenode(NamenodeCommand),
}

/// The namenodes that agree.
#[derive(Debug, Subcommand)]
enum GroupCommand {
    /// When most namenodes are lost for good: have one that is left go on alone. It runs on that one's
    /// machine.
    Recover(recover_alone::RecoverAloneArgs),
    #[command(flatten)]
    Running(namenodes::GroupCommand),
}

/// What needs the namenode.
#[derive(Debug, Subcommand)]
enum NamenodeCommand {
    /// Show the cluster at a glance.
    #[command(after_help = "Example:\n  \
        harvestfs admin status")]
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the datanodes.
    #[command(after_help = "Example:\n  \
        harvestfs admin nodes")]
    Nodes {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check the namespace and every block; exit status 1 when something is wrong.
    #[command(after_help = "Examples:\n  \
        harvestfs admin fsck\n  \
        harvestfs admin fsck --recover /root/read-back")]
    Fsck {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Instead, read the blocks in quarantine back into this directory, each into a file.
        #[arg(long, value_name = "DIR", conflicts_with = "json")]
        recover: Option<PathBuf>,
    },
    /// End recovery: let the namenode go on without the changes that it lacks, but datanodes know of.
    Recover(recovery::RecoverArgs),
    /// List the blocks that the namenode never allocated and that datanodes keep for a while.
    #[command(after_help = "Example:\n  \
        harvestfs admin quarantine")]
    Quarantine {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Have the namenode write a snapshot of its journal now.
    #[command(after_help = "Example:\n  \
        harvestfs admin snapshot")]
    Snapshot,
    /// What is known of the primary tenants: CPU use and reimages.
    #[command(subcommand)]
    History(history::HistoryCommand),
    /// Show how evenly servers are filled, what moves for that and what is in the way; or change how
    /// evenly they are to be.
    Balance(balance::BalanceArgs),
    /// Take servers or racks out of use while their data is kept whole, or end that.
    #[command(subcommand)]
    Decommission(decommission::DecommissionCommand),
    /// Let servers or racks be away for a while without their blocks being repaired, or end that.
    #[command(subcommand)]
    Maintenance(maintenance::MaintenanceCommand),
    /// Show which versions the parts of the cluster have, and end an upgrade.
    #[command(subcommand)]
    Upgrade(upgrade::UpgradeCommand),
    #[command(flatten)]
    Placement(placement::PlacementCommand),
}

/// Runs `harvestfs admin`.
///
/// # Errors
/// When the cluster cannot be reached, or `fsck` found something.
pub fn run(args: &AdminArgs) -> anyhow::Result<()> {
    link::block_on(async {
        match &args.command {
            AdminCommand::Namenode(GroupCommand::Recover(recover)) => {
                recover_alone::run(&args.cluster, recover).await
            }
            AdminCommand::Namenode(GroupCommand::Running(command)) => {
                AdminLink::with(&args.cluster, async |link| {
                    namenodes::execute(link, command).await
                })
                .await
            }
            AdminCommand::Backup(backup) => backup::run(&args.cluster, backup).await,
            AdminCommand::Restore(args) => backup::restore(args),
            AdminCommand::Doctor { json } => doctor::run(&args.cluster, *json).await,
            AdminCommand::OfNamenode(command) => {
                AdminLink::with(&args.cluster, async |link| execute(link, command).await).await
            }
        }
    })
}

async fn execute(link: &AdminLink, command: &NamenodeCommand) -> anyhow::Result<()> {
    match command {
        NamenodeCommand::Status { json } => {
            let AdminReply::Status(status) = link.ask(AdminRequest::Status, DEADLINE).await? else {
                return Err(link::unexpected());
            };
            if *json {
                println!("{}", serde_json::to_string_pretty(&status)?);
            } else {
                print_status(&status);
            }
            Ok(())
        }
        NamenodeCommand::Nodes { json } => {
            let AdminReply::Nodes(mut nodes) = link.ask(AdminRequest::Nodes, DEADLINE).await?
            else {
                return Err(link::unexpected());
            };
            nodes.sort_by(|a, b| by_name_and_number(&a.server.name, &b.server.name));
            if *json {
                println!("{}", serde_json::to_string_pretty(&nodes)?);
            } else {
                print_nodes(&nodes);
            }
            Ok(())
        }
        NamenodeCommand::Fsck {
            recover: Some(directory),
            ..
        } => dropped_by_signal(recovery::read_back(link, directory)).await,
        NamenodeCommand::Recover(_) => recovery::recover(link).await,
        NamenodeCommand::Quarantine { json } => recovery::quarantine(link, *json).await,
        NamenodeCommand::Fsck { json, .. } => {
            let AdminReply::Fsck(report) = link.ask(AdminRequest::Fsck, FSCK_DEADLINE).await?
            else {
                return Err(link::unexpected());
            };
            if *json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print_fsck(&report);
            }
            match Verdict::on(&report) {
                Verdict::Healthy => Ok(()),
                Verdict::IsRemoving => anyhow::bail!("what no file uses is not removed yet"),
                Verdict::NotHealthy => anyhow::bail!("the file system is not healthy"),
            }
        }
        NamenodeCommand::Snapshot => {
            link.ask(AdminRequest::Snapshot, FSCK_DEADLINE).await?;
            Ok(())
        }
        NamenodeCommand::History(command) => history::execute(link, command).await,
        NamenodeCommand::Balance(args) => balance::execute(link, args).await,
        NamenodeCommand::Decommission(command) => decommission::execute(link, command).await,
        NamenodeCommand::Maintenance(command) => maintenance::execute(link, command).await,
        NamenodeCommand::Upgrade(command) => upgrade::execute(link, command).await,
        NamenodeCommand::Placement(command) => placement::execute(link, command).await,
    }
}

fn print_status(status: &ClusterStatus) {
    println!(
        "cluster {} (release {}, version {})",
        status.cluster, status.version, status.cluster_version
    );
    if status.newest_version > status.cluster_version {
        println!(
            "upgrade to version {} under way: harvestfs admin upgrade status",
            status.newest_version
        );
    }
    let ready = if status.ready {
        "ready"
    } else {
        "still learning where blocks are"
    };
    println!("namenode up for {} s, {ready}", status.uptime_s);
    if let Some(recovery) = &status.recovery {
        println!("IN RECOVERY, changes nothing: it {}", recovery.describe());
        for node in &recovery.ahead {
            println!("  {} obeyed {}", node.name, node.obeyed);
        }
    }
    for node in &status.refused_nodes {
        println!(
            "{} obeys another namenode, which started later: {}",
            node.name, node.obeyed
        );
    }
    if status.quarantined_blocks > 0 {
        println!(
            "quarantine: {}, {}",
            count(status.quarantined_blocks, "block"),
            units::human(status.quarantined_bytes)
        );
    }
    println!(
        "datanodes: {} alive and {} in maintenance of {}, {} of {} used",
        status.nodes_alive,
        status.nodes_in_maintenance,
        status.nodes_known,
        units::human(status.used_bytes),
        units::human(status.quota_bytes)
    );
    println!(
        "inodes: {} ({}, {})",
        status.inodes,
        count(status.files, "file"),
        count(status.directories, "directory")
    );
    println!(
        "blocks: {} ({} below their replication, {} with less than files ask for because there are \
         too few datanodes, {} lost)",
        status.blocks, status.under_replicated_blocks, status.curtailed_blocks, status.lost_blocks
    );
    if let Some(trouble) = status.writes.trouble() {
        println!("{}", trouble.what);
    }
    println!(
        "repairs: {} under way, {} done",
        status.repairs_under_way, status.repairs_done
    );
    println!(
        "sessions: {}, journal at {} in epoch {}, {} of memory",
        status.sessions,
        status.journal_lsn,
        status.epoch,
        units::human(status.engine_bytes)
    );
}

/// `dn2` before `dn10`.
fn by_name_and_number(a: &str, b: &str) -> Ordering {
    let split = |name: &str| {
        let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let number = name[stem.len()..].parse::<u64>().ok();
        (stem.to_owned(), number, name.to_owned())
    };
    split(a).cmp(&split(b))
}

fn print_nodes(nodes: &[NodeStatus]) {
    println!(
        "{:<16} {:<6} {:<10} {:<16} {:<16} {:>9} {:>10} {:>10}  ADDRESS",
        "SERVER", "STATE", "RACK", "ENVIRONMENT", "FUNCTION", "REPLICAS", "USED", "QUOTA"
    );
    for node in nodes {
        let state = match (node.alive, node.busy) {
            _ if node.maintenance_left_ms.is_some() => "maint",
            (false, _) => "dead",
            (true, true) => "busy",
            (true, false) if node.draining => "drain",
            (true, false) => "alive",
        };
        let used: u64 = node.volumes.iter().map(|volume| volume.used_bytes).sum();
        let quota: u64 = node.volumes.iter().map(|volume| volume.quota_bytes).sum();
        println!(
            "{:<16} {:<6} {:<10} {:<16} {:<16} {:>9} {:>10} {:>10}  {}",
            node.server.name,
            state,
            node.server.rack,
            node.server.environment,
            node.server.machine_function,
            node.replicas,
            units::human(used),
            units::human(quota),
            node.server.data_addr
        );
    }
}

/// What a report comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Healthy,
    /// Only what files do not use any more is still there.
    IsRemoving,
    NotHealthy,
}

impl Verdict {
    fn on(report: &FsckReport) -> Self {
        if report.healthy {
            return Self::Healthy;
        }
        let of_files = report.lost_blocks + report.missing_replicas + report.excess_replicas;
        // Other findings come first in a truncated list.
        let is_all_unused = report.findings.iter().all(|it| it.message.contains(UNUSED));
        if of_files == 0 && is_all_unused {
            Self::IsRemoving
        } else {
            Self::NotHealthy
        }
    }
}

fn print_fsck(report: &FsckReport) {
    for finding in &report.findings {
        match &finding.path {
            Some(path) => println!("{}: {}", names::text(path.as_bytes()), finding.message),
            None => println!("{}", finding.message),
        }
    }
    println!(
        "{}, {}, {}",
        count(report.files, "file"),
        count(report.directories, "directory"),
        count(report.blocks, "block")
    );
    println!(
        "{}, {}, {}, {}",
        count(report.lost_blocks, "lost block"),
        count(report.missing_replicas, "missing replica"),
        count(report.excess_replicas, "excess replica"),
        count(report.orphan_blocks, "unused replica")
    );
    match Verdict::on(report) {
        Verdict::Healthy => println!("The file system is healthy."),
        Verdict::IsRemoving => println!(
            "All files are whole. What is left of removed and overwritten files is still to be removed."
        ),
        Verdict::NotHealthy => println!("The file system is NOT healthy."),
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::admin::FsckFinding;

    use super::*;

    #[test]
    fn what_is_left_of_removed_files_harms_none() {
        let verdict = |healthy, counts: [u64; 4], messages: &[&str]| {
            let finding = |message: &&str| FsckFinding {
                ino: None,
                path: None,
                block: None,
                message: (*message).to_owned(),
            };
            Verdict::on(&FsckReport {
                healthy,
                files: 1,
                directories: 1,
                blocks: 1,
                lost_blocks: counts[0],
                missing_replicas: counts[1],
                excess_replicas: counts[2],
                orphan_blocks: counts[3],
                findings: messages.iter().map(finding).collect(),
            })
        };
        let unused: &str = &format!("dn-1 has a replica of block 7, {UNUSED} (any more)");
        let other = "of another kind";
        assert_eq!(verdict(true, [0; 4], &[]), Verdict::Healthy);
        // Quarantined replicas are among the findings, too.
        assert_eq!(verdict(true, [0; 4], &[other]), Verdict::Healthy);
        assert_eq!(verdict(false, [0; 4], &[other]), Verdict::NotHealthy);
        // Not all of them are listed.
        for orphans in [2, 5_000] {
            let with = |messages: &[&str]| verdict(false, [0, 0, 0, orphans], messages);
            assert_eq!(with(&[unused, unused]), Verdict::IsRemoving);
            assert_eq!(with(&[other, unused]), Verdict::NotHealthy);
        }
        for of_files in 0..3 {
            let mut counts = [0, 0, 0, 2];
            counts[of_files] = 1;
            let verdict = verdict(false, counts, &[unused, unused]);
            assert_eq!(verdict, Verdict::NotHealthy);
        }
    }

    #[test]
    fn servers_are_in_the_order_of_their_numbers() {
        let mut names = ["dn10", "b", "dn2", "dn1", "dn", "7", "a-3-x"];
        names.sort_by(|a, b| by_name_and_number(a, b));
        assert_eq!(names, ["7", "a-3-x", "b", "dn", "dn1", "dn2", "dn10"]);
    }
}
