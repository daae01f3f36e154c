//! The state that the journal shares with its readers, and with the writers and receivers of
//! snapshots.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::disk::Disk;
use super::files::JournalFiles;
use super::format::{segment_name, snapshot_name};
use super::{JournalError, Lsn};

/// The files of an open journal. No lock is held while one of them is read, written or removed.
pub(super) struct Store {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) cluster_id: u128,
    live: Mutex<Live>,
    marks: Mutex<Marks>,
    snapshots: Mutex<Snapshots>,
}

/// The distance in bytes between two records of a segment whose offsets are remembered.
const MARKS_DISTANCE_BYTES: u64 = 64 << 10;

/// Offsets of some records that were read, so that others are found without reading their segment from the start.
#[derive(Debug, Default)]
struct Marks {
    /// The [`Live::epoch`] to which the offsets belong.
    epoch: u64,
    /// By the first record of the segment and the record: the end of a segment is no offset in the next one.
    offsets: BTreeMap<(Lsn, Lsn), u64>,
}

/// The records that can be read.
#[derive(Debug, Clone)]
pub(super) struct Live {
    /// First record of each segment, ascending; never empty.
    pub(super) segments: Vec<Lsn>,
    /// The last record written.
    pub(super) last_lsn: Lsn,
    /// Raised when a segment is replaced: one that was opened before may hold other records than
    /// the one that has its name now.
    pub(super) epoch: u64,
}

impl Live {
    /// The first record that can be read, or the next one when there is none.
    pub(super) fn first_lsn(&self) -> Lsn {
        self.segments[0]
    }

    /// The segment that holds `lsn`, or will hold it; `lsn` must not be before the first record.
    pub(super) fn segment_of(&self, lsn: Lsn) -> Lsn {
        self.segments[self.segments.partition_point(|&first| first <= lsn) - 1]
    }
}

#[derive(Debug)]
struct Snapshots {
    plan: Option<RunningPlan>,
    /// A snapshot is being received from a peer, or waits for its installation.
    receiving: bool,
    /// Last record covered by the newest snapshot known to be good; 0 without one.
    newest_lsn: Lsn,
    /// Last record covered by the snapshot before it; 0 without one.
    previous_lsn: Lsn,
}

/// The state of an existing [`super::SnapshotPlan`] or its [`super::SnapshotWriter`].
#[derive(Debug)]
struct RunningPlan {
    lsn: Lsn,
    phase: Phase,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Writing,
    /// Records that it would cover were removed or replaced.
    Superseded,
    Installing,
}

/// The result of a purge.
#[derive(Debug)]
pub struct Purged {
    /// The first record that can still be read, or the next one when there is none.
    pub first_lsn: Lsn,
    /// Segments and snapshots that were removed.
    pub removed_files: usize,
    /// The error if not all superfluous files could be removed. They do no harm, and the next purge
    /// tries again.
    pub removal_error: Option<JournalError>,
}

impl Store {
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        cluster_id: u128,
        segments: Vec<Lsn>,
        last_lsn: Lsn,
        (newest_lsn, previous_lsn): (Lsn, Lsn),
    ) -> Self {
        assert!(!segments.is_empty(), "a journal has a segment");
        Self {
            disk,
            cluster_id,
            live: Mutex::new(Live {
                segments,
                last_lsn,
                epoch: 0,
            }),
            marks: Mutex::default(),
            snapshots: Mutex::new(Snapshots {
                plan: None,
                receiving: false,
                newest_lsn,
                previous_lsn,
            }),
        }
    }

    pub(super) fn live(&self) -> Live {
        self.live.lock().clone()
    }

    /// Lets readers see the records up to `last_lsn`, which were written.
    pub(super) fn appended(&self, last_lsn: Lsn) {
        self.live.lock().last_lsn = last_lsn;
    }

    /// Adds a new segment.
    pub(super) fn rotated(&self, first_lsn: Lsn) {
        self.live.lock().segments.push(first_lsn);
    }

    /// Notes that a record was read between the offsets `before` and `offset` of the segment of `first_lsn`, and that
    /// record `lsn` begins, or would begin, at `offset`.
    pub(super) fn mark(&self, epoch: u64, (first_lsn, lsn): (Lsn, Lsn), before: u64, offset: u64) {
        if before / MARKS_DISTANCE_BYTES == offset / MARKS_DISTANCE_BYTES {
            return;
        }
        let mut marks = self.marks.lock();
        if marks.epoch < epoch {
            *marks = Marks {
                epoch,
                offsets: BTreeMap::new(),
            };
        }
        if marks.epoch == epoch {
            marks.offsets.insert((first_lsn, lsn), offset);
        }
    }

    /// The last record at or before `lsn`, in the segment of `first_lsn`, whose offset is remembered; with that offset.
    pub(super) fn mark_before(&self, epoch: u64, first_lsn: Lsn, lsn: Lsn) -> Option<(Lsn, u64)> {
        let marks = self.marks.lock();
        if marks.epoch != epoch {
            return None;
        }
        let of_segment = (first_lsn, first_lsn)..=(first_lsn, lsn);
        let before = marks.offsets.range(of_segment).next_back();
        before.map(|(&(_, lsn), &offset)| (lsn, offset))
    }

    /// Limits readers to the records up to `last_lsn` and the segments up to `last_first_lsn`. To be
    /// called both before and after that segment is replaced: a file opened in between may be the old
    /// one.
    pub(super) fn truncate_live(&self, last_first_lsn: Lsn, last_lsn: Lsn) {
        let mut live = self.live.lock();
        live.segments.retain(|&first| first <= last_first_lsn);
        live.last_lsn = last_lsn;
        live.epoch += 1;
    }

    /// Limits readers to these segments, and to the records up to `last_lsn`. To be called both before
    /// and after files are replaced: a file opened in between may be an old one.
    pub(super) fn replace_live(&self, segments: &[Lsn], last_lsn: Lsn) {
        let mut live = self.live.lock();
        live.segments = segments.to_vec();
        live.last_lsn = last_lsn;
        live.epoch += 1;
    }

    /// Returns whether the segment of `first_lsn` ends before `next_lsn` because the segments after it
    /// were purged; if so, readers ignore everything before the gap from then on. Releases before
    /// format version 2 removed several segments at once, and a power loss may have left any of them.
    pub(super) fn forget_gap(&self, first_lsn: Lsn, next_lsn: Lsn) -> bool {
        let newest_snapshot_lsn = self.newest_snapshot_lsn();
        let mut live = self.live.lock();
        let following = live.segments.iter().find(|&&first| first > first_lsn);
        match following.copied() {
            Some(following) if next_lsn < following && following <= newest_snapshot_lsn + 1 => {
                tracing::warn!(
                    next_lsn,
                    following,
                    "records between two segments are missing"
                );
                live.segments.retain(|&first| first >= following);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Last record covered by the newest snapshot; 0 without one.
    pub(super) fn newest_snapshot_lsn(&self) -> Lsn {
        self.snapshots.lock().newest_lsn
    }

    /// Last records covered by the newest snapshot and by the one before; 0 without one.
    pub(super) fn snapshot_lsns(&self) -> (Lsn, Lsn) {
        let snapshots = self.snapshots.lock();
        (snapshots.newest_lsn, snapshots.previous_lsn)
    }

    pub(super) fn check_no_plan(&self) -> Result<(), JournalError> {
        match self.snapshots.lock().plan {
            Some(_) => Err(JournalError::SnapshotInProgress),
            None => Ok(()),
        }
    }

    /// Registers a plan, and returns the number of the snapshot on which it is based (0: none).
    pub(super) fn plan_begins(&self, lsn: Lsn) -> Lsn {
        let mut snapshots = self.snapshots.lock();
        let phase = Phase::Writing;
        snapshots.plan = Some(RunningPlan { lsn, phase });
        snapshots.newest_lsn
    }

    /// Marks the plan as being installed; fails if it was superseded.
    pub(super) fn plan_installs(&self) -> Result<(), JournalError> {
        match &mut self.snapshots.lock().plan {
            Some(plan) if plan.phase == Phase::Superseded => {
                Err(JournalError::SnapshotSuperseded { lsn: plan.lsn })
            }
            Some(plan) => {
                plan.phase = Phase::Installing;
                Ok(())
            }
            None => unreachable!("a plan that exists is counted"),
        }
    }

    pub(super) fn plan_ends(&self) {
        self.snapshots.lock().plan = None;
    }

    pub(super) fn receiving_begins(&self) -> Result<(), JournalError> {
        let mut snapshots = self.snapshots.lock();
        if snapshots.receiving {
            return Err(JournalError::SnapshotInProgress);
        }
        snapshots.receiving = true;
        Ok(())
    }

    pub(super) fn receiving_ends(&self) {
        self.snapshots.lock().receiving = false;
    }

    /// Prepares the removal of the records after `lsn`: a plan that would cover them must not be
    /// installed.
    pub(super) fn forbid_snapshots_after(&self, lsn: Lsn) -> Result<(), JournalError> {
        let mut snapshots = self.snapshots.lock();
        let snapshot_lsn = snapshots.newest_lsn;
        if lsn < snapshot_lsn {
            return Err(JournalError::TruncatesSnapshot { lsn, snapshot_lsn });
        }
        match &mut snapshots.plan {
            Some(plan) if plan.lsn > lsn => match plan.phase {
                Phase::Installing => return Err(JournalError::SnapshotInProgress),
                Phase::Writing | Phase::Superseded => plan.phase = Phase::Superseded,
            },
            Some(_) | None => {}
        }
        Ok(())
    }

    /// Notes that a snapshot up to `lsn` is in place. `connected`: the records between it and the
    /// snapshot before it are there, so that one stays useful.
    pub(super) fn snapshot_installed(&self, lsn: Lsn, connected: bool) {
        let mut snapshots = self.snapshots.lock();
        if lsn > snapshots.newest_lsn {
            snapshots.previous_lsn = if connected { snapshots.newest_lsn } else { 0 };
            snapshots.newest_lsn = lsn;
        }
        match &mut snapshots.plan {
            Some(plan) if !connected && plan.phase == Phase::Writing => {
                plan.phase = Phase::Superseded;
            }
            Some(_) | None => {}
        }
    }

    /// Removes the segments that hold no record after `through_lsn`, and the snapshots before the
    /// last two. The records after the last snapshot but one stay, so that a snapshot that turns
    /// out damaged does not lose anything.
    pub(super) fn purge(&self, through_lsn: Lsn) -> Purged {
        let through_lsn = through_lsn.min(self.snapshots.lock().previous_lsn);
        let first_lsn = {
            let mut live = self.live.lock();
            let last = live.segments.len() - 1;
            // A segment ends where the next one begins.
            let superfluous = live.segments[1..]
                .iter()
                .take_while(|&&next| next <= through_lsn + 1)
                .count();
            live.segments.drain(..superfluous.min(last));
            live.first_lsn()
        };
        let mut marks = self.marks.lock();
        marks.offsets = marks.offsets.split_off(&(first_lsn, 0));
        drop(marks);
        let mut removed_files = 0;
        let removal = self.remove_before(first_lsn, &mut removed_files);
        Purged {
            first_lsn,
            removed_files,
            removal_error: removal.err(),
        }
    }

    fn remove_before(&self, first_lsn: Lsn, removed_files: &mut usize) -> Result<(), JournalError> {
        let (newest_lsn, previous_lsn) = self.snapshot_lsns();
        let files = JournalFiles::list(&*self.disk)?;
        let snapshots = files.snapshots.iter();
        for &lsn in snapshots.filter(|&&lsn| lsn < newest_lsn && lsn != previous_lsn) {
            *removed_files += remove(&*self.disk, &snapshot_name(lsn))?;
        }
        let segments = files.segments.iter();
        *removed_files += remove_segments(&*self.disk, segments.filter(|&&lsn| lsn < first_lsn))?;
        Ok(())
    }
}

/// Removes the segments with these first records, each durably before the next: after a crash, there is
/// no gap between those that are left. Returns how many existed.
pub(super) fn remove_segments<'a>(
    disk: &dyn Disk,
    segments: impl Iterator<Item = &'a Lsn>,
) -> Result<usize, JournalError> {
    let mut removed = 0;
    for &first_lsn in segments {
        let was_there = remove(disk, &segment_name(first_lsn))?;
        if was_there > 0 {
            disk.sync_dir()
                .map_err(|e| JournalError::io("sync", &disk.location(), e))?;
        }
        removed += was_there;
    }
    Ok(removed)
}

/// Removes a file, unless another purge has removed it already. Returns the number of files removed.
fn remove(disk: &dyn Disk, name: &str) -> Result<usize, JournalError> {
    match disk.remove(name) {
        Ok(()) => Ok(1),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(e) => Err(JournalError::io("remove", name, e)),
    }
}
