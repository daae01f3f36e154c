//! The additional operations of a replicated journal: removing a suffix, reading while it is open,
//! installing a snapshot from a peer, and purging.

use std::sync::Arc;

use super::format::{FileHeader, snapshot_name};
use super::log::{Journal, new_salt};
use super::reader::JournalReader;
use super::received::{ReceivedSnapshot, SnapshotReceiver};
use super::segment::{ActiveSegment, SegmentReader};
use super::store::{Purged, remove_segments};
use super::{JournalError, Lsn};

impl Journal {
    /// Removes all records after `lsn`, durably; the next appended record gets the number after it.
    /// Records up to `lsn` are durable when this returns. Does nothing if there are none after it.
    ///
    /// After a crash, a start finds either all previous records or exactly those up to `lsn`.
    /// A snapshot plan for records after `lsn` is superseded.
    ///
    /// [`JournalError::TruncatesSnapshot`], [`JournalError::SnapshotInProgress`] (one that covers
    /// more is being installed) and [`JournalError::DiskFull`] (a segment is rewritten, which takes
    /// space) leave the journal unchanged and usable; any other error is final.
    pub fn truncate_after(&mut self, lsn: Lsn) -> Result<(), JournalError> {
        self.check_not_failed()?;
        if lsn >= self.last_lsn() {
            return Ok(());
        }
        self.store.forbid_snapshots_after(lsn)?;
        match self.truncate_files(lsn) {
            Err(e @ JournalError::DiskFull { .. }) => Err(e),
            truncated => self.remember_failure(truncated),
        }
    }

    fn truncate_files(&mut self, lsn: Lsn) -> Result<(), JournalError> {
        let store = Arc::clone(&self.store);
        let disk = &*store.disk;
        let live = store.live();
        assert!(
            live.first_lsn() <= lsn + 1,
            "records up to {lsn}, at which the newest snapshot may end, were purged"
        );
        // If it holds none of the records that stay, it becomes empty.
        let last_first_lsn = live.segment_of(lsn + 1);
        let old = SegmentReader::open(disk, last_first_lsn, store.cluster_id)?;
        // Higher than that of any segment: the one that is rewritten may be of a much lower generation.
        let generation = self.segment.header.generation + 1;
        let segment_bytes = self.segment_bytes;
        let copy = ActiveSegment::truncated_copy_of(
            disk,
            old,
            lsn,
            generation,
            new_salt(),
            segment_bytes,
        )?;
        store.truncate_live(last_first_lsn, lsn);
        // From here on, the segments after it do not count: they are of a lower generation.
        self.segment = copy.install(disk)?;
        store.truncate_live(last_first_lsn, lsn);
        let removed = live.segments.iter();
        remove_segments(disk, removed.filter(|&&first| first > last_first_lsn))?;
        self.next_lsn = lsn + 1;
        self.synced_lsn = lsn;
        Ok(())
    }

    /// A reader of this journal for any thread.
    pub fn reader(&self) -> JournalReader {
        JournalReader::new(Arc::clone(&self.store))
    }

    /// Begins to receive a peer's snapshot, which covers the records up to `lsn`. Only one at a time:
    /// otherwise [`JournalError::SnapshotInProgress`].
    pub fn receive_snapshot(&self, lsn: Lsn) -> Result<SnapshotReceiver, JournalError> {
        SnapshotReceiver::new(Arc::clone(&self.store), lsn)
    }

    /// Makes a snapshot from a peer the newest one, durably. If the journal ends before the snapshot, it
    /// continues after it: the next record gets the number after those that the snapshot covers, and all
    /// earlier records are removed. Otherwise all records stay; if those of the peer differ, the caller
    /// must truncate them before.
    ///
    /// After a crash, either everything is as before or the snapshot is in place.
    ///
    /// The file is removed when it is not installed. [`JournalError::SnapshotNotNewer`] and
    /// [`JournalError::DiskFull`] leave the journal unchanged and usable; any other error is final.
    pub fn install_snapshot(
        &mut self,
        received: ReceivedSnapshot,
    ) -> Result<SnapshotReceived, JournalError> {
        assert!(
            received.is_of(&self.store),
            "a snapshot that was received for another journal"
        );
        self.check_not_failed()?;
        let (lsn, newest_lsn) = (received.lsn(), self.store.newest_snapshot_lsn());
        if lsn <= newest_lsn {
            return Err(JournalError::SnapshotNotNewer { lsn, newest_lsn });
        }
        let connected = lsn <= self.last_lsn();
        if connected {
            // A start that found fewer records than the snapshot covers would drop them and begin after it.
            self.sync()?;
            let installed = received.install(&snapshot_name(lsn));
            self.remember_failure(installed)?;
            self.store.snapshot_installed(lsn, true);
        } else {
            match self.restart_after(received) {
                Err(e @ JournalError::DiskFull { .. }) => return Err(e),
                restarted => self.remember_failure(restarted)?,
            }
        }
        Ok(SnapshotReceived { lsn, connected })
    }

    /// Continues the journal after a snapshot that covers more than it has.
    fn restart_after(&mut self, received: ReceivedSnapshot) -> Result<(), JournalError> {
        let store = Arc::clone(&self.store);
        let disk = &*store.disk;
        let lsn = received.lsn();
        let header = FileHeader {
            lsn: lsn + 1,
            salt: new_salt(),
            len_bytes: self.segment_bytes,
            from_peer: true,
            ..self.segment.header
        };
        // Before anything is changed, since there may be no space for the segment.
        let segment = ActiveSegment::prepare(disk, header)?;
        let removed = store.live().segments;
        store.replace_live(&[header.lsn], lsn);
        // From here on, the snapshot counts: a start that finds it without the segment creates the segment.
        received.install(&snapshot_name(lsn))?;
        store.snapshot_installed(lsn, false);
        self.segment = segment.install(disk)?;
        store.replace_live(&[header.lsn], lsn);
        self.next_lsn = header.lsn;
        self.synced_lsn = lsn;
        remove_segments(disk, removed.iter())?;
        Ok(())
    }

    /// Removes files that a snapshot has made superfluous and that the caller does not want to keep for
    /// lagging peers: segments that hold no record after `through_lsn` nor after the last snapshot but
    /// one, and the snapshots before the last two.
    pub fn purge(&self, through_lsn: Lsn) -> Purged {
        self.store.purge(through_lsn)
    }
}

/// The result of [`Journal::install_snapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotReceived {
    /// The last record that the snapshot covers.
    pub lsn: Lsn,
    /// Whether the journal had the record `lsn`: then all its records stay, otherwise it now holds none.
    pub connected: bool,
}
