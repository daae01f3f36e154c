//! Changes of replicas since the last report to the namenode.

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::limits::REPLICAS_PER_REPORT_MAX;
use harvestfs_protocol::node::ReplicaChange;

/// Maximum number of queued changes. If there are more, because the namenode is unreachable, full reports are sent
/// instead.
const CHANGES_QUEUED_MAX: usize = 4 * REPLICAS_PER_REPORT_MAX;

/// What happened to a replica on a volume.
pub type Change = (StorageId, ReplicaChange);

/// A bounded queue of changes.
#[derive(Debug)]
pub struct Changes {
    queue: Vec<Change>,
    overflowed: bool,
    queued_max: usize,
    per_report_max: usize,
}

/// The pending report.
#[derive(Debug, PartialEq, Eq)]
pub enum Pending {
    /// These changes, in order; possibly none.
    Changes(Vec<Change>),
    /// Everything: there were too many changes to report them one by one.
    Everything,
}

impl Default for Changes {
    fn default() -> Self {
        Self::with_limits(CHANGES_QUEUED_MAX, REPLICAS_PER_REPORT_MAX)
    }
}

impl Changes {
    pub(super) fn with_limits(queued_max: usize, per_report_max: usize) -> Self {
        // Otherwise empty reports would follow each other endlessly.
        assert!(
            (1..=queued_max).contains(&per_report_max),
            "{per_report_max} changes in a report, and {queued_max} that wait"
        );
        Self {
            queue: Vec::new(),
            overflowed: false,
            queued_max,
            per_report_max,
        }
    }

    /// Adds a change.
    pub fn push(&mut self, storage: StorageId, change: ReplicaChange) {
        if self.queue.len() >= self.queued_max {
            self.queue = Vec::new();
            self.overflowed = true;
        }
        if !self.overflowed {
            self.queue.push((storage, change));
        }
    }

    /// Takes as many changes as one report may carry.
    pub fn take(&mut self) -> Pending {
        if std::mem::take(&mut self.overflowed) {
            return Pending::Everything;
        }
        let rest_at = self.queue.len().min(self.per_report_max);
        let rest = self.queue.split_off(rest_at);
        Pending::Changes(std::mem::replace(&mut self.queue, rest))
    }

    /// Puts back changes that could not be reported, before those that were added since.
    pub fn put_back(&mut self, mut changes: Vec<Change>) {
        assert!(
            changes.len() <= self.per_report_max,
            "{} changes are put back, and a report has {}",
            changes.len(),
            self.per_report_max
        );
        changes.append(&mut self.queue);
        self.queue = changes;
    }

    /// Forgets everything, because full reports follow.
    pub fn clear(&mut self) {
        self.queue = Vec::new();
        self.overflowed = false;
    }

    /// Whether there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && !self.overflowed
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::BlockId;

    use super::*;

    fn deleted(block: usize) -> Change {
        (StorageId(1), ReplicaChange::Deleted(BlockId(block as u64)))
    }

    #[test]
    fn changes_come_in_order_and_in_parts() {
        let mut changes = Changes::default();
        for block in 0..REPLICAS_PER_REPORT_MAX + 1 {
            let (storage, change) = deleted(block);
            changes.push(storage, change);
        }
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
        let mut changes = Changes::default();
        for block in 0..CHANGES_QUEUED_MAX + 10 {
            let (storage, change) = deleted(block);
            changes.push(storage, change);
        }
        assert_eq!(changes.take(), Pending::Everything);
        assert_eq!(changes.take(), Pending::Changes(vec![]));
    }
}
