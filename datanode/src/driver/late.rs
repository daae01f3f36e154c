//! Volumes that are still being opened when the others begin to serve. Each joins them once it is open, and the
//! namenodes are told by new registrations. A restart instead would not do: a disk may be as slow at each start, and the
//! process would be started over and over.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::types::VolumeStatus;
use harvestfs_protocol::watch;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::driver::budget::Budget;
use crate::driver::node::Node;
use crate::store::{Double, Found, PieceRemoved, Progress, Volume, VolumeError, VolumeOptions};

/// How long nothing more is removed, or verified, while a disk does not answer.
pub const SILENCE_PAUSE: Duration = Duration::from_secs(30);

/// What is open, with what was found on it.
pub type OpenVolume = (Arc<Volume>, Vec<Found>);

/// A volume that is still being opened.
pub struct LateVolume {
    pub options: VolumeOptions,
    pub progress: Arc<Progress>,
    pub opened: oneshot::Receiver<Result<OpenVolume, VolumeError>>,
}

/// What is known about such volumes.
pub struct Late {
    volumes: Vec<(VolumeOptions, Arc<Progress>)>,
    /// How many have joined.
    joined: watch::Sender<usize>,
    /// What the configuration says by now, if it was read again.
    configured: Mutex<Option<Vec<VolumeOptions>>>,
}

impl Late {
    pub fn new(volumes: &[LateVolume]) -> Self {
        let volumes = volumes
            .iter()
            .map(|it| (it.options.clone(), it.progress.clone()));
        Self {
            volumes: volumes.collect(),
            joined: watch::Sender::new(0),
            configured: Mutex::new(None),
        }
    }

    /// Adds those that have not joined to those that have. They cannot be used, but they are there: a namenode that was
    /// not told of them would take the server for one that was reimaged, and end what operators have said of it.
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

    /// What such a volume may use once it is open. The namenode takes an order to change it for carried out when it sees
    /// what it ordered.
    fn quota_bytes(&self, options: &VolumeOptions, progress: &Progress) -> u64 {
        let configured = self.configured.lock();
        let mut of_volumes = configured.iter().flatten();
        let of_volume = of_volumes.find(|it| it.path == options.path);
        let quota_bytes = of_volume.map(|it| it.quota_bytes);
        let newer = quota_bytes.filter(|it| *it != options.quota_bytes);
        let opened_with = progress.quota_bytes().unwrap_or(options.quota_bytes);
        newer.unwrap_or(opened_with)
    }

    /// Changes with each volume that joins from now on.
    pub fn joined(&self) -> watch::Receiver<usize> {
        self.joined.subscribe()
    }

    /// Another volume has joined.
    pub fn has_joined(&self) {
        self.joined.send_modify(|joined| *joined += 1);
    }

    /// The configuration was read again, and says this.
    pub fn reconfigure(&self, volumes: &[VolumeOptions]) {
        *self.configured.lock() = Some(volumes.to_vec());
    }
}

/// Waits for a volume and has it join, unless the node stops before. What it has that is on another one by then is removed
/// at a rate, as with all replicas that are removed; 0 means no limit.
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
        return;
    };
    if volume.health.is_good() {
        tracing::info!(volume = %path, "the volume is open by now, and is used");
    }
    // It was opened with the quota of before.
    let configured = node.late.configured.lock().clone();
    if let Some(configured) = configured {
        node.store.configure_quotas(&configured).await;
    }
    remove(&volume, doubles, budget).await;
}

/// Each slow start would leave more of them behind, and what they take is the owner's.
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
