//! Processor time of a piece of work, measured in two ways.
//!
//! *Processes*: user and system time of this program and of the processes that belong to the
//! target. They are found by a variable in their environment ([`Marker`]), because a cluster that
//! detaches itself is no child of this program. *Machine*: everything that was not idle on the
//! whole machine; it includes kernel threads and every other process.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result};

const MARKER_VARIABLE: &str = "MOUNT_BENCH_TARGET";

/// An environment variable that marks all processes of one target.
#[derive(Debug, Clone)]
pub struct Marker {
    value: String,
}

impl Marker {
    /// A marker that no other target has: from a name and the id of this process.
    pub fn new(target: &str) -> Self {
        Self {
            value: format!("{target}-{}", std::process::id()),
        }
    }

    /// Name and value of the variable, for `Command::env`.
    pub fn variable(&self) -> (&str, &str) {
        (MARKER_VARIABLE, &self.value)
    }

    /// The ids of all living processes that carry the marker.
    pub fn processes(&self) -> Vec<i32> {
        let wanted = format!("{MARKER_VARIABLE}={}", self.value).into_bytes();
        let Ok(entries) = fs::read_dir("/proc") else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| {
                // A process may end between listing and reading, or belong to somebody else.
                fs::read(format!("/proc/{pid}/environ"))
                    .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|v| v == wanted))
            })
            .collect()
    }
}

/// Processor time used up to one moment.
#[derive(Debug)]
pub struct Snapshot {
    own_ticks: u64,
    target_ticks: HashMap<i32, u64>,
    machine_ticks: u64,
}

/// Processor time used between two snapshots, in seconds.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Used {
    /// By this program and the processes of the target.
    pub processes_s: f64,
    /// By everything on the machine, the kernel's own threads included.
    pub machine_s: f64,
}

impl Snapshot {
    /// Reads the counters now.
    pub fn take(marker: Option<&Marker>) -> Result<Self> {
        // Children of this program (tar, rm) count once they are waited for.
        let own_ticks = process_ticks("self", true).context("/proc/self/stat is not readable")?;
        let target_ticks = marker
            .map(Marker::processes)
            .unwrap_or_default()
            .into_iter()
            .filter_map(|pid| Some((pid, process_ticks(&pid.to_string(), false)?)))
            .collect();
        let stat = fs::read_to_string("/proc/stat")?;
        let machine_ticks = machine_ticks(&stat).context("/proc/stat has no line «cpu»")?;
        Ok(Self {
            own_ticks,
            target_ticks,
            machine_ticks,
        })
    }

    /// Time used since `earlier`. Processes that ended in between are not counted.
    pub fn since(&self, earlier: &Self) -> Used {
        let target_ticks: u64 = self
            .target_ticks
            .iter()
            .map(|(pid, ticks)| {
                ticks.saturating_sub(earlier.target_ticks.get(pid).copied().unwrap_or(0))
            })
            .sum();
        let per_second = rustix::param::clock_ticks_per_second() as f64;
        let own_ticks = self.own_ticks.saturating_sub(earlier.own_ticks);
        let machine_ticks = self.machine_ticks.saturating_sub(earlier.machine_ticks);
        Used {
            processes_s: (own_ticks + target_ticks) as f64 / per_second,
            machine_s: machine_ticks as f64 / per_second,
        }
    }
}

fn process_ticks(pid: &str, with_children: bool) -> Option<u64> {
    parse_process_ticks(
        &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?,
        with_children,
    )
}

/// User and system time of `/proc/PID/stat`, optionally with that of children waited for.
fn parse_process_ticks(stat: &str, with_children: bool) -> Option<u64> {
    // The second field is the program's name in parentheses and may itself hold spaces and
    // parentheses: what follows the last one is field 3. Times are the fields 14 to 17.
    let fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let count = if with_children { 4 } else { 2 };
    let ticks: Vec<u64> = fields
        .skip(11)
        .take(count)
        .map(|field| field.parse().ok())
        .collect::<Option<_>>()?;
    (ticks.len() == count).then(|| ticks.iter().sum())
}

/// Everything but idle and waiting in the first line of `/proc/stat`.
fn machine_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line
        .split_ascii_whitespace()
        .map(|field| field.parse().ok())
        .collect::<Option<_>>()?;
    // user, nice, system, idle, iowait, irq, softirq; what follows is counted elsewhere already.
    Some(ticks.iter().take(3).sum::<u64>() + ticks.iter().skip(5).take(2).sum::<u64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_times_are_found_behind_a_hostile_name() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1";
        assert_eq!(parse_process_ticks(stat, false), Some(120));
        assert_eq!(parse_process_ticks(stat, true), Some(127));
        assert_eq!(parse_process_ticks("7 (a) S 1 2", false), None);
    }

    #[test]
    fn machine_time_excludes_idle_and_waiting() {
        let stat = "cpu  1 20 300 7777 8888 4000 50000 9 9 9\ncpu0 0 0\n";
        assert_eq!(machine_ticks(stat), Some(54321));
    }

    #[test]
    fn a_marked_process_is_found_and_an_unmarked_one_is_not() {
        let marker = Marker::new("cpu-test");
        assert!(marker.processes().is_empty());
        let (name, value) = marker.variable();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .env(name, value)
            .spawn()
            .unwrap();
        // The environment is readable only a moment after the new program began.
        let limit = std::time::Duration::from_secs(10);
        let seen = crate::target::wait_until("the child's environment", limit, || {
            Ok(!marker.processes().is_empty())
        });
        let found = marker.processes();
        child.kill().unwrap();
        child.wait().unwrap();
        seen.unwrap();
        assert_eq!(found, vec![i32::try_from(child.id()).unwrap()]);
    }
}
