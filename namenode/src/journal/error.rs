//! Errors of the journal.

use std::io;
use std::path::PathBuf;

use super::Lsn;

/// Why a journal operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The operating system refused an operation on a journal file.
    #[error("journal: cannot {operation} {file}: {source}")]
    Io {
        /// The operation, as a verb: "write", "sync", ...
        operation: &'static str,
        /// File name inside the journal directory, or the directory itself.
        file: String,
        /// The error of the operating system.
        source: io::Error,
    },

    /// The file with the vote and the members is damaged: the promises of this namenode to others are lost.
    #[error(
        "journal: the file `member` in {location} is damaged, and with it what this namenode promised to others. If others \
         go on, move its data directory aside, make another one with `harvestfs init namenode`, and have it taken in with \
         `harvestfs admin namenode add`; if it is the only one, restore a copy or a backup"
    )]
    Member {
        /// The directory.
        location: String,
    },

    /// The file with the vote and the members is missing, and other namenodes may know this one.
    #[error(
        "journal: the file `member` in {location} is missing, and with it what this namenode promised to others: restore it \
         (or the whole directory) if it was moved. If others go on, move the data directory aside, make another one with \
         `harvestfs init namenode`, and have it taken in with `harvestfs admin namenode add`; if it is the only one, \
         restore a copy or a backup"
    )]
    MemberMissing {
        /// The directory.
        location: String,
    },

    /// The disk has no room for the next segment or snapshot. Nothing of the refused append was
    /// written; records that were acknowledged before are intact.
    #[error(
        "journal: no space left to create {file} ({needed_bytes} bytes); \
         free space on the disk of the journal directory, then try again"
    )]
    DiskFull {
        /// File that could not be created.
        file: String,
        /// Its size in bytes.
        needed_bytes: u64,
    },

    /// Another process has this journal open.
    #[error("journal: {dir} is in use by another namenode; stop it first", dir = dir.display())]
    Locked {
        /// The journal directory.
        dir: PathBuf,
    },

    /// The directory holds no journal and the options do not allow creating one.
    #[error(
        "journal: no journal in {location}; if this cluster is new, initialise it, \
         otherwise restore the journal directory (its disk may have been reformatted)"
    )]
    Empty {
        /// Where a journal was looked for.
        location: String,
    },

    /// A file belongs to a different cluster.
    #[error(
        "journal: {file} belongs to cluster {found:032x}, not to {expected:032x}; \
         the configuration points at the journal directory of another cluster"
    )]
    WrongCluster {
        /// The file.
        file: String,
        /// Cluster id found in the file.
        found: u128,
        /// Cluster id of the options.
        expected: u128,
    },

    /// A file was written by a version of the format that this program does not know.
    #[error(
        "journal: {file} has format version {found}, this program reads versions up to {supported}; \
         start the newer program that wrote it"
    )]
    UnsupportedVersion {
        /// The file.
        file: String,
        /// Version found in the file.
        found: u32,
        /// The newest version that this program reads.
        supported: u32,
    },

    /// Acknowledged data is damaged. Nothing at or after this place was used.
    #[error(
        "journal: {file} is damaged at byte {offset} (record {lsn}): {reason}; this record had \
         been acknowledged, so the namenode does not start: restore the journal directory from a \
         copy, and check the disk"
    )]
    Corrupt {
        /// The damaged file.
        file: String,
        /// Byte offset of the damage in the file.
        offset: u64,
        /// Log sequence number expected at that place.
        lsn: Lsn,
        /// What is wrong there.
        reason: String,
    },

    /// Records between the snapshot and the newest segment are missing as a whole.
    #[error(
        "journal: the records from {lsn} on are missing, no segment holds them; \
         restore the missing files of the journal directory from a copy"
    )]
    MissingRecords {
        /// First log sequence number that no file holds.
        lsn: Lsn,
    },

    /// A record exceeds [`super::RECORD_BYTES_MAX`]. Nothing was written.
    #[error("journal: a record of {bytes} bytes exceeds the limit of {max_bytes} bytes")]
    RecordTooLarge {
        /// Size of the record.
        bytes: usize,
        /// The limit.
        max_bytes: usize,
    },

    /// The records of one append do not fit in one segment. Nothing was written.
    #[error("journal: an append of {bytes} bytes exceeds the {max_bytes} bytes of a segment")]
    AppendTooLarge {
        /// Size of the encoded records.
        bytes: u64,
        /// Room in an empty segment.
        max_bytes: u64,
    },

    /// An option has a value that the journal cannot work with.
    #[error("journal: {option} is {value}, but must be {accepted}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The value given.
        value: u64,
        /// The values accepted.
        accepted: String,
    },

    /// A snapshot is already being written, installed or received.
    #[error("journal: a snapshot is already being written")]
    SnapshotInProgress,

    /// While the snapshot was being written, records that it was to cover were removed, or a newer one
    /// came from a peer. It is not installed; the journal is not affected.
    #[error("journal: the snapshot up to record {lsn} was superseded while it was being written")]
    SnapshotSuperseded {
        /// The last record that it would have covered.
        lsn: Lsn,
    },

    /// A snapshot from a peer covers no more than the newest one. Nothing was changed.
    #[error(
        "journal: the received snapshot up to record {lsn} is not newer than the one up to record \
         {newest_lsn}"
    )]
    SnapshotNotNewer {
        /// The last record covered by the received one.
        lsn: Lsn,
        /// The last record covered by the newest one.
        newest_lsn: Lsn,
    },

    /// What a peer sent is not a complete snapshot. It is never installed; nothing was changed.
    #[error(
        "journal: the received snapshot up to record {lsn} is damaged at byte {offset}: {reason}; \
         it has to be sent again"
    )]
    ReceivedSnapshotDamaged {
        /// The last record that it should cover.
        lsn: Lsn,
        /// Byte offset of the damage.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },

    /// Records that a snapshot covers cannot be removed by a truncation. Nothing was changed.
    #[error(
        "journal: the records after {lsn} cannot be removed, since a snapshot covers those up to \
         {snapshot_lsn}"
    )]
    TruncatesSnapshot {
        /// The last record that was to stay.
        lsn: Lsn,
        /// The last record covered by the newest snapshot.
        snapshot_lsn: Lsn,
    },

    /// A requested record is no longer in the journal; a snapshot covers it.
    #[error("journal: record {lsn} was purged; the first one that is there is {first_lsn}")]
    RecordPurged {
        /// The requested record.
        lsn: Lsn,
        /// The first record that can be read, or the next one when there is none.
        first_lsn: Lsn,
    },

    /// An earlier write or sync failed. What was appended since the last successful sync may or
    /// may not be on the disk, so nothing more is acknowledged until the journal is reopened.
    #[error("journal: stopped by an earlier failure ({first}); restart the namenode")]
    Stopped {
        /// The first failure.
        first: String,
    },

    /// The journal was closed, and may be open again elsewhere in this process.
    #[error("journal: it is closed")]
    Closed,

    /// The operating system refused the journal thread.
    #[error("journal: cannot start the journal thread: {source}")]
    Thread {
        /// The error of the operating system.
        source: io::Error,
    },
}

impl JournalError {
    /// Wraps an error of the operating system; "no space" becomes [`JournalError::DiskFull`].
    pub(super) fn create(file: &str, needed_bytes: u64, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull {
                file: file.to_owned(),
                needed_bytes,
            },
            _ => Self::io("create", file, source),
        }
    }

    pub(crate) fn io(operation: &'static str, file: &str, source: io::Error) -> Self {
        Self::Io {
            operation,
            file: file.to_owned(),
            source,
        }
    }

    pub(super) fn corrupt(file: &str, offset: u64, lsn: Lsn, reason: impl Into<String>) -> Self {
        Self::Corrupt {
            file: file.to_owned(),
            offset,
            lsn,
            reason: reason.into(),
        }
    }
}
