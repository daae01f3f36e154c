//! The journal in a healthy, real directory.

use std::fs;
use std::io::{Read, Write};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;

fn options_in(dir: &TempDir) -> JournalOptions {
    JournalOptions {
        dir: dir.path().join("journal"),
        ..options()
    }
}

fn append_synced(journal: &mut Journal, count: u64) {
    for lsn in journal.last_lsn() + 1..=journal.last_lsn() + count {
        assert_eq!(journal.append(&[record(lsn)]).unwrap(), lsn);
    }
    journal.sync().unwrap();
}

/// A batch whose outcome goes to the returned channel.
fn batch(
    records: Vec<Vec<u8>>,
    wants_durable: bool,
) -> (
    Batch,
    mpsc::Receiver<Result<Lsn, std::sync::Arc<JournalError>>>,
) {
    let (sender, receiver) = mpsc::channel();
    let done: Completion = Box::new(move |outcome| sender.send(outcome).unwrap());
    let batch = Batch {
        first: None,
        records,
        wants_durable,
        done,
    };
    (batch, receiver)
}

#[test]
fn records_come_back_across_segments() {
    let dir = tempfile::tempdir().unwrap();
    let options = options_in(&dir);
    let (mut journal, recovered) = Journal::open(&options).unwrap();
    assert_eq!(recovered.last_lsn, 0);
    assert_records(recovered.records, 1, 0);
    append_synced(&mut journal, 700);
    drop(journal);

    let (mut journal, recovered) = Journal::open(&options).unwrap();
    assert_eq!(recovered.last_lsn, 700);
    assert_eq!(recovered.tail, TailReport::Clean);
    assert!(recovered.snapshot.is_none());
    assert_records(recovered.records, 1, 700);
    append_synced(&mut journal, 10);
    drop(journal);

    let (_journal, recovered) = Journal::open(&options).unwrap();
    assert_records(recovered.records, 1, 710);
}

#[test]
fn empty_records_and_empty_appends_are_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let options = options_in(&dir);
    let (mut journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    let none: [&[u8]; 0] = [];
    assert_eq!(journal.append(&none).unwrap(), 0);
    assert_eq!(journal.append(&["", "x", ""]).unwrap(), 3);
    journal.sync().unwrap();
    drop(journal);
    let (_journal, recovered) = Journal::open(&options).unwrap();
    let records: Vec<_> = recovered.records.map(Result::unwrap).collect();
    assert_eq!(
        records,
        [(1, vec![]), (2, b"x".to_vec()), (3, vec![])],
        "an empty record is a record"
    );
}

#[test]
fn a_snapshot_replaces_the_records_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let options = options_in(&dir);
    let (mut journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    assert!(
        journal
            .begin_snapshot(journal.last_lsn())
            .unwrap()
            .is_none(),
        "nothing yet"
    );
    let content: Vec<u8> = (0..700_000u32).map(|i| (i % 251) as u8).collect();
    for round in 1..=3 {
        append_synced(&mut journal, 300);
        let plan = journal.begin_snapshot(journal.last_lsn()).unwrap().unwrap();
        append_synced(&mut journal, 5);
        let base_lsn = plan.base().unwrap().map_or(0, |(lsn, _)| lsn);
        assert_records(plan.records().unwrap(), base_lsn + 1, plan.lsn());
        let mut writer = plan.writer().unwrap();
        writer.write_all(&content[..round * 200_000]).unwrap();
        assert!(matches!(
            journal.begin_snapshot(journal.last_lsn()),
            Err(JournalError::SnapshotInProgress)
        ));
        let installed = writer.install().unwrap();
        assert!(journal.purge(Lsn::MAX).removal_error.is_none());
        assert_eq!(installed.content_bytes, round as u64 * 200_000);
    }
    drop(journal);

    let (_journal, recovered) = Journal::open(&options).unwrap();
    let (lsn, mut reader) = recovered.snapshot.unwrap();
    assert_eq!(lsn, 910);
    let mut read = Vec::new();
    reader.read_to_end(&mut read).unwrap();
    assert!(read == content[..600_000]);
    assert_records(recovered.records, 911, 915);
    let names = fs::read_dir(&options.dir).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let snapshots = names.filter(|name| name.starts_with("snapshot-")).count();
    assert_eq!(snapshots, 2, "the newest and the one before it stay");
}

#[test]
fn a_snapshot_that_is_given_up_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let options = options_in(&dir);
    let (mut journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    append_synced(&mut journal, 5);
    let mut writer = journal
        .begin_snapshot(journal.last_lsn())
        .unwrap()
        .unwrap()
        .writer()
        .unwrap();
    writer.write_all(b"half").unwrap();
    drop(writer);
    let plan = journal.begin_snapshot(journal.last_lsn()).unwrap().unwrap();
    assert_eq!(plan.lsn(), 5);
    let installed = plan.writer().unwrap().install().unwrap();
    assert_eq!((installed.lsn, installed.content_bytes), (5, 0));
    assert!(
        journal
            .begin_snapshot(journal.last_lsn())
            .unwrap()
            .is_none(),
        "nothing new"
    );
}

#[test]
fn the_writer_answers_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let options = options_in(&dir);
    let (journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    // Groups that do not all fit into one segment together.
    let writer_options = JournalWriterOptions {
        group_bytes: 12 * 1024,
        ..JournalWriterOptions::default()
    };
    let writer = JournalWriter::start(journal, writer_options).unwrap();
    let mut answers = Vec::new();
    for first in (1..=999).step_by(3) {
        let (batch, answer) = batch(records(first, first + 2), first % 2 == 0);
        assert!(submit(&writer, batch));
        answers.push((first + 2, answer));
    }
    for (lsn, answer) in answers {
        assert_eq!(answer.recv().unwrap().unwrap(), lsn);
    }
    let journal = writer.shutdown().unwrap();
    assert_eq!(journal.durable_lsn(), 999);
    drop(journal);
    let (_journal, recovered) = Journal::open(&options).unwrap();
    assert_records(recovered.records, 1, 999);
}

#[tokio::test]
async fn the_writer_keeps_the_order_on_whichever_thread_it_commits() {
    let dir = tempfile::tempdir().unwrap();
    let options = options_in(&dir);
    let (journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let mut answers = Vec::new();
    for lsn in 1..=2_000 {
        let wants_durable = lsn % 3 == 0;
        let (batch, answer) = batch(records(lsn, lsn), wants_durable);
        if wants_durable {
            writer.commit(batch).await;
        } else {
            writer.submit(batch).await;
        }
        if lsn % 7 == 0 {
            // By now nothing is queued.
            assert_eq!(answer.recv().unwrap().unwrap(), lsn);
        } else {
            answers.push((lsn, answer));
        }
    }
    for (lsn, answer) in answers {
        assert_eq!(answer.recv().unwrap().unwrap(), lsn);
    }
    drop(writer.shutdown().unwrap());
    let (_journal, recovered) = Journal::open(&options).unwrap();
    assert_records(recovered.records, 1, 2_000);
}

#[test]
fn the_writer_syncs_what_nobody_waits_for() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(&options_in(&dir)).unwrap();
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let (batch, answer) = batch(records(1, 3), false);
    assert!(submit(&writer, batch));
    assert_eq!(answer.recv().unwrap().unwrap(), 3);
    let deadline = Instant::now() + Duration::from_secs(30);
    while writer.counters().durable_lsn() < 3 {
        assert!(Instant::now() < deadline, "never synced");
        std::thread::yield_now();
    }
}

#[test]
fn the_writer_queue_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(&options_in(&dir)).unwrap();
    let writer_options = JournalWriterOptions {
        queue_bytes: 4096,
        ..JournalWriterOptions::default()
    };
    let writer = JournalWriter::start(journal, writer_options).unwrap();
    // Blocks the journal thread inside the completion of the first batch.
    let (release, released) = mpsc::channel::<()>();
    let (entered, in_answer) = mpsc::channel();
    let holding = Batch {
        first: None,
        records: records(1, 1),
        wants_durable: true,
        done: Box::new(move |_| {
            entered.send(()).unwrap();
            released.recv().unwrap();
        }),
    };
    assert!(submit(&writer, holding));
    in_answer.recv().unwrap();
    let mut accepted = Vec::new();
    let thousand = || batch(vec![vec![7; 1000]], true);
    loop {
        let (batch, answer) = thousand();
        if !submit(&writer, batch) {
            break;
        }
        accepted.push(answer);
    }
    assert_eq!(
        accepted.len(),
        3,
        "1,028 bytes each, counted in steps of 256"
    );
    release.send(()).unwrap();
    for answer in accepted {
        answer.recv().unwrap().unwrap();
    }
    let (batch, answer) = thousand();
    assert!(submit(&writer, batch), "there is room again");
    assert_eq!(answer.recv().unwrap().unwrap(), 5);
    assert!(writer.shutdown().is_ok());
}

#[tokio::test]
async fn the_writer_takes_batches_and_snapshots_from_async_code() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(&options_in(&dir)).unwrap();
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let done: Completion = Box::new(move |outcome| sender.send(outcome).unwrap());
    let batch = Batch {
        first: None,
        records: records(1, 4),
        wants_durable: true,
        done,
    };
    writer.submit(batch).await;
    assert_eq!(receiver.await.unwrap().unwrap(), 4);
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let done: SnapshotCompletion = Box::new(move |plan| sender.send(plan.ok()).ok().unwrap());
    writer.begin_snapshot(4, done).await;
    let plan = receiver.await.unwrap().unwrap().unwrap();
    assert_eq!(plan.lsn(), 4);
    assert_records(plan.records().unwrap(), 1, 4);
}
