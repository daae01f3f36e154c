//! Changes of replicas since the last report to the namenode.

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::limits::REPLICAS_PER_REPORT_MAX;
use harvestfs_protocol::node::ReplicaChange;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Most changes that wait. When there are more, because the namenode is away, full reports are due
/// instead.
const CHANGES_QUEUED_MAX: usize = 4 * REPLICAS_PER_REPORT_MAX;

/// A bounded queue of changes. Adding never waits.
#[derive(Debug, Default)]
pub struct Changes {
    state: Mutex<State>,
    added: Notify,
}

#[derive(Debug, Default)]
struct State {
    queue: Vec<(StorageId, ReplicaChange)>,
    overflowed: bool,
}

/// What is to be reported.
#[derive(Debug, PartialEq, Eq)]
pub enum Pending {
    /// These changes, in order; possibly none.
    Changes(Vec<(StorageId, ReplicaChange)>),
    /// Too many to report one by one: everything.
    Everything,
}

impl Changes {
    /// Adds a change.
    pub fn push(&self, storage: StorageId, change: ReplicaChange) {
        let mut state = self.state.lock();
        if state.queue.len() >= CHANGES_QUEUED_MAX {
            state.queue = Vec::new();
            state.overflowed = true;
        }
        if !state.overflowed {
            state.queue.push((storage, change));
        }
        drop(state);
        self.added.notify_one();
    }

    /// Waits until there is something to report.
    pub async fn wait(&self) {
        while self.is_empty() {
            self.added.notified().await;
        }
    }

    /// Takes as much as one report may carry.
    pub fn take(&self) -> Pending {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.overflowed) {
            return Pending::Everything;
        }
        let rest_at = state.queue.len().min(REPLICAS_PER_REPORT_MAX);
        let rest = state.queue.split_off(rest_at);
        Pending::Changes(std::mem::replace(&mut state.queue, rest))
    }

    /// Puts back what could not be reported, before what came since.
    pub fn put_back(&self, mut changes: Vec<(StorageId, ReplicaChange)>) {
        let mut state = self.state.lock();
        changes.append(&mut state.queue);
        state.queue = changes;
    }

    /// Forgets everything, because full reports follow.
    pub fn clear(&self) {
        *self.state.lock() = State::default();
    }

    fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.queue.is_empty() && !state.overflowed
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::BlockId;

    use super::*;

    fn deleted(block: usize) -> (StorageId, ReplicaChange) {
        (StorageId(1), ReplicaChange::Deleted(BlockId(block as u64)))
    }

    #[tokio::test]
    async fn changes_come_in_order_and_in_parts() {
        let changes = Changes::default();
        for block in 0..REPLICAS_PER_REPORT_MAX + 1 {
            let (storage, change) = deleted(block);
            changes.push(storage, change);
        }
        changes.wait().await;
        let Pending::Changes(first) = changes.take() else {
            panic!("not that many");
        };
        assert_eq!(first.len(), REPLICAS_PER_REPORT_MAX);
        changes.put_back(vec![deleted(7)]);
        let rest = Pending::Changes(vec![deleted(7), deleted(REPLICAS_PER_REPORT_MAX)]);
        assert_eq!(changes.take(), rest);
        assert_eq!(changes.take(), Pending::Changes(vec![]));
    }

    #[test]
    fn too_many_changes_become_a_full_report() {
        let changes = Changes::default();
        for block in 0..CHANGES_QUEUED_MAX + 10 {
            let (storage, change) = deleted(block);
            changes.push(storage, change);
        }
        assert_eq!(changes.take(), Pending::Everything);
        assert_eq!(changes.take(), Pending::Changes(vec![]));
    }
}
