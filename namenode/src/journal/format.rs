//! Bytes on the disk: file headers, record headers, file names. The layout is described in the
//! documentation of [`super`].

use super::{JournalError, Lsn};

/// Newest version of the layout of segments and snapshots.
pub(super) const FORMAT_VERSION: u32 = 2;

/// The version without the fields that only replicated journals need. It is written as long as it
/// suffices, so that a release that knows no other version can continue with the journal.
const FORMAT_VERSION_ALONE: u32 = 1;

const FLAG_FROM_PEER: u32 = 1;

/// Size of the header of a segment or snapshot as encoded.
pub(super) const FILE_HEADER_BYTES: usize = 64;

/// Offset of the first record in a segment. One page, so that no append rewrites the page (on
/// disk: the sectors) of the header.
pub(super) const RECORDS_OFFSET: u64 = 4096;

/// Size of the header before each record's payload.
pub(super) const RECORD_HEADER_BYTES: usize = 28;

/// A bound that no journal reaches: a million records per second for a hundred thousand years.
const LSN_MAX: Lsn = 1 << 62;

pub(super) const SEGMENT_MAGIC: [u8; 8] = *b"HFSJSEG\0";
pub(super) const SNAPSHOT_MAGIC: [u8; 8] = *b"HFSJSNP\0";

const SEGMENT_PREFIX: &str = "segment-";
const SNAPSHOT_PREFIX: &str = "snapshot-";
const RECEIVED_PREFIX: &str = "received-";
const TEMPORARY_SUFFIX: &str = ".tmp";

pub(super) fn segment_name(first_lsn: Lsn) -> String {
    format!("{SEGMENT_PREFIX}{first_lsn:020}")
}

pub(super) fn snapshot_name(lsn: Lsn) -> String {
    format!("{SNAPSHOT_PREFIX}{lsn:020}")
}

/// The name of a snapshot from a peer until it is installed.
pub(super) fn received_name(lsn: Lsn) -> String {
    temporary_name(&format!("{RECEIVED_PREFIX}{lsn:020}"))
}

/// The name of a segment or snapshot until it is complete.
pub(super) fn temporary_name(name: &str) -> String {
    format!("{name}{TEMPORARY_SUFFIX}")
}

/// The kind of a file in the journal directory, judged by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    /// A segment whose first record has this number.
    Segment(Lsn),
    /// A snapshot that covers all records up to this number.
    Snapshot(Lsn),
    /// Left behind by an interrupted creation; may be removed.
    Temporary,
    /// Not a file of the journal.
    Other,
}

impl FileKind {
    pub(super) fn of(name: &str) -> Self {
        let number = |digits: &str| -> Option<Lsn> {
            let plain = digits.len() == 20 && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse().ok()).flatten()
        };
        let (stem, temporary) = match name.strip_suffix(TEMPORARY_SUFFIX) {
            Some(stem) => (stem, true),
            None => (name, false),
        };
        let kind = if let Some(lsn) = stem.strip_prefix(SEGMENT_PREFIX).and_then(number) {
            Self::Segment(lsn)
        } else if let Some(lsn) = stem.strip_prefix(SNAPSHOT_PREFIX).and_then(number) {
            Self::Snapshot(lsn)
        } else if temporary
            && stem
                .strip_prefix(RECEIVED_PREFIX)
                .and_then(number)
                .is_some()
        {
            return Self::Temporary;
        } else {
            return Self::Other;
        };
        if temporary { Self::Temporary } else { kind }
    }
}

/// Header at offset 0 of every segment and snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileHeader {
    pub(super) cluster_id: u128,
    /// Segment: number of the first record. Snapshot: number of the last record covered.
    pub(super) lsn: Lsn,
    /// Enters every record checksum of the segment, so that bytes that a user put into a record,
    /// or that another file left on the disk, are never mistaken for a record header.
    pub(super) salt: u64,
    /// Size the file was created with; 0 for a snapshot, which grows as it is written.
    pub(super) len_bytes: u64,
    /// How often a suffix of the journal had been removed when the segment was made; 0 for a
    /// snapshot. A segment that follows one of a higher generation was removed with such a suffix.
    pub(super) generation: u32,
    /// Snapshot: it came from a peer, and the journal may have ended before it. Segment: it was
    /// begun after such a snapshot, and does not continue any older segment.
    pub(super) from_peer: bool,
}

impl FileHeader {
    pub(super) fn encode(&self, magic: [u8; 8]) -> [u8; FILE_HEADER_BYTES] {
        let mut bytes = [0; FILE_HEADER_BYTES];
        bytes[0..8].copy_from_slice(&magic);
        let flags = if self.from_peer { FLAG_FROM_PEER } else { 0 };
        let version = match (self.generation, flags) {
            (0, 0) => FORMAT_VERSION_ALONE,
            _ => FORMAT_VERSION,
        };
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.cluster_id.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.lsn.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.salt.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.generation.to_le_bytes());
        bytes[60..64].copy_from_slice(&flags.to_le_bytes());
        let checksum = file_header_checksum(&bytes);
        bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes and checks the header of `file`, whose name contains `lsn`.
    pub(super) fn decode(
        bytes: &[u8],
        magic: [u8; 8],
        file: &str,
        lsn: Lsn,
        cluster_id: u128,
    ) -> Result<Self, JournalError> {
        let corrupt = |reason: &str| JournalError::corrupt(file, 0, lsn, reason);
        let bytes: &[u8; FILE_HEADER_BYTES] = bytes
            .try_into()
            .map_err(|_| corrupt("the file is shorter than its header"))?;
        if bytes[0..8] != magic {
            return Err(corrupt("the header does not start with the magic number"));
        }
        if u32_at(bytes, 12) != file_header_checksum(bytes) {
            return Err(corrupt("the checksum of the header does not match"));
        }
        let version = u32_at(bytes, 8);
        if !(FORMAT_VERSION_ALONE..=FORMAT_VERSION).contains(&version) {
            return Err(JournalError::UnsupportedVersion {
                file: file.to_owned(),
                found: version,
                supported: FORMAT_VERSION,
            });
        }
        let header = Self {
            cluster_id: u128::from(u64_at(bytes, 16)) | (u128::from(u64_at(bytes, 24)) << 64),
            lsn: u64_at(bytes, 32),
            salt: u64_at(bytes, 40),
            len_bytes: u64_at(bytes, 48),
            generation: u32_at(bytes, 56),
            from_peer: u32_at(bytes, 60) == FLAG_FROM_PEER,
        };
        if u32_at(bytes, 60) > FLAG_FROM_PEER {
            return Err(corrupt("the header has unknown flags"));
        }
        if header.cluster_id != cluster_id {
            return Err(JournalError::WrongCluster {
                file: file.to_owned(),
                found: header.cluster_id,
                expected: cluster_id,
            });
        }
        if header.lsn != lsn {
            return Err(corrupt(
                "the record number in the header differs from the name",
            ));
        }
        if header.lsn == 0 || header.lsn > LSN_MAX {
            return Err(corrupt("the record number is out of range"));
        }
        Ok(header)
    }
}

fn file_header_checksum(bytes: &[u8; FILE_HEADER_BYTES]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..12]);
    hasher.update(&bytes[16..]);
    hasher.finalize()
}

/// Header before each record's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) payload_bytes: u32,
    pub(super) lsn: Lsn,
    /// Every record up to this one was durable before this record took effect. Recovery uses it to
    /// tell a torn tail (never synced) from damage (synced once).
    pub(super) synced_lsn: Lsn,
    pub(super) payload_crc: u32,
}

/// The result of decoding a record header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderBytes {
    /// Nothing was ever written here.
    Blank,
    /// A header with a matching checksum.
    Valid(RecordHeader),
    /// Anything else.
    Invalid,
}

impl RecordHeader {
    pub(super) fn encode(&self, salt: u64) -> [u8; RECORD_HEADER_BYTES] {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.lsn.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.synced_lsn.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_crc.to_le_bytes());
        let checksum = record_header_checksum(&bytes, salt);
        bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; RECORD_HEADER_BYTES], salt: u64) -> HeaderBytes {
        if bytes.iter().all(|&b| b == 0) {
            return HeaderBytes::Blank;
        }
        if u32_at(bytes, 4) != record_header_checksum(bytes, salt) {
            return HeaderBytes::Invalid;
        }
        HeaderBytes::Valid(Self {
            payload_bytes: u32_at(bytes, 0),
            lsn: Self::claimed_lsn(bytes),
            synced_lsn: u64_at(bytes, 16),
            payload_crc: u32_at(bytes, 24),
        })
    }

    /// The record number in a header whose checksum was not verified.
    pub(super) fn claimed_lsn(bytes: &[u8; RECORD_HEADER_BYTES]) -> Lsn {
        u64_at(bytes, 8)
    }
}

fn record_header_checksum(bytes: &[u8; RECORD_HEADER_BYTES], salt: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&salt.to_le_bytes());
    hasher.update(&bytes[..4]);
    hasher.update(&bytes[8..]);
    hasher.finalize()
}

/// Checksum of a payload, bound to its segment and its number.
pub(super) fn payload_checksum(payload: &[u8], lsn: Lsn, salt: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&salt.to_le_bytes());
    hasher.update(&lsn.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

/// Appends one encoded record to `buffer`.
pub(super) fn encode_record(
    buffer: &mut Vec<u8>,
    payload: &[u8],
    lsn: Lsn,
    synced_lsn: Lsn,
    salt: u64,
) {
    let header = RecordHeader {
        // Callers have checked the payload against RECORD_BYTES_MAX, which is below 4 GiB.
        payload_bytes: payload.len() as u32,
        lsn,
        synced_lsn,
        payload_crc: payload_checksum(payload, lsn, salt),
    };
    buffer.extend_from_slice(&header.encode(salt));
    buffer.extend_from_slice(payload);
}

/// Little-endian u32 at `offset`, which the callers keep inside `bytes`.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[offset..offset + 4]);
    u32::from_le_bytes(word)
}

/// Little-endian u64 at `offset`, which the callers keep inside `bytes`.
pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(word)
}
