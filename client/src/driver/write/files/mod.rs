//! Files that are open in this client or have written data in memory. All handles of a file share one
//! state.

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

/// See the module.
pub(crate) struct Files {
    cluster: Arc<Cluster>,
    writers: Arc<Writers>,
    committer: Committer,
    pub(crate) dirty: DirtyBudget,
    recent: Arc<Recent>,
    packs: Mutex<FxHashMap<PlacementRules, Arc<DataWriter<Job>>>>,
    /// Blocks that this client writes to, and those that could not be sealed on enough datanodes: what is in them may not
    /// be on stable storage, whether or not the files are open.
    unsealed: Mutex<Vec<Arc<BlockStream<Job>>>>,
    files: Mutex<FxHashMap<InodeId, Arc<FileState>>>,
    /// Files whose data was given up after they were closed, and why; the newest last.
    unseen_losses: Mutex<VecDeque<(InodeId, ClientError)>>,
    /// How many were closed before what was written to them was committed.
    closed_early: AtomicUsize,
    /// The ones among them whose data is not even in flight.
    closing: Mutex<Vec<(RequestId, Arc<FileState>)>>,
    /// The client is about to be closed: nothing waits without end any more.
    pub(crate) will_close: AtomicBool,
}

/// One of the files.
pub(crate) struct FileState {
    pub(crate) ino: InodeId,
    /// Serialises operations that the namenode does in one step on the file as it is known there:
    /// truncation, cloning.
    pub(crate) serial: Arc<tokio::sync::Mutex<()>>,
    inner: Mutex<Inner>,
    /// Who writes and has to have the file for itself queues here, in order.
    turns: tokio::sync::Mutex<()>,
    /// Something that a flush waits for.
    progress: Notify,
}

struct Inner {
    data: DirtyFile,
    /// Somebody writes who has the file for itself.
    is_kept: bool,
    /// Writes data in bulk into blocks of the file's own.
    writer: Option<Arc<DataWriter<Job>>>,
    /// Blocks with data of this file that may not be stable.
    unstable: Vec<Arc<BlockStream<Job>>>,
    /// How often blocks came into the file of which there may be more: it was there before this state of it
    /// was, or took over another file's, or one of its own was lost.
    taken_over: u64,
    /// Up to which of these times all blocks are stable.
    taken_over_stable: u64,
    /// The last mutation of the file that may not be durable.
    relaxed: u64,
}

/// A piece of a file on its way into a block.
pub(crate) struct Job {
    file: Arc<FileState>,
    order: Order,
    piece: TakenPiece,
    /// To be on stable storage when it is acknowledged.
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

    /// Bytes in memory.
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

    /// Whether it was so again when it was tried again.
    fn is_refused_again(&self) -> bool {
        self.inner.lock().data.is_refused_again()
    }

    /// Bytes in memory that were refused again and are not being tried once more.
    fn refused_bytes(&self) -> u64 {
        self.inner.lock().data.refused_bytes()
    }

    /// Waits until `found` finds something; it looks again after each progress.
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

    /// How its blocks are to be placed; none: that may have changed.
    pub(crate) fn set_rules(&self, rules: Option<PlacementRules>) {
        self.inner.lock().data.set_rules(rules);
    }

    /// The number of a question for them, while they are not known.
    fn ask_rules(&self) -> Option<Question> {
        let mut inner = self.inner.lock();
        let is_unknown = inner.data.rules().is_none();
        is_unknown.then(|| inner.data.ask_rules())
    }

    /// The file was just created, with these rules when they are known.
    pub(crate) fn is_new(&self, rules: Option<PlacementRules>) {
        let mut inner = self.inner.lock();
        inner.data.set_rules(rules);
        inner.taken_over_stable = inner.taken_over;
    }

    /// Data that was given up so far, and the last reason.
    pub(crate) fn losses(&self) -> (u64, Option<ClientError>) {
        self.inner.lock().data.losses()
    }

    /// Something of it that was stored is lost.
    pub(crate) fn lost(&self, reason: ClientError) {
        self.inner.lock().data.lost(reason);
    }

    /// Why data was given up while no handle was open; said once.
    pub(crate) fn take_unseen_loss(&self) -> Option<ClientError> {
        self.inner.lock().data.take_unseen_loss()
    }

    /// What is in memory of a range, in order, and where everything in memory ends.
    pub(crate) fn overlay(&self, range: Range<u64>) -> (Vec<(u64, Bytes)>, u64) {
        self.inner.lock().data.overlay(range)
    }

    /// What commits will change of the attributes.
    pub(crate) fn uncommitted(&self) -> Uncommitted {
        self.inner.lock().data.uncommitted()
    }

    /// Sets the modification time of the next commit, if one is given; false when nothing waits for
    /// a commit.
    pub(crate) fn change_with_commit(&self, mtime: Option<Timestamp>) -> bool {
        self.inner.lock().data.change_with_commit(mtime)
    }

    /// A mutation of the file with this number may not be durable; `fsync` sees to it.
    pub(crate) fn note_relaxed(&self, relaxed: u64) {
        let mut inner = self.inner.lock();
        inner.relaxed = inner.relaxed.max(relaxed);
    }

    /// It may have blocks of another file from now on, which need not be stable. Nor need the mutations up to this
    /// number be durable, which made them part of that file.
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

    /// The writer of small pieces of files with these rules.
    fn pack(self: &Arc<Self>, rules: PlacementRules) -> Arc<DataWriter<Job>> {
        let mut packs = self.packs.lock();
        let start = || DataWriter::start(&self.writers, self, Topology::Star, rules);
        packs.entry(rules).or_insert_with(start).clone()
    }

    /// Makes sure that a file knows how its blocks are to be placed. Asks again where that was changed meanwhile.
    pub(crate) async fn find_rules(&self, file: &FileState) -> Result<(), ClientError> {
        while let Some(question) = file.ask_rules() {
            let rules = self.cluster.session.rules_of(file.ino).await?;
            file.inner.lock().data.rules_answered(question, rules);
        }
        Ok(())
    }

    /// They were forgotten while a flush waits for data that is to be sent again.
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

    /// Waits until everything written to a file so far is part of it; with `durable`, and on stable
    /// storage.
    ///
    /// # Errors
    /// What kept it from being written. It stays in memory and is tried again.
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

    /// Flushes a file for somebody who only looks at it: what is refused for want of room stays in memory, of which its
    /// writers are told.
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

    /// Something of a file could not be stored: those who wait for that, or for its room, look again.
    fn has_failed(&self, file: &FileState) {
        file.progress.notify_waiters();
        if file.is_refused() {
            self.dirty.freed.notify_waiters();
        }
    }

    /// Its last name was removed here.
    pub(crate) fn lost_last_name(self: &Arc<Self>, file: &Arc<FileState>) {
        self.update(file, |inner| inner.data.lost_last_name());
    }

    /// Blocks with pieces of a file that were not committed are gone.
    fn blocks_lost(self: &Arc<Self>, file: &Arc<FileState>, is_lost: impl Fn(BlockId) -> bool) {
        let request = RequestId::current();
        self.update(file, |inner| inner.data.blocks_lost(is_lost, request));
    }

    /// Changes the state of a file and does what follows from it.
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
                // It ends with the first commit.
                self.cluster.session.delegations.returned(file.ino);
            }
            let after = inner.data.held_bytes();
            // Under the lock: else what came in would be counted after it has left.
            self.dirty.changed(before, after);
            (result, actions, bulk, after < before)
        };
        if has_shrunk {
            // What was committed, given up or cut off need not be waited for.
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
                // It is closed with the last handle, while another one may be opened and written to.
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

    /// The writer of the file's own blocks, started when it is needed for the first time.
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
