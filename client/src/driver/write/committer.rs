//! Commits of many files in one request: all that were queued while the previous request was in
//! flight go out together.

use std::collections::VecDeque;
use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::limits::{EXTENTS_PER_COMMIT_MAX, FILES_PER_COMMIT_MAX};
use harvestfs_protocol::meta::{FileCommit, FileCommitted, MetaReply, mutation};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{Credentials, Extent};
use parking_lot::{Mutex, MutexGuard};

use crate::driver::core::Core;
use crate::driver::write::file_state::FileState;
use crate::driver::write::requests::carrier;
use crate::engine::write::writeback::Order;
use crate::error::ClientError;

/// Requests of one kind in flight. Two keep the namenode busy; with more, fewer files share one.
const REQUESTS_MAX: usize = 2;

/// New data of one file.
pub(crate) struct Entry {
    pub(crate) file: Arc<FileState>,
    pub(crate) order: Order,
    pub(crate) commit: FileCommit,
    pub(crate) credentials: Credentials,
    pub(crate) durable: bool,
    /// The request that waits for it.
    pub(crate) request: RequestId,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Committer {
    relaxed: Mutex<Queue>,
    durable: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    requests: usize,
}

impl Committer {
    pub(crate) fn submit(&self, core: &Arc<Core>, entry: Entry) {
        let durable = entry.durable;
        let batch = {
            let mut queue = self.lock(durable);
            queue.entries.push_back(entry);
            if queue.requests == REQUESTS_MAX {
                return;
            }
            queue.requests += 1;
            take_batch(&mut queue.entries)
        };
        let core = core.clone();
        core.session.runtime.clone().spawn(async move {
            let mut batch = batch;
            while !batch.is_empty() {
                let request = carrier(batch.iter().map(|entry| entry.request));
                request.scope(commit(&core, batch, durable)).await;
                let mut queue = core.committer.lock(durable);
                batch = take_batch(&mut queue.entries);
                if batch.is_empty() {
                    queue.requests -= 1;
                }
            }
        });
    }

    fn lock(&self, durable: bool) -> MutexGuard<'_, Queue> {
        let queue = if durable {
            &self.durable
        } else {
            &self.relaxed
        };
        queue.lock()
    }
}

/// What may go into one request: the same credentials, within the limits.
fn take_batch(entries: &mut VecDeque<Entry>) -> Vec<Entry> {
    let mut batch: Vec<Entry> = Vec::new();
    let mut extents = 0;
    while let Some(next) = entries.front() {
        extents += next.commit.extents.len();
        let fits = batch.len() < FILES_PER_COMMIT_MAX && extents <= EXTENTS_PER_COMMIT_MAX;
        let same = batch
            .first()
            .is_none_or(|first| first.credentials == next.credentials);
        if !(batch.is_empty() || fits && same) {
            break;
        }
        batch.extend(entries.pop_front());
    }
    batch
}

async fn commit(core: &Arc<Core>, batch: Vec<Entry>, durable: bool) {
    let mut refused = commit_once(core, batch, durable).await;
    // What was removed here a moment ago counts until the namenode knows that it is not open.
    if !refused.is_empty() && core.session.release_now().await {
        refused = commit_once(core, refused, durable).await;
    }
    fail(refused, &FsError::QuotaExceeded.into());
}

/// Gives back what a quota refused.
async fn commit_once(core: &Arc<Core>, batch: Vec<Entry>, durable: bool) -> Vec<Entry> {
    let Some(credentials) = batch.first().map(|first| first.credentials.clone()) else {
        return Vec::new();
    };
    let op = mutation::Commit {
        files: batch.iter().map(|entry| entry.commit.clone()).collect(),
        durable,
    };
    let generation = core.session.generation();
    let mut result = core.session.mutate(&credentials, op).await;
    if matches!(result, Err(ClientError::Fs(FsError::SessionExpired)))
        && let Err(error) = core.session.link_of_next_session(Some(generation)).await
    {
        // Without a session, writing the data again would be in vain.
        result = Err(error);
    }
    let (ticket, results) = match result {
        Ok((ticket, MetaReply::Committed(results))) if results.len() == batch.len() => {
            (ticket, results)
        }
        Ok(_) => {
            fail(batch, &ClientError::UnexpectedReply(mutation::Commit::NAME));
            return Vec::new();
        }
        Err(error) => {
            fail(batch, &error);
            return Vec::new();
        }
    };
    let mut refused = Vec::new();
    let relaxed_number = core.session.last_relaxed();
    for (entry, result) in batch.into_iter().zip(results) {
        match result {
            Ok(committed) => {
                // The cache first: what leaves the file's memory must be found there.
                ticket.committed(&committed.attr, &final_extents(&entry, &committed));
                let number = if durable { 0 } else { relaxed_number };
                entry.file.commit_done(entry.order, number);
            }
            Err(error) => {
                ticket.changed_inode(entry.commit.ino);
                if error == FsError::QuotaExceeded {
                    refused.push(entry);
                } else {
                    entry.file.commit_failed(entry.order, &error.into());
                }
            }
        }
    }
    refused
}

fn final_extents(entry: &Entry, committed: &FileCommitted) -> Vec<Extent> {
    let moved = |extent: &Extent| Extent {
        file_offset: extent.file_offset + committed.append_offset,
        ..*extent
    };
    match entry.order {
        Order::File => entry.commit.extents.clone(),
        Order::Append => entry.commit.extents.iter().map(moved).collect(),
    }
}

fn fail(batch: Vec<Entry>, error: &ClientError) {
    for entry in batch {
        entry.file.commit_failed(entry.order, error);
    }
}
