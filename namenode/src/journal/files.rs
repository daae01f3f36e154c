//! The files of a journal directory.

use super::disk::Disk;
use super::format::FileKind;
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
