//! One segment file: creating, copying, appending, reading, and judging its tail.

use std::io;

use super::disk::{Disk, DiskFile};
use super::format::{
    FILE_HEADER_BYTES, FileHeader, HeaderBytes, RECORD_HEADER_BYTES, RECORDS_OFFSET, RecordHeader,
    SEGMENT_MAGIC, encode_record, payload_checksum, segment_name, temporary_name,
};
use super::{JournalError, Lsn, RECORD_BYTES_MAX};

/// How far ahead of the records zeros are written. Writing into space that is reserved but was
/// never written makes the file system commit its own journal with the sync; overwriting zeros
/// does not, which saves a third of the time of a sync.
fn zero_ahead_bytes(segment_bytes: u64) -> u64 {
    (segment_bytes / 64).clamp(RECORDS_OFFSET, 1024 * 1024)
}

const READ_CHUNK_BYTES: usize = 1024 * 1024;
/// The size of the first read, when it is not known whether more is wanted; each further read doubles it.
const READ_FIRST_BYTES: usize = 32 * 1024;

/// The segment that records are appended to.
pub(super) struct ActiveSegment {
    file: Box<dyn DiskFile>,
    pub(super) name: String,
    pub(super) header: FileHeader,
    /// Where the next record goes.
    offset: u64,
    /// Up to here the file holds records or zeros that were written.
    zeroed_to: u64,
}

impl ActiveSegment {
    /// Creates an empty segment; it is durable, name included, when this returns. A failure leaves the
    /// journal as it was.
    pub(super) fn create(disk: &dyn Disk, header: FileHeader) -> Result<Self, JournalError> {
        Self::prepare(disk, header)?.install(disk)
    }

    /// Creates an empty segment, which is durable when this returns and gets its name with
    /// [`ActiveSegment::install`].
    pub(super) fn prepare(disk: &dyn Disk, header: FileHeader) -> Result<Self, JournalError> {
        let begun = Self::begin(disk, header);
        let synced = begun.and_then(|mut segment| segment.file.sync().map(|()| segment));
        synced.map_err(|e| {
            remove_temporary(disk, header.lsn);
            JournalError::create(&segment_name(header.lsn), header.len_bytes, e)
        })
    }

    /// Copies the records of the newest segment to a new file, which is durable when this returns
    /// and takes the name of the old one with [`ActiveSegment::install`].
    ///
    /// That the records can be read does not prove that they are on the disk: when a sync failed, the
    /// kernel keeps their pages as if they had been written, and no later sync of that file
    /// writes them. They are verified as they are copied, since the kernel may drop such pages at
    /// any time and read the disk instead.
    ///
    /// In the new file, each record states that all before it are durable: the file has no final name
    /// until they are.
    pub(super) fn copy_of(
        disk: &dyn Disk,
        old: SegmentReader,
        salt: u64,
        segment_bytes: u64,
    ) -> Result<(Self, SegmentTail), JournalError> {
        let header = FileHeader {
            salt,
            len_bytes: segment_bytes.max(old.len_bytes),
            ..old.header
        };
        Self::copied(disk, old, header, Lsn::MAX, SegmentReader::tail)
    }

    /// Copies the records up to `through_lsn` of a segment, all of which must be readable, as
    /// [`ActiveSegment::copy_of`] does, to one of `generation`: once it has the name of the old
    /// one, segments that follow and are of an earlier generation no longer count.
    pub(super) fn truncated_copy_of(
        disk: &dyn Disk,
        old: SegmentReader,
        through_lsn: Lsn,
        generation: u32,
        salt: u64,
        segment_bytes: u64,
    ) -> Result<Self, JournalError> {
        let header = FileHeader {
            salt,
            len_bytes: segment_bytes.max(old.len_bytes),
            generation,
            ..old.header
        };
        let check = |old: SegmentReader| {
            if old.next_lsn == through_lsn + 1 {
                return Ok(());
            }
            let reason = "a record that was written cannot be read";
            Err(JournalError::corrupt(
                &old.name,
                old.offset,
                old.next_lsn,
                reason,
            ))
        };
        let (segment, ()) = Self::copied(disk, old, header, through_lsn, check)?;
        Ok(segment)
    }

    /// Copies records up to `through_lsn` to a segment with another header, which is durable when this
    /// returns and has a temporary name. Before the copy is synced, `judge` may refuse what was read.
    fn copied<T>(
        disk: &dyn Disk,
        mut old: SegmentReader,
        header: FileHeader,
        through_lsn: Lsn,
        judge: impl FnOnce(SegmentReader) -> Result<T, JournalError>,
    ) -> Result<(Self, T), JournalError> {
        let copy = || {
            let mut segment = Self::begin(disk, header)
                .map_err(|e| JournalError::create(&old.name, header.len_bytes, e))?;
            segment.take_records(&mut old, through_lsn)?;
            let judged = judge(old)?;
            segment.sync()?;
            Ok((segment, judged))
        };
        copy().inspect_err(|_| remove_temporary(disk, header.lsn))
    }

    /// Starts a segment under its temporary name; nothing is durable yet.
    fn begin(disk: &dyn Disk, header: FileHeader) -> io::Result<Self> {
        let name = segment_name(header.lsn);
        let len_bytes = header.len_bytes;
        let mut file = disk.create(&temporary_name(&name), len_bytes)?;
        let zeroed_to = len_bytes.min(zero_ahead_bytes(len_bytes));
        let mut start = vec![0; zeroed_to as usize];
        start[..FILE_HEADER_BYTES].copy_from_slice(&header.encode(SEGMENT_MAGIC));
        file.write_at(&start, 0)?;
        Ok(Self {
            file,
            name,
            header,
            offset: RECORDS_OFFSET,
            zeroed_to,
        })
    }

    /// Writes the records that `old` yields, up to `through_lsn`. They fit, since the segment is at least
    /// as large as `old`.
    fn take_records(
        &mut self,
        old: &mut SegmentReader,
        through_lsn: Lsn,
    ) -> Result<(), JournalError> {
        let mut buffer = Vec::new();
        let mut copied = false;
        while !copied {
            copied = old.next_lsn > through_lsn;
            if !copied {
                match old.step()? {
                    Step::Record { lsn, payload } => {
                        encode_record(&mut buffer, &payload, lsn, lsn - 1, self.header.salt);
                    }
                    Step::End | Step::Bad { .. } => copied = true,
                }
            }
            if copied || buffer.len() >= READ_CHUNK_BYTES {
                // No zeros are written ahead: the next piece follows immediately.
                self.file
                    .write_at(&buffer, self.offset)
                    .map_err(|e| JournalError::io("write", &self.name, e))?;
                self.offset += buffer.len() as u64;
                self.zeroed_to = self.zeroed_to.max(self.offset);
                buffer.clear();
            }
        }
        Ok(())
    }

    /// Gives a segment whose content is durable its name, replacing any file that has it, and makes
    /// the rename durable.
    pub(super) fn install(self, disk: &dyn Disk) -> Result<Self, JournalError> {
        // Never DiskFull, which promises that nothing changed: the new name may already be in place.
        disk.install(&temporary_name(&self.name), &self.name)
            .map_err(|e| JournalError::io("create", &self.name, e))?;
        Ok(self)
    }

    /// Removes a segment that was not installed.
    pub(super) fn discard(&self, disk: &dyn Disk) {
        remove_temporary(disk, self.header.lsn);
    }

    /// Bytes of encoded records that still fit.
    pub(super) fn room_bytes(&self) -> u64 {
        match self.header.len_bytes.checked_sub(self.offset) {
            Some(room) => room,
            None => panic!(
                "{} has {} bytes, but records up to {}",
                self.name, self.header.len_bytes, self.offset
            ),
        }
    }

    /// Writes encoded records, which must fit. `buffer` is extended with zeros when the zeros
    /// written ahead are used up.
    pub(super) fn write(&mut self, buffer: &mut Vec<u8>) -> Result<(), JournalError> {
        let records_end = self.offset + buffer.len() as u64;
        assert!(
            records_end <= self.header.len_bytes,
            "records up to byte {records_end} do not fit {}, which has {} bytes",
            self.name,
            self.header.len_bytes
        );
        if records_end > self.zeroed_to {
            let zeroed_to =
                (records_end + zero_ahead_bytes(self.header.len_bytes)).min(self.header.len_bytes);
            buffer.resize((zeroed_to - self.offset) as usize, 0);
            self.zeroed_to = zeroed_to;
        }
        self.file
            .write_at(buffer, self.offset)
            .map_err(|e| JournalError::io("write", &self.name, e))?;
        self.offset = records_end;
        Ok(())
    }

    pub(super) fn sync(&mut self) -> Result<(), JournalError> {
        self.file
            .sync()
            .map_err(|e| JournalError::io("sync", &self.name, e))
    }
}

/// Frees the space of a segment that could not be completed. Errors are ignored: the caller reports the
/// original one, and the next start removes the file.
fn remove_temporary(disk: &dyn Disk, first_lsn: Lsn) {
    let _ = disk.remove(&temporary_name(&segment_name(first_lsn)));
}

/// What a segment holds at one offset.
pub(super) enum Step {
    /// A record with matching checksums and the expected number.
    Record { lsn: Lsn, payload: Vec<u8> },
    /// Blank space, or less space than a header needs.
    End,
    /// Anything else.
    Bad { reason: &'static str },
}

/// Reads the records of one segment in order.
pub(super) struct SegmentReader {
    file: Box<dyn DiskFile>,
    pub(super) name: String,
    pub(super) header: FileHeader,
    len_bytes: u64,
    /// Where the next record is expected.
    pub(super) offset: u64,
    /// Number that the next record must have.
    pub(super) next_lsn: Lsn,
    window: Vec<u8>,
    window_offset: u64,
    read_ahead_bytes: usize,
}

impl SegmentReader {
    pub(super) fn open(
        disk: &dyn Disk,
        first_lsn: Lsn,
        cluster_id: u128,
    ) -> Result<Self, JournalError> {
        let name = segment_name(first_lsn);
        let file = disk
            .open(&name)
            .map_err(|e| JournalError::io("open", &name, e))?;
        let read_error = |e| JournalError::io("read", &name, e);
        let len_bytes = file.len_bytes().map_err(read_error)?;
        let mut bytes = [0; FILE_HEADER_BYTES];
        let read = file.read_at(&mut bytes, 0).map_err(read_error)?;
        let header =
            FileHeader::decode(&bytes[..read], SEGMENT_MAGIC, &name, first_lsn, cluster_id)?;
        Ok(Self {
            file,
            name,
            header,
            len_bytes,
            offset: RECORDS_OFFSET,
            next_lsn: first_lsn,
            window: Vec::new(),
            window_offset: RECORDS_OFFSET,
            read_ahead_bytes: READ_FIRST_BYTES,
        })
    }

    /// Reads at the current offset. After anything but [`Step::Record`], the reader stays there.
    pub(super) fn step(&mut self) -> Result<Step, JournalError> {
        let salt = self.header.salt;
        let bad = |reason| Ok(Step::Bad { reason });
        let bytes = self.view(self.offset, RECORD_HEADER_BYTES)?;
        let Some(bytes) = bytes.and_then(|bytes| bytes.try_into().ok()) else {
            return Ok(Step::End);
        };
        let header = match RecordHeader::decode(bytes, salt) {
            HeaderBytes::Blank => return Ok(Step::End),
            HeaderBytes::Invalid => return bad("the checksum of a record header does not match"),
            HeaderBytes::Valid(header) => header,
        };
        if header.lsn != self.next_lsn {
            return bad("a record is out of sequence");
        }
        let payload_bytes = header.payload_bytes as usize;
        if payload_bytes > RECORD_BYTES_MAX {
            return bad("a record is longer than the limit");
        }
        let payload_offset = self.offset + RECORD_HEADER_BYTES as u64;
        let Some(payload) = self.view(payload_offset, payload_bytes)? else {
            return bad("a record reaches beyond the end of the segment");
        };
        if payload_checksum(payload, header.lsn, salt) != header.payload_crc {
            return bad("the checksum of a record does not match");
        }
        let payload = payload.to_vec();
        self.offset = payload_offset + payload_bytes as u64;
        self.next_lsn += 1;
        Ok(Step::Record {
            lsn: header.lsn,
            payload,
        })
    }

    /// Seeks to the offset at which record `lsn` was found, or at which the first record must be, and reads
    /// it next.
    pub(super) fn go_to(&mut self, lsn: Lsn, offset: u64) {
        self.offset = offset;
        self.next_lsn = lsn;
    }

    /// Discards the data that was read ahead: the segment may have grown.
    pub(super) fn forget_window(&mut self) {
        self.window.clear();
    }

    /// Judges what follows the last valid record, where [`SegmentReader::step`] stopped.
    pub(super) fn tail(mut self) -> Result<SegmentTail, JournalError> {
        let end_offset = self.offset;
        let mut written_to = end_offset;
        let mut at = end_offset;
        while at < self.len_bytes {
            let chunk_bytes = (self.len_bytes - at).min(READ_CHUNK_BYTES as u64) as usize;
            // A header may straddle the end of the chunk, so the views overlap.
            let view_bytes =
                (self.len_bytes - at).min((READ_CHUNK_BYTES + RECORD_HEADER_BYTES - 1) as u64);
            let (next_lsn, salt) = (self.next_lsn, self.header.salt);
            let Some(bytes) = self.view(at, view_bytes as usize)? else {
                break;
            };
            if let Some(last) = bytes[..chunk_bytes].iter().rposition(|&b| b != 0) {
                written_to = at + last as u64 + 1;
                if let Some((found_at, later)) = find_later_header(bytes, salt, next_lsn) {
                    return Err(JournalError::corrupt(
                        &self.name,
                        end_offset,
                        next_lsn,
                        format!(
                            "no valid record here, but record {} at byte {} says that \
                             everything up to record {} was on the disk before it",
                            later.lsn,
                            at + found_at as u64,
                            later.synced_lsn
                        ),
                    ));
                }
            }
            at += chunk_bytes as u64;
        }
        Ok(SegmentTail {
            last_lsn: self.next_lsn - 1,
            end_offset,
            written_to,
            missing_bytes: self.header.len_bytes.saturating_sub(self.len_bytes),
        })
    }

    /// The `len` bytes at `offset`, or `None` if the segment ends before.
    fn view(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>, JournalError> {
        if offset + len as u64 > self.len_bytes {
            return Ok(None);
        }
        let window_end = self.window_offset + self.window.len() as u64;
        if offset < self.window_offset || offset + len as u64 > window_end {
            let is_next = offset >= self.window_offset && offset <= window_end;
            self.read_ahead_bytes = match is_next {
                true => READ_CHUNK_BYTES.min(self.read_ahead_bytes * 2),
                false => READ_FIRST_BYTES,
            };
            let wanted = (len.max(self.read_ahead_bytes) as u64).min(self.len_bytes - offset);
            self.window.resize(wanted as usize, 0);
            let read = self
                .file
                .read_at(&mut self.window, offset)
                .map_err(|e| JournalError::io("read", &self.name, e))?;
            self.window.truncate(read);
            self.window_offset = offset;
            if read < len {
                return Ok(None);
            }
        }
        let start = (offset - self.window_offset) as usize;
        Ok(Some(&self.window[start..start + len]))
    }
}

/// Searches for a record header that proves that record `lsn` was synced once.
fn find_later_header(bytes: &[u8], salt: u64, lsn: Lsn) -> Option<(usize, RecordHeader)> {
    bytes
        .windows(RECORD_HEADER_BYTES)
        .enumerate()
        .find_map(|(at, window)| {
            let window = window.try_into().ok()?;
            if RecordHeader::claimed_lsn(window) <= lsn {
                return None;
            }
            match RecordHeader::decode(window, salt) {
                HeaderBytes::Valid(header) if header.synced_lsn >= lsn => Some((at, header)),
                _ => None,
            }
        })
}

/// Where the valid records of the newest segment end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentTail {
    /// The last valid record; the one before the segment's first if there is none.
    pub(super) last_lsn: Lsn,
    /// First byte after the last valid record.
    pub(super) end_offset: u64,
    /// First byte after which the segment holds only zeros; equal to `end_offset` when clean.
    pub(super) written_to: u64,
    /// By how many bytes the file is shorter than when it was created; no crash causes that.
    pub(super) missing_bytes: u64,
}
