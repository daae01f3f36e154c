//! Removing a suffix, reading while the journal is open, a snapshot from a peer, purging: on a healthy
//! disk.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use super::sim_disk::{Faults, Image, SimDisk};
use super::*;

fn open(disk: &SimDisk) -> (Journal, Recovered) {
    Journal::open_on(Arc::new(disk.clone()), &options()).unwrap()
}

fn open_new() -> (SimDisk, Journal) {
    let disk = SimDisk::default();
    let (journal, _) = open(&disk);
    (disk, journal)
}

fn append_synced(journal: &mut Journal, through: Lsn, epoch: usize) {
    for lsn in journal.last_lsn() + 1..=through {
        journal.append(&[record_in_epoch(lsn, epoch)]).unwrap();
    }
    journal.sync().unwrap();
}

fn snapshot(journal: &mut Journal, content: &[u8]) {
    let plan = journal.begin_snapshot(journal.last_lsn()).unwrap().unwrap();
    let mut writer = plan.writer().unwrap();
    writer.write_all(content).unwrap();
    writer.install().unwrap();
}

/// Sends the newest snapshot of one journal to another.
fn send(from: &Journal, to: &Journal) -> ReceivedSnapshot {
    let file = from.reader().newest_snapshot().unwrap().unwrap();
    let mut receiver = to.receive_snapshot(file.lsn()).unwrap();
    let mut buffer = [0; 1000];
    loop {
        let read = file
            .read_at(&mut buffer, receiver.received_bytes())
            .unwrap();
        if read == 0 {
            return receiver.finish().unwrap();
        }
        receiver.write_all(&buffer[..read]).unwrap();
    }
}

/// Checks that these are the records `from..=through`, those after `old_through` of epoch 1.
fn assert_epochs(records: &[(Lsn, Vec<u8>)], from: Lsn, through: Lsn, old_through: Lsn) {
    let lsns: Vec<Lsn> = records.iter().map(|(lsn, _)| *lsn).collect();
    assert_eq!(lsns, (from..=through).collect::<Vec<_>>());
    for (lsn, payload) in records {
        let epoch = usize::from(*lsn > old_through);
        assert!(*payload == record_in_epoch(*lsn, epoch), "record {lsn}");
    }
}

fn all(recovered: Recovered) -> Vec<(Lsn, Vec<u8>)> {
    recovered.records.map(Result::unwrap).collect()
}

fn segments(image: &Image) -> Vec<Lsn> {
    let numbers = image
        .keys()
        .filter_map(|name| name.strip_prefix("segment-"));
    numbers.map(|number| number.parse().unwrap()).collect()
}

#[test]
fn a_removed_suffix_is_gone_and_its_numbers_are_used_again() {
    for keep in [0, 1, 17, 60, 150, 199, 200] {
        let (disk, mut journal) = open_new();
        append_synced(&mut journal, 200, 0);
        journal.truncate_after(keep).unwrap();
        assert_eq!(journal.last_lsn(), keep);
        assert_eq!(journal.durable_lsn(), keep);
        let (_journal, recovered) = open(&SimDisk::holding(&disk.image()));
        assert_eq!(recovered.tail, TailReport::Clean);
        assert_epochs(&all(recovered), 1, keep, keep);

        append_synced(&mut journal, 230, 1);
        let read = journal.reader().read(1, 1000, usize::MAX).unwrap();
        assert_epochs(&read, 1, 230, keep);
        drop(journal);
        let (_journal, recovered) = open(&disk);
        assert_epochs(&all(recovered), 1, 230, keep);
    }
}

#[test]
fn records_that_a_snapshot_covers_are_not_removed() {
    let (disk, mut journal) = open_new();
    append_synced(&mut journal, 50, 0);
    let plan = journal.begin_snapshot(journal.last_lsn()).unwrap().unwrap();
    append_synced(&mut journal, 60, 0);
    // The plan would cover what is removed here.
    journal.truncate_after(40).unwrap();
    let superseded = plan.writer().unwrap().install();
    assert!(matches!(
        superseded,
        Err(JournalError::SnapshotSuperseded { lsn: 50 })
    ));
    snapshot(&mut journal, b"up to 40");
    append_synced(&mut journal, 45, 1);
    assert!(matches!(
        journal.truncate_after(39),
        Err(JournalError::TruncatesSnapshot {
            lsn: 39,
            snapshot_lsn: 40
        })
    ));
    journal.truncate_after(40).unwrap();
    append_synced(&mut journal, 41, 1);
    drop(journal);
    let (_journal, recovered) = open(&disk);
    assert_epochs(&all(recovered), 41, 41, 40);
}

#[test]
fn a_truncation_without_space_changes_nothing() {
    let (disk, mut journal) = open_new();
    append_synced(&mut journal, 200, 0);
    disk.fail(Faults {
        create: Some((0, std::io::ErrorKind::StorageFull)),
        ..Faults::default()
    });
    let refused = journal.truncate_after(100);
    assert!(matches!(refused, Err(JournalError::DiskFull { .. })));
    append_synced(&mut journal, 210, 0);
    assert_epochs(
        &journal.reader().read(1, 300, usize::MAX).unwrap(),
        1,
        210,
        210,
    );
    disk.fail(Faults {
        sync_dir: Some((0, std::io::ErrorKind::Other)),
        ..Faults::default()
    });
    journal.truncate_after(100).unwrap_err();
    // What is on the disk is in doubt.
    assert!(matches!(journal.sync(), Err(JournalError::Stopped { .. })));
}

#[test]
fn reading_is_bounded_and_goes_on_where_it_stopped() {
    let (_disk, mut journal) = open_new();
    append_synced(&mut journal, 300, 0);
    let mut reader = journal.reader();
    let mut read = Vec::new();
    while let Some(from) = Some(read.len() as Lsn + 1).filter(|&from| from <= 300) {
        let part = reader.read(from, 301, 2000).unwrap();
        let bytes: usize = part.iter().map(|(_, payload)| payload.len() + 28).sum();
        assert!(bytes <= 2000 || part.len() == 1, "{bytes}");
        assert!(!part.is_empty());
        read.extend(part);
    }
    assert_epochs(&read, 1, 300, 300);
    assert_eq!(reader.read(7, 9, usize::MAX).unwrap().len(), 2);
    assert_eq!(reader.read(5, 6, 0).unwrap().len(), 1);
    assert!(reader.read(9, 9, usize::MAX).unwrap().is_empty());
    assert!(reader.read(301, 400, usize::MAX).unwrap().is_empty());
    // Not synced, but there.
    journal.append(&[record(301)]).unwrap();
    assert_epochs(&reader.read(299, 400, usize::MAX).unwrap(), 299, 301, 301);
    assert!(matches!(
        reader.read(0, 5, 1),
        Err(JournalError::RecordPurged {
            lsn: 0,
            first_lsn: 1
        })
    ));
}

/// As openraft looks for the members at a start: in pieces, from the end.
#[test]
fn reading_backwards_does_not_read_everything_again_and_again() {
    const PIECE: Lsn = 64;
    let disk = SimDisk::default();
    let options = JournalOptions {
        segment_bytes: 4 << 20,
        ..options()
    };
    let (mut journal, _) = Journal::open_on(Arc::new(disk.clone()), &options).unwrap();
    append_synced(&mut journal, 40_000, 0);
    let mut reader = journal.reader();
    let before = disk.read_bytes();
    let mut pieces = 0;
    let firsts: Vec<Lsn> = (1..=40_000).step_by(PIECE as usize).collect();
    for first in firsts.into_iter().rev() {
        let read = reader.read(first, first + PIECE, usize::MAX).unwrap();
        assert_epochs(&read, first, (first + PIECE - 1).min(40_000), Lsn::MAX);
        pieces += 1;
    }
    let read_bytes = disk.read_bytes() - before;
    let all_bytes: usize = disk.image().values().map(Vec::len).sum();
    let most = 2 * all_bytes as u64 + pieces * (256 << 10);
    assert!(read_bytes < most, "{read_bytes} bytes, more than {most}");

    // Remembered offsets are dropped by a truncation.
    journal.truncate_after(20_000).unwrap();
    append_synced(&mut journal, 40_000, 1);
    for first in [39_000, 20_001, 19_990, 1] {
        let read = reader.read(first, first + PIECE, usize::MAX).unwrap();
        assert_epochs(&read, first, first + PIECE - 1, 20_000);
    }
}

#[test]
fn a_purge_keeps_what_the_caller_and_the_snapshots_need() {
    let (disk, mut journal) = open_new();
    append_synced(&mut journal, 200, 0);
    snapshot(&mut journal, b"200");
    append_synced(&mut journal, 400, 0);
    assert_eq!(journal.purge(Lsn::MAX).first_lsn, 1, "one snapshot only");
    snapshot(&mut journal, b"400");
    assert_eq!(journal.reader().first_lsn(), 1, "nothing was removed");
    let mut reader = journal.reader();
    assert_eq!(reader.read(1, 2, 1).unwrap().len(), 1);

    let purged = journal.purge(120);
    let first_lsn = purged.first_lsn;
    assert!(purged.removal_error.is_none() && purged.removed_files > 0);
    assert!((60..=121).contains(&first_lsn), "{first_lsn}");
    assert!(matches!(
        reader.read(first_lsn - 1, 300, 1),
        Err(JournalError::RecordPurged { .. })
    ));
    assert_epochs(
        &reader.read(first_lsn, 401, usize::MAX).unwrap(),
        first_lsn,
        400,
        400,
    );
    // A new start knows it, too.
    drop(journal);
    let (mut journal, _) = open(&disk);
    assert_eq!(journal.reader().first_lsn(), first_lsn);
    assert_eq!(journal.purge(Lsn::MAX).first_lsn, 201);
    assert_eq!(segments(&disk.image())[0], 201);

    append_synced(&mut journal, 500, 0);
    snapshot(&mut journal, b"500");
    let purged = journal.purge(Lsn::MAX);
    assert_eq!(purged.first_lsn, 401);
    assert!(!disk.image().contains_key("snapshot-00000000000000000200"));
    assert!(disk.image().contains_key("snapshot-00000000000000000400"));
}

#[test]
fn a_snapshot_of_a_peer_replaces_a_journal_that_ends_before_it() {
    let (_, mut leader) = open_new();
    append_synced(&mut leader, 300, 0);
    let content: Vec<u8> = (0..600_000u32).map(|i| (i % 251) as u8).collect();
    snapshot(&mut leader, &content);
    for had in [0, 1, 50, 200, 299] {
        let (disk, mut journal) = open_new();
        append_synced(&mut journal, had, 1);
        let received = send(&leader, &journal);
        assert_eq!(received.lsn(), 300);
        let mut read = Vec::new();
        received.content().unwrap().read_to_end(&mut read).unwrap();
        assert!(read == content);
        let installed = journal.install_snapshot(received).unwrap();
        assert!(!installed.connected);
        assert_eq!((journal.last_lsn(), journal.durable_lsn()), (300, 300));
        let mut reader = journal.reader();
        assert_eq!((reader.first_lsn(), reader.last_lsn()), (301, 300));
        assert!(matches!(
            reader.read(1, 2, 1),
            Err(JournalError::RecordPurged { first_lsn: 301, .. })
        ));
        assert!(
            journal
                .begin_snapshot(journal.last_lsn())
                .unwrap()
                .is_none(),
            "nothing new"
        );
        append_synced(&mut journal, 330, 0);
        // Its own snapshots go on from there, and the received one can be sent on.
        snapshot(&mut journal, b"330");
        append_synced(&mut journal, 340, 0);
        assert_epochs(&reader.read(301, 999, usize::MAX).unwrap(), 301, 340, 340);
        drop(journal);
        let (journal, recovered) = open(&disk);
        assert_eq!(recovered.snapshot.as_ref().unwrap().0, 330);
        assert_epochs(&all(recovered), 331, 340, 340);
        assert_eq!(segments(&disk.image())[0], 301);
        assert_eq!(journal.reader().first_lsn(), 301);
    }
}

#[test]
fn a_snapshot_of_a_peer_leaves_the_records_of_a_journal_that_goes_on() {
    let (_, mut leader) = open_new();
    append_synced(&mut leader, 100, 0);
    snapshot(&mut leader, b"100");
    let (disk, mut journal) = open_new();
    append_synced(&mut journal, 100, 0);
    journal.append(&[record(101)]).unwrap();
    let installed = journal.install_snapshot(send(&leader, &journal)).unwrap();
    assert!(installed.connected);
    assert_eq!(journal.durable_lsn(), 101);
    let received = send(&leader, &journal);
    assert!(matches!(
        journal.install_snapshot(received),
        Err(JournalError::SnapshotNotNewer {
            lsn: 100,
            newest_lsn: 100
        })
    ));
    assert!(!disk.image().keys().any(|name| name.ends_with(".tmp")));
    assert_eq!(journal.reader().first_lsn(), 1);
    drop(journal);
    let (_journal, recovered) = open(&disk);
    assert_eq!(recovered.snapshot.as_ref().unwrap().0, 100);
    assert_epochs(&all(recovered), 101, 101, 101);
}

#[test]
fn what_is_not_a_whole_snapshot_is_never_installed() {
    let (_, mut leader) = open_new();
    append_synced(&mut leader, 100, 0);
    snapshot(&mut leader, &[5; 3000]);
    let file = leader.reader().newest_snapshot().unwrap().unwrap();
    let mut sent = vec![0; file.len_bytes() as usize];
    assert_eq!(file.read_at(&mut sent, 0).unwrap(), sent.len());
    let (disk, mut journal) = open_new();
    append_synced(&mut journal, 10, 0);
    let before = disk.image();
    let receive = |lsn, bytes: &[u8]| {
        let mut receiver = journal.receive_snapshot(lsn).unwrap();
        assert!(matches!(
            journal.receive_snapshot(lsn),
            Err(JournalError::SnapshotInProgress)
        ));
        receiver.write_all(bytes).unwrap();
        receiver.finish().err()
    };
    for len in (0..sent.len()).step_by(7) {
        let refused = receive(100, &sent[..len]);
        assert!(
            matches!(
                refused,
                Some(JournalError::ReceivedSnapshotDamaged { lsn: 100, .. })
            ),
            "{len}: {refused:?}"
        );
    }
    for at in (0..sent.len()).step_by(11) {
        let mut damaged = sent.clone();
        damaged[at] ^= 0x10;
        assert!(receive(100, &damaged).is_some(), "byte {at}");
    }
    assert!(receive(100, &[&sent[..], b"more"].concat()).is_some());
    assert!(receive(99, &sent).is_some(), "of another number");
    assert!(receive(100, &sent).is_none());
    assert!(disk.image() == before, "what is given up leaves nothing");
}

#[test]
fn a_journal_of_version_1_is_read_and_goes_on() {
    let mut image = Image::new();
    for (name, content) in [
        (
            "segment-00000000000000000001",
            &include_bytes!("version_1/segment-00000000000000000001")[..],
        ),
        (
            "segment-00000000000000000031",
            &include_bytes!("version_1/segment-00000000000000000031")[..],
        ),
        (
            "snapshot-00000000000000000030",
            &include_bytes!("version_1/snapshot-00000000000000000030")[..],
        ),
    ] {
        image.insert(name.to_owned(), content.to_vec());
    }
    let disk = SimDisk::holding(&image);
    let (mut journal, mut recovered) = open(&disk);
    let mut content = String::new();
    let (lsn, snapshot) = recovered.snapshot.as_mut().unwrap();
    snapshot.read_to_string(&mut content).unwrap();
    assert_eq!((*lsn, content.as_str()), (30, "the state after record 30"));
    assert_epochs(&all(recovered), 31, 59, 59);
    assert_epochs(
        &journal.reader().read(1, 99, usize::MAX).unwrap(),
        1,
        59,
        59,
    );
    let versions = |disk: &SimDisk| -> Vec<u8> {
        let image = disk.image();
        let headers = image.iter().filter(|(name, _)| name.starts_with("segment"));
        headers.map(|(_, content)| content[8]).collect()
    };
    assert_eq!(
        versions(&disk),
        [1, 1],
        "the older release can go on with it"
    );
    journal.truncate_after(40).unwrap();
    append_synced(&mut journal, 50, 1);
    assert_eq!(versions(&disk), [1, 2]);
    drop(journal);
    let (_journal, recovered) = open(&disk);
    assert_epochs(&all(recovered), 31, 50, 40);
}

#[test]
fn records_are_read_on_another_thread_while_the_journal_is_written_and_cut() {
    let dir = tempfile::tempdir().unwrap();
    let options = JournalOptions {
        dir: dir.path().to_owned(),
        ..options()
    };
    let (journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let mut reader = writer.reader();
            let ended = Arc::clone(&ended);
            thread::spawn(move || {
                let (mut next, mut reads) = (1, 0u64);
                while !ended.load(Ordering::Relaxed) || reads == 0 {
                    match reader.read(next, next + 50, 4000) {
                        Ok(read) => {
                            // All of them as they were written, in whichever epoch.
                            let mut epoch = 0;
                            for (lsn, payload) in &read {
                                assert_eq!(*lsn, next);
                                let of = (epoch..8).find(|&e| *payload == record_in_epoch(next, e));
                                epoch = of.unwrap_or_else(|| panic!("record {next}"));
                                next += 1;
                            }
                            reads += u64::from(!read.is_empty());
                            if read.is_empty() {
                                next = reader.first_lsn();
                                thread::yield_now();
                            }
                        }
                        Err(JournalError::RecordPurged { first_lsn, .. }) => next = first_lsn,
                        Err(e) => panic!("{e}"),
                    }
                }
                reads
            })
        })
        .collect();
    let mut last = 0;
    for epoch in 0..8 {
        let through = last + 300;
        let (answers, answered) = mpsc::channel();
        for lsn in last + 1..=through {
            let answers = answers.clone();
            let batch = Batch {
                first: None,
                records: vec![record_in_epoch(lsn, epoch)],
                wants_durable: lsn % 5 == 0,
                done: Box::new(move |outcome| answers.send(outcome).unwrap()),
            };
            assert!(submit(&writer, batch));
        }
        let (cut, was_cut) = mpsc::channel();
        last = through - 120;
        wait(writer.truncate_after(last, Box::new(move |outcome| cut.send(outcome).unwrap())));
        for lsn in through - 299..=through {
            assert_eq!(answered.recv().unwrap().unwrap(), lsn);
        }
        was_cut.recv().unwrap().unwrap();
        assert_eq!(writer.counters().durable_lsn(), last);
        let (begun, plan) = mpsc::channel();
        wait(writer.begin_snapshot(last, Box::new(move |plan| begun.send(plan).ok().unwrap())));
        let plan = plan.recv().unwrap().unwrap().unwrap();
        assert_eq!(plan.lsn(), last);
        plan.writer().unwrap().install().unwrap();
        assert!(writer.reader().purge(last - 100).removal_error.is_none());
    }
    ended.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.join().unwrap() > 0);
    }
    let newest = writer.reader().newest_snapshot().unwrap().unwrap();
    assert_eq!(newest.lsn(), last);
    let mut content = Vec::new();
    newest.into_content().read_to_end(&mut content).unwrap();
    assert!(content.is_empty());
    assert!(writer.shutdown().is_ok());
}

#[test]
fn the_writer_installs_what_it_received() {
    let (_, mut leader) = open_new();
    append_synced(&mut leader, 300, 0);
    snapshot(&mut leader, b"300");
    let file = leader.reader().newest_snapshot().unwrap().unwrap();
    let mut sent = vec![0; file.len_bytes() as usize];
    file.read_at(&mut sent, 0).unwrap();

    let (disk, journal) = open_new();
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let mut receiver = writer.reader().receive_snapshot(300).unwrap();
    receiver.write_all(&sent).unwrap();
    let received = receiver.finish().unwrap();
    let (done, installed) = mpsc::channel();
    wait(writer.install_snapshot(
        received,
        Box::new(move |outcome| done.send(outcome).unwrap()),
    ));
    let installed = installed.recv().unwrap().unwrap();
    assert_eq!(
        installed,
        SnapshotReceived {
            lsn: 300,
            connected: false
        }
    );
    assert_eq!(writer.counters().durable_lsn(), 300);
    // A failure that is final stops the writer.
    disk.fail(Faults {
        sync: Some((0, std::io::ErrorKind::Other)),
        ..Faults::default()
    });
    let (answers, answered) = mpsc::channel();
    let batch = Batch {
        first: None,
        records: vec![record(301)],
        wants_durable: false,
        done: Box::new(move |outcome| answers.send(outcome).unwrap()),
    };
    assert!(submit(&writer, batch));
    assert_eq!(answered.recv().unwrap().unwrap(), 301);
    let (done, cut) = mpsc::channel();
    wait(writer.truncate_after(300, Box::new(move |outcome| done.send(outcome).unwrap())));
    assert!(cut.recv().unwrap().is_err());
    assert!(writer.shutdown().is_err());
}

/// Hands in an operation, for which there is room.
fn wait(handed_in: impl Future<Output = ()>) {
    let polled = pin!(handed_in).poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_ready());
}

/// Where the last record of a segment ends is remembered, and the next segment begins with the number that would follow.
#[test]
fn a_segment_is_read_from_its_beginning_whatever_is_remembered_of_the_one_before() {
    let disk = SimDisk::default();
    let options = JournalOptions {
        segment_bytes: 1 << 20,
        ..options()
    };
    let (mut journal, _) = Journal::open_on(Arc::new(disk), &options).unwrap();
    let long = vec![1; 70_000];
    journal.append(&[&long]).unwrap();
    snapshot(&mut journal, b"up to 1");
    journal.append(&[[2], [3], [4]]).unwrap();
    journal.sync().unwrap();
    let mut reader = journal.reader();
    // Onwards, and back.
    for from in [1, 3, 2] {
        let read = reader.read(from, 5, usize::MAX).unwrap();
        assert_eq!(read.last(), Some(&(4, vec![4])));
        assert_eq!(read.len() as u64, 5 - from);
    }
}
