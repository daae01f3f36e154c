//! What openraft and the owner of the engine do to the log at the same time.

use std::fs;
use std::path::Path;
use std::pin::pin;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures::Stream;
use harvestfs_protocol::limits::APPENDED_BYTES_MAX;
use openraft::RaftLogReader;

use super::*;
use crate::consensus::Member;
use crate::consensus::member_file::Told;
use crate::journal::JournalOptions;

const OF_THIS: Term = 1;
const OF_ANOTHER: Term = 2;

fn journal_in(dir: &Path) -> (Journal, Lsn) {
    let options = JournalOptions {
        segment_bytes: 4 << 20,
        create_if_empty: true,
        ..JournalOptions::new(dir, 7)
    };
    let (journal, recovered) = Journal::open(&options).unwrap();
    (journal, recovered.last_lsn)
}

fn store_in(dir: &Path, queue_bytes: usize) -> LogStore {
    let this = MemberId(1);
    let member = Member {
        name: "nn".to_owned(),
        addr: ([10, 0, 0, 1], 1).into(),
    };
    let options = JournalWriterOptions {
        queue_bytes,
        ..JournalWriterOptions::default()
    };
    let kept = Kept::founding(this, BTreeMap::from([(this, member)])).unwrap();
    let executed = Arc::new(Executed::new(0, 0));
    let (journal, _) = journal_in(dir);
    LogStore::start(journal, options, None, kept, Arc::default(), executed).unwrap()
}

fn records(count: usize, bytes: usize) -> Vec<Record> {
    let record = Record {
        command: Bytes::from(vec![7; bytes]),
        awaited: true,
    };
    vec![record; count]
}

/// Makes the journal do nothing until something is sent, or the sender is dropped.
async fn hold_up(store: &LogStore) -> mpsc::Sender<()> {
    let (release, released) = mpsc::channel();
    let (enter, entered) = mpsc::channel();
    let holding = Batch {
        first: None,
        records: Vec::new(),
        wants_durable: false,
        done: Box::new(move |_| {
            enter.send(()).unwrap();
            let _ = released.recv();
        }),
    };
    store.writer().unwrap().submit(holding).await;
    entered.recv().unwrap();
    release
}

/// What a deposed leader acknowledges to the next one must be on its disk, which was stuck for a while.
#[tokio::test]
async fn a_vote_is_saved_after_what_was_appended_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = store_in(dir.path(), 1 << 20);
    let led = Vote::new_committed(OF_THIS, MemberId(1));
    store.save_vote(&led).await.unwrap();
    let release = hold_up(&store).await;
    store.submit(OF_THIS, records(3, 1)).await.unwrap();
    let mut other = store.clone();
    let vote = Vote::new(OF_ANOTHER, MemberId(2));
    let mut voted = Box::pin(other.save_vote(&vote));
    let context = &mut Context::from_waker(Waker::noop());
    let mut outvoted = pin!(store.voted_after(OF_THIS));
    assert!(outvoted.as_mut().poll(context).is_pending());
    assert!(voted.as_mut().poll(context).is_pending());
    // The owner of the engine need not wait for that.
    assert!(outvoted.as_mut().poll(context).is_ready());
    assert_eq!(store.voted_term(), OF_ANOTHER);
    assert!(store.submit(OF_THIS, records(1, 1)).await.is_err());
    drop(release);
    voted.await.unwrap();
    assert!(store.is_durable());
}

/// The owner of the engine shares this thread, and drops its clients when there is a vote in a later term.
#[tokio::test]
async fn others_run_while_a_vote_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_in(dir.path(), 1 << 20);
    let mut other = store.clone();
    let vote = Vote::new(OF_ANOTHER, MemberId(2));
    let mut voted = Box::pin(other.save_vote(&vote));
    {
        let _writing = store.shared.writing.lock();
        let context = &mut Context::from_waker(Waker::noop());
        assert!(voted.as_mut().poll(context).is_pending());
        assert_eq!(store.voted_term(), OF_ANOTHER);
    }
    voted.await.unwrap();
    assert_eq!((store.vote(), store.writes()), (vote, 1));
}

/// A leader's disk was stuck for a while. What it had written and the journal had no room for yet must not come after
/// what removes it.
#[tokio::test]
async fn what_waits_for_room_is_removed_with_what_is_queued() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = store_in(dir.path(), 4096);
    let led = Vote::new_committed(OF_THIS, MemberId(1));
    store.save_vote(&led).await.unwrap();
    let release = hold_up(&store).await;
    // Three batches, each of which takes all the room.
    let mut submitted = Box::pin(store.submit(OF_THIS, records(6, 600 << 10)));
    let context = &mut Context::from_waker(Waker::noop());
    assert!(submitted.as_mut().poll(context).is_pending());
    let mut other = store.clone();
    let mut removed = Box::pin(other.truncate_after(None));
    assert!(removed.as_mut().poll(context).is_pending());
    drop(release);
    let (submitted, removed) = futures::future::join(submitted, removed).await;
    assert!(submitted.is_ok(), "it was handed in before");
    removed.unwrap();
    store.close().unwrap();
    drop((store, other));
    assert_eq!(journal_in(dir.path()).1, 0);
}

/// A start of a group's member reads everything since its snapshot.
#[tokio::test]
async fn others_run_between_the_pieces_of_a_long_log() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = store_in(dir.path(), 1 << 20);
    let led = Vote::new_committed(OF_THIS, MemberId(1));
    store.save_vote(&led).await.unwrap();
    let written = records(6, APPENDED_BYTES_MAX / 2);
    store.submit(OF_THIS, written).await.unwrap();
    let mut entries = pin!(store.entries_stream(2..6).await);
    let context = &mut Context::from_waker(Waker::noop());
    let (mut read, mut pauses) = (Vec::new(), 0);
    loop {
        match entries.as_mut().poll_next(context) {
            Poll::Pending => pauses += 1,
            Poll::Ready(Some(entry)) => read.push(entry.unwrap().index()),
            Poll::Ready(None) => break,
        }
    }
    assert_eq!((read, pauses), (vec![2, 3, 4, 5], 1));
}

/// More waits for a slow disk than entries are kept in memory.
#[tokio::test]
async fn what_the_journal_does_not_have_yet_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = store_in(dir.path(), 64 << 20);
    let led = Vote::new_committed(OF_THIS, MemberId(1));
    store.save_vote(&led).await.unwrap();
    let release = hold_up(&store).await;
    let count = 40;
    let written = records(count, 1 << 20);
    store.submit(OF_THIS, written.clone()).await.unwrap();
    let entry = |(lsn, it)| Entry::new(log_id(OF_THIS, lsn), EntryPayload::Normal(it));
    let entries: Vec<Entry> = (1..).zip(written).map(entry).collect();
    store.append(entries, IOFlushed::noop()).await.unwrap();
    let read = store.try_get_log_entries(..).await.unwrap();
    assert_eq!(read.len(), count);
    drop(release);
    store.close().unwrap();
}

/// Its disk was full for a moment.
#[tokio::test]
async fn a_removed_member_that_could_not_write_that_down_does_so_when_it_is_told_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_in(dir.path(), 1 << 20);
    let in_the_way = dir.path().join("member.tmp");
    fs::create_dir(&in_the_way).unwrap();
    store.left();
    assert!(!store.shared.executed.is_replaced());
    fs::remove_dir(&in_the_way).unwrap();
    store.left();
    assert!(store.shared.executed.is_replaced(), "it starts over");
    let written = member_file::read(&*store.shared.disk).unwrap().unwrap();
    assert_eq!(written.kept.told, Told::Left);
    store.close().unwrap();
}
