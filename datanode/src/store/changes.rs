//! Changes of replicas since the last reports to the namenodes.

use std::sync::atomic::{AtomicBool, Ordering};

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::node::ReplicaChange;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::engine;
use crate::engine::link::LinkId;

/// A queue of changes for each link. Adding never waits.
#[derive(Debug)]
pub struct Changes {
    queues: Vec<ChangeQueue>,
}

/// A queue of changes, with a way to wait for them.
#[derive(Debug, Default)]
pub struct ChangeQueue {
    /// There is a namenode to report to.
    is_used: AtomicBool,
    queue: Mutex<engine::link::changes::Changes>,
    added: Notify,
}

impl Changes {
    /// Queues for at most so many links at a time.
    pub fn new(links_max: usize) -> Self {
        Self {
            queues: std::iter::repeat_with(ChangeQueue::default)
                .take(links_max)
                .collect(),
        }
    }

    /// Adds a change, for all namenodes.
    pub fn push(&self, storage: StorageId, change: ReplicaChange) {
        let used = self.queues.iter().filter(|it| it.is_used());
        for queue in used {
            queue.push(storage, change);
        }
    }

    /// The queue of changes for the namenode on a link.
    pub fn of(&self, LinkId(link): LinkId) -> &ChangeQueue {
        &self.queues[link]
    }
}

impl ChangeQueue {
    /// Notes that from now on there is a namenode to report to, starting with everything.
    pub fn begin(&self) {
        self.is_used.store(true, Ordering::Release);
    }

    /// Notes that there is no longer a namenode to report to.
    pub fn end(&self) {
        self.is_used.store(false, Ordering::Release);
        self.lock().clear();
    }

    fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

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

    /// Locks the queue, to take from it.
    pub fn lock(&self) -> MutexGuard<'_, engine::link::changes::Changes> {
        self.queue.lock()
    }
}
