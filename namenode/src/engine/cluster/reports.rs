//! Reports of datanodes and clients about replicas.

use harvestfs_protocol::ids::{BlockId, NodeId, StorageId};
use harvestfs_protocol::node::{BlockReport, IncrementalReport, ReplicaChange, ReplicaReport};

use super::prefetch::PREFETCHED;
use super::table::{NodeIx, ReplicaState, Slot, StorageIx};
use super::{Cluster, ClusterError};

impl Cluster {
    /// Processes a part of a full report of one volume. After the last part, a replica that neither a
    /// part nor, since the first part, an incremental report has named is not on the volume.
    ///
    /// So the datanode must take its inventory after everything that it reported before the first part,
    /// and must not name in a later part a replica that it reported as deleted meanwhile.
    ///
    /// # Errors
    /// The node must register again: [`ClusterError::NotRegistered`],
    /// [`ClusterError::UnknownStorage`]. [`ClusterError::ReportOutOfOrder`] when a part is missing.
    pub fn block_report(
        &mut self,
        now_ms: u64,
        node: NodeId,
        report: &BlockReport,
    ) -> Result<(), ClusterError> {
        self.advance(now_ms);
        let index = self.live_node(node)?;
        let storage = self.storage_on(index, report.storage)?;
        let it = &mut self.table.storages[storage as usize];
        if report.part == 0 {
            it.epoch = it.epoch.wrapping_add(1);
            it.next_part = 0;
            self.takeover.report_begun(index, storage);
        }
        let it = &mut self.table.storages[storage as usize];
        if report.part != it.next_part {
            let expected = it.next_part;
            self.ask_for_report(index, storage);
            return Err(ClusterError::ReportOutOfOrder {
                expected,
                got: report.part,
            });
        }
        // There may be any number of parts.
        it.next_part = it.next_part.saturating_add(1);
        it.report_ms = self.now_ms;
        if !self.table.home(storage).usable {
            return Ok(());
        }
        for replicas in report.replicas.chunks(PREFETCHED) {
            for replica in replicas {
                self.prefetch_block(replica.block);
            }
            for replica in replicas {
                self.have(index, storage, replica);
            }
        }
        if report.last {
            self.finish_report(index, storage);
        }
        Ok(())
    }

    fn finish_report(&mut self, node: NodeIx, storage: StorageIx) {
        let it = &mut self.table.storages[storage as usize];
        it.next_part = 0;
        let epoch = it.epoch;
        self.table.home_mut(storage).inventoried = true;
        let mut missing = Vec::new();
        for &slot in self.table.storages[storage as usize].blocks() {
            let replica = self.table.replica_in(slot, storage);
            let block = self.table.known(slot);
            let Some(replica) = replica else {
                panic!(
                    "block {} is on a volume's list, but has no replica there",
                    block.id
                );
            };
            let replica = block.replicas[replica];
            // Full reports leave out replicas known to be corrupt. One that was commanded to be removed may be gone;
            // the datanode reports next which ones are not.
            let deletes = &self.nodes[node as usize].deletes;
            let may_be_left_out =
                replica.state == ReplicaState::Corrupt && !deletes.is_commanded(block.id);
            if replica.epoch != epoch && !may_be_left_out {
                missing.push((slot, block.id));
            }
        }
        for (slot, block) in missing {
            self.nodes[node as usize].deletes.remove(block);
            self.remove_reported(slot, storage);
        }
        if !self.takeover.report_complete(storage) {
            self.ask_for_report(node, storage);
        }
        if self.is_inventoried(&self.nodes[node as usize]) {
            self.reconcile_pipelines_of(node);
        }
        self.refresh_node(node);
    }

    /// Processes changes on the volumes of a datanode.
    ///
    /// # Errors
    /// The node must register again: [`ClusterError::NotRegistered`], or
    /// [`ClusterError::UnknownStorage`] for a volume that it did not register; the changes of its other
    /// volumes are still applied.
    pub fn incremental_report(
        &mut self,
        now_ms: u64,
        node: NodeId,
        report: &IncrementalReport,
    ) -> Result<(), ClusterError> {
        self.advance(now_ms);
        let index = self.live_node(node)?;
        let mut result = Ok(());
        for (storage, change) in &report.changes {
            match self.storage_on(index, *storage) {
                Ok(storage) => self.take_in(index, storage, change),
                Err(error) => result = Err(error),
            }
        }
        result
    }

    fn take_in(&mut self, node: NodeIx, storage: StorageIx, change: &ReplicaChange) {
        match change {
            ReplicaChange::Have(replica) => {
                if self.table.home(storage).usable {
                    self.have(node, storage, replica);
                }
            }
            ReplicaChange::Deleted(block) => {
                self.nodes[node as usize].deletes.remove(*block);
                match self.table.slot(*block) {
                    Some(slot) => self.remove_reported(slot, storage),
                    None => self.unknown_removed(node, *block),
                }
            }
            ReplicaChange::Corrupt(block) => self.corrupt(*block, node, Some(storage)),
            ReplicaChange::RepairFailed(block) => {
                if let Some(slot) = self.table.slot(*block) {
                    self.fail_repair(slot, node);
                }
            }
        }
    }

    fn storage_on(&self, node: NodeIx, storage: StorageId) -> Result<StorageIx, ClusterError> {
        // A node has few volumes.
        let volumes = &self.nodes[node as usize].storages;
        volumes
            .iter()
            .copied()
            .find(|&index| self.table.storages[index as usize].id() == storage)
            .ok_or(ClusterError::UnknownStorage(storage))
    }

    /// Processes a report that a replica is on a volume.
    fn have(&mut self, node: NodeIx, storage: StorageIx, report: &ReplicaReport) {
        let Some(slot) = self.slot_at(node, report.block) else {
            // Every block that may have replicas is known here before a datanode can learn of it. The
            // length that it reports for any other block may be any number.
            let bytes = u32::try_from(report.length_bytes).unwrap_or(u32::MAX);
            self.have_unknown(node, report.block, bytes);
            return;
        };
        let home = self.table.home(storage);
        assert!(
            home.node == node && home.usable,
            "a replica of block {} is reported by node {node}, on a volume of {home:?}",
            report.block
        );
        self.lengthen(slot, node, report);
        let state = self.judge(slot, node, report);
        self.salvage.note(slot, node, report.length_bytes, state);
        match self.table.replica_on(slot, node) {
            None => {
                self.arrive(slot, node);
                self.table.add_replica(slot, storage, state);
            }
            Some(index) => self.have_again(slot, index, node, storage, state),
        }
        if let Some(block) = self.table.get(slot)
            && block.sealed
            && state.awaits_seal()
        {
            self.watch_seal(slot);
        }
        if state.is_good() {
            self.complete_repair(slot, node);
        }
        self.close_pipeline_if_reported(slot);
        self.settle(slot);
    }

    /// Finds the block that a node reports. It is nearly always one that the node was to receive, and
    /// then needs no lookup.
    fn slot_at(&self, node: NodeIx, block: BlockId) -> Option<Slot> {
        let is_it = |&slot: &Slot| self.table.get(slot).is_some_and(|it| it.id == block);
        let mut incoming = self.nodes[node as usize].incoming.iter().copied();
        incoming.find(is_it).or_else(|| self.table.slot(block))
    }

    /// Judges a replica by its length and by whether it is sealed.
    fn judge(&self, slot: Slot, node: NodeIx, report: &ReplicaReport) -> ReplicaState {
        let covered = self.table.known(slot).is_covered_by(report.length_bytes);
        match (report.sealed, covered) {
            (true, true) => ReplicaState::Sealed,
            (false, true) => ReplicaState::Open,
            // The report may be older than the last commit of the writer.
            (false, false) if self.pipeline(slot).contains(&node) => ReplicaState::Open,
            // Also when its writer is not known any more, as after a change of leader: its contents show when it is
            // sealed.
            (false, false) => ReplicaState::Unconfirmed,
            (true, false) => ReplicaState::Short,
        }
    }

    /// Processes a report of a replica that the table has already.
    fn have_again(
        &mut self,
        slot: Slot,
        index: usize,
        node: NodeIx,
        storage: StorageIx,
        reported: ReplicaState,
    ) {
        let block = self.table.known(slot);
        let (id, bytes) = (block.id, block.required_bytes);
        let known = block.replicas[index];
        let known_is_there = self.table.home(known.storage).usable;
        let deletes = &mut self.nodes[node as usize].deletes;
        let state = match known.state {
            _ if !known_is_there => {
                deletes.forget_command(id);
                reported
            }
            // It was reported as present, not as read and found intact.
            ReplicaState::Corrupt if known.storage == storage => ReplicaState::Corrupt,
            // A different replica, on a volume that joined late.
            ReplicaState::Corrupt => {
                deletes.remove(id);
                reported
            }
            ReplicaState::Deleting => {
                deletes.add(id, bytes);
                ReplicaState::Deleting
            }
            // It has all that is left of a block whose end is lost, and may be gone already.
            ReplicaState::Short | ReplicaState::Unconfirmed
                if reported.is_good() && deletes.is_commanded(id) =>
            {
                deletes.add(id, bytes);
                ReplicaState::Deleting
            }
            ReplicaState::Excess if reported == ReplicaState::Sealed => {
                deletes.add(id, bytes);
                ReplicaState::Excess
            }
            ReplicaState::Excess => {
                deletes.remove(id);
                reported
            }
            _ => reported,
        };
        if known.storage == storage {
            self.table.restamp(slot, index, state);
        } else {
            // The datanode moved it to another of its volumes, or received it again after a reimage.
            self.table.remove_replica(slot, index);
            self.table.add_replica(slot, storage, state);
        }
    }

    /// Removes a replica that is no longer on a volume.
    fn remove_reported(&mut self, slot: Slot, storage: StorageIx) {
        let Some(index) = self.table.replica_in(slot, storage) else {
            return;
        };
        let node = self.table.home(storage).node;
        let block = self.table.known(slot).id;
        self.nodes[node as usize].deletes.forget_command(block);
        self.leave_pipeline(slot, node);
        self.table.remove_replica(slot, index);
        self.settle(slot);
    }

    /// Marks a replica as corrupt. `storage` is given when the datanode itself reports it; then the
    /// replica is certainly there.
    fn corrupt(&mut self, block: BlockId, node: NodeIx, storage: Option<StorageIx>) {
        let Some(slot) = self.table.slot(block) else {
            if storage.is_some() {
                // Its length is not reported.
                self.have_unknown(node, block, 0);
            }
            return;
        };
        match (self.table.replica_on(slot, node), storage) {
            (Some(index), _) => {
                let known = self.table.known(slot).replicas[index].state;
                let deletes = &mut self.nodes[node as usize].deletes;
                if known != ReplicaState::Corrupt {
                    deletes.remove(block);
                }
                // The replica still exists: no earlier command has removed it.
                deletes.forget_command(block);
                self.table.restamp(slot, index, ReplicaState::Corrupt);
            }
            (None, Some(storage)) => {
                self.arrive(slot, node);
                self.table.add_replica(slot, storage, ReplicaState::Corrupt);
            }
            (None, None) => {}
        }
        self.leave_pipeline(slot, node);
        self.settle(slot);
    }

    /// Takes in a client's complaint that it could not use a replica: it is bad, or its datanode does not answer. See
    /// the module `doubts`.
    pub fn report_bad_replica(&mut self, now_ms: u64, block: BlockId, node: NodeId, corrupt: bool) {
        self.advance(now_ms);
        let Some(index) = self.node_index(node) else {
            return;
        };
        if corrupt {
            self.doubt_replica(index, block);
        } else {
            self.doubt_node(index);
        }
    }
}
