//! `harvestfs admin upgrade`: shows the versions of the parts, and raises that of the cluster.

use std::collections::BTreeMap;

use clap::Subcommand;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::upgrade::{UpgradePart, UpgradeReply, UpgradeRequest, UpgradeStatus};

use super::DEADLINE;
use super::link::{self, AdminLink};

/// What to do about an upgrade.
#[derive(Debug, Subcommand)]
pub enum UpgradeCommand {
    /// Show the version of the cluster, what runs where, and what is missing before `finish`.
    #[command(after_help = "Example:\n  \
        harvestfs admin upgrade status")]
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Raise the version of the cluster to the newest one that all namenodes and datanodes have. There is no
    /// way back to an older release after that.
    #[command(after_help = "Example:\n  \
        harvestfs admin upgrade finish")]
    Finish,
    /// Write a record of the next version, and say how many there are.
    #[cfg(feature = "next-version")]
    Probe,
}

/// Runs `harvestfs admin upgrade`.
///
/// # Errors
/// When no namenode leads, or `finish` is refused.
pub async fn execute(link: &AdminLink, command: &UpgradeCommand) -> anyhow::Result<()> {
    match command {
        UpgradeCommand::Status { json } => {
            let status = ask(link, UpgradeRequest::Status).await?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&status)?);
            } else {
                print(&status);
            }
        }
        UpgradeCommand::Finish => {
            let before = ask(link, UpgradeRequest::Status).await?;
            let status = ask(link, UpgradeRequest::Finish).await?;
            if status.cluster > before.cluster {
                println!(
                    "The cluster has version {} now, and had {} before.",
                    status.cluster, before.cluster
                );
            } else {
                println!(
                    "The cluster has version {} already: nothing to do.",
                    status.cluster
                );
            }
        }
        #[cfg(feature = "next-version")]
        UpgradeCommand::Probe => {
            let request = AdminRequest::Upgrade(UpgradeRequest::Probe);
            match link.ask(request, DEADLINE).await? {
                AdminReply::Upgrade(UpgradeReply::Probes(probes)) => {
                    println!("{}", harvestfs_protocol::outlook::count(probes, "probe"));
                }
                _ => return Err(link::unexpected()),
            }
        }
    }
    Ok(())
}

async fn ask(link: &AdminLink, request: UpgradeRequest) -> anyhow::Result<UpgradeStatus> {
    match link.ask(AdminRequest::Upgrade(request), DEADLINE).await? {
        AdminReply::Upgrade(UpgradeReply::Status(status)) => Ok(*status),
        _ => Err(link::unexpected()),
    }
}

fn print(status: &UpgradeStatus) {
    println!("The cluster has version {}.", status.cluster);
    println!("{:<10} {:<32} {:<16} VERSIONS", "PART", "NAME", "RELEASE");
    for (kind, parts) in [
        ("namenode", &status.namenodes),
        ("datanode", &status.datanodes),
    ] {
        for part in parts {
            print_part(kind, &part.name, part);
        }
    }
    // A machine may have thousands of connected commands, and namenodes of 0.2.0 list each of them.
    let mut clients: BTreeMap<(&str, String), (usize, &UpgradePart)> = BTreeMap::new();
    for client in &status.clients {
        let release = client.release.clone().unwrap_or_default();
        clients
            .entry((client.name.as_str(), release))
            .or_insert((0, client))
            .0 += 1;
    }
    for ((name, _), (number, client)) in clients {
        let name = match number {
            1 => name.to_owned(),
            _ => format!("{name} ({number})"),
        };
        print_part("client", &name, client);
    }
    println!("{}", advice(status));
}

fn print_part(kind: &str, name: &str, part: &UpgradePart) {
    let versions = part.versions.map(|it| it.to_string());
    println!(
        "{kind:<10} {name:<32} {:<16} {}",
        part.release.as_deref().unwrap_or("-"),
        match (versions, part.is_live) {
            (Some(versions), true) => versions,
            (Some(versions), false) => format!("{versions} (does not answer)"),
            (None, true) => "not known".to_owned(),
            (None, false) => "does not answer".to_owned(),
        }
    );
}

/// What is to be done next.
pub fn advice(status: &UpgradeStatus) -> String {
    if !status.is_under_way() {
        return "No upgrade is under way.".to_owned();
    }
    let newest = status.newest;
    if status.missing.is_empty() {
        return format!(
            "All parts have version {newest}: end the upgrade with `harvestfs admin upgrade finish`. Until \
             then you can go back."
        );
    }
    let missing: Vec<String> = status
        .missing
        .iter()
        .map(|it| format!("  {}: {}", it.part, it.reason))
        .collect();
    format!(
        "An upgrade to version {newest} is under way. What is missing:\n{}",
        missing.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::version::{Version, Versions};

    use super::*;

    fn status(namenode: u32, datanode: u32) -> UpgradeStatus {
        let part = |name: &str, newest| UpgradePart {
            name: name.to_owned(),
            release: Some(format!("0.{newest}.0")),
            versions: Some(Versions {
                newest: Version(newest),
                oldest: Version(12),
            }),
            is_live: true,
        };
        UpgradeStatus::of(
            Version(12),
            vec![part("10.0.0.1:9310", namenode)],
            vec![part("dn1", datanode)],
            vec![],
        )
    }

    #[test]
    fn the_next_step_is_named() {
        assert_eq!(advice(&status(12, 12)), "No upgrade is under way.");
        let half = advice(&status(13, 12));
        assert!(
            half.contains("  the datanode dn1: it runs 0.12.0"),
            "{half}"
        );
        assert!(advice(&status(13, 13)).contains("upgrade finish"));
    }
}
