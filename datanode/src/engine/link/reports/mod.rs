//! Reports of replicas to the namenode: everything after a registration, then changes, and full reports of volumes on
//! request.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::limits::REPLICAS_PER_REPORT_MAX;
use harvestfs_protocol::node::{BlockReport, ReplicaReport};

use super::changes::{Change, Changes, Pending};

/// How long changes are gathered for one report.
pub const GATHERING_TIME: Duration = Duration::from_millis(50);

/// The reports on one registered connection. If one of them fails, the connection ends.
#[derive(Debug, Default)]
pub struct Reports {
    next: Next,
    /// The volume that was reported last.
    reported: Option<StorageId>,
    asked: Option<StorageId>,
    is_gathered: bool,
}

#[derive(Debug, Default)]
enum Next {
    #[default]
    Everything,
    Volumes(VecDeque<StorageId>),
    Changes,
}

/// The next action.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// [List](Reports::volumes) the volumes that can be used.
    ListVolumes,
    /// List the replicas of a volume, and report them in full.
    ReportVolume(StorageId),
    /// A volume was reported. Add its replicas that wait to be deleted, and are in no full report, to the queue of
    /// changes: the namenode may have forgotten them.
    ListCorrupt(StorageId),
    /// Everything has been reported.
    Reported,
    /// Gather changes for [`GATHERING_TIME`].
    Gather,
    /// Report these changes, or [put them back](Changes::put_back) if that fails: they are reported again, unless the
    /// next registration makes them superfluous.
    ReportChanges(Vec<Change>),
    /// Wait until there are changes, or a volume is requested.
    Wait,
}

impl Reports {
    /// Supplies the list of volumes that can be used, when it is requested.
    pub fn volumes(&mut self, storages: Vec<StorageId>) {
        // Otherwise volumes that were not reported yet would be left out.
        assert!(
            matches!(self.next, Next::Everything),
            "{storages:?} are listed, but {:?} are next",
            self.next
        );
        self.next = Next::Volumes(storages.into());
    }

    /// Handles the namenode's request for a volume that arrives while there is nothing else to do.
    pub fn asked(&mut self, storage: StorageId) {
        self.asked = Some(storage);
    }

    /// Returns the next action after all previous ones are done. `asked` is called when it is time for a volume that
    /// the namenode has requested.
    pub fn next(
        &mut self,
        changes: &mut Changes,
        asked: impl FnOnce() -> Option<StorageId>,
    ) -> Step {
        if let Some(storage) = self.reported.take() {
            return Step::ListCorrupt(storage);
        }
        match &mut self.next {
            Next::Everything => return self.everything(changes),
            Next::Volumes(storages) => {
                if let Some(storage) = storages.pop_front() {
                    return self.report(storage);
                }
                self.next = Next::Changes;
                return Step::Reported;
            }
            Next::Changes => {}
        }
        if let Some(storage) = self.asked.take().or_else(asked) {
            return self.report(storage);
        }
        if changes.is_empty() {
            self.is_gathered = false;
            return Step::Wait;
        }
        if !std::mem::replace(&mut self.is_gathered, true) {
            return Step::Gather;
        }
        self.is_gathered = false;
        match changes.take() {
            Pending::Changes(changes) => {
                assert!(
                    !changes.is_empty(),
                    "changes were gathered, and there are none: {self:?}"
                );
                Step::ReportChanges(changes)
            }
            Pending::Everything => self.everything(changes),
        }
    }

    fn report(&mut self, storage: StorageId) -> Step {
        self.reported = Some(storage);
        Step::ReportVolume(storage)
    }

    fn everything(&mut self, changes: &mut Changes) -> Step {
        self.next = Next::Everything;
        // Changes until now are part of the full reports. Those from now on are sent after them, so
        // that a full report never takes back a change that was reported after it.
        changes.clear();
        Step::ListVolumes
    }
}

/// The full report of a volume, in parts.
pub fn parts(
    storage: StorageId,
    replicas: &[ReplicaReport],
) -> impl Iterator<Item = BlockReport> + '_ {
    parts_of(storage, replicas, REPLICAS_PER_REPORT_MAX)
}

fn parts_of(
    storage: StorageId,
    replicas: &[ReplicaReport],
    part_max: usize,
) -> impl Iterator<Item = BlockReport> + '_ {
    let parts = replicas.len().div_ceil(part_max).max(1);
    (0..parts).map(move |part| BlockReport {
        storage,
        part: part as u32,
        last: part + 1 == parts,
        replicas: replicas
            .iter()
            .skip(part * part_max)
            .take(part_max)
            .copied()
            .collect(),
    })
}
