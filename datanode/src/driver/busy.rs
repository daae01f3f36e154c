//! Whether the server is to be left to its primary tenant: the single answer for everything in the datanode.

use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::node::{PrimaryLoad, ServerSize};
use harvestfs_protocol::watch;
use harvestfs_telemetry::metrics::Counter;
use harvestfs_telemetry::primary::{self, Monitor, Status};

use crate::engine::busy::{self, Looks};
use crate::store::{BlockStore, now};

/// How often the monitor is checked. Together with the time between its samples, this is the time within which a
/// datanode reacts; a check costs a microsecond.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whether the server is to be left alone, and for how long at least.
#[derive(Debug)]
pub struct BusySignal {
    monitor: Option<Monitor>,
    size: Option<ServerSize>,
    /// How long a denied peer should wait; `None` while there is no denial.
    denied: watch::Sender<Option<Duration>>,
}

impl BusySignal {
    /// Follows a monitor of the primary tenant, if there is one.
    pub fn new(monitor: Option<Monitor>) -> Self {
        Self {
            monitor,
            size: primary::memory_mib().map(|memory_mib| ServerSize {
                cores: primary::cores(),
                memory_mib,
            }),
            denied: watch::Sender::new(None),
        }
    }

    /// Checks the primary tenant and the disks, forever, and adds up how long the server is left alone.
    pub async fn keep_looking(&self, store: &BlockStore, busy_seconds: &Counter) {
        let mut looks = Looks::default();
        loop {
            let denied = busy::denied(self.status().map(|it| it.verdict), store.is_silent());
            let left_alone = looks.look(denied.is_some(), now());
            if !left_alone.is_zero() {
                busy_seconds.inc_by(left_alone.as_secs_f64());
            }
            self.set(denied);
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn set(&self, denied: Option<Duration>) {
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

    /// Returns a receiver that changes whenever a denial begins or ends.
    pub fn changes(&self) -> watch::Receiver<Option<Duration>> {
        self.denied.subscribe()
    }

    /// The primary tenant's resource usage for heartbeats, from the last sample.
    pub fn primary(&self) -> Option<PrimaryLoad> {
        busy::primary(&self.status()?.load?, self.size)
    }

    fn status(&self) -> Option<Status> {
        let monitor = self.monitor.as_ref();
        monitor.map(|monitor| monitor.status(now()))
    }
}
