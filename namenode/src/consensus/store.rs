//! The journal as the log of openraft.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use parking_lot::Mutex;

use super::entry::encode;
use super::member_file::{self, Kept, term_of};
use super::{Entry, Group, LogId, StoredMembers, Term, Vote};
use crate::journal::disk::Disk;
use crate::journal::{
    Batch, Journal, JournalCounters, JournalError, JournalWriter, JournalWriterOptions, Lsn,
};

/// Bytes of records that are handed to the journal as one batch; the record that reaches it is the last. Far
/// below the size of a segment, into which a batch has to fit.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// Bytes of commands of the newest entries that are kept in memory, to be applied and sent.
const RECENT_BYTES_MAX: usize = 32 << 20;

/// The log of one member. Cheap to clone.
#[derive(Clone)]
pub(super) struct LogStore {
    shared: Arc<Shared>,
}

struct Shared {
    disk: Arc<dyn Disk>,
    counters: Arc<JournalCounters>,
    /// None: it was closed.
    writer: Mutex<Option<Arc<JournalWriter>>>,
    tail: Arc<Mutex<Tail>>,
    kept: Mutex<Kept>,
}

/// The end of the log.
#[derive(Default)]
struct Tail {
    /// The newest entries, without gaps, in order.
    recent: VecDeque<Entry>,
    recent_bytes: usize,
    /// The last entry that cannot be read any more.
    purged: Option<LogId>,
    last: Option<LogId>,
    /// Appends that are to be durable, in order.
    pending: VecDeque<(Lsn, IOFlushed<Group>)>,
}

impl Tail {
    fn push(&mut self, entry: Entry) {
        assert!(
            self.last
                .is_none_or(|last| last.index() + 1 == entry.index()),
            "{} follows {:?}",
            entry.log_id(),
            self.last
        );
        self.recent_bytes += bytes_of(&entry);
        self.last = Some(entry.log_id());
        self.recent.push_back(entry);
        while self.recent_bytes > RECENT_BYTES_MAX
            && let Some(oldest) = self.recent.pop_front()
        {
            self.recent_bytes -= bytes_of(&oldest);
        }
    }

    fn durable(&mut self, durable: Result<Lsn, &Arc<JournalError>>) {
        let is_due = |lsn: Lsn| durable.as_ref().map_or(true, |durable| lsn <= *durable);
        while let Some((_, flushed)) = self.pending.pop_front_if(|(lsn, _)| is_due(*lsn)) {
            flushed.io_completed(
                durable
                    .map(drop)
                    .map_err(|error| io::Error::other(Arc::clone(error))),
            );
        }
    }
}

fn no_records() -> Batch {
    Batch {
        records: Vec::new(),
        wants_durable: false,
        // The journal's progress says when.
        done: Box::new(|_| ()),
    }
}

fn bytes_of(entry: &Entry) -> usize {
    match &entry.payload {
        openraft::EntryPayload::Normal(record) => size_of::<Entry>() + record.command.len(),
        _ => size_of::<Entry>(),
    }
}

impl LogStore {
    /// Continues a journal whose last entry is `last`.
    pub(super) fn start(
        journal: Journal,
        options: JournalWriterOptions,
        last: Option<LogId>,
        kept: Kept,
    ) -> Result<Self, JournalError> {
        let disk = journal.disk();
        let tail = Arc::new(Mutex::new(Tail {
            purged: last,
            last,
            ..Tail::default()
        }));
        let progressing = Arc::clone(&tail);
        let progress = move |durable: Result<Lsn, &Arc<JournalError>>| {
            progressing.lock().durable(durable);
        };
        let writer = JournalWriter::start(journal, options)?;
        writer.on_progress(Box::new(progress));
        Ok(Self {
            shared: Arc::new(Shared {
                disk,
                counters: writer.counters(),
                writer: Mutex::new(Some(Arc::new(writer))),
                tail,
                kept: Mutex::new(kept),
            }),
        })
    }

    /// The journal, until it is closed.
    pub(super) fn writer(&self) -> Option<Arc<JournalWriter>> {
        self.shared.writer.lock().clone()
    }

    pub(super) fn counters(&self) -> Arc<JournalCounters> {
        Arc::clone(&self.shared.counters)
    }

    /// Makes everything durable and ends the journal's thread. Blocks. Nothing is appended any more.
    pub(super) fn close(&self) -> Result<(), Arc<JournalError>> {
        let Some(writer) = self.shared.writer.lock().take() else {
            return Ok(());
        };
        match Arc::into_inner(writer) {
            Some(writer) => writer.shutdown().map(drop),
            None => panic!("the journal is closed while it is written"),
        }
    }

    pub(super) fn members(&self) -> StoredMembers {
        self.shared.kept.lock().members.clone()
    }

    /// Other members are in the group from here on.
    pub(super) fn keep_members(&self, members: StoredMembers) -> Result<(), JournalError> {
        self.keep(|kept| kept.members = members)
    }

    fn keep(&self, change: impl FnOnce(&mut Kept)) -> Result<(), JournalError> {
        let mut kept = self.shared.kept.lock();
        change(&mut kept);
        member_file::write(&self.shared.disk, &kept)
    }
}

impl RaftLogReader<Group> for LogStore {
    async fn try_get_log_entries<R>(&mut self, range: R) -> Result<Vec<Entry>, io::Error>
    where
        R: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let tail = self.shared.tail.lock();
        let first = match range.start_bound() {
            Bound::Included(first) => *first,
            Bound::Excluded(before) => before + 1,
            Bound::Unbounded => 0,
        };
        let is_in = |entry: &&Entry| range.contains(&entry.index());
        match tail.recent.front() {
            Some(oldest) if oldest.index() <= first => {
                let skipped = (first - oldest.index()) as usize;
                let from = tail.recent.iter().skip(skipped);
                Ok(from.take_while(is_in).cloned().collect())
            }
            _ => Err(io::Error::other(
                "not implemented: reading from the journal",
            )),
        }
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.shared.kept.lock().vote)
    }
}

impl RaftLogStorage<Group> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Group>, io::Error> {
        let tail = self.shared.tail.lock();
        Ok(LogState {
            last_purged_log_id: tail.purged,
            last_log_id: tail.last,
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.keep(|kept| kept.vote = Some(*vote))
            .map_err(io::Error::other)
    }

    async fn append<I>(&mut self, entries: I, flushed: IOFlushed<Group>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let Some(writer) = self.writer() else {
            return Err(io::Error::other("the journal is closed"));
        };
        let mut batches = vec![no_records()];
        let mut bytes = 0;
        {
            let mut tail = self.shared.tail.lock();
            let mut kept = self.shared.kept.lock();
            for entry in entries {
                if bytes >= BATCH_BYTES_MAX {
                    bytes = 0;
                    batches.push(no_records());
                }
                let term: Term = entry.log_id.committed_leader_id().term;
                if term_of(&kept.terms, entry.index()) != term {
                    kept.terms.push((entry.index(), term));
                }
                let record = encode(&entry);
                bytes += record.len();
                let batch = batches.last_mut().expect("there is one");
                batch.wants_durable |= match &entry.payload {
                    openraft::EntryPayload::Normal(record) => record.awaited,
                    _ => true,
                };
                batch.records.push(record);
                tail.push(entry);
            }
            let last = tail.last.map_or(0, |last| last.index());
            tail.pending.push_back((last, flushed));
        }
        for batch in batches {
            writer.commit(batch).await;
        }
        Ok(())
    }

    async fn truncate_after(&mut self, _last: Option<LogId>) -> Result<(), io::Error> {
        Err(io::Error::other("not implemented: truncating"))
    }

    async fn purge(&mut self, _upto: LogId) -> Result<(), io::Error> {
        // Snapshots remove what they cover.
        Ok(())
    }
}
