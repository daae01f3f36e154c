//! Credentials of the callers on whose behalf the kernel makes requests.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use harvestfs_protocol::limits::GROUPS_MAX;
use harvestfs_protocol::types::Credentials;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::caller::Processes;
use crate::serve::Header;
use crate::{blocking, now};

/// How long groups are cached: a process that gives up a group keeps it here for that time. The kernel, which checks
/// first, sees the change immediately.
const GROUPS_LIFETIME: Duration = Duration::from_secs(1);
/// Number of processes whose groups are cached.
const PROCESSES_MAX: usize = 1_024;
/// Number of processes whose groups are read at the same time.
const READS_MAX: usize = 16;
/// How long reading groups may take; after that, the process counts as having none.
const READ_DEADLINE: Duration = Duration::from_secs(10);

/// Supplementary groups, which requests do not carry, of the processes that called most recently.
pub struct Callers {
    cache: Arc<Cache>,
}

struct Cache {
    processes: Arc<dyn Processes>,
    groups: Mutex<HashMap<Process, (Instant, Vec<u32>)>>,
    reads: Arc<Semaphore>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Process {
    pid: u32,
    uid: u32,
    gid: u32,
}

impl Callers {
    /// Starts with an empty cache.
    pub fn new(processes: Arc<dyn Processes>) -> Self {
        Self {
            cache: Arc::new(Cache {
                processes,
                groups: Mutex::default(),
                reads: Arc::new(Semaphore::new(READS_MAX)),
            }),
        }
    }

    /// The credentials of the calling process. To be awaited where the request is served, and not on the thread that
    /// reads requests: reading `/proc` for a process can wait for a lock that the process holds until one of its
    /// requests is answered.
    pub fn credentials(&self, header: Header) -> impl Future<Output = Credentials> + Send + use<> {
        self.of(Process {
            pid: header.pid,
            uid: header.uid,
            gid: header.gid,
        })
    }

    fn of(&self, process: Process) -> impl Future<Output = Credentials> + Send + use<> {
        // Root needs none.
        let cache = (process.uid != 0).then(|| self.cache.clone());
        async move {
            Credentials {
                uid: process.uid,
                gid: process.gid,
                groups: match cache {
                    None => Vec::new(),
                    Some(cache) => cache.groups(process).await,
                },
            }
        }
    }
}

impl Cache {
    async fn groups(&self, process: Process) -> Vec<u32> {
        if let Some(groups) = self.remembered(process) {
            return groups;
        }
        let (reads, processes) = (self.reads.clone(), self.processes.clone());
        let read = timeout(READ_DEADLINE, async move {
            let permit = reads.acquire_owned().await.ok()?;
            let read = blocking::run(async move {
                let groups = processes.groups(process.pid);
                // Only now: a read that was given up still runs.
                drop(permit);
                groups
            });
            read.await
        });
        let Ok(Some(groups)) = read.await else {
            tracing::warn!(
                pid = process.pid,
                "the groups of a process cannot be read in time; it is served without them"
            );
            return Vec::new();
        };
        let mut processes = self.groups.lock();
        if processes.len() >= PROCESSES_MAX {
            processes.clear();
        }
        processes.insert(process, (now(), groups.clone()));
        groups
    }

    fn remembered(&self, process: Process) -> Option<Vec<u32>> {
        let processes = self.groups.lock();
        let (read_at, groups) = processes.get(&process)?;
        (now().duration_since(*read_at) < GROUPS_LIFETIME).then(|| groups.clone())
    }
}

/// Reads the supplementary groups of a process. Returns an empty list if the process is gone or in another PID
/// namespace: then only its primary group counts.
pub fn read_groups(pid: u32) -> Vec<u32> {
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
    use crate::caller::ProcFs;

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

    #[tokio::test]
    async fn groups_are_read_elsewhere_and_then_remembered() {
        let callers = Callers::new(Arc::new(ProcFs));
        let this = Process {
            pid: std::process::id(),
            uid: 1,
            gid: 2,
        };
        let groups = read_groups(this.pid);
        let reads = callers.cache.reads.clone();
        let all = reads.acquire_many(READS_MAX as u32).await.expect("open");
        let mut first = Box::pin(callers.of(this));
        assert!(
            is_pending(&mut first).await,
            "a read waits for its turn instead of blocking the thread"
        );
        drop(all);
        assert_eq!(first.await.groups, groups);
        let _all = reads.acquire_many(READS_MAX as u32).await.expect("open");
        assert_eq!(callers.of(this).await.groups, groups);
        let root = Process { uid: 0, ..this };
        assert!(callers.of(root).await.groups.is_empty());
    }

    async fn is_pending(future: &mut (impl Future<Output = Credentials> + Unpin)) -> bool {
        std::future::poll_fn(|context| {
            let polled = std::pin::Pin::new(&mut *future).poll(context);
            std::task::Poll::Ready(polled.is_pending())
        })
        .await
    }
}
