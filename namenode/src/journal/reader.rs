//! Reading records back across segments: at the start, and while the journal is open.

use std::collections::VecDeque;
use std::sync::Arc;

use harvestfs_protocol::limits::SNAPSHOT_PART_BYTES_MAX;

use super::disk::Disk;
use super::format::{RECORD_HEADER_BYTES, RECORDS_OFFSET};
use super::received::SnapshotReceiver;
use super::segment::{SegmentReader, Step};
use super::snapshot::SnapshotReader;
use super::store::{Live, Purged, Store};
use super::{JournalError, Lsn};

/// Streams the records of a range of log sequence numbers, in order and without gaps.
///
/// Yields one error and then ends when a record cannot be read; nothing after damage is ever
/// returned.
pub struct RecordReader {
    disk: Arc<dyn Disk>,
    cluster_id: u128,
    /// First record numbers of the segments not opened yet.
    segments: VecDeque<Lsn>,
    current: Option<SegmentReader>,
    next_lsn: Lsn,
    through_lsn: Lsn,
    failed: bool,
}

impl RecordReader {
    /// A reader of the records `from_lsn..=through_lsn`. `segments` holds the first record
    /// numbers of all segments, in ascending order.
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        cluster_id: u128,
        segments: &[Lsn],
        from_lsn: Lsn,
        through_lsn: Lsn,
    ) -> Result<Self, JournalError> {
        let holding = segments.partition_point(|&first| first <= from_lsn);
        if holding == 0 && from_lsn <= through_lsn {
            return Err(JournalError::MissingRecords { lsn: from_lsn });
        }
        Ok(Self {
            disk,
            cluster_id,
            segments: segments[holding.saturating_sub(1)..]
                .iter()
                .copied()
                .collect(),
            current: None,
            next_lsn: from_lsn,
            through_lsn,
            failed: false,
        })
    }

    fn read_next(&mut self) -> Result<(Lsn, Vec<u8>), JournalError> {
        loop {
            let Some(segment) = &mut self.current else {
                let Some(first_lsn) = self.segments.pop_front() else {
                    return Err(JournalError::MissingRecords { lsn: self.next_lsn });
                };
                let opened = SegmentReader::open(&*self.disk, first_lsn, self.cluster_id)?;
                self.current = Some(opened);
                continue;
            };
            match segment.step()? {
                Step::Record { lsn, payload } if lsn == self.next_lsn => {
                    self.next_lsn += 1;
                    return Ok((lsn, payload));
                }
                // The first segment may begin before the range.
                Step::Record { .. } => {}
                Step::End if self.segments.front() == Some(&segment.next_lsn) => {
                    self.current = None;
                }
                Step::End => {
                    return Err(JournalError::corrupt(
                        &segment.name,
                        segment.offset,
                        segment.next_lsn,
                        "the segment ends too early",
                    ));
                }
                Step::Bad { reason } => {
                    return Err(JournalError::corrupt(
                        &segment.name,
                        segment.offset,
                        segment.next_lsn,
                        reason,
                    ));
                }
            }
        }
    }
}

impl Iterator for RecordReader {
    type Item = Result<(Lsn, Vec<u8>), JournalError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.next_lsn > self.through_lsn {
            return None;
        }
        let result = self.read_next();
        self.failed = result.is_err();
        Some(result)
    }
}

/// Reads records, and the newest snapshot, of a journal that is open and may be appended to,
/// truncated and purged meanwhile, on any thread.
///
/// It remembers where it stopped, so that continuing from there is cheap; use a separate clone for
/// each peer that is served.
pub struct JournalReader {
    store: Arc<Store>,
    /// The segment that was read last, and the `Live::epoch` in which it was opened.
    at: Option<(u64, SegmentReader)>,
}

impl JournalReader {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store, at: None }
    }

    /// The cluster whose journal it is.
    pub fn cluster_id(&self) -> u128 {
        self.store.cluster_id
    }

    /// The first record that can be read, or the next one when there is none.
    pub fn first_lsn(&self) -> Lsn {
        self.store.live().first_lsn()
    }

    /// The last record written, durable or not; the one before [`JournalReader::first_lsn`] when
    /// there is none.
    pub fn last_lsn(&self) -> Lsn {
        self.store.live().last_lsn
    }

    /// Reads the records from `from_lsn` on, up to and without `to_lsn`, in order and without gaps:
    /// as many as fit into `bytes_max` bytes (28 more for each than its own), at least one if there
    /// is one. Records that were appended but not synced are among them; those not appended yet are
    /// left out.
    ///
    /// Blocks on the disk. [`JournalError::RecordPurged`] if `from_lsn` was purged, or was never in the
    /// journal because a snapshot from a peer covers it.
    pub fn read(
        &mut self,
        from_lsn: Lsn,
        to_lsn: Lsn,
        bytes_max: usize,
    ) -> Result<Vec<(Lsn, Vec<u8>)>, JournalError> {
        if let Some((_, segment)) = &mut self.at {
            segment.forget_window();
        }
        loop {
            let live = self.store.live();
            let first_lsn = live.first_lsn();
            if from_lsn < first_lsn {
                return Err(JournalError::RecordPurged {
                    lsn: from_lsn,
                    first_lsn,
                });
            }
            let through_lsn = live.last_lsn.min(to_lsn.saturating_sub(1));
            let read = self.read_live(&live, from_lsn, through_lsn, bytes_max);
            let now = self.store.live();
            // The journal may have been truncated between the reads of two segments.
            if now.epoch == live.epoch {
                return read.inspect_err(|_| self.at = None);
            }
        }
    }

    fn read_live(
        &mut self,
        live: &Live,
        from_lsn: Lsn,
        through_lsn: Lsn,
        bytes_max: usize,
    ) -> Result<Vec<(Lsn, Vec<u8>)>, JournalError> {
        let mut records = Vec::new();
        let mut bytes = 0;
        let mut wanted = from_lsn;
        while wanted <= through_lsn && bytes < bytes_max.max(1) {
            let first_lsn = live.segment_of(wanted);
            let segment = match &mut self.at {
                Some((epoch, segment))
                    if *epoch == live.epoch && segment.header.lsn == first_lsn =>
                {
                    segment
                }
                _ => {
                    let opened =
                        SegmentReader::open(&*self.store.disk, first_lsn, self.store.cluster_id);
                    let opened = opened.map_err(|e| self.purged_or(e, wanted))?;
                    &mut self.at.insert((live.epoch, opened)).1
                }
            };
            if segment.next_lsn != wanted {
                let mark = self.store.mark_before(live.epoch, first_lsn, wanted);
                let (lsn, offset) = mark.unwrap_or((first_lsn, RECORDS_OFFSET));
                // No seek when reading on from the current offset is at least as short.
                if segment.next_lsn > wanted || segment.next_lsn < lsn {
                    segment.go_to(lsn, offset);
                }
            }
            let offset = segment.offset;
            let step = segment.step()?;
            let (next_lsn, next_offset) = (segment.next_lsn, segment.offset);
            self.store
                .mark(live.epoch, (first_lsn, next_lsn), offset, next_offset);
            match step {
                Step::Record { lsn, .. } if lsn < wanted => {}
                Step::Record { lsn, payload } => {
                    bytes += RECORD_HEADER_BYTES + payload.len();
                    if bytes > bytes_max && !records.is_empty() {
                        segment.go_to(lsn, offset);
                        break;
                    }
                    records.push((lsn, payload));
                    wanted = lsn + 1;
                }
                Step::End if self.store.forget_gap(first_lsn, segment.next_lsn) => {
                    let first_lsn = self.store.live().first_lsn();
                    return Err(JournalError::RecordPurged {
                        lsn: wanted,
                        first_lsn,
                    });
                }
                Step::End => {
                    let (lsn, reason) = (segment.next_lsn, "the segment ends too early");
                    return Err(JournalError::corrupt(&segment.name, offset, lsn, reason));
                }
                Step::Bad { reason } => {
                    let lsn = segment.next_lsn;
                    return Err(JournalError::corrupt(&segment.name, offset, lsn, reason));
                }
            }
        }
        Ok(records)
    }

    /// [`JournalError::RecordPurged`] if the segment of the record was not found because it was purged
    /// meanwhile, otherwise `error`.
    fn purged_or(&self, error: JournalError, lsn: Lsn) -> JournalError {
        match self.store.live().first_lsn() {
            first_lsn if lsn < first_lsn => JournalError::RecordPurged { lsn, first_lsn },
            _ => error,
        }
    }

    /// See [`super::Journal::receive_snapshot`].
    pub fn receive_snapshot(&self, lsn: Lsn) -> Result<SnapshotReceiver, JournalError> {
        SnapshotReceiver::new(Arc::clone(&self.store), lsn)
    }

    /// See [`super::Journal::purge`]. Removes files on the calling thread, not on the journal's: call it on
    /// one that may block.
    pub fn purge(&self, through_lsn: Lsn) -> Purged {
        self.store.purge(through_lsn)
    }

    /// The last records that the newest snapshot covers, and the one before it; 0 without one.
    pub fn snapshot_lsns(&self) -> (Lsn, Lsn) {
        self.store.snapshot_lsns()
    }

    /// The newest snapshot as a peer needs it; `None` without one.
    pub fn newest_snapshot(&self) -> Result<Option<SnapshotFile>, JournalError> {
        match self.store.newest_snapshot_lsn() {
            0 => Ok(None),
            lsn => {
                let store = &*self.store;
                let file = SnapshotReader::open(&*store.disk, lsn, store.cluster_id)?;
                Ok(Some(SnapshotFile(file)))
            }
        }
    }
}

impl Clone for JournalReader {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.store))
    }
}

/// The bytes of a snapshot file, with their checksums, for [`super::SnapshotReceiver`]. It can still be
/// read after it was superseded and removed.
pub struct SnapshotFile(SnapshotReader);

impl SnapshotFile {
    /// The last record that the snapshot covers.
    pub fn lsn(&self) -> Lsn {
        self.0.header.lsn
    }

    /// Size of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    /// Reads at `offset` until `buffer` is full or the file ends; returns the number of bytes read. They
    /// are not verified here; the receiver of the whole file verifies them.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, JournalError> {
        self.0.read_file_at(buffer, offset)
    }

    /// The bytes from `offset` on that fit into one message, read as by [`SnapshotFile::read_at`].
    pub fn part(&self, offset: u64) -> Result<Vec<u8>, JournalError> {
        let left = usize::try_from(self.len_bytes().saturating_sub(offset));
        let mut part = vec![0; left.unwrap_or(usize::MAX).min(SNAPSHOT_PART_BYTES_MAX)];
        let read = self.read_at(&mut part, offset)?;
        part.truncate(read);
        Ok(part)
    }

    /// A reader of its content, from the start, which verifies what it reads.
    pub fn into_content(self) -> SnapshotReader {
        self.0
    }
}
