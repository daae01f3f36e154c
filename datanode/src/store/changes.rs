//! Changes of replicas since the last reports to the namenodes.

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::node::ReplicaChange;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::engine;
use crate::engine::link::LinkId;

/// A queue of changes for each namenode. Adding never waits.
#[derive(Debug)]
pub struct Changes {
    queues: Vec<ChangeQueue>,
}

/// A queue of changes that can be waited for.
#[derive(Debug, Default)]
pub struct ChangeQueue {
    queue: Mutex<engine::link::changes::Changes>,
    added: Notify,
}

impl Changes {
    /// For links to so many namenodes.
    pub fn new(namenodes: usize) -> Self {
        Self {
            queues: std::iter::repeat_with(ChangeQueue::default)
                .take(namenodes)
                .collect(),
        }
    }

    /// Adds a change, for all namenodes.
    pub fn push(&self, storage: StorageId, change: ReplicaChange) {
        for queue in &self.queues {
            queue.push(storage, change);
        }
    }

    /// What the namenode on a link is to be told.
    pub fn of(&self, LinkId(link): LinkId) -> &ChangeQueue {
        &self.queues[link]
    }
}

impl ChangeQueue {
    /// Adds a change, for this namenode only.
    pub fn push(&self, storage: StorageId, change: ReplicaChange) {
        self.queue.lock().push(storage, change);
        self.added.notify_one();
    }

    /// Waits until there is something to report.
    pub async fn wait(&self) {
        while self.lock().is_empty() {
            self.added.notified().await;
        }
    }

    /// The queue, to take from it.
    pub fn lock(&self) -> MutexGuard<'_, engine::link::changes::Changes> {
        self.queue.lock()
    }
}
