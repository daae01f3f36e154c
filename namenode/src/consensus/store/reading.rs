//! Reading the log: the newest entries from memory, those before them from the journal.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};

use futures::stream::{self, Stream, TryStreamExt};
use harvestfs_protocol::limits::APPENDED_BYTES_MAX;
use openraft::entry::RaftEntry;
use openraft::{EntryPayload, OptionalSend, RaftLogReader};

use super::LogStore;
use crate::consensus::entry::{Record, entry_of};
use crate::consensus::tail::bytes_of;
use crate::consensus::{Entry, Group, Vote};
use crate::journal::Lsn;

/// Bytes of records that are read from the journal at a time.
const READ_BYTES_MAX: usize = 4 << 20;

/// The first entry of a range, and the one after its last.
fn bounds_of(range: &impl RangeBounds<u64>) -> (Lsn, Lsn) {
    let first = match range.start_bound() {
        Bound::Included(first) => *first,
        Bound::Excluded(before) => before + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last + 1,
        Bound::Excluded(end) => *end,
        Bound::Unbounded => Lsn::MAX,
    };
    (first, end)
}

impl LogStore {
    /// Returns the records of a leader from `from` up to and including `to`; fewer if they are many, and only those
    /// before the first entry that is not a command.
    pub(in crate::consensus) fn records(
        mut self,
        from: Lsn,
        to: Lsn,
    ) -> Result<Vec<Record>, io::Error> {
        let entries = self.entries(from, to + 1, READ_BYTES_MAX)?;
        let record = |entry: Entry| match entry.payload {
            EntryPayload::Normal(record) => Some(record),
            EntryPayload::Blank | EntryPayload::Membership(_) => None,
        };
        // openraft adds the other entries itself.
        Ok(entries.into_iter().map_while(record).collect())
    }

    /// Returns the entries from `first` to before `end`, without gaps; not all of them if they exceed `bytes`.
    fn entries(&mut self, first: Lsn, end: Lsn, bytes: usize) -> Result<Vec<Entry>, io::Error> {
        let mut next = first.max(1);
        let mut entries = Vec::new();
        let mut left = bytes;
        loop {
            let oldest = {
                let tail = self.shared.tail.lock();
                let last = tail.last.map_or(0, |last| last.index());
                let end = end.min(last + 1);
                let oldest = tail.recent.front().map_or(last + 1, RaftEntry::index);
                // None if they are older. What is read below may have left memory meanwhile, so that more has to be
                // read.
                let recent = next.checked_sub(oldest).into_iter();
                let recent = recent.flat_map(|from| tail.recent.iter().skip(from as usize));
                for entry in recent.take_while(|it| it.index() < end) {
                    if left == 0 {
                        break;
                    }
                    left = left.saturating_sub(bytes_of(entry));
                    next = entry.index() + 1;
                    entries.push(entry.clone());
                }
                if next >= end || left == 0 {
                    return Ok(entries);
                }
                oldest.min(end)
            };
            let read = self.reader.read(next, oldest, READ_BYTES_MAX.min(left));
            let read = read.map_err(io::Error::other)?;
            assert!(
                !read.is_empty(),
                "records from {next} to {oldest} are in the journal"
            );
            for (lsn, record) in read {
                let entry = entry_of(lsn, record).map_err(io::Error::other)?;
                left = left.saturating_sub(bytes_of(&entry));
                entries.push(entry);
                next = lsn + 1;
            }
        }
    }
}

impl RaftLogReader<Group> for LogStore {
    async fn try_get_log_entries<R>(&mut self, range: R) -> Result<Vec<Entry>, io::Error>
    where
        R: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (first, end) = bounds_of(&range);
        self.entries(first, end, usize::MAX)
    }

    /// The committed entries, to be applied. After a start of a member of a group, that is everything since its
    /// snapshot: more than fits into memory at a time, and it would block everything else.
    async fn entries_stream<R>(
        &mut self,
        range: R,
    ) -> impl Stream<Item = Result<Entry, io::Error>> + OptionalSend
    where
        R: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (first, end) = bounds_of(&range);
        let pieces = stream::try_unfold((self, first), move |(store, next)| async move {
            if next >= end {
                return Ok::<_, io::Error>(None);
            }
            if next > first {
                tokio::task::yield_now().await;
            }
            let piece = store.entries(next, end, APPENDED_BYTES_MAX)?;
            let Some(next) = piece.last().map(|last| last.index() + 1) else {
                return Ok(None);
            };
            let piece = stream::iter(piece.into_iter().map(Ok::<Entry, io::Error>));
            Ok(Some((piece, (store, next))))
        });
        pieces.try_flatten()
    }

    /// As many entries as one message takes, and one more.
    async fn limited_get_log_entries(
        &mut self,
        first: Lsn,
        end: Lsn,
    ) -> Result<Vec<Entry>, io::Error> {
        self.entries(first, end, APPENDED_BYTES_MAX)
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.shared.kept.lock().vote)
    }
}
