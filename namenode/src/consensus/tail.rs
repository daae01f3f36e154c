//! The end of the log: the newest entries, and records in flight to the journal.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use openraft::EntryPayload;
use openraft::entry::RaftEntry;
use openraft::storage::IOFlushed;

use super::entry::encode;
use super::{Entry, Group, LogId, Term};
use crate::journal::{Batch, JournalError, JournalWriter, Lsn};

/// Size at which a batch of records is handed to the journal; the record that reaches it is the last of the batch.
/// Far below the size of a segment, into which a batch has to fit.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// Bytes of the newest entries that are kept in memory, to be applied and sent. Entries that openraft has not added
/// yet are kept in addition: as many as the owner submits while it has a lease, since without one it takes no
/// requests. So are entries that are not durable, since the journal may not have them yet: as many as it queues and
/// writes at a time.
const RECENT_BYTES_MAX: usize = 32 << 20;

/// The end of the log.
#[derive(Default)]
pub(super) struct Tail {
    /// The newest entries, without gaps, in order.
    pub(super) recent: VecDeque<Entry>,
    pub(super) recent_bytes: usize,
    /// The last entry that can no longer be read.
    pub(super) purged: Option<LogId>,
    pub(super) last: Option<LogId>,
    pub(super) durable: Lsn,
    /// The last entry that openraft has added. What was submitted after it is compared with what openraft adds in its
    /// place, or is proposed again.
    pub(super) heard: Lsn,
    /// The newest term that this member voted in: no leader of an earlier term adds an entry any more.
    pub(super) term: Term,
    /// Appends that wait to become durable, in order.
    pub(super) pending: VecDeque<(Lsn, IOFlushed<Group>)>,
}

impl Tail {
    pub(super) fn push(&mut self, entry: Entry) {
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
        self.forget_oldest();
    }

    /// Notes that openraft has added the entries up to `lsn`.
    pub(super) fn hear(&mut self, lsn: Lsn) {
        self.heard = lsn;
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        while self.recent_bytes > RECENT_BYTES_MAX
            && let Some(oldest) = self.recent.front()
            && oldest.index() <= self.heard.min(self.durable)
        {
            self.recent_bytes -= bytes_of(oldest);
            self.recent.pop_front();
        }
    }

    /// Notes that appends are durable up to there, or that none will be.
    pub(super) fn progress(&mut self, durable: Result<Lsn, &Arc<JournalError>>) {
        if let Ok(durable) = durable {
            self.durable = durable;
            self.forget_oldest();
        }
        let ended = durable.unwrap_or(Lsn::MAX);
        while self.pending.front().is_some_and(|(lsn, _)| *lsn <= ended)
            && let Some((_, flushed)) = self.pending.pop_front()
        {
            flushed.io_completed(match durable {
                Ok(_) => Ok(()),
                Err(error) => Err(io::Error::other(Arc::clone(error))),
            });
        }
    }

    pub(super) fn last_recent_is_after(&self, lsn: Lsn) -> bool {
        self.recent
            .back()
            .is_some_and(|newest| newest.index() > lsn)
    }

    /// The entry with this number, if it is in memory.
    pub(super) fn recent(&self, lsn: Lsn) -> Option<&Entry> {
        let oldest = self.recent.front()?.index();
        let at = usize::try_from(lsn.checked_sub(oldest)?).ok()?;
        self.recent.get(at)
    }
}

/// Records in flight to the journal.
#[derive(Default)]
pub(super) struct Batches {
    full: Vec<Batch>,
    /// The number of the first of `records`.
    first: Option<Lsn>,
    records: Vec<Vec<u8>>,
    bytes: usize,
    wants_durable: bool,
}

impl Batches {
    pub(super) fn add(&mut self, entry: &Entry) {
        let record = encode(entry);
        self.first = self.first.or(Some(entry.index()));
        self.bytes += record.len();
        self.wants_durable |= match &entry.payload {
            EntryPayload::Normal(record) => record.awaited,
            EntryPayload::Blank | EntryPayload::Membership(_) => true,
        };
        self.records.push(record);
        if self.bytes >= BATCH_BYTES_MAX {
            self.end();
        }
    }

    pub(super) fn end(&mut self) {
        self.bytes = 0;
        self.full.push(Batch {
            first: self.first.take(),
            records: std::mem::take(&mut self.records),
            wants_durable: std::mem::take(&mut self.wants_durable),
            // The journal reports that as progress.
            done: Box::new(|_| ()),
        });
    }

    pub(super) async fn commit(mut self, writer: &JournalWriter) {
        if !self.records.is_empty() {
            self.end();
        }
        for batch in self.full {
            writer.commit(batch).await;
        }
    }
}

pub(super) fn bytes_of(entry: &Entry) -> usize {
    match &entry.payload {
        EntryPayload::Normal(record) => size_of::<Entry>() + record.command.len(),
        _ => size_of::<Entry>(),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::consensus::entry::{Record, log_id};

    /// With so many entries of a MiB, none of which is durable.
    fn tail_with(entries: Lsn) -> Tail {
        let command = Bytes::from(vec![7; 1 << 20]);
        let mut tail = Tail::default();
        for lsn in 1..=entries {
            let record = Record {
                command: command.clone(),
                awaited: false,
            };
            let entry = Entry::new(log_id(1, lsn), EntryPayload::Normal(record));
            tail.push(entry);
        }
        assert_eq!(tail.recent.len() as u64, entries);
        tail
    }

    fn oldest(tail: &Tail) -> Option<Lsn> {
        tail.recent.front().map(RaftEntry::index)
    }

    /// A leader without a lease submits, and openraft refuses.
    #[test]
    fn what_openraft_has_not_heard_of_is_not_forgotten() {
        let mut tail = tail_with(40);
        tail.progress(Ok(40));
        assert_eq!(oldest(&tail), Some(1));
        tail.hear(4);
        assert_eq!(oldest(&tail), Some(5));
        tail.hear(40);
        // Each has more bytes than its command.
        assert_eq!((oldest(&tail), tail.recent.len()), (Some(10), 31));
    }

    /// A disk that is slow has them still to be written.
    #[test]
    fn what_the_journal_may_not_have_is_not_forgotten() {
        let mut tail = tail_with(40);
        tail.hear(40);
        assert_eq!(oldest(&tail), Some(1));
        tail.progress(Ok(4));
        assert_eq!(oldest(&tail), Some(5));
        tail.progress(Ok(40));
        assert_eq!((oldest(&tail), tail.recent.len()), (Some(10), 31));
    }
}
