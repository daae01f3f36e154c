//! Kills the store with SIGKILL while it commits, repeatedly and in the same directory.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use crate::child;
use crate::store::{Kind, Result};
use crate::workload::mix;

/// Maximum number of commits between two kills.
const COMMITS_MAX: u64 = 60;

pub struct Kills {
    pub rounds: u64,
    /// Number of acknowledged records, each of which was compared after every later kill.
    pub acknowledged: u64,
    /// The first error, if there was one.
    pub failure: Option<String>,
}

pub fn rounds(kind: Kind, dir: &Path, rounds: u64) -> Result<Kills> {
    let mut acknowledged = 0;
    for round in 0..rounds {
        acknowledged = append_until_killed(kind, dir, 1 + mix(round) % COMMITS_MAX, acknowledged)?;
        let checked = child::command("check", kind, dir, acknowledged)?.output()?;
        if !checked.status.success() {
            let reason = String::from_utf8_lossy(&checked.stderr);
            return Ok(Kills {
                rounds: round + 1,
                acknowledged,
                failure: Some(reason.lines().last().unwrap_or("no message").to_owned()),
            });
        }
    }
    Ok(Kills {
        rounds,
        acknowledged,
        failure: None,
    })
}

/// Kills the child after `answers` acknowledgements; returns the last acknowledged record.
fn append_until_killed(kind: Kind, dir: &Path, answers: u64, before: u64) -> Result<u64> {
    let mut child = child::command("append", kind, dir, 100_000)?
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let stdout = child.stdout.take().ok_or("the child has no stdout")?;
    let (mut acknowledged, mut seen) = (before, 0);
    for line in BufReader::new(stdout).lines() {
        if let Some(number) = line?.strip_prefix("acknowledged ") {
            acknowledged = number.parse()?;
            seen += 1;
            if seen == answers {
                child.kill()?;
            }
        }
    }
    child.wait()?;
    if seen < answers {
        return Err(format!("{}: the child ended by itself", kind.name()).into());
    }
    Ok(acknowledged)
}
