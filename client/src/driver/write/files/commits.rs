//! Commits of many files in one request.

use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::{MetaReply, mutation};
use harvestfs_protocol::request_id::RequestId;
use parking_lot::Mutex;

use super::{FileState, Files, Inner};
use crate::driver::clock;
use crate::driver::write::requests::carrier;
use crate::engine::session::call::Unanswered;
use crate::engine::write::commits::{Commits, Entry};
use crate::engine::write::file::Commit;
use crate::engine::write::writeback::Order;
use crate::error::ClientError;

type Batch = Vec<Entry<Arc<FileState>>>;

/// A request that occupies one of the limited places in flight.
struct InFlight {
    files: Arc<Files>,
    durable: bool,
    is_over: bool,
}

impl InFlight {
    /// Frees the place: the request was answered, or is late enough that the next one may be sent.
    fn over(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let next = self.files.committer.queue(self.durable).lock().answered();
        if let Some(batch) = next {
            self.files.start_commit(batch, self.durable);
        }
    }
}

/// The queues of commits, by whether they are to be durable.
#[derive(Default)]
pub(super) struct Committer {
    relaxed: Mutex<Commits<Arc<FileState>>>,
    durable: Mutex<Commits<Arc<FileState>>>,
}

impl Committer {
    fn queue(&self, durable: bool) -> &Mutex<Commits<Arc<FileState>>> {
        if durable {
            &self.durable
        } else {
            &self.relaxed
        }
    }
}

impl FileState {
    /// Whether the answer to a commit matters: its data was not given up meanwhile.
    fn awaits(&self, commit: &Commit) -> bool {
        self.inner.lock().data.awaits(commit)
    }
}

impl Files {
    /// Submits a commit. A change of the file whose caller stopped waiting must not overtake data
    /// that was written later.
    pub(super) fn submit_commit(self: &Arc<Self>, file: &Arc<FileState>, commit: Commit) {
        let (session, ino) = (&self.cluster.session, file.ino);
        if !session.cache.is_content_unsettled(ino) {
            return self.send_commit(file, commit);
        }
        let request = commit.request;
        let (files, file) = (self.clone(), file.clone());
        session.runtime.spawn(request.scope(async move {
            let session = &files.cluster.session;
            let settled = session.settled(|cache| cache.is_content_unsettled(ino));
            match settled.await {
                Ok(()) => files.send_commit(&file, commit),
                Err(given_up) => files.commit_failed(&file, &commit, &given_up),
            }
        }));
    }

    fn send_commit(self: &Arc<Self>, file: &Arc<FileState>, commit: Commit) {
        let durable = commit.durable;
        let entry = Entry {
            file: file.clone(),
            commit,
        };
        let first = self.committer.queue(durable).lock().submit(entry);
        if let Some(first) = first {
            self.start_commit(first, durable);
        }
    }

    fn start_commit(self: &Arc<Self>, batch: Batch, durable: bool) {
        let request = carrier(batch.iter().map(|entry| entry.commit.request));
        let files = self.clone();
        self.cluster
            .session
            .runtime
            .spawn(request.scope(async move {
                let mut in_flight = InFlight {
                    files: files.clone(),
                    durable,
                    is_over: false,
                };
                files.commit(batch, &mut in_flight).await;
                in_flight.over();
            }));
    }

    async fn commit(self: &Arc<Self>, batch: Batch, in_flight: &mut InFlight) {
        let session = &self.cluster.session;
        let releases = session.holds.lock().releases_answered();
        let mut refused = self.commit_once(batch, in_flight).await;
        // Recently removed files count against the quota until the namenode knows that they are not open.
        if !refused.is_empty() && session.release_now(releases).await {
            // Data that was given up meanwhile is reported as lost.
            refused.retain(|entry| entry.file.awaits(&entry.commit));
            refused = self.commit_once(refused, in_flight).await;
        }
        self.commits_failed(refused, &Unanswered::refused(FsError::QuotaExceeded));
    }

    /// Sends the commits once; returns those that a quota refused.
    async fn commit_once(self: &Arc<Self>, batch: Batch, in_flight: &mut InFlight) -> Batch {
        let durable = in_flight.durable;
        let Some(first) = batch.first() else {
            return Vec::new();
        };
        let credentials = first.commit.credentials.clone();
        let commits = batch.iter().map(|entry| entry.commit.commit.clone());
        let op = mutation::Commit {
            files: commits.collect(),
            durable,
        };
        let session = &self.cluster.session;
        let generation = session.generation();
        // Cleared when the data failed or was given up before there was an answer: another commit may contain it.
        let mut wanted = vec![true; batch.len()];
        let silence = |unanswered: &Unanswered| {
            for (Entry { file, commit }, is_wanted) in batch.iter().zip(&mut wanted) {
                match commit.order {
                    _ if !*is_wanted => {}
                    Order::Append => {
                        *is_wanted = self.commit_unanswered(file, commit, unanswered);
                    }
                    Order::File => {
                        self.commit_failed(file, commit, unanswered);
                        *is_wanted = false;
                    }
                }
            }
            in_flight.over();
            wanted.clone()
        };
        let mut result = session.commit(&credentials, op, silence).await;
        if let Err(given_up) = &mut result
            && matches!(given_up.error, ClientError::Fs(FsError::SessionExpired))
            && let Err(error) = session.link_of_next_session(generation).await
        {
            // Without a session, writing the data again would be futile.
            given_up.error = error;
        }
        let answer = match result {
            Ok((ticket, MetaReply::Committed(results))) if results.len() == batch.len() => {
                Ok((ticket, results))
            }
            Ok(_) => {
                let error = ClientError::UnexpectedReply(mutation::Commit::NAME);
                Err(Unanswered::unknown(error))
            }
            Err(given_up) => Err(given_up),
        };
        let (ticket, results) = match answer {
            Ok(answer) => answer,
            Err(given_up) => {
                let batch = batch.into_iter().zip(wanted);
                let failed = batch.filter(|(_, is_wanted)| *is_wanted);
                self.commits_failed(failed.map(|(entry, _)| entry).collect(), &given_up);
                return Vec::new();
            }
        };
        let mut refused = Vec::new();
        let relaxed_number = session.last_relaxed();
        for ((entry, is_wanted), result) in batch.into_iter().zip(wanted).zip(results) {
            let (file, commit) = (&entry.file, &entry.commit);
            match result {
                _ if !is_wanted => ticket.changed_inode(file.ino),
                Ok(committed) => {
                    // Update the cache first: data that leaves the file's memory must be found there.
                    match entry.final_extents(committed.append_offset) {
                        Some(extents) => ticket.committed(&committed.attr, &extents),
                        // The namenode returned an impossible offset.
                        None => ticket.changed_inode(file.ino),
                    }
                    let number = if durable { 0 } else { relaxed_number };
                    self.commit_done(file, commit, number);
                }
                Err(error) => {
                    ticket.changed_inode(file.ino);
                    if error == FsError::QuotaExceeded {
                        refused.push(entry);
                    } else {
                        self.commit_failed(file, commit, &Unanswered::refused(error));
                    }
                }
            }
        }
        refused
    }

    fn commits_failed(self: &Arc<Self>, batch: Batch, failed: &Unanswered) {
        for entry in batch {
            self.commit_failed(&entry.file, &entry.commit, failed);
        }
    }

    /// Notes that a commit is part of the file; `relaxed` is its number if it may not be durable.
    fn commit_done(self: &Arc<Self>, file: &Arc<FileState>, commit: &Commit, relaxed: u64) {
        self.update(file, |inner| {
            inner.relaxed = inner.relaxed.max(relaxed);
            if !inner.data.awaits(commit) {
                return;
            }
            // This happens before anyone can see that the data has left the file's memory.
            for (place, data) in inner.data.commit_done(commit.order) {
                self.recent.keep(place, &data);
            }
        });
        file.progress.notify_waiters();
    }

    /// Notes that a commit was refused, or that its outcome is unknown.
    fn commit_failed(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        commit: &Commit,
        failed: &Unanswered,
    ) {
        let request = RequestId::current();
        self.update(file, |inner| {
            if inner.data.awaits(commit) {
                let (order, now) = (commit.order, clock::now());
                inner.data.commit_failed(order, failed, request, now);
            }
        });
        self.has_failed(file);
    }

    /// Notes that a commit of appends was not answered in time. Returns whether to repeat it.
    fn commit_unanswered(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        commit: &Commit,
        unanswered: &Unanswered,
    ) -> bool {
        let (error, now) = (&unanswered.error, clock::now());
        let change = |inner: &mut Inner| inner.data.commit_unanswered(commit, error, now);
        let goes_on = self.update(file, change);
        self.has_failed(file);
        goes_on
    }
}
