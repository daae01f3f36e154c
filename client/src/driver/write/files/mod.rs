//! Files that are open in this client or have written data in memory. All handles of a file share
//! one state.

mod all;
mod commits;
mod cut;
mod dirty;
mod durable;
mod enter;
mod handles;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{PlacementRules, Timestamp};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use self::commits::Committer;
pub(crate) use self::cut::{Cut, Serial};
use self::dirty::DirtyBudget;
pub(crate) use self::enter::Target;
use super::pipeline::{BlockStream, Source};
use super::writer::{DataWriter, Writers};
use crate::driver::clock;
use crate::driver::cluster::Cluster;
use crate::engine::read::recent::Recent;
use crate::engine::write::block::Written;
use crate::engine::write::file::{Actions, DirtyFile, Question, Uncommitted};
use crate::engine::write::packet;
use crate::engine::write::queue::Topology;
use crate::engine::write::writeback::{Order, Place, TakenPiece};
use crate::error::ClientError;

/// The files of a client, and the writers of their data.
pub(crate) struct Files {
    cluster: Arc<Cluster>,
    writers: Arc<Writers>,
    committer: Committer,
    pub(crate) dirty: DirtyBudget,
    recent: Arc<Recent>,
    packs: Mutex<FxHashMap<PlacementRules, Arc<DataWriter<Job>>>>,
    /// Blocks that this client is writing, and those that could not be sealed on enough datanodes:
    /// their data may not be on stable storage, whether or not the files are open.
    unsealed: Mutex<Vec<Arc<BlockStream<Job>>>>,
    files: Mutex<FxHashMap<InodeId, Arc<FileState>>>,
    /// Files whose data was given up after they were closed, and why; the newest last.
    unseen_losses: Mutex<VecDeque<(InodeId, ClientError)>>,
    /// Number of files that were closed before their data was committed.
    closed_early: AtomicUsize,
    /// Those of them whose data is not yet in flight.
    closing: Mutex<Vec<(RequestId, Arc<FileState>)>>,
    /// Whether the client is about to be closed: from then on nothing waits indefinitely.
    pub(crate) will_close: AtomicBool,
}

/// The state of one file.
pub(crate) struct FileState {
    pub(crate) ino: InodeId,
    /// Serializes operations that the namenode executes in one step on its own state of the file:
    /// truncation, cloning.
    pub(crate) serial: Arc<tokio::sync::Mutex<()>>,
    inner: Mutex<Inner>,
    /// The queue, in order, of writers that need exclusive entry to the file.
    turns: tokio::sync::Mutex<()>,
    /// Notified when something changes that a flush waits for.
    progress: Notify,
}

struct Inner {
    data: DirtyFile,
    /// Whether a writer has exclusive entry to the file.
    is_kept: bool,
    /// Writes bulk data into blocks of the file's own.
    writer: Option<Arc<DataWriter<Job>>>,
    /// Blocks with data of this file that may not be stable.
    unstable: Vec<Arc<BlockStream<Job>>>,
    /// How often blocks may have come into the file that `unstable` lacks: when this state of an existing file was
    /// created, when the file took over data of another one, and when one of its own blocks was lost.
    taken_over: u64,
    /// The value of `taken_over` up to which all blocks are stable.
    taken_over_stable: u64,
    /// The last mutation of the file that may not be durable.
    relaxed: u64,
}

/// A piece of a file that is being written to a block.
pub(crate) struct Job {
    file: Arc<FileState>,
    order: Order,
    piece: TakenPiece,
    /// Whether it must be on stable storage when it is acknowledged.
    sync: bool,
    /// The request that waits for it.
    request: RequestId,
}

impl packet::Piece for Job {
    fn data(&self) -> &Bytes {
        &self.piece.data
    }

    fn is_continued_by(&self, next: &Self) -> bool {
        Arc::ptr_eq(&self.file, &next.file)
            && self.order == next.order
            && self.piece.offset + self.piece.data.len() as u64 == next.piece.offset
    }

    fn sync(&self) -> bool {
        self.sync
    }

    fn file(&self) -> InodeId {
        self.file.ino
    }

    fn request(&self) -> RequestId {
        self.request
    }
}

impl FileState {
    pub(crate) fn has_data(&self) -> bool {
        self.held_bytes() > 0
    }

    /// Returns the number of bytes in memory.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.inner.lock().data.held_bytes()
    }

    pub(crate) fn has_appends(&self) -> bool {
        self.inner.lock().data.has_appends()
    }

    /// Whether a flush has to succeed before it takes more data.
    pub(crate) fn takes_no_more(&self) -> bool {
        self.inner.lock().data.takes_no_more()
    }

    /// Whether data was refused, and nothing of the file was stored since.
    fn is_refused(&self) -> bool {
        self.inner.lock().data.is_refused()
    }

    /// Whether the data was refused again when it was retried.
    fn is_refused_again(&self) -> bool {
        self.inner.lock().data.is_refused_again()
    }

    /// Returns the number of bytes in memory that were refused again and are not being retried now.
    fn refused_bytes(&self) -> u64 {
        self.inner.lock().data.refused_bytes()
    }

    /// Waits until `found` returns a value; it is called again after each progress.
    async fn once<T>(&self, found: impl Fn(&DirtyFile) -> Option<T>) -> T {
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            progress.as_mut().enable();
            let found = found(&self.inner.lock().data);
            if let Some(found) = found {
                return found;
            }
            progress.await;
        }
    }

    pub(crate) fn rules(&self) -> Option<PlacementRules> {
        self.inner.lock().data.rules()
    }

    /// Sets how the blocks of the file are to be placed; `None` if that may have changed.
    pub(crate) fn set_rules(&self, rules: Option<PlacementRules>) {
        self.inner.lock().data.set_rules(rules);
    }

    /// Returns the number for a query for the rules, while they are unknown.
    fn ask_rules(&self) -> Option<Question> {
        let mut inner = self.inner.lock();
        let is_unknown = inner.data.rules().is_none();
        is_unknown.then(|| inner.data.ask_rules())
    }

    /// Notes that the file was just created, with these rules if they are known.
    pub(crate) fn is_new(&self, rules: Option<PlacementRules>) {
        let mut inner = self.inner.lock();
        inner.data.set_rules(rules);
        inner.taken_over_stable = inner.taken_over;
    }

    /// Returns how often data was given up so far, and the last reason.
    pub(crate) fn losses(&self) -> (u64, Option<ClientError>) {
        self.inner.lock().data.losses()
    }

    /// Notes that stored data of the file was lost.
    pub(crate) fn lost(&self, reason: ClientError) {
        self.inner.lock().data.lost(reason);
    }

    /// Takes the reason why data was given up while no handle was open, to be reported once.
    pub(crate) fn take_unseen_loss(&self) -> Option<ClientError> {
        self.inner.lock().data.take_unseen_loss()
    }

    /// Returns the data in memory of a range, in order, and the end of everything in memory.
    pub(crate) fn overlay(&self, range: Range<u64>) -> (Vec<(u64, Bytes)>, u64) {
        self.inner.lock().data.overlay(range)
    }

    /// Returns how commits will change the attributes.
    pub(crate) fn uncommitted(&self) -> Uncommitted {
        self.inner.lock().data.uncommitted()
    }

    /// Sets the modification time of the next commit, if one is given; false when nothing waits for
    /// a commit.
    pub(crate) fn change_with_commit(&self, mtime: Option<Timestamp>) -> bool {
        self.inner.lock().data.change_with_commit(mtime)
    }

    /// Notes that a mutation of the file with this number may not be durable; `fsync` makes it so.
    pub(crate) fn note_relaxed(&self, relaxed: u64) {
        let mut inner = self.inner.lock();
        inner.relaxed = inner.relaxed.max(relaxed);
    }

    /// Notes that the file may have blocks of another file from now on, which may not be stable.
    /// Nor may the mutations up to this number be durable, which made the blocks part of that file.
    pub(crate) fn took_over(&self, relaxed: u64) {
        self.inner.lock().taken_over += 1;
        self.note_relaxed(relaxed);
    }

    fn is_dirty_for(&self, age: Duration) -> bool {
        self.inner.lock().data.is_dirty_for(age, clock::now())
    }
}

impl Files {
    pub(crate) fn new(cluster: Arc<Cluster>, recent: Arc<Recent>) -> Self {
        let bytes_max = cluster.session.options.dirty_bytes_max;
        Self {
            writers: Arc::new(Writers::new(cluster.clone())),
            cluster,
            committer: Committer::default(),
            dirty: DirtyBudget::new(bytes_max),
            recent,
            packs: Mutex::default(),
            unsealed: Mutex::default(),
            files: Mutex::default(),
            unseen_losses: Mutex::default(),
            closed_early: AtomicUsize::new(0),
            closing: Mutex::default(),
            will_close: AtomicBool::new(false),
        }
    }

    /// Returns the writer for small pieces of files with these rules.
    fn pack(self: &Arc<Self>, rules: PlacementRules) -> Arc<DataWriter<Job>> {
        let mut packs = self.packs.lock();
        let start = || DataWriter::start(&self.writers, self, Topology::Star, rules);
        packs.entry(rules).or_insert_with(start).clone()
    }

    /// Makes sure that the placement rules of a file are known. Queries again if they changed meanwhile.
    pub(crate) async fn find_rules(&self, file: &FileState) -> Result<(), ClientError> {
        while let Some(question) = file.ask_rules() {
            let rules = self.cluster.session.rules_of(file.ino).await?;
            file.inner.lock().data.rules_answered(question, rules);
        }
        Ok(())
    }

    /// Queries the rules in the background: they were reset while a flush waits for data that has to be sent again.
    fn start_finding_rules(self: &Arc<Self>, file: &Arc<FileState>, question: Question) {
        let (files, file) = (self.clone(), file.clone());
        self.cluster.session.runtime.spawn(async move {
            let found = files.cluster.session.rules_of(file.ino).await;
            let has_failed = found.is_err();
            files.update(&file, |inner| {
                inner.data.rules_found(question, found, clock::now());
            });
            if has_failed {
                files.has_failed(&file);
            }
        });
    }

    /// Starts flushing a file without waiting for it.
    pub(crate) fn start_flush(self: &Arc<Self>, file: &Arc<FileState>) {
        if file.has_data() {
            let request = RequestId::current();
            self.update(file, |inner| inner.data.want_all(request));
        }
    }

    /// Waits until everything written to a file so far is part of it; with `durable`, until it is
    /// also on stable storage.
    ///
    /// # Errors
    /// The error that kept the data from being written. It stays in memory and is retried.
    pub(crate) fn flush<'a>(
        self: &'a Arc<Self>,
        file: &'a Arc<FileState>,
        durable: bool,
    ) -> BoxFuture<'a, Result<(), ClientError>> {
        Box::pin(async move {
            if file.has_data() {
                self.find_rules(file).await?;
                self.flush_memory(file, durable).await?;
            }
            if durable {
                self.make_durable(file).await?;
            }
            Ok(())
        })
    }

    /// Flushes a file for a caller that only looks at it: data refused for lack of room stays in
    /// memory, and its writers get the error.
    ///
    /// # Errors
    /// As [`Files::flush`] otherwise.
    pub(crate) async fn flush_if_there_is_room(
        self: &Arc<Self>,
        file: &Arc<FileState>,
    ) -> Result<(), ClientError> {
        match self.flush(file, false).await {
            Err(error) if error.refuses_data() => Ok(()),
            flushed => flushed,
        }
    }

    async fn flush_memory(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        durable: bool,
    ) -> Result<(), ClientError> {
        let request = RequestId::current();
        let flush = self.update(file, |inner| inner.data.begin_flush(durable, request));
        file.once(|data| data.flushed(&flush)).await
    }

    /// Wakes those who wait for data of a file, or for its memory, after it could not be stored.
    fn has_failed(&self, file: &FileState) {
        file.progress.notify_waiters();
        if file.is_refused() {
            self.dirty.freed.notify_waiters();
        }
    }

    /// Notes that this session removed the file's last name.
    pub(crate) fn lost_last_name(self: &Arc<Self>, file: &Arc<FileState>) {
        self.update(file, |inner| inner.data.lost_last_name());
    }

    /// Notes that blocks with uncommitted pieces of a file are lost.
    fn blocks_lost(self: &Arc<Self>, file: &Arc<FileState>, is_lost: impl Fn(BlockId) -> bool) {
        let request = RequestId::current();
        self.update(file, |inner| inner.data.blocks_lost(is_lost, request));
    }

    /// Changes the state of a file and performs the resulting actions.
    fn update<R>(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        change: impl FnOnce(&mut Inner) -> R,
    ) -> R {
        let (result, actions, bulk, has_shrunk) = {
            let mut inner = file.inner.lock();
            let before = inner.data.held_bytes();
            let result = change(&mut inner);
            let tight = self.dirty.is_tight();
            let actions = inner.data.advance(tight, RequestId::current());
            let bulk = self.bulk_writer(&mut inner, &actions);
            if !actions.commits.is_empty() {
                // The delegation ends with the first commit.
                self.cluster.session.delegations.returned(file.ino);
            }
            let after = inner.data.held_bytes();
            // Counted under the lock: otherwise data could be counted after it has left.
            self.dirty.changed(before, after);
            (result, actions, bulk, after < before)
        };
        if has_shrunk {
            // Waiters need not wait for data that was committed, given up or cut off.
            file.progress.notify_waiters();
        }
        if actions.is_no_longer_early {
            self.cluster.session.delegations.owes_no_more(file.ino);
            self.closed_early.fetch_sub(1, Ordering::Relaxed);
        }
        for _ in 0..actions.holds_owed {
            self.hold_closed(file);
        }
        if let Some(question) = actions.needs_rules {
            self.start_finding_rules(file, question);
        }
        for send in actions.sends {
            let (order, request) = (send.order, send.request);
            let last = send.pieces.len() - 1;
            let pieces = send.pieces.into_iter().enumerate();
            let jobs = pieces.map(|(index, piece)| Job {
                file: file.clone(),
                order,
                piece,
                sync: send.sync && index == last,
                request,
            });
            let jobs = jobs.collect();
            let left = match &bulk {
                // The writer is closed with the last handle, but another handle may be opened and written to.
                Some(writer) if send.bulk => writer.try_submit(jobs).err(),
                _ => Some(jobs),
            };
            if let Some(jobs) = left {
                self.pack(send.rules).submit(self, jobs);
            }
        }
        for commit in actions.commits {
            self.submit_commit(file, commit);
        }
        result
    }

    /// Returns the writer of the file's own blocks, starting it when it is first needed.
    fn bulk_writer(
        self: &Arc<Self>,
        inner: &mut Inner,
        actions: &Actions,
    ) -> Option<Arc<DataWriter<Job>>> {
        let rules = actions.sends.iter().find(|send| send.bulk)?.rules;
        let start = || DataWriter::start(&self.writers, self, Topology::Chain, rules);
        Some(inner.writer.get_or_insert_with(start).clone())
    }
}

impl Source for Files {
    type Job = Job;

    fn begun(&self, stream: &Arc<BlockStream<Job>>) {
        self.remember(stream);
    }

    fn written(self: &Arc<Self>, piece: Written<Job>, stream: &Arc<BlockStream<Job>>) {
        let place = Place {
            block: stream.new.block,
            block_offset: piece.block_offset,
        };
        let job = piece.job;
        self.update(&job.file, |inner| {
            inner.data.piece_written(job.order, job.piece.id, place);
            let mut unstable = inner.unstable.iter();
            let known = unstable.any(|other| Arc::ptr_eq(other, stream));
            if !piece.stable && !known {
                inner.unstable.retain(|other| !other.is_sealed());
                inner.unstable.push(stream.clone());
            }
        });
    }

    fn failed(self: &Arc<Self>, pieces: Vec<Job>, error: &ClientError) {
        let Some(file) = pieces.first().map(|job| job.file.clone()) else {
            return;
        };
        let pieces: Vec<_> = pieces.iter().map(|job| (job.order, job.piece.id)).collect();
        self.update(&file, |inner| {
            inner.data.pieces_failed(&pieces, error, clock::now());
        });
        self.has_failed(&file);
    }

    fn block_lost(self: &Arc<Self>, block: BlockId) {
        for file in self.all() {
            self.blocks_lost(&file, |lost| lost == block);
        }
    }
}
