use std::io::{Cursor, Read, Write};
use std::net::SocketAddr;

use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::timeline::Epoch;
use proptest::prelude::*;

use super::*;
use crate::journal::{Journal, JournalOptions, SnapshotReader};

const CLUSTER: ClusterId = ClusterId(7);

fn content(length_bytes: u64) -> BackupContent {
    BackupContent {
        cluster: CLUSTER,
        record: 3,
        term: 2,
        epoch: Epoch { number: 5, id: 6 },
        unix_ms: 1_700_000_000_000,
        version: "1.2.3".to_owned(),
        edition: 1,
        name: "nn".to_owned(),
        addr: SocketAddr::from(([10, 0, 0, 1], 9310)),
        led: true,
        behind_records: 0,
        namenodes: vec![SocketAddr::from(([10, 0, 0, 1], 9310))],
        files: 1,
        directories: 2,
        blocks: 3,
        length_bytes,
    }
}

fn written(content: &BackupContent, parts: &[Vec<u8>]) -> Vec<u8> {
    let mut writer = BackupWriter::begin(Vec::new(), content).unwrap();
    for part in parts {
        writer.part(part).unwrap();
    }
    writer.end().unwrap()
}

/// All of the snapshot, if the file is good.
fn read(file: &[u8]) -> Result<(BackupContent, Vec<u8>), BackupError> {
    let mut reader = BackupReader::open(file)?;
    let mut bytes = Vec::new();
    reader
        .read_to_end(&mut bytes)
        .map_err(BackupError::of_read)?;
    Ok((reader.content().clone(), bytes))
}

/// The file of a snapshot of a journal with three records, which has this content.
fn snapshot(content: &[u8]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let options = JournalOptions {
        segment_bytes: 16 << 10,
        create_if_empty: true,
        ..JournalOptions::new(dir.path(), CLUSTER.0)
    };
    let (mut journal, _) = Journal::open(&options).unwrap();
    journal.append(&[b"1", b"2", b"3"]).unwrap();
    let plan = journal.begin_snapshot(3).unwrap().unwrap();
    let mut writer = plan.writer().unwrap();
    writer.write_all(content).unwrap();
    writer.install().unwrap();
    let file = journal.reader().newest_snapshot().unwrap().unwrap();
    let mut bytes = vec![0; file.len_bytes() as usize];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

#[test]
fn each_byte_counts_and_a_file_that_is_cut_anywhere_is_none() {
    let snapshot = snapshot(b"what the namespace has");
    let (first, rest) = snapshot.split_at(50);
    let content = content(snapshot.len() as u64);
    let file = written(&content, &[first.to_vec(), rest.to_vec()]);
    assert_eq!(verify(&file[..]).unwrap(), content);
    assert_eq!(read(&file).unwrap(), (content, snapshot));
    for at in 0..file.len() {
        for bit in 0..8 {
            let mut damaged = file.clone();
            damaged[at] ^= 1 << bit;
            assert!(read(&damaged).is_err(), "bit {bit} of byte {at}");
        }
        assert!(read(&file[..at]).is_err(), "{at} bytes");
        assert!(verify(&file[..at]).is_err(), "{at} bytes");
    }
    let longer = [&file[..], &[0]].concat();
    assert!(matches!(read(&longer), Err(BackupError::Damaged { .. })));
    assert!(matches!(verify(&b"tar"[..]), Err(BackupError::Other)));
}

#[test]
fn a_snapshot_that_was_damaged_before_is_noticed() {
    let good = snapshot(b"what the namespace has");
    let content = content(good.len() as u64);
    for at in 0..good.len() {
        let mut damaged = good.clone();
        damaged[at] ^= 1;
        let file = written(&content, &[damaged]);
        let error = verify(&file[..]).unwrap_err();
        assert!(
            matches!(error, BackupError::Snapshot(_)),
            "byte {at}: {error}"
        );
    }
    // Or one of something else.
    for other in [
        BackupContent {
            record: 4,
            ..content.clone()
        },
        BackupContent {
            cluster: ClusterId(8),
            ..content.clone()
        },
    ] {
        let file = written(&other, std::slice::from_ref(&good));
        assert!(matches!(verify(&file[..]), Err(BackupError::Snapshot(_))));
    }
}

/// Reads until that fails, and then again.
fn assert_keeps_failing(mut reader: impl Read) {
    let mut bytes = Vec::new();
    let first = reader.read_to_end(&mut bytes).unwrap_err();
    assert!(!bytes.is_empty());
    for _ in 0..2 {
        let error = reader.read(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), first.kind());
        assert_eq!(error.to_string(), first.to_string());
    }
}

#[test]
fn a_reader_that_has_failed_keeps_failing() {
    let mut file = written(&content(200), &[vec![1; 100], vec![2; 100]]);
    let last = file.len() - DIGEST_BYTES - PART_HEADER_BYTES - 1;
    file[last] ^= 1;
    assert_keeps_failing(BackupReader::open(&file[..]).unwrap());
    let mut file = snapshot(b"what the namespace has");
    let last = file.len() - 1;
    file[last] ^= 1;
    assert_keeps_failing(SnapshotReader::of_bytes(&file[..], 3, CLUSTER.0).unwrap());
}

#[test]
fn parts_of_another_order_or_of_another_file_are_no_backup() {
    let parts = [vec![1; 100], vec![2; 100]];
    let content = content(200);
    let file = written(&content, &parts);
    let first = file.len() - DIGEST_BYTES - 3 * PART_HEADER_BYTES - 200;
    let length = PART_HEADER_BYTES + 100;
    let mut swapped = file.clone();
    swapped[first..first + length].copy_from_slice(&file[first + length..first + 2 * length]);
    swapped[first + length..first + 2 * length].copy_from_slice(&file[first..first + length]);
    assert!(matches!(read(&swapped), Err(BackupError::Damaged { .. })));
    // The same parts after another description, all with valid checksums: only the digest of the file differs.
    let other = BackupContent {
        record: 9,
        ..content.clone()
    };
    let other_file = written(&other, &parts);
    let at = other_file.len() - DIGEST_BYTES;
    let mixed = [&other_file[..at], &file[file.len() - DIGEST_BYTES..]].concat();
    assert!(matches!(read(&mixed), Err(BackupError::Damaged { .. })));
}

#[test]
fn another_version_says_so() {
    let mut file = written(&content(1), &[vec![1]]);
    file[8] = 2;
    let length = u32::from_le_bytes(file[12..16].try_into().unwrap()) as usize;
    let checksum = header_checksum(&file[..16], &file[HEADER_BYTES..HEADER_BYTES + length]);
    file[16..20].copy_from_slice(&checksum.to_le_bytes());
    assert!(matches!(
        read(&file),
        Err(BackupError::Version { found: 2 })
    ));
}

#[test]
fn a_writer_takes_what_was_said_and_nothing_else() {
    let begin = || BackupWriter::begin(Vec::new(), &content(3)).unwrap();
    assert!(begin().end().is_err(), "nothing");
    assert!(begin().part(&[]).is_err());
    assert!(begin().part(&[0; 4]).is_err(), "too much");
    let mut short = begin();
    short.part(&[0; 2]).unwrap();
    assert_eq!(short.written_bytes(), 2);
    assert!(short.end().is_err());
    let long = BackupContent {
        version: "x".repeat(DESCRIPTION_BYTES_MAX),
        ..content(3)
    };
    assert!(BackupWriter::begin(Vec::new(), &long).is_err());
}

proptest! {
    #[test]
    fn what_was_written_is_read_and_damage_is_noticed(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..3_000), 0..5),
        damage in any::<prop::sample::Index>(),
        by in 1..=u8::MAX,
        cut in any::<prop::sample::Index>(),
    ) {
        let length_bytes = parts.iter().map(|part| part.len() as u64).sum();
        let content = content(length_bytes);
        let file = written(&content, &parts);
        prop_assert_eq!(read(&file).unwrap(), (content, parts.concat()));
        let mut damaged = file.clone();
        damaged[damage.index(file.len())] ^= by;
        prop_assert!(read(&damaged).is_err());
        prop_assert!(read(&file[..cut.index(file.len())]).is_err());
    }

    #[test]
    fn no_bytes_make_reading_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let file = [&MAGIC[..], &bytes].concat();
        prop_assert!(verify(Cursor::new(file)).is_err());
    }
}
