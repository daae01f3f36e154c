//! `harvestfs cycles classes`: shows which servers have similar use, and what is left to jobs.

use std::time::Duration;

use clap::Args;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::classes::{Classes, UtilisationClass};
use harvestfs_protocol::outlook::count;

use crate::admin::history::percent;
use crate::admin::link::{self, AdminLink};
use crate::cluster::ClusterArgs;
use crate::units;

/// Most time for the answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// Arguments of `harvestfs cycles classes`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  harvestfs cycles classes\n  harvestfs cycles classes --servers\n  harvestfs cycles classes --json"
)]
pub struct ClassesArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Name the tenants and servers of each class.
    #[arg(long)]
    servers: bool,
    /// Print what the namenode serves as `/classes`.
    #[arg(long, conflicts_with = "servers")]
    json: bool,
}

/// Runs `harvestfs cycles classes`.
///
/// # Errors
/// When the cluster cannot be reached.
pub fn run(args: &ClassesArgs) -> anyhow::Result<()> {
    let classes = link::block_on(AdminLink::with(&args.cluster, async |link| {
        match link.ask(AdminRequest::Classes, DEADLINE).await? {
            AdminReply::Classes(classes) => Ok(classes),
            _ => Err(link::unexpected()),
        }
    }))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&classes)?);
    } else {
        print(&classes, args.servers);
    }
    Ok(())
}

fn print(classes: &Classes, with_servers: bool) {
    match classes.analysed_unix_s {
        Some(at_s) => println!("analysed at {}", units::utc(Duration::from_secs(at_s))),
        None => println!(
            "not analysed yet: that is done once a day, and by `harvestfs admin history analyse`"
        ),
    }
    if !classes.classes.is_empty() {
        println!(
            "{:>5} {:<13} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "CLASS",
            "PATTERN",
            "TENANTS",
            "SERVERS",
            "AVERAGE",
            "PEAK",
            "NOW",
            "SHORT",
            "MEDIUM",
            "LONG"
        );
    }
    for class in &classes.classes {
        print_class(class, with_servers);
    }
    let without = &classes.without_class;
    if !without.is_empty() {
        println!(
            "{} in no class: their tenants have not been sampled for long enough",
            count(without.len() as u64, "server")
        );
        if with_servers {
            for server in without {
                println!("        {}", server.name);
            }
        }
    }
    if !classes.classes.is_empty() {
        println!(
            "SHORT, MEDIUM, LONG: the share of all cores that owners are expected to leave to a job of that length; a third \
             of each server is kept for its owner all the same"
        );
    }
}

fn print_class(class: &UtilisationClass, with_servers: bool) {
    let or_dash = |permille: Option<u16>| permille.map_or_else(|| "-".to_owned(), percent);
    let headroom = class.headroom;
    println!(
        "{:>5} {:<13} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        class.class,
        class.pattern.name(),
        class.tenants.len(),
        class.servers.len(),
        percent(class.average_cpu_permille),
        percent(class.peak_cpu_permille),
        or_dash(class.cpu_permille),
        or_dash(headroom.map(|it| it.short_permille)),
        or_dash(headroom.map(|it| it.medium_permille)),
        or_dash(headroom.map(|it| it.long_permille)),
    );
    if with_servers {
        for tenant in &class.tenants {
            println!("        {}/{}", tenant.environment, tenant.machine_function);
        }
        for server in &class.servers {
            println!(
                "        {:<24} {}",
                server.name,
                or_dash(server.cpu_permille)
            );
        }
    }
}
