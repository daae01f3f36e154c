//! The tasks of the child processes: `journal-stores child <what> <store> <dir> [number]`.

use std::collections::HashMap;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::store::{Kind, Op, Result};
use crate::workload::{mix, put, value};

/// Commit size of [`fill`], which measures space, not speed.
const OPS_PER_COMMIT: u64 = 1000;

/// The command that runs `what` in a child process.
pub fn command(what: &str, kind: Kind, dir: &Path, number: u64) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["child", what, kind.key()]).arg(dir);
    command.arg(number.to_string());
    Ok(command)
}

pub fn run(args: &[String]) -> Result<()> {
    let [what, kind, dir, number] = args else {
        return Err("child: what, store, directory, number".into());
    };
    let kind = Kind::from_key(kind).ok_or("child: no such store")?;
    let dir = PathBuf::from(dir);
    let number = number.parse()?;
    match what.as_str() {
        "append" => append(kind, &dir, number),
        "check" => check(kind, &dir, number),
        "fill" => fill(kind, &dir, number),
        "recover" => recover(kind, &dir),
        "compact" => kind.open(&dir)?.compact(),
        _ => Err("child: no such task".into()),
    }
}

/// Commits records in groups of 1 to 20 and prints the number of the last one of each group when it is durable.
fn append(kind: Kind, dir: &Path, commits: u64) -> Result<()> {
    let mut store = kind.open(dir)?;
    let mut next = 0;
    store.scan(&mut |_, _| next += 1)?;
    for _ in 0..commits {
        let count = 1 + mix(next) % 20;
        let ops: Vec<_> = (next..next + count).map(put).collect();
        store.commit(&ops)?;
        next += count;
        stdout().write_all(format!("acknowledged {next}\n").as_bytes())?;
    }
    Ok(())
}

/// Checks that the first `acknowledged` records of [`append`] exist, that nothing else exists except the records after
/// them, and prints the total number.
fn check(kind: Kind, dir: &Path, acknowledged: u64) -> Result<()> {
    let mut found = HashMap::new();
    kind.open(dir)?.scan(&mut |key, value| {
        found.insert(key, value.to_vec());
    })?;
    let total = found.len() as u64;
    for n in 0..total.max(acknowledged) {
        match found.get(&mix(n)) {
            Some(stored) if stored == value(n).as_slice() => {}
            Some(_) => return Err(format!("record {n} has another value").into()),
            None if n < acknowledged => {
                return Err(format!("record {n} of {acknowledged} acknowledged is lost").into());
            }
            None => return Err(format!("a record after {n}, but not {n}").into()),
        }
    }
    println!("found {total}");
    Ok(())
}

/// Does 5 `unit`s of inserts, as many overwrites, and half as many deletes; then ends without closing the store, as in
/// a crash. Prints the peak memory use in KiB.
fn fill(kind: Kind, dir: &Path, unit: u64) -> Result<()> {
    let mut store = kind.open(dir)?;
    let records = 5 * unit;
    let overwrite = |n| Op::Put(mix(mix(n) % records), value(n + records));
    let inserts = (0..records).map(put);
    let overwrites = (0..records).map(overwrite);
    let deletes = (0..records / 2).map(|n| Op::Delete(mix(2 * n)));
    let mut ops = Vec::new();
    for op in inserts.chain(overwrites).chain(deletes) {
        ops.push(op);
        if ops.len() as u64 == OPS_PER_COMMIT {
            store.commit(&ops)?;
            ops.clear();
        }
    }
    store.commit(&ops)?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.ok_or("the kernel does not say how much memory was used")?;
    println!("{}", peak.trim().trim_end_matches(" kB"));
    stdout().flush()?;
    std::process::abort();
}

/// Prints the time in milliseconds until the store is open, the time until everything was read, and the number of
/// records.
fn recover(kind: Kind, dir: &Path) -> Result<()> {
    let started = Instant::now();
    let mut store = kind.open(dir)?;
    let open_ms = started.elapsed().as_millis();
    let mut count = 0;
    store.scan(&mut |_, _| count += 1)?;
    println!("{open_ms} {} {count}", started.elapsed().as_millis());
    Ok(())
}
