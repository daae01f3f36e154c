//! The journal's files. The layout is that of the documentation of `harvestfs_namenode::journal`, written a second
//! time: the result of recovery is compared with the intended content.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use arbitrary::{Arbitrary, Unstructured};
use harvestfs_namenode::journal::{
    Journal, JournalError, JournalOptions, RECORD_BYTES_MAX, Recovered, TailReport,
};

use crate::{parts, put, scratch};

const CLUSTER: u128 = 7;
const SALT: u64 = 0x0123_4567_89ab_cdef;
const SEGMENT_BYTES: u64 = 16 * 1024;
const RECORDS_OFFSET: usize = 4096;
const SEGMENT_MAGIC: &[u8; 8] = b"HFSJSEG\0";
const SNAPSHOT_MAGIC: &[u8; 8] = b"HFSJSNP\0";

/// The first byte decides whose header checksum is corrected; then two parts follow: the content of the first
/// segment, and that of a snapshot of record 1 (absent if empty).
pub fn journal_files(input: &[u8]) {
    let Some((flags, rest)) = input.split_first() else {
        return;
    };
    let [segment, snapshot] = parts(rest);
    let directory = empty_journal();
    for (flag, name, content) in [
        (1, segment_name(1), segment),
        (2, snapshot_name(1), snapshot),
    ] {
        let mut content = content.to_vec();
        if content.len() >= 64 && flags & flag != 0 {
            let checksum = header_checksum(&content[..64]);
            content[12..16].copy_from_slice(&checksum.to_le_bytes());
        }
        if !content.is_empty() {
            put(&directory.join(name), &content);
        }
    }
    if let Ok((_, recovered)) = open(&directory) {
        let Recovered {
            snapshot, records, ..
        } = recovered;
        if let Some((_, mut reader)) = snapshot {
            // It was verified when the journal was opened.
            reader
                .read_to_end(&mut Vec::new())
                .expect("a snapshot that was found to be good");
        }
        records.for_each(drop);
    }
}

/// A piece of the content of a segment, in order.
#[derive(Debug, Arbitrary)]
enum Piece {
    /// The next record, as the journal writes it.
    Good { payload: Vec<u8>, unsynced: u8 },
    /// A record that may have an error: its header's checksum matches if `header_matches`.
    Odd {
        lsn_ahead: i8,
        unsynced: u8,
        longer_bytes: u32,
        payload: Vec<u8>,
        header_matches: bool,
        payload_matches: bool,
    },
    /// Arbitrary bytes.
    Raw(Vec<u8>),
    /// Blank space.
    Blank(u8),
}

#[derive(Debug, Arbitrary)]
struct Segment {
    pieces: Vec<Piece>,
    /// How many bytes are cut off the end of the file.
    cut_bytes: u16,
}

/// Recovery must return exactly the records before the first place that is not the next record, or refuse because a
/// later record proves that something is missing; records that are appended afterwards must be found.
pub fn journal_recovery(input: &[u8]) {
    let Ok(plan) = Segment::arbitrary(&mut Unstructured::new(input)) else {
        return;
    };
    let mut content = vec![0; RECORDS_OFFSET];
    let mut expected = Vec::new();
    let mut in_sequence = true;
    let mut next_lsn = 1_u64;
    for piece in plan.pieces {
        match piece {
            Piece::Good { payload, unsynced } => {
                let synced = next_lsn.saturating_sub(1 + u64::from(unsynced));
                content.extend(record(next_lsn, synced, payload.len() as u32, &payload));
                if in_sequence {
                    expected.push(payload);
                }
                next_lsn += 1;
            }
            Piece::Odd {
                lsn_ahead,
                unsynced,
                longer_bytes,
                payload,
                header_matches,
                payload_matches,
            } => {
                let lsn = next_lsn.saturating_add_signed(i64::from(lsn_ahead));
                let synced = lsn.saturating_sub(u64::from(unsynced));
                let length = (payload.len() as u32).saturating_add(longer_bytes);
                let mut bytes = record(lsn, synced, length, &payload);
                if !payload_matches {
                    bytes[24] ^= 1;
                    let checksum = record_header_checksum(&bytes);
                    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
                }
                if !header_matches {
                    bytes[4] ^= 1;
                }
                content.extend(bytes);
                let is_good =
                    lsn_ahead == 0 && longer_bytes == 0 && header_matches && payload_matches;
                if in_sequence && is_good {
                    expected.push(payload);
                    next_lsn += 1;
                } else {
                    in_sequence = false;
                }
            }
            Piece::Raw(bytes) => {
                in_sequence &= bytes.is_empty();
                content.extend(bytes);
            }
            Piece::Blank(length) => {
                in_sequence &= length == 0;
                content.resize(content.len() + usize::from(length), 0);
            }
        }
    }
    let made_bytes = (content.len() as u64).max(SEGMENT_BYTES) + u64::from(plan.cut_bytes);
    content.resize(content.len().max(SEGMENT_BYTES as usize), 0);
    content[..64].copy_from_slice(&file_header(SEGMENT_MAGIC, 1, made_bytes));
    let directory = empty_journal();
    put(&directory.join(segment_name(1)), &content);

    match open(&directory) {
        Ok((mut journal, recovered)) => {
            assert_eq!(read_all(recovered), expected);
            let lsn = journal.append(&[b"after"]).expect("there is room");
            assert_eq!(lsn, expected.len() as u64 + 1);
            journal.sync().expect("the disk works");
            drop(journal);
            expected.push(b"after".to_vec());
            let (_, recovered) = open(&directory).expect("it was opened before");
            assert_eq!(recovered.tail, TailReport::Clean, "it was written anew");
            assert_eq!(read_all(recovered), expected);
            truncate(&directory, expected);
        }
        // Only something after the good records can prove that more were there.
        Err(JournalError::Corrupt { lsn, .. }) => {
            assert!(!in_sequence);
            assert_eq!(lsn, expected.len() as u64 + 1);
        }
        Err(other) => panic!("{other}"),
    }
}

/// Removes half of the records; then exactly the others must be found, both by readers and after a restart.
fn truncate(directory: &Path, mut expected: Vec<Vec<u8>>) {
    let (mut journal, recovered) = open(directory).expect("it was opened before");
    drop(recovered);
    expected.truncate(expected.len() / 2);
    let kept = expected.len() as u64;
    journal.truncate_after(kept).expect("the disk works");
    let read = journal.reader().read(1, u64::MAX, usize::MAX);
    let read = read.expect("the records are there").into_iter();
    assert_eq!(
        read.map(|(_, payload)| payload).collect::<Vec<_>>(),
        expected
    );
    assert_eq!(journal.append(&[b"anew"]).expect("there is room"), kept + 1);
    journal.sync().expect("the disk works");
    drop(journal);
    expected.push(b"anew".to_vec());
    let (_, recovered) = open(directory).expect("it was written anew");
    assert_eq!(read_all(recovered), expected);
}

#[derive(Debug, Arbitrary)]
struct Chunk {
    payload: Vec<u8>,
    index_ahead: u8,
    longer_bytes: u32,
    checksum_matches: bool,
}

#[derive(Debug, Arbitrary)]
struct Snapshot {
    chunks: Vec<Chunk>,
    more_bytes_claimed: u8,
    end_matches: bool,
    trailing: Vec<u8>,
}

/// A snapshot must be returned as it was written, or skipped in favour of the records that it contains.
pub fn journal_snapshot(input: &[u8]) {
    let Ok(plan) = Snapshot::arbitrary(&mut Unstructured::new(input)) else {
        return;
    };
    let mut file = file_header(SNAPSHOT_MAGIC, 1, 0).to_vec();
    let mut content = Vec::new();
    let mut is_good = plan.trailing.is_empty() && plan.end_matches && plan.more_bytes_claimed == 0;
    let mut index = 0;
    for chunk in plan.chunks {
        let length = (chunk.payload.len() as u32).saturating_add(chunk.longer_bytes);
        let claimed_index = index + u64::from(chunk.index_ahead);
        let checksum = payload_checksum(&chunk.payload, claimed_index);
        let flipped = u32::from(!chunk.checksum_matches);
        file.extend(length.to_le_bytes());
        file.extend((checksum ^ flipped).to_le_bytes());
        file.extend(&chunk.payload);
        is_good &= chunk.checksum_matches
            && chunk.longer_bytes == 0
            && chunk.index_ahead == 0
            // A chunk of length 0 is the end.
            && !chunk.payload.is_empty();
        content.extend(chunk.payload);
        index += 1;
    }
    let total = (content.len() as u64 + u64::from(plan.more_bytes_claimed)).to_le_bytes();
    let flipped = u32::from(!plan.end_matches);
    file.extend(0_u32.to_le_bytes());
    file.extend((payload_checksum(&total, index) ^ flipped).to_le_bytes());
    file.extend(total);
    file.extend(&plan.trailing);

    let directory = empty_journal();
    put(&directory.join(snapshot_name(1)), &file);
    for (first_lsn, records) in [(1, &[&b"first"[..]][..]), (2, &[])] {
        let mut segment = vec![0; RECORDS_OFFSET];
        segment[..64].copy_from_slice(&file_header(SEGMENT_MAGIC, first_lsn, SEGMENT_BYTES));
        for payload in records {
            segment.extend(record(first_lsn, 0, payload.len() as u32, payload));
        }
        segment.resize(SEGMENT_BYTES as usize, 0);
        put(&directory.join(segment_name(first_lsn)), &segment);
    }
    let (_, recovered) = open(&directory).expect("without the snapshot, the records are there");
    match recovered.snapshot {
        Some((lsn, mut reader)) => {
            assert_eq!(lsn, 1);
            let mut found = Vec::new();
            reader.read_to_end(&mut found).expect("it was verified");
            assert_eq!(found, content);
            assert_eq!(recovered.records.count(), 0);
        }
        None => {
            assert!(!is_good);
            assert_eq!(recovered.skipped_snapshots.len(), 1);
            let records = recovered
                .records
                .map(|record| record.expect("it is whole").1);
            let records: Vec<_> = records.collect();
            assert_eq!(records, [b"first"]);
        }
    }
}

fn options(directory: &Path) -> JournalOptions {
    JournalOptions {
        segment_bytes: SEGMENT_BYTES,
        ..JournalOptions::new(directory, CLUSTER)
    }
}

fn open(directory: &Path) -> Result<(Journal, Recovered), JournalError> {
    Journal::open(&options(directory))
}

fn read_all(recovered: Recovered) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    for record in recovered.records {
        let (lsn, payload) = record.expect("recovery has seen it");
        payloads.push(payload);
        assert_eq!(lsn, payloads.len() as u64);
    }
    assert_eq!(recovered.last_lsn, payloads.len() as u64);
    payloads
}

fn empty_journal() -> PathBuf {
    let directory = scratch().join("journal");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory).expect("TMPDIR can be written");
    directory
}

fn segment_name(lsn: u64) -> String {
    format!("segment-{lsn:020}")
}

fn snapshot_name(lsn: u64) -> String {
    format!("snapshot-{lsn:020}")
}

pub(crate) fn first_segment(payloads: &[&[u8]]) -> Vec<u8> {
    let mut content = vec![0; RECORDS_OFFSET];
    content[..64].copy_from_slice(&file_header(SEGMENT_MAGIC, 1, SEGMENT_BYTES));
    for (lsn, payload) in (1..).zip(payloads) {
        content.extend(record(lsn, lsn - 1, payload.len() as u32, payload));
    }
    content
}

pub(crate) fn snapshot_of_record_1(payload: &[u8]) -> Vec<u8> {
    let mut file = file_header(SNAPSHOT_MAGIC, 1, 0).to_vec();
    file.extend((payload.len() as u32).to_le_bytes());
    file.extend(payload_checksum(payload, 0).to_le_bytes());
    file.extend(payload);
    let total = (payload.len() as u64).to_le_bytes();
    file.extend(0_u32.to_le_bytes());
    file.extend(payload_checksum(&total, 1).to_le_bytes());
    file.extend(total);
    file
}

fn file_header(magic: &[u8; 8], lsn: u64, made_bytes: u64) -> [u8; 64] {
    let mut header = [0; 64];
    header[..8].copy_from_slice(magic);
    header[8..12].copy_from_slice(&1_u32.to_le_bytes());
    header[16..32].copy_from_slice(&CLUSTER.to_le_bytes());
    header[32..40].copy_from_slice(&lsn.to_le_bytes());
    header[40..48].copy_from_slice(&SALT.to_le_bytes());
    header[48..56].copy_from_slice(&made_bytes.to_le_bytes());
    let checksum = header_checksum(&header);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    header
}

fn header_checksum(header: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..12]);
    hasher.update(&header[16..]);
    hasher.finalize()
}

fn record(lsn: u64, synced_lsn: u64, length: u32, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() <= RECORD_BYTES_MAX, "{}", payload.len());
    let mut bytes = vec![0; 28];
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes[8..16].copy_from_slice(&lsn.to_le_bytes());
    bytes[16..24].copy_from_slice(&synced_lsn.to_le_bytes());
    bytes[24..28].copy_from_slice(&payload_checksum(payload, lsn).to_le_bytes());
    let checksum = record_header_checksum(&bytes);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn record_header_checksum(record: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&SALT.to_le_bytes());
    hasher.update(&record[..4]);
    hasher.update(&record[8..28]);
    hasher.finalize()
}

/// Returns the checksum of a payload, bound to its number.
fn payload_checksum(payload: &[u8], number: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&SALT.to_le_bytes());
    hasher.update(&number.to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}
