//! Whether the server is to be left to its owner: the one answer for everything in the datanode.

use std::time::{Duration, Instant as StdInstant};

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::node::PrimaryLoad;
use harvestfs_protocol::watch;
use harvestfs_telemetry::gate::Verdict;
use harvestfs_telemetry::metrics::Counter;
use harvestfs_telemetry::primary::{Monitor, Status};
use tokio::time::Instant;

use crate::store::BlockStore;

/// How often the monitor is looked at. With the time between its samples it makes up the time within
/// which a datanode reacts; a look costs a microsecond.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// When to ask again a datanode whose disks do not answer.
const SILENT_RETRY: Duration = Duration::from_secs(2);

/// Says whether the server is to be left alone, and until when at least.
#[derive(Debug)]
pub struct BusySignal {
    monitor: Option<Monitor>,
    /// How long a denied peer should wait; `None` while there is no denial.
    denied: watch::Sender<Option<Duration>>,
}

impl BusySignal {
    /// Moved by a monitor of the primary, if there is one.
    pub fn new(monitor: Option<Monitor>) -> Self {
        Self {
            monitor,
            denied: watch::Sender::new(None),
        }
    }

    /// Looks at the primary and at the disks, for ever, and adds up how long the server is left
    /// alone.
    pub async fn keep_looking(&self, store: &BlockStore, busy_seconds: &Counter) {
        let mut looked = Instant::now();
        loop {
            self.look(store);
            tokio::time::sleep(LOOK_INTERVAL).await;
            let since = std::mem::replace(&mut looked, Instant::now());
            if self.denied.borrow().is_some() {
                busy_seconds.inc_by((looked - since).as_secs_f64());
            }
        }
    }

    fn look(&self, store: &BlockStore) {
        let by_primary = match self.status().map(|status| status.verdict) {
            Some(Verdict::Busy { retry_after, .. }) => Some(retry_after),
            Some(Verdict::Free) | None => None,
        };
        // A disk that the owner keeps so busy that it does not answer at all.
        let by_disks = store.is_silent().then_some(SILENT_RETRY);
        let denied = by_primary.or(by_disks);
        self.denied.send_if_modified(|known| {
            let changed = known.is_some() != denied.is_some();
            *known = denied;
            changed
        });
    }

    /// The denial, if the server is to be left alone.
    pub fn denial(&self) -> Option<DataError> {
        self.denied.borrow().map(|retry_after| DataError::Busy {
            retry_after_ms: retry_after.as_millis().try_into().unwrap_or(u32::MAX),
        })
    }

    /// Waits until the server is to be left alone, and returns the denial.
    pub async fn denied(&self) -> DataError {
        let mut changes = self.denied.subscribe();
        loop {
            if let Some(denial) = self.denial() {
                return denial;
            }
            // The sender lives as long as `self`.
            let _ = changes.changed().await;
        }
    }

    /// Waits until the server may be used.
    pub async fn free(&self) {
        let _ = self.denied.subscribe().wait_for(Option::is_none).await;
    }

    /// Waits until the answer of [`BusySignal::denial`] changes from one to none, or back.
    pub fn changes(&self) -> watch::Receiver<Option<Duration>> {
        self.denied.subscribe()
    }

    /// What the primary uses, for heartbeats, from the last sample.
    pub fn primary(&self) -> Option<PrimaryLoad> {
        let load = self.status()?.load?;
        // Shares are from 0 to 1.
        let permille = |share: f64| (share * 1000.0).round() as u16;
        Some(PrimaryLoad {
            cpu_permille: permille(load.cpu_share?),
            memory_permille: load.memory_share.map(permille),
            stalled_permille: load.stalled_share.map(permille),
        })
    }

    fn status(&self) -> Option<Status> {
        let now: StdInstant = Instant::now().into_std();
        self.monitor.as_ref().map(|monitor| monitor.status(now))
    }
}
