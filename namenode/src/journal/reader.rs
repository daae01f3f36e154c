//! Reading records back across segments.

use std::collections::VecDeque;
use std::sync::Arc;

use super::disk::Disk;
use super::segment::{SegmentReader, Step};
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
