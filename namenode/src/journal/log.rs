//! The journal itself: open, append, sync, begin a snapshot.

use std::path::PathBuf;
use std::sync::Arc;

use harvestfs_protocol::machine;
use harvestfs_protocol::planted::{self, Bug};

use super::disk::{Disk, RealDisk};
use super::files::{Chain, JournalFiles};
use super::format::{FileHeader, RECORD_HEADER_BYTES, RECORDS_OFFSET, encode_record};
use super::reader::RecordReader;
use super::segment::{ActiveSegment, SegmentReader, SegmentTail};
use super::snapshot::{SnapshotPlan, SnapshotReader};
use super::store::{Store, remove_segments};
use super::{JournalError, Lsn, RECORD_BYTES_MAX};

const SEGMENT_BYTES_MIN: u64 = 16 * 1024;
const SEGMENT_BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;

/// Where and how a journal is kept.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// Directory of the journal. Other files in it, such as `member`, are left alone.
    pub dir: PathBuf,
    /// The cluster id, which is in every file; a journal of another cluster is refused.
    pub cluster_id: u128,
    /// Size of one segment file in bytes, reserved on the disk when the segment is created.
    pub segment_bytes: u64,
    /// Whether to create the directory and a first segment when there is no journal. Only for a new
    /// cluster: a namenode whose disk was reformatted must not start with an empty namespace.
    pub create_if_empty: bool,
}

impl JournalOptions {
    /// Options with segments of 64 MiB that open an existing journal.
    pub fn new(dir: impl Into<PathBuf>, cluster_id: u128) -> Self {
        Self {
            dir: dir.into(),
            cluster_id,
            segment_bytes: 64 * 1024 * 1024,
            create_if_empty: false,
        }
    }
}

/// What [`Journal::open`] found on the disk.
pub struct Recovered {
    /// The newest good snapshot and the last record that it covers.
    pub snapshot: Option<(Lsn, SnapshotReader)>,
    /// All records after the snapshot, in order.
    pub records: RecordReader,
    /// The last record in the journal; 0 when it is new.
    pub last_lsn: Lsn,
    /// How the newest segment ended.
    pub tail: TailReport,
    /// The errors of damaged snapshots that were skipped. Nothing is lost, since an older snapshot (or the
    /// first record) and all records after it were there; but the disk should be checked.
    pub skipped_snapshots: Vec<JournalError>,
}

/// How the newest segment ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TailReport {
    /// Nothing followed the last record.
    Clean,
    /// The last record was followed by remains of records that had not been synced, as a
    /// crash during a write leaves them. They were dropped.
    Torn {
        /// File name of the segment.
        segment: String,
        /// Byte offset at which the last record ends.
        offset: u64,
        /// Bytes after it that were dropped.
        dropped_bytes: u64,
        /// By how many bytes the file was shorter than when it was created. If not 0,
        /// something other than a crash truncated it, and acknowledged records may be lost.
        missing_bytes: u64,
    },
}

/// An append-only log of opaque records on one disk.
///
/// Blocking; [`super::JournalWriter`] runs it on a thread of its own.
pub struct Journal {
    pub(super) store: Arc<Store>,
    pub(super) segment_bytes: u64,
    pub(super) segment: ActiveSegment,
    pub(super) next_lsn: Lsn,
    pub(super) synced_lsn: Lsn,
    /// The first failure of a write or sync; nothing is written after it.
    failed: Option<String>,
    buffer: Vec<u8>,
}

impl Journal {
    /// Opens the journal in `options.dir`, which stays locked until the journal and all readers
    /// and snapshot plans made from it are dropped.
    pub fn open(options: &JournalOptions) -> Result<(Self, Recovered), JournalError> {
        let disk = RealDisk::open(&options.dir, options.create_if_empty)?;
        Self::open_on(Arc::new(disk), options)
    }

    /// Opens the journal on `disk`; `options.dir` is not used.
    pub fn open_on(
        disk: Arc<dyn Disk>,
        options: &JournalOptions,
    ) -> Result<(Self, Recovered), JournalError> {
        check_options(options)?;
        let cluster_id = options.cluster_id;
        let files = JournalFiles::list(&*disk)?;
        for name in &files.temporaries {
            disk.remove(name)
                .map_err(|e| JournalError::io("remove", name, e))?;
        }
        // From here on, renames are relied upon that a killed process did not sync.
        if !planted::is(Bug::SkipsJournalDirectorySync) {
            disk.sync_dir()
                .map_err(|e| JournalError::io("sync", &disk.location(), e))?;
        }

        if files.segments.is_empty() && files.snapshots.is_empty() {
            return Self::create(disk, options);
        }
        let (base, skipped_snapshots) = newest_good_snapshot(&*disk, &files, cluster_id)?;
        let base_lsn = base.map_or(0, |header| header.lsn);
        if files.segments.is_empty() {
            return Err(JournalError::MissingRecords { lsn: base_lsn + 1 });
        }
        let mut chain = Chain::of(&*disk, &files.segments, base_lsn, cluster_id)?;
        let Some(&newest_first_lsn) = chain.segments.last() else {
            return Err(JournalError::MissingRecords { lsn: base_lsn + 1 });
        };
        let newest = SegmentReader::open(&*disk, newest_first_lsn, cluster_id)?;
        let (mut segment, tail) =
            ActiveSegment::copy_of(&*disk, newest, new_salt(), options.segment_bytes)?;
        let mut last_lsn = tail.last_lsn;
        let tail = TailReport::new(&segment.name, &tail);
        let newest_snapshot_lsn = files.snapshots.last().copied().unwrap_or(0);
        if last_lsn < newest_snapshot_lsn {
            match base {
                // A crash during its installation, before the segment after it was in place.
                Some(base) if base.from_peer && base.lsn == newest_snapshot_lsn => {
                    segment.discard(&*disk);
                    let header = FileHeader {
                        lsn: base_lsn + 1,
                        salt: new_salt(),
                        len_bytes: options.segment_bytes,
                        from_peer: true,
                        ..segment.header
                    };
                    segment = ActiveSegment::prepare(&*disk, header)?;
                    last_lsn = base_lsn;
                    chain.superfluous.append(&mut chain.segments);
                    chain.superfluous.sort_unstable();
                    chain.segments.push(header.lsn);
                }
                // A local snapshot is begun only after its records were synced and the next segment was created.
                Some(_) | None => {
                    return Err(JournalError::MissingRecords { lsn: last_lsn + 1 });
                }
            }
        }
        let records = RecordReader::new(
            Arc::clone(&disk),
            cluster_id,
            &chain.segments,
            base_lsn + 1,
            last_lsn,
        )?;
        let snapshot = match base_lsn {
            0 => None,
            lsn => Some((lsn, SnapshotReader::open(&*disk, lsn, cluster_id)?)),
        };
        // From here on, the records that were found are durable, even if no earlier sync wrote them. A failure
        // before this point has changed nothing but temporary files.
        let segment = segment.install(&*disk)?;
        remove_segments(&*disk, chain.superfluous.iter())?;
        let recovered = Recovered {
            snapshot,
            records,
            last_lsn,
            tail,
            skipped_snapshots,
        };
        let before_base = files.snapshots.iter().rev().find(|&&lsn| lsn < base_lsn);
        let snapshot_lsns = (base_lsn, before_base.copied().unwrap_or(0));
        let store = Store::new(disk, cluster_id, chain.segments, last_lsn, snapshot_lsns);
        Ok((
            Self::with_segment(store, options, segment, last_lsn),
            recovered,
        ))
    }

    fn create(
        disk: Arc<dyn Disk>,
        options: &JournalOptions,
    ) -> Result<(Self, Recovered), JournalError> {
        if !options.create_if_empty {
            return Err(JournalError::Empty {
                location: disk.location(),
            });
        }
        let cluster_id = options.cluster_id;
        let header = FileHeader {
            cluster_id,
            lsn: 1,
            salt: new_salt(),
            len_bytes: options.segment_bytes,
            generation: 0,
            from_peer: false,
        };
        let segment = ActiveSegment::create(&*disk, header)?;
        let recovered = Recovered {
            snapshot: None,
            records: RecordReader::new(Arc::clone(&disk), cluster_id, &[1], 1, 0)?,
            last_lsn: 0,
            tail: TailReport::Clean,
            skipped_snapshots: Vec::new(),
        };
        let store = Store::new(disk, cluster_id, vec![1], 0, (0, 0));
        Ok((Self::with_segment(store, options, segment, 0), recovered))
    }

    fn with_segment(
        store: Store,
        options: &JournalOptions,
        segment: ActiveSegment,
        last_lsn: Lsn,
    ) -> Self {
        Self {
            store: Arc::new(store),
            segment_bytes: options.segment_bytes,
            segment,
            next_lsn: last_lsn + 1,
            synced_lsn: last_lsn,
            failed: None,
            buffer: Vec::new(),
        }
    }

    /// Writes records and returns the number of the last one ([`Journal::last_lsn`] when
    /// `records` is empty). They are durable after [`Journal::sync`].
    ///
    /// Not atomic across a crash: before the sync, any prefix of the records may survive.
    /// [`JournalError::DiskFull`] and the errors about sizes leave the journal unchanged and usable;
    /// any other error is final.
    pub fn append(&mut self, records: &[impl AsRef<[u8]>]) -> Result<Lsn, JournalError> {
        self.check_not_failed()?;
        let bytes = self.check_sizes(records)?;
        if bytes > self.segment.room_bytes() {
            self.rotate()?;
        }
        self.buffer.clear();
        let mut lsn = self.next_lsn;
        for record in records {
            let salt = self.segment.header.salt;
            encode_record(
                &mut self.buffer,
                record.as_ref(),
                lsn,
                self.synced_lsn,
                salt,
            );
            lsn += 1;
        }
        if !self.buffer.is_empty() {
            let written = self.segment.write(&mut self.buffer);
            self.remember_failure(written)?;
        }
        self.next_lsn = lsn;
        self.store.appended(lsn - 1);
        Ok(lsn - 1)
    }

    /// Makes everything appended so far durable. An error is final: it is unknown what the failed sync
    /// left on the disk, and the kernel may report success next time without having written anything.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        self.check_not_failed()?;
        if self.synced_lsn == self.last_lsn() {
            return Ok(());
        }
        if !planted::is(Bug::SkipsJournalSync) {
            let synced = self.segment.sync();
            if !planted::is(Bug::IgnoresFailedJournalSync) {
                self.remember_failure(synced)?;
            }
        }
        self.synced_lsn = self.last_lsn();
        Ok(())
    }

    /// The disk of the journal, for other files in its directory.
    pub fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.store.disk)
    }

    /// The last record appended; 0 when there is none.
    pub fn last_lsn(&self) -> Lsn {
        self.next_lsn - 1
    }

    /// The last record known to be durable.
    pub fn durable_lsn(&self) -> Lsn {
        self.synced_lsn
    }

    /// Syncs, starts a new segment, and returns what a background thread needs to write a
    /// snapshot of everything up to `lsn`, which must have been appended. `None` if the newest
    /// snapshot already covers it.
    pub fn begin_snapshot(&mut self, lsn: Lsn) -> Result<Option<SnapshotPlan>, JournalError> {
        self.check_not_failed()?;
        assert!(
            lsn <= self.last_lsn(),
            "a snapshot up to record {lsn}, and {} is the last",
            self.last_lsn()
        );
        self.store.check_no_plan()?;
        if self.store.newest_snapshot_lsn() >= lsn {
            return Ok(None);
        }
        if self.segment.header.lsn < self.next_lsn {
            self.rotate()?;
        }
        let store = Arc::clone(&self.store);
        Ok(Some(SnapshotPlan::new(store, lsn, new_salt())))
    }

    /// Continues in a new segment. The old one is synced first: recovery relies on only the newest
    /// segment having a tail that was never synced. No sync of the old one has failed, and a segment
    /// found at the start was replaced by a copy, so this sync proves that all of it is on the disk.
    fn rotate(&mut self) -> Result<(), JournalError> {
        self.sync()?;
        let header = FileHeader {
            lsn: self.next_lsn,
            salt: new_salt(),
            len_bytes: self.segment_bytes,
            from_peer: false,
            ..self.segment.header
        };
        let created = ActiveSegment::create(&*self.store.disk, header);
        match created {
            // Nothing was changed; the caller may retry when there is space.
            Err(e @ JournalError::DiskFull { .. }) => Err(e),
            created => {
                self.segment = self.remember_failure(created)?;
                self.store.rotated(self.next_lsn);
                Ok(())
            }
        }
    }

    /// Returns the encoded size of the records if all of them fit the limits.
    fn check_sizes(&self, records: &[impl AsRef<[u8]>]) -> Result<u64, JournalError> {
        let mut total = 0;
        for record in records {
            let bytes = record.as_ref().len();
            if bytes > RECORD_BYTES_MAX {
                return Err(JournalError::RecordTooLarge {
                    bytes,
                    max_bytes: RECORD_BYTES_MAX,
                });
            }
            total += (RECORD_HEADER_BYTES + bytes) as u64;
        }
        let max_bytes = self.append_bytes_max();
        if total > max_bytes {
            return Err(JournalError::AppendTooLarge {
                bytes: total,
                max_bytes,
            });
        }
        Ok(total)
    }

    /// The most that one append may hold, in encoded bytes.
    pub(super) fn append_bytes_max(&self) -> u64 {
        self.segment_bytes - RECORDS_OFFSET
    }

    pub(super) fn check_not_failed(&self) -> Result<(), JournalError> {
        match &self.failed {
            None => Ok(()),
            Some(first) => Err(JournalError::Stopped {
                first: first.clone(),
            }),
        }
    }

    pub(super) fn remember_failure<T>(
        &mut self,
        result: Result<T, JournalError>,
    ) -> Result<T, JournalError> {
        if let Err(e) = &result {
            self.failed.get_or_insert_with(|| e.to_string());
        }
        result
    }
}

impl TailReport {
    fn new(segment: &str, tail: &SegmentTail) -> Self {
        let dropped_bytes = tail.written_to - tail.end_offset;
        if dropped_bytes == 0 && tail.missing_bytes == 0 {
            return Self::Clean;
        }
        Self::Torn {
            segment: segment.to_owned(),
            offset: tail.end_offset,
            dropped_bytes,
            missing_bytes: tail.missing_bytes,
        }
    }
}

fn check_options(options: &JournalOptions) -> Result<(), JournalError> {
    let accepted = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
    if accepted.contains(&options.segment_bytes) {
        return Ok(());
    }
    Err(JournalError::Option {
        option: "segment_bytes",
        value: options.segment_bytes,
        accepted: format!("from {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"),
    })
}

/// The header of the newest undamaged snapshot, and the errors of the damaged ones after it.
fn newest_good_snapshot(
    disk: &dyn Disk,
    files: &JournalFiles,
    cluster_id: u128,
) -> Result<(Option<FileHeader>, Vec<JournalError>), JournalError> {
    let mut skipped = Vec::new();
    for &lsn in files.snapshots.iter().rev() {
        let verified = SnapshotReader::open(disk, lsn, cluster_id).and_then(|snapshot| {
            let header = snapshot.header;
            snapshot.verify().map(|()| header)
        });
        match verified {
            Ok(header) => return Ok((Some(header), skipped)),
            Err(e @ JournalError::Corrupt { .. }) => skipped.push(e),
            Err(e) => return Err(e),
        }
    }
    let starts_at_first_record = files.segments.first() == Some(&1);
    match skipped.pop() {
        // Without any good snapshot, the records must go back to the very first.
        Some(damage) if !starts_at_first_record => Err(damage),
        Some(damage) => {
            skipped.push(damage);
            Ok((None, skipped))
        }
        None => Ok((None, skipped)),
    }
}

/// A random number that clients, whose bytes are in records, cannot predict.
pub(super) fn new_salt() -> u64 {
    machine::random()
}
