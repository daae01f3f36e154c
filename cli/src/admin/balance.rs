//! `harvestfs admin balance`: shows how evenly servers are filled.

use clap::Args;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::placement::{
    BalanceChange, BalanceOutcome, BalancePause, BalanceReport, ClassBalance, PlacementReply,
    PlacementRequest, ServerFill,
};

use super::link::{self, AdminLink};
use super::placement;

/// `harvestfs admin balance`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs admin balance\n  \
    harvestfs admin balance 20                servers may be 20 % of their quotas apart")]
pub struct BalanceArgs {
    /// How many percent of their quotas apart servers may be before replicas move, `on` for what is
    /// configured, or `off`; holds until the configuration changes.
    #[arg(value_name = "PERCENT|on|off", value_parser = change)]
    change: Option<BalanceChange>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn change(text: &str) -> Result<BalanceChange, String> {
    match text {
        "on" => Ok(BalanceChange::Configured),
        "off" => Ok(BalanceChange::Spread(0)),
        percent => percent
            .parse()
            .ok()
            .filter(|percent| (1..=99).contains(percent))
            .map(|percent: u32| BalanceChange::Spread(percent * 10))
            .ok_or_else(|| {
                format!("`{text}` is neither a percentage from 1 to 99, nor on, nor off")
            }),
    }
}

/// Runs it.
///
/// # Errors
/// When the cluster cannot be reached or refuses.
pub async fn execute(link: &AdminLink, args: &BalanceArgs) -> anyhow::Result<()> {
    let request = PlacementRequest::Balance(args.change);
    let PlacementReply::Balance(report) = placement::ask(link, request).await? else {
        return Err(link::unexpected());
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print_report(&report);
    }
    Ok(())
}

fn print_report(report: &BalanceReport) {
    match report.pause {
        None => println!(
            "replicas move when a volume is more than {} fuller than a server",
            percent(u64::from(report.spread_permille))
        ),
        Some(pause) => println!("no replica moves: {}", pause_text(pause)),
    }
    println!(
        "moves: {} under way, {} done, {} failed; at most {} of a server in {} s",
        report.moves_under_way,
        report.moves_done,
        report.moves_failed,
        report.limits.moves_per_node,
        report.limits.window_ms / 1_000
    );
    for class in &report.classes {
        print_class(class);
    }
}

fn print_class(class: &ClassBalance) {
    println!(
        "{:?}: {}; the emptiest uses {} of its quota, the median {}, the fullest {}",
        class.class,
        count(class.servers, "server"),
        percent(class.least_permille),
        percent(class.median_permille),
        percent(class.most_permille)
    );
    println!("  too full: {}", count(class.volumes_too_full, "volume"));
    for volume in &class.too_full {
        println!(
            "    {}, volume {}: {}",
            fill_text(&volume.server),
            volume.storage,
            outcome_text(volume.outcome)
        );
    }
    println!("  too empty: {}", count(class.servers_too_empty, "server"));
    for server in &class.too_empty {
        println!("    {}", fill_text(server));
    }
}

fn fill_text(server: &ServerFill) -> String {
    format!(
        "{} ({}): {}",
        server.server,
        placement::grid_text(server.cell),
        percent(server.fill_permille)
    )
}

fn percent(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

fn pause_text(pause: BalancePause) -> &'static str {
    match pause {
        BalancePause::Off => "balancing is off (`harvestfs admin balance on`)",
        BalancePause::NoBudget => {
            "there is no budget for moves (`harvestfs admin repair --moves-per-hour`)"
        }
        BalancePause::Starting => "the namenode is still learning where blocks are",
        BalancePause::Storm => "many datanodes fell silent together",
        BalancePause::Repairs => "blocks that wait for repair or a better place go first",
    }
}

fn outcome_text(outcome: BalanceOutcome) -> &'static str {
    match outcome {
        BalanceOutcome::Begun => "a replica moves",
        BalanceOutcome::Budget => "the budget of moves is used up",
        BalanceOutcome::Constraints => {
            "no emptier server can take what was tried without a constraint being broken or more \
             reimages"
        }
        BalanceOutcome::NoTarget => {
            "the emptier servers are busy, take part in enough repairs, or have no room"
        }
        BalanceOutcome::Unsettled => "what was tried is being written, repaired or moved",
        BalanceOutcome::Unavailable => "its server is busy or silent",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read() {
        assert_eq!(change("on"), Ok(BalanceChange::Configured));
        assert_eq!(change("off"), Ok(BalanceChange::Spread(0)));
        assert_eq!(change("5"), Ok(BalanceChange::Spread(50)));
        for bad in ["", "0", "100", "5%", "-1", "maybe", "4294967297"] {
            let error = change(bad).expect_err("no change");
            assert!(error.contains("from 1 to 99"), "{error}");
        }
    }
}
