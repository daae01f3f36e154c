//! A disk that fails, and options that do not fit.

use std::io::{self, Write};
use std::sync::{Arc, mpsc};

use super::sim_disk::{Faults, Replay, SimDisk};
use super::*;

fn open(disk: &SimDisk) -> Result<(Journal, Recovered), JournalError> {
    Journal::open_on(Arc::new(disk.clone()), &options())
}

fn open_new() -> (SimDisk, Journal) {
    let disk = SimDisk::default();
    let (journal, _) = open(&disk).unwrap();
    (disk, journal)
}

#[test]
fn after_a_failed_sync_nothing_more_is_acknowledged() {
    let (disk, mut journal) = open_new();
    journal.append(&records(1, 3)).unwrap();
    disk.fail(Faults {
        sync: Some((0, io::ErrorKind::Other)),
        ..Faults::default()
    });
    assert!(matches!(
        journal.sync(),
        Err(JournalError::Io {
            operation: "sync",
            ..
        })
    ));
    // The disk works again, but what the kernel dropped is unknown.
    assert!(matches!(journal.sync(), Err(JournalError::Stopped { .. })));
    let appended = journal.append(&records(4, 4));
    assert!(matches!(appended, Err(JournalError::Stopped { .. })));
    assert_eq!(journal.durable_lsn(), 0);
    assert!(journal.begin_snapshot(journal.last_lsn()).is_err());
}

#[test]
fn what_is_found_after_a_failed_sync_is_written_again_before_it_is_relied_upon() {
    for seed in 0..20 {
        let (disk, mut journal) = open_new();
        journal.append(&records(1, 3)).unwrap();
        journal.sync().unwrap();
        journal.append(&records(4, 40)).unwrap();
        disk.fail(Faults {
            sync: Some((0, io::ErrorKind::Other)),
            ..Faults::default()
        });
        journal.sync().unwrap_err();
        drop(journal);
        // The records are still in the page cache, but no sync writes them.
        let (mut journal, recovered) = open(&disk).unwrap();
        assert_eq!(recovered.last_lsn, 40);
        assert_eq!(recovered.tail, TailReport::Clean);
        journal.append(&records(41, 45)).unwrap();
        journal.sync().unwrap();
        let mut replay = Replay::default();
        for op in disk.ops() {
            replay.apply(&op);
        }
        let image = replay.crash_image(seed);
        let (_journal, recovered) = open(&SimDisk::holding(&image)).unwrap();
        assert_records(recovered.records, 1, 45);
    }
}

#[test]
fn a_start_whose_sync_fails_changes_nothing() {
    let (disk, mut journal) = open_new();
    journal.append(&records(1, 3)).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let before = disk.image();
    disk.fail(Faults {
        sync: Some((0, io::ErrorKind::Other)),
        ..Faults::default()
    });
    assert!(matches!(
        open(&disk),
        Err(JournalError::Io {
            operation: "sync",
            ..
        })
    ));
    assert!(disk.image() == before);
    let (_journal, recovered) = open(&disk).unwrap();
    assert_records(recovered.records, 1, 3);
}

#[test]
fn a_snapshot_with_a_failed_sync_is_never_installed() {
    let (disk, mut journal) = open_new();
    journal.append(&records(1, 3)).unwrap();
    let mut writer = journal
        .begin_snapshot(journal.last_lsn())
        .unwrap()
        .unwrap()
        .writer()
        .unwrap();
    disk.fail(Faults {
        sync: Some((0, io::ErrorKind::Other)),
        ..Faults::default()
    });
    // More than is left to the sync at the end.
    writer.write_all(&vec![7; 5 << 20]).unwrap_err();
    writer.install().unwrap_err();
    let (_journal, recovered) = open(&disk).unwrap();
    assert!(recovered.snapshot.is_none());
    assert_records(recovered.records, 1, 3);
}

#[test]
fn after_a_failed_write_nothing_more_is_written() {
    let (disk, mut journal) = open_new();
    disk.fail(Faults {
        write: Some((0, io::ErrorKind::Other)),
        ..Faults::default()
    });
    let appended = journal.append(&records(1, 3));
    assert!(matches!(
        appended,
        Err(JournalError::Io {
            operation: "write",
            ..
        })
    ));
    assert!(matches!(journal.sync(), Err(JournalError::Stopped { .. })));
}

#[test]
fn a_full_disk_leaves_the_journal_usable() {
    let (disk, mut journal) = open_new();
    let mut last_lsn = 0;
    for fault in [
        Faults {
            create: Some((0, io::ErrorKind::StorageFull)),
            ..Faults::default()
        },
        Faults {
            write: Some((0, io::ErrorKind::StorageFull)),
            ..Faults::default()
        },
    ] {
        // 12,000 bytes: a segment of 16 KiB takes one of them.
        journal.append(&[vec![1; 12_000]]).unwrap();
        disk.fail(fault);
        last_lsn += 1;
        let refused = journal.append(&[vec![2; 12_000]]);
        let Err(JournalError::DiskFull { needed_bytes, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(needed_bytes, 16 * 1024);
        assert_eq!(journal.last_lsn(), last_lsn);
        assert_eq!(journal.durable_lsn(), last_lsn, "synced before rotating");
        let (_journal, recovered) = open(&SimDisk::holding(&disk.image())).unwrap();
        assert_eq!(recovered.last_lsn, last_lsn);
        // Space again.
        disk.fail(Faults::default());
        assert_eq!(journal.append(&[vec![2; 12_000]]).unwrap(), last_lsn + 1);
        last_lsn += 1;
        journal.begin_snapshot(journal.last_lsn()).unwrap();
    }
    journal.sync().unwrap();
    let (_journal, recovered) = open(&SimDisk::holding(&disk.image())).unwrap();
    assert_eq!(recovered.last_lsn, last_lsn);
    assert_eq!(recovered.records.map(Result::unwrap).count(), 4);
}

#[test]
fn a_segment_whose_name_is_in_doubt_stops_the_journal() {
    let (disk, mut journal) = open_new();
    journal.append(&[vec![1; 12_000]]).unwrap();
    disk.fail(Faults {
        sync_dir: Some((0, io::ErrorKind::StorageFull)),
        ..Faults::default()
    });
    assert!(journal.append(&[vec![2; 12_000]]).is_err());
    assert!(matches!(journal.sync(), Err(JournalError::Stopped { .. })));
    let (_journal, recovered) = open(&SimDisk::holding(&disk.image())).unwrap();
    assert_eq!(recovered.last_lsn, 1);
}

#[test]
fn a_failed_writer_answers_everyone_and_says_why() {
    let (disk, journal) = open_new();
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    disk.fail(Faults {
        sync: Some((0, io::ErrorKind::Other)),
        ..Faults::default()
    });
    let (answers, answered) = mpsc::channel();
    for lsn in 1..=50 {
        let answers = answers.clone();
        let batch = Batch {
            first: None,
            records: records(lsn, lsn),
            wants_durable: true,
            done: Box::new(move |outcome| answers.send(outcome).unwrap()),
        };
        assert!(submit(&writer, batch));
    }
    for _ in 1..=50 {
        let failure = answered.recv().unwrap().unwrap_err();
        assert!(failure.to_string().contains("sync"), "{failure}");
    }
    assert_eq!(writer.counters().durable_lsn(), 0);
    assert!(writer.failure().is_some());
    assert!(writer.shutdown().is_err());
}

/// Records handed in after the ones before them were removed would otherwise be mistaken for others.
#[tokio::test]
#[should_panic(expected = "records from 4 on are handed to the journal, in which 3 is")]
async fn records_get_the_numbers_that_they_were_given() {
    let (_disk, journal) = open_new();
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    for first in [1, 2, 4] {
        let batch = Batch {
            first: Some(first),
            records: records(first, first),
            wants_durable: true,
            done: Box::new(|_| ()),
        };
        writer.commit(batch).await;
    }
}

#[test]
fn a_snapshot_that_cannot_be_written_does_not_disturb_the_journal() {
    let (disk, mut journal) = open_new();
    journal.append(&records(1, 3)).unwrap();
    let plan = journal.begin_snapshot(journal.last_lsn()).unwrap().unwrap();
    let writer = plan.writer().unwrap();
    disk.fail(Faults {
        write: Some((0, io::ErrorKind::StorageFull)),
        ..Faults::default()
    });
    assert!(writer.install().is_err());
    journal.append(&records(4, 6)).unwrap();
    journal.sync().unwrap();
    let (_journal, recovered) = open(&SimDisk::holding(&disk.image())).unwrap();
    assert!(recovered.snapshot.is_none());
    assert_records(recovered.records, 1, 6);
    assert!(
        journal
            .begin_snapshot(journal.last_lsn())
            .unwrap()
            .is_some(),
        "another try"
    );
}

#[test]
fn sizes_beyond_the_limits_are_refused_whole() {
    let (_disk, mut journal) = open_new();
    let refused = journal.append(&[vec![0; RECORD_BYTES_MAX + 1]]);
    assert!(matches!(refused, Err(JournalError::RecordTooLarge { .. })));
    let refused = journal.append(&[vec![0; 10_000], vec![0; 10_000]]);
    assert!(matches!(refused, Err(JournalError::AppendTooLarge { .. })));
    assert_eq!(journal.last_lsn(), 0);
    let exactly = 16 * 1024 - 4096 - 28;
    assert_eq!(journal.append(&[vec![0; exactly]]).unwrap(), 1);
    assert_eq!(journal.append(&[vec![0; exactly]]).unwrap(), 2);
}

#[test]
fn an_option_out_of_range_is_named() {
    let too_small = JournalOptions {
        segment_bytes: 100,
        ..options()
    };
    let opened = Journal::open_on(Arc::new(SimDisk::default()), &too_small);
    let message = opened.err().unwrap().to_string();
    assert!(message.contains("segment_bytes is 100"), "{message}");
}

#[test]
fn a_journal_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = JournalOptions {
        dir: dir.path().to_owned(),
        ..options()
    };
    let (journal, recovered) = Journal::open(&options).unwrap();
    let second = Journal::open(&options);
    assert!(matches!(second, Err(JournalError::Locked { .. })));
    drop((journal, recovered));
    assert!(Journal::open(&options).is_ok());
}

#[test]
fn an_empty_directory_is_not_a_journal() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = JournalOptions {
        dir: dir.path().join("a/b"),
        create_if_empty: false,
        ..options()
    };
    let opened = Journal::open(&options);
    assert!(matches!(opened, Err(JournalError::Empty { .. })));
    assert!(!dir.path().join("a").exists());
    options.create_if_empty = true;
    drop(Journal::open(&options).unwrap());
    options.create_if_empty = false;
    assert!(Journal::open(&options).is_ok());
}

#[test]
fn another_cluster_and_a_newer_format_are_refused() {
    let (disk, journal) = open_new();
    drop(journal);
    let other = JournalOptions {
        cluster_id: 1,
        ..options()
    };
    let opened = Journal::open_on(Arc::new(disk.clone()), &other);
    assert!(matches!(opened, Err(JournalError::WrongCluster { .. })));

    let mut image = disk.image();
    let header = image.values_mut().next().unwrap();
    header[8] = 3;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..12]);
    hasher.update(&header[16..64]);
    header[12..16].copy_from_slice(&hasher.finalize().to_le_bytes());
    let opened = open(&SimDisk::holding(&image));
    assert!(matches!(
        opened,
        Err(JournalError::UnsupportedVersion { found: 3, .. })
    ));
}

/// Records acknowledged into a removed journal would be lost when the process ends.
#[test]
fn a_journal_that_is_removed_acknowledges_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let options = JournalOptions {
        dir: dir.path().join("journal"),
        ..options()
    };
    let (mut journal, _recovered) = Journal::open(&options).unwrap();
    journal.append(&records(1, 3)).unwrap();
    journal.sync().unwrap();
    std::fs::remove_dir_all(&options.dir).unwrap();
    journal.append(&records(4, 4)).unwrap();
    let error = journal.sync().unwrap_err();
    assert!(error.to_string().contains("removed the file"), "{error}");
    assert_eq!(journal.durable_lsn(), 3);
}
