//! Volumes that are still being opened when the others begin to serve. Each joins them once it is open, and the
//! namenodes learn of it by new registrations. A restart would not do instead: a disk may be as slow at each start,
//! and the process would be restarted over and over.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::types::VolumeStatus;
use harvestfs_protocol::watch;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::driver::budget::Budget;
use crate::driver::node::Node;
use crate::store::{Double, Found, PieceRemoved, Progress, Volume, VolumeError, VolumeOptions};

/// How long removal and verification pause while a disk does not respond.
pub const SILENCE_PAUSE: Duration = Duration::from_secs(30);

/// An open volume, with the replicas found on it.
pub type OpenVolume = (Arc<Volume>, Vec<Found>);

/// A volume that is still being opened.
pub struct LateVolume {
    pub options: VolumeOptions,
    pub progress: Arc<Progress>,
    pub opened: oneshot::Receiver<Result<OpenVolume, VolumeError>>,
}

/// The state of all such volumes.
pub struct Late {
    volumes: Vec<(VolumeOptions, Arc<Progress>)>,
    /// The directories of volumes that are not used before the next start, and are in no status.
    failed: Mutex<Vec<PathBuf>>,
    /// How many have joined.
    joined: watch::Sender<usize>,
    /// The current configuration, if it was read again since the start.
    configured: Mutex<Option<Vec<VolumeOptions>>>,
}

impl Late {
    /// Such volumes, and the directories of those that have failed already.
    pub fn new(volumes: &[LateVolume], failed: Vec<PathBuf>) -> Self {
        let volumes = volumes
            .iter()
            .map(|it| (it.options.clone(), it.progress.clone()));
        Self {
            volumes: volumes.collect(),
            failed: Mutex::new(failed),
            joined: watch::Sender::new(0),
            configured: Mutex::new(None),
        }
    }

    /// Appends the status of volumes that have not joined yet. They cannot be used, but they exist: a namenode to
    /// which they are not reported would take the server for reimaged and cancel what operators have ordered for it.
    pub fn add_to(&self, statuses: &mut Vec<VolumeStatus>) {
        for (options, progress) in &self.volumes {
            let is_there = |it: &VolumeStatus| Some(it.storage) == progress.storage();
            if let Some(storage) = progress.storage()
                && !statuses.iter().any(is_there)
            {
                statuses.push(VolumeStatus {
                    storage,
                    class: options.class,
                    quota_bytes: self.quota_bytes(options, progress),
                    used_bytes: 0,
                    healthy: false,
                    shrinks_in_ms: None,
                });
            }
        }
    }

    /// The directories of configured volumes that are in no status, because they are refused, or because it is not
    /// known which volumes they are: otherwise nothing but the log would tell that they are missing.
    pub fn without_status(&self) -> Vec<PathBuf> {
        let unknown = self
            .volumes
            .iter()
            .filter(|(_, progress)| progress.storage().is_none())
            .map(|(options, _)| options.path.clone());
        self.failed.lock().iter().cloned().chain(unknown).collect()
    }

    /// The quota of such a volume once it is open. The namenode considers a quota change done when it sees the quota
    /// that it ordered.
    fn quota_bytes(&self, options: &VolumeOptions, progress: &Progress) -> u64 {
        let configured = self.configured.lock();
        let mut of_volumes = configured.iter().flatten();
        let of_volume = of_volumes.find(|it| it.path == options.path);
        let quota_bytes = of_volume.map(|it| it.quota_bytes);
        let newer = quota_bytes.filter(|it| *it != options.quota_bytes);
        let opened_with = progress.quota_bytes().unwrap_or(options.quota_bytes);
        newer.unwrap_or(opened_with)
    }

    /// Returns a receiver that changes with each volume that joins from now on.
    pub fn joined(&self) -> watch::Receiver<usize> {
        self.joined.subscribe()
    }

    /// Takes note that another volume has joined.
    pub fn has_joined(&self) {
        self.joined.send_modify(|joined| *joined += 1);
    }

    /// Takes note that the configuration was read again.
    pub fn reconfigure(&self, volumes: &[VolumeOptions]) {
        *self.configured.lock() = Some(volumes.to_vec());
    }
}

/// Waits for a volume to open and adds it to the others, unless the node stops first. Those of its replicas that
/// another volume has by then are removed at a limited rate, like all removals; 0 means no limit.
pub async fn run(node: Arc<Node>, volume: LateVolume, removal_bytes_per_second: u64) {
    let budget = Budget::new(removal_bytes_per_second);
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = join_when_open(&node, volume, &budget) => {}
    }
}

async fn join_when_open(node: &Node, late: LateVolume, budget: &Budget) {
    let LateVolume {
        options, opened, ..
    } = late;
    let path = options.path.display();
    let (volume, found) = match opened.await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => {
            tracing::error!(%error, "a volume cannot be used");
            return;
        }
        Err(_) => {
            tracing::error!(volume = %path, "opening the volume broke off: this is a bug");
            return;
        }
    };
    let Some(doubles) = node.join(&volume, found).await else {
        let storage = volume.storage();
        tracing::error!(
            volume = %path, %storage,
            "the server has this volume already: one directory is a copy of the other, take it away"
        );
        // Its status is that of the other one.
        node.late.failed.lock().push(options.path);
        return;
    };
    if volume.health.is_good() {
        tracing::info!(volume = %path, "the volume is open by now, and is used");
    }
    // It was opened with the previous quota.
    let configured = node.late.configured.lock().clone();
    if let Some(configured) = configured {
        node.store.configure_quotas(&configured).await;
    }
    remove(&volume, doubles, budget).await;
}

/// Removes files that do not count. Each slow start would otherwise leave more of them behind, and the space that they
/// take is the primary tenant's.
async fn remove(volume: &Volume, doubles: Vec<Double>, budget: &Budget) {
    for double in doubles {
        if !volume.health.is_good() {
            return;
        }
        let mut left = Some(double);
        while let Some(double) = left {
            while volume.is_silent() {
                tokio::time::sleep(SILENCE_PAUSE).await;
            }
            left = match double.remove_piece().await {
                Ok(PieceRemoved::Last(bytes)) => {
                    budget.spend(bytes).await;
                    None
                }
                Ok(PieceRemoved::Some(bytes, rest)) => {
                    budget.spend(bytes).await;
                    Some(rest)
                }
                Ok(PieceRemoved::Silent(rest)) => {
                    tokio::time::sleep(SILENCE_PAUSE).await;
                    Some(rest)
                }
                Err(error) => {
                    tracing::warn!(%error, "a file that is not needed is left alone");
                    None
                }
            };
        }
    }
}
