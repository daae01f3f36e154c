//! Commits of many files in one request: all that were queued while the previous requests were in
//! flight are sent together.

use std::collections::VecDeque;

use harvestfs_protocol::limits::{EXTENTS_PER_COMMIT_MAX, FILES_PER_COMMIT_MAX};
use harvestfs_protocol::types::Extent;

use super::file::Commit;
use super::writeback::Order;
use crate::engine::cache::extents::is_sound;

/// Maximum number of requests of one kind in flight. Two keep the namenode busy; with more, fewer files share one.
const REQUESTS_MAX: usize = 2;

/// New data of one file, which `F` identifies.
pub(crate) struct Entry<F> {
    pub(crate) file: F,
    pub(crate) commit: Commit,
}

impl<F> Entry<F> {
    /// Returns the extents with their final place in the file, if the append was placed at
    /// `append_offset`; `None` if that offset is impossible.
    pub(crate) fn final_extents(&self, append_offset: u64) -> Option<Vec<Extent>> {
        let extents = self.commit.commit.extents.iter().copied();
        match self.commit.order {
            Order::File => Some(extents.collect()),
            Order::Append => extents
                .map(|extent| {
                    let file_offset = extent.file_offset.checked_add(append_offset)?;
                    let moved = Extent {
                        file_offset,
                        ..extent
                    };
                    is_sound(&moved).then_some(moved)
                })
                .collect(),
        }
    }
}

/// The queue of commits.
pub(crate) struct Commits<F> {
    entries: VecDeque<Entry<F>>,
    requests: usize,
}

impl<F> Default for Commits<F> {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            requests: 0,
        }
    }
}

impl<F> Commits<F> {
    /// Adds an entry; returns what is to be sent in another request, if one more may be in flight.
    pub(crate) fn submit(&mut self, entry: Entry<F>) -> Option<Vec<Entry<F>>> {
        assert!(
            self.requests > 0 || self.entries.is_empty(),
            "{} commits wait, and no request is in flight that they wait for",
            self.entries.len()
        );
        self.entries.push_back(entry);
        if self.requests == REQUESTS_MAX {
            return None;
        }
        self.requests += 1;
        Some(self.take_batch())
    }

    /// Notes that a request was answered; returns what is to be sent in the next one, if there is anything.
    pub(crate) fn answered(&mut self) -> Option<Vec<Entry<F>>> {
        assert!(
            (1..=REQUESTS_MAX).contains(&self.requests),
            "one of {} requests is answered, and {} commits wait",
            self.requests,
            self.entries.len()
        );
        let batch = self.take_batch();
        if batch.is_empty() {
            self.requests -= 1;
            return None;
        }
        Some(batch)
    }

    /// Takes the entries that may share one request: those with the same credentials, within the limits.
    fn take_batch(&mut self) -> Vec<Entry<F>> {
        let mut batch: Vec<Entry<F>> = Vec::new();
        let mut extents = 0;
        while let Some(next) = self.entries.front() {
            extents += next.commit.commit.extents.len();
            let fits = batch.len() < FILES_PER_COMMIT_MAX && extents <= EXTENTS_PER_COMMIT_MAX;
            let same = batch
                .first()
                .is_none_or(|first| first.commit.credentials == next.commit.credentials);
            if !(batch.is_empty() || fits && same) {
                break;
            }
            batch.extend(self.entries.pop_front());
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::{BlockId, InodeId};
    use harvestfs_protocol::meta::FileCommit;
    use harvestfs_protocol::request_id::RequestId;
    use harvestfs_protocol::types::Credentials;
    use proptest::prelude::*;

    use super::*;

    fn entry(number: usize, uid: u32, extents: usize, order: Order) -> Entry<usize> {
        let extent = |at: usize| Extent {
            file_offset: at as u64,
            length_bytes: 1,
            block: BlockId(1),
            block_offset: at as u64,
        };
        Entry {
            file: number,
            commit: Commit {
                order,
                first: 1,
                commit: FileCommit {
                    ino: InodeId(number as u64),
                    extents: (0..extents).map(extent).collect(),
                    append: order == Order::Append,
                    mtime: None,
                },
                credentials: Credentials {
                    uid,
                    ..Credentials::root()
                },
                durable: false,
                request: RequestId::NONE,
            },
        }
    }

    #[test]
    fn appends_are_where_the_file_ended() {
        let offsets = |order| -> Vec<u64> {
            let extents = entry(0, 0, 2, order).final_extents(100);
            extents
                .expect("sound extents")
                .iter()
                .map(|extent| extent.file_offset)
                .collect()
        };
        assert_eq!(offsets(Order::File), [0, 1]);
        assert_eq!(offsets(Order::Append), [100, 101]);
    }

    proptest! {
        /// Every entry is sent once and in order, together with others of the same user, in at most
        /// two concurrent requests; an entry that is too large to be combined is sent alone.
        #[test]
        fn entries_share_requests(
            entries in prop::collection::vec(
                (0u32..2, 1usize..EXTENTS_PER_COMMIT_MAX, any::<bool>()), 1..40),
        ) {
            let count = entries.len();
            let mut commits = Commits::default();
            let mut in_flight: VecDeque<Vec<Entry<usize>>> = VecDeque::new();
            let mut sent = Vec::new();
            let mut events = entries.into_iter().enumerate().peekable();
            while events.peek().is_some() || !in_flight.is_empty() {
                let batch = match events.next() {
                    Some((number, (uid, extents, answer_first))) => {
                        if answer_first && in_flight.pop_front().is_some() {
                            let batch = commits.answered();
                            sent.extend(batch.iter().flatten().map(|entry| entry.file));
                            in_flight.extend(batch);
                        }
                        commits.submit(entry(number, uid, extents, Order::File))
                    }
                    None => {
                        in_flight.pop_front();
                        commits.answered()
                    }
                };
                if let Some(batch) = batch {
                    prop_assert!(!batch.is_empty() && batch.len() <= FILES_PER_COMMIT_MAX);
                    let extents = batch.iter().map(|it| it.commit.commit.extents.len());
                    prop_assert!(batch.len() == 1 || extents.sum::<usize>() <= EXTENTS_PER_COMMIT_MAX);
                    let first = &batch[0].commit.credentials;
                    prop_assert!(batch.iter().all(|it| it.commit.credentials == *first));
                    sent.extend(batch.iter().map(|entry| entry.file));
                    in_flight.push_back(batch);
                }
                prop_assert!(in_flight.len() <= REQUESTS_MAX);
            }
            prop_assert_eq!(sent, (0..count).collect::<Vec<_>>());
            prop_assert_eq!(commits.requests, 0);
        }
    }
}
