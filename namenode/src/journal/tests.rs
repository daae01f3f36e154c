//! The journal on a real directory.

use std::fs;
use std::io::{Read, Write};
use std::sync::mpsc;

use tempfile::TempDir;

use super::*;

const CLUSTER: u128 = 0x00c0_ffee;

fn options(dir: &TempDir) -> JournalOptions {
    JournalOptions {
        segment_bytes: 64 * 1024,
        create_if_empty: true,
        ..JournalOptions::new(dir.path().join("journal"), CLUSTER)
    }
}

fn record(lsn: Lsn) -> Vec<u8> {
    let len = (lsn as usize * 37) % 300;
    (0..len).map(|i| (lsn as usize * 31 + i) as u8).collect()
}

fn append(journal: &mut Journal, count: u64) {
    for _ in 0..count {
        let lsn = journal.last_lsn() + 1;
        assert_eq!(journal.append(&[record(lsn)]).unwrap(), lsn);
    }
    journal.sync().unwrap();
}

fn assert_records(records: RecordReader, from: Lsn, through: Lsn) {
    let mut expected = from;
    for item in records {
        let (lsn, payload) = item.unwrap();
        assert_eq!(lsn, expected);
        assert!(payload == record(lsn), "payload of record {lsn}");
        expected += 1;
    }
    assert_eq!(expected, through + 1);
}

#[test]
fn records_come_back_across_segments() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let (mut journal, recovered) = Journal::open(&options).unwrap();
    assert_eq!(recovered.last_lsn, 0);
    drop(recovered);
    append(&mut journal, 2000);
    drop(journal);

    let (mut journal, recovered) = Journal::open(&options).unwrap();
    assert_eq!(recovered.last_lsn, 2000);
    assert_eq!(recovered.tail, TailReport::Clean);
    assert!(recovered.snapshot.is_none());
    assert_records(recovered.records, 1, 2000);
    append(&mut journal, 10);
    drop(journal);

    let (_journal, recovered) = Journal::open(&options).unwrap();
    assert_records(recovered.records, 1, 2010);
}

#[test]
fn a_snapshot_replaces_the_records_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let (mut journal, _) = Journal::open(&options).unwrap();
    let content: Vec<u8> = (0..700_000u32).map(|i| (i % 251) as u8).collect();
    for round in 1..=3 {
        append(&mut journal, 1000);
        let plan = journal.begin_snapshot().unwrap().unwrap();
        append(&mut journal, 5);
        let base_lsn = plan.base().unwrap().map_or(0, |(lsn, _)| lsn);
        assert_records(plan.records().unwrap(), base_lsn + 1, plan.lsn());
        let mut writer = plan.writer().unwrap();
        writer.write_all(&content[..round * 200_000]).unwrap();
        assert!(matches!(
            journal.begin_snapshot(),
            Err(JournalError::SnapshotInProgress)
        ));
        let installed = writer.install().unwrap();
        assert!(installed.removal_error.is_none());
        assert_eq!(installed.content_bytes, round as u64 * 200_000);
    }
    drop(journal);

    let (_journal, recovered) = Journal::open(&options).unwrap();
    let (lsn, mut reader) = recovered.snapshot.unwrap();
    assert_eq!(lsn, 3010);
    let mut read = Vec::new();
    reader.read_to_end(&mut read).unwrap();
    assert!(read == content[..600_000]);
    assert_records(recovered.records, 3011, 3015);
    let snapshots = fs::read_dir(&options.dir)
        .unwrap()
        .filter(|e| {
            let name = e.as_ref().unwrap().file_name();
            name.to_string_lossy().starts_with("snapshot-")
        })
        .count();
    assert_eq!(snapshots, 2, "the newest and the one before it stay");
}

#[test]
fn the_writer_answers_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let (journal, _) = Journal::open(&options).unwrap();
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let (answers, answered) = mpsc::channel();
    for first in (1..=999).step_by(3) {
        let answers = answers.clone();
        let batch = Batch {
            records: (first..first + 3).map(record).collect(),
            wants_durable: first % 2 == 0,
            done: Box::new(move |outcome| answers.send((first, outcome)).unwrap()),
        };
        assert!(writer.try_submit(batch).is_ok());
    }
    for first in (1..=999).step_by(3) {
        let (answered, outcome) = answered.recv().unwrap();
        assert_eq!((answered, outcome.unwrap()), (first, first + 2));
    }
    let journal = writer.shutdown().unwrap();
    assert_eq!(journal.durable_lsn(), 999);
    drop(journal);
    let (_journal, recovered) = Journal::open(&options).unwrap();
    assert_records(recovered.records, 1, 999);
}
