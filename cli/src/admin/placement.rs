//! `harvestfs admin placement | policy | repair | safe-to-reimage | quota`.

use std::time::{Duration, Instant};

use anyhow::bail;
use clap::{Args, Subcommand};
use harvestfs_placement::PolicyKind;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::placement::{
    BlockPlace, DomainLoss, GridCell, LossRisk, PlacementReply, PlacementReport, PlacementRequest,
    ReimageImpact, RepairChange, RepairLimits, ReplicaPlace,
};

use super::DEADLINE;
use super::link::{self, AdminLink};
use super::quota;
use super::wave::PlanArgs;
use crate::units::{self, Size};

/// Time between two questions to the cluster whether it has reached the requested state.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time within which datanodes report to a namenode that has just started.
const REPORTED_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, Subcommand)]
pub enum PlacementCommand {
    /// Show the grid, its tenants, how diverse blocks are, and why a block is where it is.
    #[command(after_help = "Examples:\n  \
        harvestfs admin placement\n  \
        harvestfs admin placement --file /photos/one.jpg    why its blocks are where they are")]
    Placement {
        /// A block to explain, 16 hexadecimal digits; may be repeated.
        #[arg(long = "block", value_name = "ID", value_parser = block)]
        blocks: Vec<BlockId>,
        /// A file whose blocks to explain, as an absolute path in the file system.
        #[arg(long, value_name = "PATH")]
        file: Option<String>,
        /// Show the tenants.
        #[arg(long)]
        tenants: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the policy, or replace it until the configuration names another one.
    #[command(after_help = "Examples:\n  \
        harvestfs admin policy\n  \
        harvestfs admin policy greedy")]
    Policy {
        /// `stock`, `greedy`, `history` or `harvest`.
        name: Option<PolicyKind>,
    },
    /// Show the budgets of repair, or change them until namenode.toml names others.
    Repair(RepairArgs),
    /// Show whether servers may be reimaged; exit status 1 when data would be lost, or left with
    /// a single replica.
    #[command(after_help = "Examples:\n  \
        harvestfs admin safe-to-reimage dn3\n  \
        harvestfs admin safe-to-reimage dn3 --hold --timeout 2h\n  \
        harvestfs admin safe-to-reimage dn3 --release\n  \
        harvestfs admin safe-to-reimage --plan waves.toml      which day of a plan may go on")]
    SafeToReimage {
        /// Names of servers.
        #[arg(required_unless_present = "plan")]
        servers: Vec<String>,
        #[command(flatten)]
        plan: PlanArgs,
        /// Copy their replicas elsewhere, place nothing new on them, and wait until it is safe.
        #[arg(long, conflicts_with = "release")]
        hold: bool,
        /// With --hold: give up waiting after this time, such as `30m` (the copying goes on).
        #[arg(long, value_parser = duration, requires = "hold")]
        timeout: Option<Duration>,
        /// End an earlier --hold: the servers are used again.
        #[arg(long)]
        release: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change how much of a server's space may be used.
    #[command(after_help = "Examples:\n  \
        harvestfs admin quota dn3 80GiB\n  \
        harvestfs admin quota dn3 20GiB --deadline 30m    the owner needs space within half an hour")]
    Quota {
        /// Name of the server.
        server: String,
        /// The new quota; of all volumes together unless --volume is given.
        size: Size,
        /// One volume, by the id that `admin nodes --json` shows.
        #[arg(long, value_name = "ID", value_parser = storage)]
        volume: Option<StorageId>,
        /// When the space must be free at the latest, such as `90s`, `30m` or `2h`.
        #[arg(long, value_parser = duration, default_value = "1h")]
        deadline: Duration,
    },
}

/// `harvestfs admin repair`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs admin repair\n  \
    harvestfs admin repair --per-hour 60 --at-once 4")]
pub struct RepairArgs {
    /// Repairs per hour and server, as source and as target each.
    #[arg(long)]
    per_hour: Option<u32>,
    /// The same for blocks with a single replica left.
    #[arg(long)]
    urgent_per_hour: Option<u32>,
    /// The same for replicas that are moved because they are misplaced.
    #[arg(long)]
    moves_per_hour: Option<u32>,
    /// Repairs per hour that one volume serves.
    #[arg(long)]
    per_volume_per_hour: Option<u32>,
    /// Concurrent repairs per server, as source and as target each.
    #[arg(long)]
    at_once: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn block(text: &str) -> Result<BlockId, String> {
    u64::from_str_radix(text, 16)
        .map(BlockId)
        .map_err(|_| format!("`{text}` is not a block: 16 hexadecimal digits"))
}

fn storage(text: &str) -> Result<StorageId, String> {
    text.parse()
        .map(StorageId)
        .map_err(|_| format!("`{text}` is not a volume: a number"))
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let unit_at = text
        .find(|letter: char| !letter.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds_per_unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => 0,
    };
    let seconds = number.parse::<u64>().ok();
    seconds
        .and_then(|number| number.checked_mul(seconds_per_unit))
        .filter(|_| seconds_per_unit > 0)
        .map(Duration::from_secs)
        .ok_or_else(|| format!("`{text}` is not a time such as 90s, 30m, 2h or 1d"))
}

/// Runs one of the commands.
///
/// # Errors
/// When the cluster cannot be reached, refuses, or the answer is no.
pub async fn execute(link: &AdminLink, command: &PlacementCommand) -> anyhow::Result<()> {
    match command {
        PlacementCommand::Placement {
            blocks,
            file,
            tenants,
            json,
        } => {
            let report = report(link, blocks.clone(), file.clone()).await?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print_report(&report, *tenants);
            }
            Ok(())
        }
        PlacementCommand::Policy { name: None } => {
            println!("{}", report(link, Vec::new(), None).await?.policy);
            Ok(())
        }
        PlacementCommand::Policy { name: Some(kind) } => {
            let name = kind.name().to_owned();
            ask(link, PlacementRequest::SetPolicy(name)).await?;
            Ok(())
        }
        PlacementCommand::Repair(args) => {
            let change = RepairChange {
                per_node: args.per_hour,
                urgent_per_node: args.urgent_per_hour,
                moves_per_node: args.moves_per_hour,
                per_volume: args.per_volume_per_hour,
                at_once: args.at_once,
            };
            let reply = ask(link, PlacementRequest::Repair(change)).await?;
            let PlacementReply::Repair(limits) = reply else {
                return Err(link::unexpected());
            };
            if args.json {
                println!("{}", serde_json::to_string_pretty(&limits)?);
            } else {
                print_limits(&limits);
            }
            Ok(())
        }
        PlacementCommand::SafeToReimage {
            servers,
            release: true,
            ..
        } => {
            let servers = servers.clone();
            ask(link, PlacementRequest::Release { servers }).await?;
            Ok(())
        }
        PlacementCommand::SafeToReimage {
            servers,
            plan,
            hold,
            timeout,
            json,
            ..
        } => {
            if plan.judge(link, *json).await? {
                return Ok(());
            }
            let impact = wait_until_safe(link, servers, *hold, *timeout).await?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&impact)?);
            } else {
                print_impact(&impact);
            }
            if !impact.is_safe() {
                bail!("not safe to reimage");
            }
            Ok(())
        }
        PlacementCommand::Quota {
            server,
            size,
            volume,
            deadline,
        } => quota::set(link, server, *size, *volume, *deadline).await,
    }
}

pub(super) async fn ask(
    link: &AdminLink,
    request: PlacementRequest,
) -> anyhow::Result<PlacementReply> {
    let request = AdminRequest::Placement(request);
    let start = Instant::now();
    loop {
        match link.ask(request.clone(), DEADLINE).await {
            Ok(AdminReply::Placement(reply)) => return Ok(reply),
            Ok(_) => return Err(link::unexpected()),
            Err(error) => match error.downcast_ref() {
                // The namenode has just started, or has just become the leader.
                Some(FsError::Busy { retry_after_ms }) if start.elapsed() < REPORTED_WITHIN => {
                    tokio::time::sleep(Duration::from_millis((*retry_after_ms).into())).await;
                }
                Some(FsError::Busy { .. }) => bail!(
                    "the namenode does not know yet what these servers have: they have not reported to it. \
                     `harvestfs admin status` shows which do"
                ),
                _ => return Err(error),
            },
        }
    }
}

async fn report(
    link: &AdminLink,
    blocks: Vec<BlockId>,
    file: Option<String>,
) -> anyhow::Result<PlacementReport> {
    match ask(link, PlacementRequest::Report { blocks, file }).await? {
        PlacementReply::Report(report) => Ok(report),
        _ => Err(link::unexpected()),
    }
}

pub(super) async fn wait_until_safe(
    link: &AdminLink,
    servers: &[String],
    hold: bool,
    timeout: Option<Duration>,
) -> anyhow::Result<ReimageImpact> {
    let start = Instant::now();
    loop {
        let request = PlacementRequest::Impact {
            servers: servers.to_vec(),
            hold,
        };
        let PlacementReply::Impact(impact) = ask(link, request).await? else {
            return Err(link::unexpected());
        };
        let timed_out = timeout.is_some_and(|timeout| start.elapsed() >= timeout);
        // A hold waits until every block has all its replicas elsewhere, not just until none is in danger.
        if !hold || timed_out || (impact.is_safe() && impact.waiting == 0) {
            return Ok(impact);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn print_report(report: &PlacementReport, tenants: bool) {
    println!("policy {}", report.policy);
    println!(
        "{:<34} {:>7} {:>7} {:>10} {:>10}",
        "PEAK CPU USE, REIMAGES", "TENANTS", "SERVERS", "FREE", "CAPACITY"
    );
    for cell in &report.cells {
        if cell.cell.is_some() || cell.servers > 0 {
            println!(
                "{:<34} {:>7} {:>7} {:>10} {:>10}",
                grid_text(cell.cell),
                cell.tenants,
                cell.servers,
                units::human(cell.free_bytes),
                units::human(cell.capacity_bytes)
            );
        }
    }
    println!("{}", scores_text(&report.blocks_by_score));
    println!(
        "{} misplaced, {} waiting for a move",
        report.misplaced_blocks, report.moves_waiting
    );
    for loss in &report.losses {
        println!("{}", loss_text(loss));
    }
    println!("{}", risk_text(&report.risk));
    if tenants {
        for it in &report.tenants {
            println!(
                "tenant {}/{}: {}, {}, {} reimages per server and month, peak {} % CPU, {} free{}",
                it.tenant.environment,
                it.tenant.machine_function,
                grid_text(it.cell),
                count(it.servers.into(), "server"),
                f64::from(it.reimages_per_1000) / 1_000.0,
                f64::from(it.peak_cpu_permille) / 10.0,
                units::human(it.free_bytes),
                if it.has_history { "" } else { " (no history)" },
            );
        }
    }
    for block in &report.blocks {
        print_block(block);
    }
}

/// How much data is expected to be lost by chance in a year.
fn risk_text(risk: &LossRisk) -> String {
    let [blocks, looked_at] = [risk.blocks, risk.looked_at].map(|it| count(it, "block"));
    let Some((worst, most)) = risk.worst.first() else {
        return "how many blocks may be lost is not known: history was not analysed yet, or there are none".into();
    };
    let which = if risk.looked_at < risk.blocks {
        format!("{blocks} by {looked_at} of them")
    } else {
        blocks
    };
    format!(
        "in a year, at most {:.1e} blocks are lost on average (of {which}), at most {:.1e} of block {worst}",
        risk.in_a_year.0, most.0
    )
}

/// Whether a domain can be lost and repaired.
fn loss_text(loss: &DomainLoss) -> String {
    let (used, free) = (loss.used_bytes, loss.free_elsewhere_bytes);
    let answer = match used.checked_sub(free) {
        None | Some(0) => "can be lost and repaired".to_owned(),
        Some(missing) => format!(
            "cannot be lost and repaired: {} more must be free",
            units::human(missing)
        ),
    };
    format!(
        "{} {} ({}) {answer}; {} must stay free elsewhere, and {} are",
        loss.kind.name(),
        loss.name,
        count(loss.servers.into(), "server"),
        units::human(used),
        units::human(free),
    )
}

/// How many blocks meet how many of the constraints for diverse replicas; numbers without blocks are left out.
fn scores_text(blocks_by_score: &[u64]) -> String {
    let most = blocks_by_score.len().saturating_sub(1);
    let scores = blocks_by_score.iter().enumerate().rev();
    let scores: Vec<String> = scores
        .filter(|(_, blocks)| **blocks > 0)
        .map(|(score, blocks)| format!("{score} of {most} for {}", count(*blocks, "block")))
        .collect();
    if scores.is_empty() {
        return "no sealed blocks".into();
    }
    format!("constraints that hold: {}", scores.join(", "))
}

/// A cell of the grid, in the words of the namenode's page.
pub(super) fn grid_text(cell: Option<GridCell>) -> String {
    const PEAKS: [&str; 3] = ["low", "medium", "high"];
    const REIMAGED: [&str; 3] = ["rarely", "sometimes", "often"];
    match cell {
        Some(GridCell { row, column }) => {
            match (
                PEAKS.get(usize::from(row)),
                REIMAGED.get(usize::from(column)),
            ) {
                (Some(peaks), Some(reimaged)) => format!("{peaks} peaks, {reimaged} reimaged"),
                _ => format!("row {row}, column {column}"),
            }
        }
        None => "outside the grid".into(),
    }
}

fn print_block(block: &BlockPlace) {
    println!(
        "{}: {} wanted, {}; {}",
        block.block,
        count(block.replication.into(), "replica"),
        if block.strict { "strict" } else { "space" },
        if block.broken.is_empty() {
            format!("holds: no shared {}", block.held.join(", "))
        } else {
            format!("misplaced: replicas share {}", block.broken.join(", "))
        }
    );
    if block.possible < block.replication || !block.given_up.is_empty() {
        let missing = block.replication.saturating_sub(block.possible);
        let replicas = (missing > 0).then(|| count(missing.into(), "replica"));
        let lacks: Vec<String> = replicas.into_iter().chain(block.given_up.clone()).collect();
        println!(
            "  the cluster does not have the datanodes for: {}",
            lacks.join(", ")
        );
    }
    if let Some(lost) = block.lost_in_a_year {
        println!(
            "  lost within a year with a probability of at most {:.1e}",
            lost.0
        );
    }
    for replica in &block.replicas {
        println!("  {}", replica_text(replica));
    }
}

fn replica_text(replica: &ReplicaPlace) -> String {
    let shares: Vec<String> = replica
        .shares
        .iter()
        .map(|(constraint, other)| format!("{constraint} with {other}"))
        .collect();
    format!(
        "{} ({}{}): {}, tenant {}/{}, {}, reimaged {} times per server and month; {}",
        replica.server,
        replica.state,
        if replica.leaving { ", leaving" } else { "" },
        replica.rack,
        replica.tenant.environment,
        replica.tenant.machine_function,
        grid_text(replica.cell),
        f64::from(replica.reimages_per_1000) / 1_000.0,
        if shares.is_empty() {
            "shares nothing with the others".into()
        } else {
            format!("shares {}", shares.join(", "))
        }
    )
}

fn print_limits(limits: &RepairLimits) {
    println!(
        "per server and {} s: {}, {} for last replicas, {}; {} per volume; {} at once",
        limits.window_ms / 1_000,
        count(limits.per_node.into(), "repair"),
        limits.urgent_per_node,
        count(limits.moves_per_node.into(), "move"),
        limits.per_volume,
        limits.at_once
    );
}

/// Most blocks that are explained; the others mostly wait for the same.
const WAITING_SHOWN: usize = 20;

pub(super) fn print_impact(impact: &ReimageImpact) {
    println!(
        "{} on the servers; without them {} would be lost, {} left with the last replica, {} below \
         the replication",
        count(impact.replicas, "replica"),
        count(impact.lost, "block"),
        impact.exposed,
        impact.waiting
    );
    for block in &impact.lost_blocks {
        println!("lost: {block}");
    }
    for block in &impact.exposed_blocks {
        println!("last replica: {block}");
    }
    for it in impact.waiting_blocks.iter().take(WAITING_SHOWN) {
        println!(
            "block {} has {} of {} replicas elsewhere: {}",
            it.block, it.elsewhere, it.wanted, it.why
        );
    }
    let shown = impact.waiting_blocks.len().min(WAITING_SHOWN) as u64;
    if shown > 0 && impact.waiting > shown {
        println!("and {} more", count(impact.waiting - shown, "block"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_is_shown_in_words() {
        let cell = |row, column| grid_text(Some(GridCell { row, column }));
        assert_eq!(cell(0, 0), "low peaks, rarely reimaged");
        assert_eq!(cell(2, 1), "high peaks, sometimes reimaged");
        assert_eq!(grid_text(None), "outside the grid");
        assert_eq!(
            scores_text(&[0, 0, 0, 1, 0, 7]),
            "constraints that hold: 5 of 5 for 7 blocks, 3 of 5 for 1 block"
        );
        assert_eq!(scores_text(&[0; 6]), "no sealed blocks");
    }

    #[test]
    fn times_and_ids_are_read() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7_200)));
        for bad in ["", "h", "10", "5x", "-1s", "99999999999999999999d"] {
            let error = duration(bad).expect_err("not a time");
            assert!(error.contains("such as 90s"), "{error}");
        }
        assert_eq!(block(&BlockId(17).to_string()), Ok(BlockId(17)));
        assert!(block("x").is_err());
        assert_eq!(storage("2748"), Ok(StorageId(0xabc)));
        assert!(storage("nothing").is_err());
    }
}
