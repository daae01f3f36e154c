//! On whose behalf the kernel asks.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use fuser::Request;
use harvestfs_protocol::{limits::GROUPS_MAX, types::Credentials};

/// A process that gives up a group keeps it here for this long. The kernel, which checks first,
/// sees it at once.
const GROUPS_LIFETIME: Duration = Duration::from_secs(1);
/// Processes remembered.
const PROCESSES_MAX: usize = 1_024;

/// Supplementary groups, which requests don't carry, of the processes that called last.
#[derive(Debug, Default)]
pub struct Callers {
    processes: Mutex<HashMap<Process, (Instant, Vec<u32>)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Process {
    pid: u32,
    uid: u32,
    gid: u32,
}

impl Callers {
    /// The credentials of the calling process.
    pub fn credentials(&self, request: &Request) -> Credentials {
        let process = Process {
            pid: request.pid(),
            uid: request.uid(),
            gid: request.gid(),
        };
        Credentials {
            uid: process.uid,
            gid: process.gid,
            // Root may do everything without them.
            groups: if process.uid == 0 {
                Vec::new()
            } else {
                self.groups(process)
            },
        }
    }

    fn groups(&self, process: Process) -> Vec<u32> {
        let now = Instant::now();
        {
            let processes = self
                .processes
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some((read_at, groups)) = processes.get(&process)
                && now.duration_since(*read_at) < GROUPS_LIFETIME
            {
                return groups.clone();
            }
        }
        let groups = read_groups(process.pid);
        let mut processes = self
            .processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if processes.len() >= PROCESSES_MAX {
            processes.clear();
        }
        processes.insert(process, (now, groups.clone()));
        groups
    }
}

/// None when the process is gone or of another PID namespace: then only its primary group counts.
fn read_groups(pid: u32) -> Vec<u32> {
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => parse_groups(&status),
        Err(_) => Vec::new(),
    }
}

fn parse_groups(status: &str) -> Vec<u32> {
    status
        .lines()
        .find_map(|line| line.strip_prefix("Groups:"))
        .map(|groups| {
            groups
                .split_ascii_whitespace()
                .filter_map(|group| group.parse().ok())
                .take(GROUPS_MAX)
                .collect()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_a_status_file() {
        assert_eq!(
            parse_groups("Name:\tsh\nGroups:\t4 24 1000 \nNStgid:\t1\n"),
            [4, 24, 1000]
        );
        assert!(parse_groups("Groups:\t\n").is_empty());
        assert!(parse_groups("").is_empty());
    }

    #[test]
    fn a_process_that_is_gone_has_no_groups() {
        assert!(read_groups(u32::MAX).is_empty());
    }
}
