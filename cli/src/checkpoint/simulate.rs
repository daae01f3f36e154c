//! `harvestfs checkpoint simulate`: the figures of the paper, with its numbers next to ours.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use harvestfs_chaos::report::{Statement, Table, statements_table};
use harvestfs_checkpoint::adaptive::Victim;
use harvestfs_checkpoint::simulate::cluster::{Outcome, Policy};
use harvestfs_checkpoint::simulate::{
    CHANGED_SHARE, Record, STORAGE, Scale, Storage, TABLE_3_BYTES, policies, two_jobs,
};

/// Bandwidths of figures 4 and 6, in bytes per second.
const BANDWIDTHS: [f64; 5] = [5e7, 1e8, 3e8, 1e9, 5e9];

/// Arguments of `harvestfs checkpoint simulate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs checkpoint simulate --hours 4 --json runs.json")]
pub struct SimulateArgs {
    /// Machines.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=2000))]
    nodes: u16,
    /// Cores of each machine; a task takes one.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    cores: u16,
    /// Hours in which jobs arrive.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..=744))]
    hours: u16,
    /// Random numbers follow from it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write every record to this file, as a JSON array.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs it. A statement of the paper whose direction is missed makes it fail.
pub fn run(command: &SimulateArgs) -> anyhow::Result<()> {
    let records = policies(&Scale {
        nodes: command.nodes.into(),
        cores_per_node: command.cores.into(),
        hours: command.hours.into(),
        seed: command.seed,
    });
    if let Some(file) = &command.json {
        fs::write(file, serde_json::to_vec_pretty(&records)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    println!("Preemption in a cluster (figures 3 and 5); response times are relative to killing");
    println!("{}", cluster_table(&records));
    println!("Two jobs on one core: response times of the high and the low one (figures 4 and 6)");
    println!("{}", two_jobs_table());
    println!("Checkpoints of 5 GB, of which 10 % change (table 3)");
    println!("{}", table_3());
    let statements = statements(&records);
    println!("{}", statements_table(&statements));
    let missed = statements.iter().filter(|it| !it.holds).count();
    anyhow::ensure!(missed == 0, "{missed} statements of the paper do not hold");
    Ok(())
}

fn find<'a>(records: &'a [Record], policy: Policy, storage: Option<&str>) -> &'a Outcome {
    records
        .iter()
        .find(|it| it.policy == policy && it.storage == storage)
        .map(|it| &it.outcome)
        .expect("policies() has a record of each policy on each storage")
}

fn cluster_table(records: &[Record]) -> Table {
    let mut table = Table::new(&[
        "policy",
        "storage",
        "wasted",
        "energy",
        "low",
        "medium",
        "high",
        "killed",
        "checkpoints",
    ]);
    let kill = find(records, Policy::Kill, None);
    for Record {
        storage,
        policy,
        outcome,
    } in records
    {
        let relative = |priority: usize| {
            format!(
                "{:.2}",
                outcome.response_s[priority] / kill.response_s[priority]
            )
        };
        table.row(&[
            format!("{policy:?}").to_lowercase(),
            storage.unwrap_or_default().to_owned(),
            format!("{:.1} %", outcome.wasted_share() * 100.0),
            format!("{:.2}", outcome.energy_j / kill.energy_j),
            relative(0),
            relative(1),
            relative(2),
            outcome.kills.to_string(),
            outcome.checkpoints.to_string(),
        ]);
    }
    table
}

fn two_jobs_table() -> Table {
    let mut table = Table::new(&["bandwidth", "wait", "kill", "checkpoint", "adaptive"]);
    for bytes_per_s in BANDWIDTHS {
        let cell = |policy| {
            let outcome = two_jobs(bytes_per_s, policy);
            format!(
                "{:.0} s, {:.0} s",
                outcome.response_s[2], outcome.response_s[0]
            )
        };
        table.row(&[
            format!("{:.2} GB/s", bytes_per_s / 1e9),
            cell(Policy::Wait),
            cell(Policy::Kill),
            cell(Policy::Checkpoint),
            cell(Policy::Adaptive),
        ]);
    }
    table
}

/// Seconds to store a first and a second checkpoint.
fn table_3_s(storage: &Storage) -> (f64, f64) {
    let victim = |dump_bytes| Victim {
        dump_bytes,
        restore_bytes: 0.0,
        progress_s: 0.0,
        has_checkpoint: false,
    };
    let time_s = |bytes| victim(bytes).overhead_s(&storage.bandwidth(), 0.0);
    (time_s(TABLE_3_BYTES), time_s(TABLE_3_BYTES * CHANGED_SHARE))
}

fn table_3() -> Table {
    let mut table = Table::new(&["storage", "first", "second", "paper: first", "second"]);
    for storage in &STORAGE {
        let (first_s, second_s) = table_3_s(storage);
        table.row(&[
            storage.name.to_owned(),
            format!("{first_s:.2} s"),
            format!("{second_s:.2} s"),
            format!("{:.2} s", storage.paper_first_s),
            format!("{:.2} s", storage.paper_second_s),
        ]);
    }
    table
}

/// What the paper says, and what came of it here.
fn statements(records: &[Record]) -> Vec<Statement> {
    let kill = find(records, Policy::Kill, None);
    let on = |policy, storage| find(records, policy, Some(storage));
    let wasted = |outcome: &Outcome| outcome.wasted_share() * 100.0;
    let response = |outcome: &Outcome, priority: usize| {
        outcome.response_s[priority] / kill.response_s[priority]
    };
    let statement = |stated: &str, measured: String, holds| Statement {
        stated: stated.to_owned(),
        measured: Some(measured),
        holds,
    };
    let storages = STORAGE.map(|storage| storage.name);
    let basic = storages.map(|storage| on(Policy::Checkpoint, storage));
    let adaptive = storages.map(|storage| on(Policy::Adaptive, storage));
    let [disk, ssd, memory] = basic;
    let gain = |priority: usize| {
        [0, 1, 2].map(|storage| {
            1.0 - adaptive[storage].response_s[priority] / basic[storage].response_s[priority]
        })
    };
    let percent = |shares: [f64; 3]| {
        shares
            .map(|share| format!("{:.0} %", share * 100.0))
            .join(", ")
    };
    let mut statements = vec![
        statement(
            "killing wastes 35 % of the core time, checkpoints 14.6, 11.1 and 8.5 % (disk, ssd, memory)",
            format!(
                "{:.1} %; {:.1}, {:.1}, {:.1} %",
                wasted(kill),
                wasted(disk),
                wasted(ssd),
                wasted(memory)
            ),
            wasted(kill) > wasted(disk)
                && wasted(disk) > wasted(ssd)
                && wasted(ssd) > wasted(memory),
        ),
        statement(
            "in memory, low jobs take 74 % less time than with killing",
            format!("{:.0} % less", (1.0 - response(memory, 0)) * 100.0),
            response(memory, 0) < 1.0,
        ),
        statement(
            "on disk, high jobs take longer than with killing; in memory as long",
            format!("{:.2}; {:.2}", response(disk, 2), response(memory, 2)),
            response(disk, 2) > 1.05 && response(memory, 2) < 1.1,
        ),
        statement(
            "checkpoints in memory need 5 % less energy than killing",
            format!(
                "{:.0} % less",
                (1.0 - memory.energy_j / kill.energy_j) * 100.0
            ),
            memory.energy_j < kill.energy_j,
        ),
    ];
    for (priority, stated) in [
        (
            0,
            "deciding shortens low jobs by 36, 12 and 3 % (disk, ssd, memory)",
        ),
        (
            2,
            "deciding shortens high jobs by 29 and 8 % on disk and ssd",
        ),
    ] {
        let gains = gain(priority);
        statements.push(statement(
            stated,
            percent(gains),
            gains[0] > 0.0 && gains[0] > gains[1] && gains[1] > gains[2],
        ));
    }
    let never_worse = BANDWIDTHS.iter().all(|&bytes_per_s| {
        let high = |policy| two_jobs(bytes_per_s, policy).response_s[2];
        high(Policy::Adaptive) <= high(Policy::Wait)
    });
    statements.push(statement(
        "deciding, the high one of two jobs is never later than by waiting",
        if never_worse { "never" } else { "later" }.to_owned(),
        never_worse,
    ));
    let ratios = STORAGE.each_ref().map(|storage| {
        let (first_s, second_s) = table_3_s(storage);
        first_s / second_s
    });
    statements.push(statement(
        "the second checkpoint is stored 10 to 11 times as fast",
        format!("{:.1} times", ratios[0]),
        ratios.iter().all(|ratio| *ratio > 9.0),
    ));
    statements
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directions_of_the_paper_are_reproduced() {
        let records = policies(&Scale {
            nodes: 40,
            cores_per_node: 16,
            hours: 24.0,
            seed: 1,
        });
        for Statement {
            stated,
            measured,
            holds,
        } in statements(&records)
        {
            assert!(holds, "{stated}: {measured:?}");
        }
    }
}
