//! The files of a journal directory.

use super::disk::Disk;
use super::format::FileKind;
use super::segment::SegmentReader;
use super::{JournalError, Lsn};

/// Segments and snapshots by the number in their names, ascending.
#[derive(Debug, Default)]
pub(super) struct JournalFiles {
    /// First record of each segment.
    pub(super) segments: Vec<Lsn>,
    /// Last record covered by each snapshot.
    pub(super) snapshots: Vec<Lsn>,
    /// Names of files that an interrupted creation left behind.
    pub(super) temporaries: Vec<String>,
}

impl JournalFiles {
    pub(super) fn list(disk: &dyn Disk) -> Result<Self, JournalError> {
        let names = disk
            .list()
            .map_err(|e| JournalError::io("list", &disk.location(), e))?;
        let mut files = Self::default();
        for name in names {
            match FileKind::of(&name) {
                FileKind::Segment(lsn) => files.segments.push(lsn),
                FileKind::Snapshot(lsn) => files.snapshots.push(lsn),
                FileKind::Temporary => files.temporaries.push(name),
                FileKind::Other => {}
            }
        }
        files.segments.sort_unstable();
        files.snapshots.sort_unstable();
        Ok(files)
    }
}

/// The segments that make up the journal, and those that do not count.
#[derive(Debug)]
pub(super) struct Chain {
    /// First records of the segments that follow each other, ascending.
    pub(super) segments: Vec<Lsn>,
    /// First records of segments that were removed on purpose, or that a snapshot from a peer made
    /// superfluous, ascending. They are to be removed.
    pub(super) superfluous: Vec<Lsn>,
}

impl Chain {
    /// Judges `segments`, which is not empty, by their headers. The records after `base_lsn` are
    /// needed: a damaged header of a segment that may hold one is an error.
    pub(super) fn of(
        disk: &dyn Disk,
        segments: &[Lsn],
        base_lsn: Lsn,
        cluster_id: u128,
    ) -> Result<Self, JournalError> {
        let needed_from = segments
            .partition_point(|&first| first <= base_lsn + 1)
            .saturating_sub(1);
        let mut chain = Self {
            segments: Vec::new(),
            superfluous: Vec::new(),
        };
        let mut generation = 0;
        for (index, &first_lsn) in segments.iter().enumerate() {
            let header = match SegmentReader::open(disk, first_lsn, cluster_id) {
                Ok(segment) => segment.header,
                Err(error @ JournalError::Corrupt { .. }) if index < needed_from => {
                    tracing::warn!(%error, "an old segment, which a snapshot covers, is not used");
                    chain.segments.clear();
                    continue;
                }
                Err(error) => return Err(error),
            };
            if header.generation < generation {
                chain.superfluous.push(first_lsn);
                continue;
            }
            generation = header.generation;
            if header.from_peer {
                if first_lsn > base_lsn + 1 {
                    // The snapshot that covered the missing records is damaged or lost.
                    return Err(JournalError::MissingRecords { lsn: base_lsn + 1 });
                }
                chain.superfluous.append(&mut chain.segments);
            }
            chain.segments.push(first_lsn);
        }
        chain.superfluous.sort_unstable();
        Ok(chain)
    }
}
