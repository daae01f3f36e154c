//! Taking over from another namenode, whose commands may still be carried out.
//!
//! A datanode drops the commands of the previous namenode as soon as it learns the epoch of this one. Until then it
//! may remove a replica that this namenode considers confirmed, and relies on when it has another one removed. So a
//! replica is relied on only when a full report of its volume was begun after its datanode had received an answer of
//! this epoch. Meanwhile, everything else continues: reads, writes and repair.
//!
//! An answer that was given has not necessarily arrived: it waits until the epoch is committed, and is only then on
//! its way. The next heartbeat on the same connection shows that it has arrived, because a datanode sends none before
//! it has the answer to the last one; if that answer does not arrive, the datanode ends the connection and registers
//! again.

use harvestfs_protocol::planted::{self, Bug};
use rustc_hash::FxHashSet;

use super::Cluster;
use super::table::{NodeIx, StorageIx};

/// Which datanodes may not know this namenode's epoch yet, and whose reports prove nothing for that
/// reason.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// Datanodes that have received no answer since the takeover, as far as is known.
    unanswered: FxHashSet<NodeIx>,
    /// Those of them to which an answer is under way.
    answering: FxHashSet<NodeIx>,
    /// Volumes without a full report that was begun after an answer.
    unproven: FxHashSet<StorageIx>,
    /// Those of them for which such a report is under way.
    under_way: FxHashSet<StorageIx>,
}

impl Takeover {
    /// Whether the reports of a volume can be relied on when replicas elsewhere are removed.
    pub(super) fn is_proven(&self, storage: StorageIx) -> bool {
        !self.unproven.contains(&storage) || planted::is(Bug::TrustsReportsOfBefore)
    }

    /// Notes that a datanode registered with this namenode while it leads: its reports come after that.
    pub(super) fn registered(&mut self, node: NodeIx, storages: &[StorageIx]) {
        self.connected(node);
        self.unanswered.remove(&node);
        for storage in storages {
            self.unproven.remove(storage);
            self.under_way.remove(storage);
        }
    }

    /// Notes that a datanode has a new connection: an answer under way on the previous one may be lost.
    pub(super) fn connected(&mut self, node: NodeIx) {
        self.answering.remove(&node);
    }

    /// Notes that a datanode is given an answer of this epoch.
    pub(super) fn answering(&mut self, node: NodeIx) {
        if self.unanswered.contains(&node) {
            self.answering.insert(node);
        }
    }

    /// Notes that a heartbeat arrived: the datanode has the answer to the one before it.
    pub(super) fn heard(&mut self, node: NodeIx) {
        if self.answering.remove(&node) {
            self.unanswered.remove(&node);
        }
    }

    /// Whether a report that a datanode begins now proves nothing.
    pub(super) fn is_unanswered(&self, node: NodeIx) -> bool {
        self.unanswered.contains(&node)
    }

    /// Notes that the first part of a full report arrived.
    pub(super) fn report_begun(&mut self, node: NodeIx, storage: StorageIx) {
        if self.is_proven(storage) {
            return;
        }
        if self.is_unanswered(node) {
            self.under_way.remove(&storage);
        } else {
            self.under_way.insert(storage);
        }
    }

    /// Notes that the last part of a full report arrived. Returns false if another report is needed.
    pub(super) fn report_complete(&mut self, storage: StorageIx) -> bool {
        assert!(
            self.under_way.is_subset(&self.unproven),
            "reports are awaited of volumes that are proven: {:?} of {:?}",
            self.under_way,
            self.unproven
        );
        if self.under_way.remove(&storage) {
            self.unproven.remove(&storage);
        }
        self.is_proven(storage)
    }
}

impl Cluster {
    /// Makes this namenode give commands, after it had followed another one.
    pub fn take_over(&mut self, now_ms: u64) {
        self.advance(now_ms);
        assert!(self.recovering, "who commands already takes nothing over");
        self.recovering = false;
        let mut storages = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            storages.extend(
                node.storages
                    .iter()
                    .map(|&storage| (index as NodeIx, storage)),
            );
        }
        self.takeover = Takeover {
            unanswered: storages.iter().map(|(node, _)| *node).collect(),
            answering: FxHashSet::default(),
            unproven: storages.iter().map(|(_, storage)| *storage).collect(),
            under_way: FxHashSet::default(),
        };
        for (node, storage) in storages {
            self.ask_for_report(node, storage);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken_over() -> Takeover {
        Takeover {
            unanswered: FxHashSet::from_iter([1]),
            answering: FxHashSet::default(),
            unproven: FxHashSet::from_iter([7, 8]),
            under_way: FxHashSet::default(),
        }
    }

    #[test]
    fn only_a_report_that_was_begun_after_an_answer_proves_a_volume() {
        let mut takeover = taken_over();
        assert!(takeover.is_proven(6));
        // One that was under way when it took over.
        assert!(!takeover.report_complete(7));
        takeover.report_begun(1, 7);
        // The first heartbeat since: the answer to the one before it was of no epoch of this namenode.
        takeover.heard(1);
        takeover.answering(1);
        assert!(!takeover.report_complete(7));
        // The answer may still be under way.
        takeover.report_begun(1, 7);
        assert!(!takeover.report_complete(7));
        takeover.report_begun(1, 7);
        takeover.heard(1);
        assert!(!takeover.report_complete(7));
        takeover.report_begun(1, 7);
        assert!(!takeover.is_proven(7));
        assert!(takeover.report_complete(7));
        assert!(takeover.is_proven(7) && !takeover.is_proven(8));
        takeover.registered(1, &[8]);
        assert!(takeover.is_proven(8));
    }

    #[test]
    fn a_heartbeat_on_another_connection_says_nothing_about_an_answer_on_the_last_one() {
        let mut takeover = taken_over();
        takeover.answering(1);
        // In recovery: its reports do not come after an answer of this epoch.
        takeover.connected(1);
        takeover.heard(1);
        takeover.report_begun(1, 7);
        assert!(!takeover.report_complete(7));
        takeover.answering(1);
        takeover.heard(1);
        takeover.report_begun(1, 7);
        assert!(takeover.report_complete(7));
    }
}
