//! Changes of replicas since the last report to the namenode.

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::node::ReplicaChange;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::engine;

/// A queue of changes that can be waited for. Adding never waits.
#[derive(Debug, Default)]
pub struct Changes {
    queue: Mutex<engine::link::changes::Changes>,
    added: Notify,
}

impl Changes {
    /// Adds a change.
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
