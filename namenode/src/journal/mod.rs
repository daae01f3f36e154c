//! The journal: an append-only log of opaque records, with snapshots.
//!
//! Its user appends records (bytes that it alone understands), each of which gets the next
//! log sequence number, [`Lsn`], starting at 1. Once [`Journal::sync`] returns, the records appended
//! before it survive a crash and a power loss. A snapshot replaces all records up to a number, so that
//! the segments before it can be removed. [`JournalWriter`] adds a thread and group commit.
//!
//! # Files
//!
//! One directory, numbers in names decimal with 20 digits, integers little-endian, checksums
//! CRC-32 (IEEE):
//!
//! | name | content |
//! |---|---|
//! | `lock` | empty; locked (`flock`) by the process that has the journal open |
//! | `segment-<lsn>` | records from `<lsn>` on, up to the first record of the next segment |
//! | `snapshot-<lsn>` | the state after the records up to `<lsn>` |
//! | `*.tmp` | a segment or snapshot being created, or a snapshot (`received-<lsn>.tmp`) being received from a peer; removed at the next start |
//!
//! Segments and snapshots are written under a temporary name, synced, renamed, and the directory
//! synced: a file with a final name is complete.
//!
//! ## File header (64 bytes, at offset 0 of both)
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic: `HFSJSEG\0` or `HFSJSNP\0` |
//! | 8 | 4 | format version: 1, or 2 if the last two fields are not both zero |
//! | 12 | 4 | checksum of bytes 0..12 and 16..64 |
//! | 16 | 16 | cluster id |
//! | 32 | 8 | lsn, as in the name |
//! | 40 | 8 | salt: random, enters all checksums below |
//! | 48 | 8 | size of the file when created (0 in a snapshot) |
//! | 56 | 4 | segment: generation, how often a suffix had been removed when it was made; else 0 |
//! | 60 | 4 | 1: the snapshot came from a peer, or the segment was begun after such a snapshot; else 0 |
//!
//! ## Segment
//!
//! Header, zeros up to offset 4096, then records without gaps, then zeros up to the end of the
//! file (its space is reserved at creation). A record:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | payload length, at most [`RECORD_BYTES_MAX`] |
//! | 4 | 4 | checksum of salt, bytes 0..4 and 8..28 |
//! | 8 | 8 | lsn |
//! | 16 | 8 | synced lsn: all records up to it were durable before this one took effect |
//! | 24 | 4 | checksum of salt, lsn, payload |
//! | 28 | | payload |
//!
//! ## Snapshot
//!
//! Header, then chunks of payload length (4 bytes, at most 256 KiB), checksum of salt, index of
//! the chunk (8 bytes, from 0) and payload (4 bytes), payload. The last chunk has the length 0
//! and is followed by the size of the content (8 bytes), which its checksum covers.
//!
//! # Torn or damaged
//!
//! A segment is synced before the next one is created, so only the newest can end in records that
//! were never synced. There, the first place without a valid record is the end of the journal. Data
//! after it is a *torn tail* unless something proves otherwise: it is reported ([`TailReport`]) and
//! dropped. Writes between two syncs reach the disk in any order, so a torn tail may contain valid
//! records. The proof of *damage* is a record header after the end whose synced lsn shows that the
//! missing record was on the disk before. Then, and whenever an older segment is damaged or missing,
//! the journal refuses to open ([`JournalError::Corrupt`], [`JournalError::MissingRecords`]). Damage
//! to records of the very last sync cannot be told from a torn tail and is reported as one.
//!
//! # After a failed sync
//!
//! When a sync fails, the kernel keeps the pages as if they had been written: they can be read until
//! it drops them, and no later sync writes them. So the journal stops at the first failure, and a start
//! does not rely on the newest segment as it finds it: the segment is copied, record by record, to a new
//! file, which is synced and takes the place of the old one (and the directory is synced) before
//! [`Journal::open`] returns. An older segment needs no copy: the next one was created after a sync of it
//! that followed no failed one. File names need no such care: a file system that cannot write its own
//! metadata stops altogether.
//!
//! Nothing after a bad place is ever returned as a record. Since checksums are salted, bytes
//! inside a record cannot pass for a record header.
//!
//! # A replicated journal
//!
//! The engine above knows nothing of this module: it receives records in order. A Raft log
//! keeps its entries in this same [`Journal`] (an entry is an opaque record, the term is part of
//! its payload) and decides when an entry is committed.
//!
//! **Removing a suffix** ([`Journal::truncate_after`]) rewrites the segment that holds the first
//! removed record without the removed records, with a new salt and a generation above all others.
//! The copy takes the name of the old segment, durably: from this moment on, segments that follow
//! and are of a lower generation do not count, so it does not matter which of them a crash leaves.
//! They are removed before anything is appended, and at each start. A segment that is damaged or
//! missing is a different case, and still refused.
//!
//! **A snapshot from a peer** ([`Journal::install_snapshot`]) is marked as such in its header. Unlike
//! any other snapshot, it may be newer than the last record: then the journal continues in a segment
//! that begins after the snapshot, and whose header says that no older segment connects with it. The
//! switch happens when the snapshot durably gets its name; a start that finds it without that segment
//! creates the segment.
//!
//! **Purging** removes segments one at a time, each durably before the next, the oldest first, so
//! that there is no gap between those that are left. The last two snapshots, and the records after
//! the older of them, always stay.
//!
//! **Reading while the journal is open** ([`JournalReader`]) reopens a file if a segment was replaced
//! since it was opened.

pub mod disk;
mod error;
mod files;
mod format;
mod log;
mod reader;
mod received;
mod replicated;
mod segment;
mod snapshot;
mod store;
mod writer;

pub use error::JournalError;
pub(crate) use format::u32_at;
pub use log::{Journal, JournalOptions, Recovered, TailReport};
pub use reader::{JournalReader, RecordReader, SnapshotFile};
pub use received::{ReceivedSnapshot, SnapshotReceiver};
pub use replicated::SnapshotReceived;
pub(crate) use snapshot::{Failure, fill};
pub use snapshot::{
    SnapshotBytes, SnapshotInstalled, SnapshotPlan, SnapshotReader, SnapshotWriter,
};
pub use store::Purged;
pub use writer::{
    Batch, Completion, InstallCompletion, JournalCounters, JournalWriter, JournalWriterOptions,
    Progress, SnapshotCompletion, TruncateCompletion,
};

/// Log sequence number: the number of a record, one more than that of the record before it. The
/// first record has number 1; 0 means "no record".
pub type Lsn = u64;

/// The most bytes that one record may have.
pub const RECORD_BYTES_MAX: usize = 8 * 1024 * 1024;

#[cfg(test)]
mod tests;
