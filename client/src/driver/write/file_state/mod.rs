//! One file that is open in this client or has written data in memory. All handles share it.

mod advance;
mod handles;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{Attr, Credentials, PlacementRules, Timestamp};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::driver::core::Core;
use crate::driver::write::committer::Entry;
use crate::driver::write::pipeline::BlockStream;
use crate::driver::write::writer::{DataWriter, Job};
use crate::engine::write::writeback::{Epoch, Order, PieceId, Place, Writeback};
use crate::error::ClientError;

/// Times that a refused commit is tried with its data in other blocks.
const REWRITES_MAX: u32 = 3;

/// Flushes of a file that no handle has open, before its data is given up: no caller is left to get
/// the error, and memory is needed.
const FAILURES_UNSEEN_MAX: u32 = 5;

/// See the module.
pub(crate) struct FileState {
    pub(crate) ino: InodeId,
    pub(crate) core: Arc<Core>,
    /// Serialises operations that the namenode does in one step on the file as it is known there:
    /// truncation, cloning.
    pub(crate) serial: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
    /// Something that a flush waits for.
    progress: Notify,
}

struct Inner {
    handles: usize,
    written: Lane,
    appended: Lane,
    credentials: Credentials,
    rules: Option<PlacementRules>,
    /// Writes data in bulk into blocks of the file's own.
    writer: Option<Arc<DataWriter>>,
    dirty_since: Option<Instant>,
    mtime: Option<Timestamp>,
    /// Blocks with data of this file that may not be stable.
    unstable: Vec<Arc<BlockStream>>,
    /// There may be more of them: the file was there before this state of it was.
    reopened: bool,
    /// The last mutation of the file that may not be durable.
    relaxed: u64,
    /// Failures so far, and the last one. What failed stays in memory and is tried again.
    failures: u64,
    failure: Option<ClientError>,
    /// Data that was given up so far, and why.
    losses: u64,
    loss: Option<ClientError>,
    rewrites: u32,
    /// Its `close` returned before the commit.
    closed_early: bool,
    /// Closed handles that the namenode hears of once nothing is in memory.
    holds_owed: u32,
    /// Its last name was removed here.
    is_nameless: bool,
    /// Failures since the last handle was closed.
    failures_unseen: u32,
    /// Something failed, and no flush was wanted since: data stays in memory until one is.
    paused: bool,
}

/// One of the two ways of writing.
struct Lane {
    data: Writeback,
    /// The flush that is wanted.
    wanted: Option<Epoch>,
    durable: bool,
    /// What wanted the last one.
    request: RequestId,
}

/// What data in memory makes of a file's attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uncommitted {
    written_end: u64,
    appended_bytes: u64,
    /// Whether a commit of appends is in flight: what is known of the file may have them already.
    appends_in_flight: bool,
    mtime: Option<Timestamp>,
}

impl Uncommitted {
    /// Whether it can be said what the attributes will be.
    pub(crate) fn is_definite(&self) -> bool {
        !self.appends_in_flight
    }

    /// The attributes as they will be once everything in memory is part of the file.
    pub(crate) fn apply(&self, attr: &mut Attr) {
        attr.size_bytes = attr.size_bytes.max(self.written_end) + self.appended_bytes;
        if let Some(mtime) = self.mtime {
            attr.mtime = mtime;
            attr.ctime = attr.ctime.max(mtime);
        }
    }
}

/// What a critical section decided to do after it.
#[derive(Default)]
struct Actions {
    jobs: Vec<(Arc<DataWriter>, Vec<Job>)>,
    commits: Vec<Entry>,
}

impl Lane {
    fn new(order: Order) -> Self {
        Self {
            data: Writeback::new(order),
            wanted: None,
            durable: false,
            request: RequestId::NONE,
        }
    }

    /// Wants everything in memory flushed.
    fn want(&mut self, durable: bool) -> Epoch {
        let flush = self.data.begin_flush();
        self.wanted = Some(flush);
        self.durable |= durable;
        self.request = RequestId::current();
        flush
    }
}

impl Inner {
    fn held_bytes(&self) -> u64 {
        self.written.data.held_bytes() + self.appended.data.held_bytes()
    }

    fn lane(&mut self, order: Order) -> &mut Lane {
        match order {
            Order::File => &mut self.written,
            Order::Append => &mut self.appended,
        }
    }

    fn give_up(&mut self, order: Order, reason: ClientError) {
        let lane = self.lane(order);
        lane.data.discard();
        self.losses += 1;
        self.loss = Some(reason);
    }
}

impl FileState {
    pub(crate) fn new(core: Arc<Core>, ino: InodeId) -> Arc<Self> {
        // One of them may be of this file.
        let relaxed = core.session.last_relaxed();
        Arc::new(Self {
            ino,
            core,
            serial: tokio::sync::Mutex::default(),
            inner: Mutex::new(Inner {
                handles: 0,
                written: Lane::new(Order::File),
                appended: Lane::new(Order::Append),
                credentials: Credentials::root(),
                rules: None,
                writer: None,
                dirty_since: None,
                mtime: None,
                unstable: Vec::new(),
                reopened: true,
                relaxed,
                failures: 0,
                failure: None,
                losses: 0,
                loss: None,
                rewrites: 0,
                closed_early: false,
                holds_owed: 0,
                is_nameless: false,
                failures_unseen: 0,
                paused: false,
            }),
            progress: Notify::new(),
        })
    }

    pub(crate) fn is_dirty_for(&self, age: Duration) -> bool {
        let since = self.inner.lock().dirty_since;
        since.is_some_and(|since| since.elapsed() >= age)
    }

    pub(crate) fn has_data(&self) -> bool {
        self.inner.lock().held_bytes() > 0
    }

    /// Bytes in memory.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.inner.lock().held_bytes()
    }

    pub(crate) fn has_appends(&self) -> bool {
        !self.inner.lock().appended.data.is_empty()
    }

    pub(crate) fn rules(&self) -> Option<PlacementRules> {
        self.inner.lock().rules
    }

    /// The rules may have changed.
    pub(crate) fn forget_rules(&self) {
        self.inner.lock().rules = None;
    }

    /// The file was just created, with these rules when they are known.
    pub(crate) fn is_new(&self, rules: Option<PlacementRules>) {
        let mut inner = self.inner.lock();
        inner.rules = rules;
        inner.reopened = false;
    }

    pub(crate) fn set_rules(&self, rules: PlacementRules) {
        self.inner.lock().rules = Some(rules);
    }

    /// Data that was given up so far, and the last reason.
    pub(crate) fn losses(&self) -> (u64, Option<ClientError>) {
        let inner = self.inner.lock();
        (inner.losses, inner.loss.clone())
    }

    /// Takes in data at an offset.
    pub(crate) fn write(self: &Arc<Self>, credentials: &Credentials, offset: u64, data: Bytes) {
        self.update(|inner| {
            inner.note_write(credentials);
            inner.written.data.write(offset, data);
        });
    }

    /// Takes in data for the end.
    pub(crate) fn append(self: &Arc<Self>, credentials: &Credentials, data: Bytes) {
        self.update(|inner| {
            inner.note_write(credentials);
            inner.appended.data.append(data);
        });
    }

    /// What is in memory of a range, in order, and where everything in memory ends.
    pub(crate) fn overlay(&self, range: Range<u64>) -> (Vec<(u64, Bytes)>, u64) {
        let mut inner = self.inner.lock();
        (inner.written.data.overlay(range), inner.written.data.end())
    }

    /// What commits will change of the attributes.
    pub(crate) fn uncommitted(&self) -> Uncommitted {
        let inner = self.inner.lock();
        if inner.held_bytes() == 0 {
            return Uncommitted::default();
        }
        Uncommitted {
            written_end: inner.written.data.end(),
            appended_bytes: inner.appended.data.held_bytes(),
            appends_in_flight: inner.appended.data.is_committing(),
            mtime: inner.mtime,
        }
    }

    /// Sets the modification time of the next commit, if one is given; false when nothing waits for
    /// a commit.
    pub(crate) fn change_with_commit(&self, mtime: Option<Timestamp>) -> bool {
        let mut inner = self.inner.lock();
        let uncommitted = [&inner.written, &inner.appended]
            .iter()
            .any(|lane| lane.data.held_bytes() > 0 && !lane.data.is_committing());
        if uncommitted && mtime.is_some() {
            inner.mtime = mtime;
        }
        uncommitted
    }

    /// Starts flushing without waiting for it.
    pub(crate) fn start_flush(self: &Arc<Self>) {
        if !self.has_data() {
            return;
        }
        if self.rules().is_some() {
            self.update(Inner::want_all);
            return;
        }
        let file = self.clone();
        self.core.session.runtime.spawn(async move {
            if let Err(error) = file.flush(false).await {
                tracing::warn!(ino = %file.ino, %error, "cannot flush a file yet");
            }
        });
    }

    /// Waits until everything written so far is part of the file; with `durable`, and on stable
    /// storage.
    ///
    /// # Errors
    /// What kept it from being written. It stays in memory and is tried again.
    pub(crate) async fn flush(self: &Arc<Self>, durable: bool) -> Result<(), ClientError> {
        if self.has_data() {
            self.core.find_rules(self).await?;
            self.flush_memory(durable).await?;
        }
        if durable {
            self.make_durable().await?;
        }
        Ok(())
    }

    async fn flush_memory(self: &Arc<Self>, durable: bool) -> Result<(), ClientError> {
        let (written, appended, failures, losses) = self.update(|inner| {
            inner.dirty_since = None;
            inner.paused = false;
            let written = inner.written.want(durable);
            let appended = inner.appended.want(durable);
            (written, appended, inner.failures, inner.losses)
        });
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            progress.as_mut().enable();
            {
                let inner = self.inner.lock();
                if let Some(loss) = inner.loss.as_ref().filter(|_| inner.losses > losses) {
                    return Err(loss.clone());
                }
                if inner.written.data.is_flushed(written)
                    && inner.appended.data.is_flushed(appended)
                {
                    return Ok(());
                }
                if let Some(failure) = inner.failure.as_ref().filter(|_| inner.failures > failures)
                {
                    return Err(failure.clone());
                }
            }
            progress.await;
        }
    }

    async fn make_durable(&self) -> Result<(), ClientError> {
        let (mut unstable, relaxed, reopened) = {
            let inner = self.inner.lock();
            (inner.unstable.clone(), inner.relaxed, inner.reopened)
        };
        if reopened {
            unstable.extend(self.core.unsealed_blocks(self.ino).await?);
        }
        for stream in &unstable {
            let stable = stream.stable().await;
            let mut inner = self.inner.lock();
            inner.unstable.retain(|other| !Arc::ptr_eq(other, stream));
            if let Err(error) = stable {
                inner.losses += 1;
                inner.loss = Some(error.clone());
                return Err(error);
            }
        }
        self.inner.lock().reopened = false;
        self.core.session.make_durable(relaxed).await
    }

    /// A piece was acknowledged by all datanodes of a block.
    pub(crate) fn piece_written(
        self: &Arc<Self>,
        order: Order,
        id: PieceId,
        place: Place,
        stream: &Arc<BlockStream>,
        stable: bool,
    ) {
        self.update(|inner| {
            inner.lane(order).data.written(id, place);
            let known = inner
                .unstable
                .iter()
                .any(|other| Arc::ptr_eq(other, stream));
            if !stable && !known {
                inner.unstable.retain(|other| !other.is_sealed());
                inner.unstable.push(stream.clone());
            }
        });
    }

    /// Pieces could not be written anywhere: one failure, however many they are.
    pub(crate) fn pieces_failed(
        self: &Arc<Self>,
        pieces: &[(Order, PieceId)],
        error: &ClientError,
    ) {
        self.update(|inner| {
            for &(order, id) in pieces {
                inner.lane(order).data.failed(id);
            }
            inner.failed(error);
        });
        self.progress.notify_waiters();
    }

    /// Blocks with pieces that were not committed are gone.
    pub(crate) fn blocks_lost(self: &Arc<Self>, is_lost: impl Fn(BlockId) -> bool) {
        self.update(|inner| {
            for lane in [&mut inner.written, &mut inner.appended] {
                if lane.data.lost(&is_lost) {
                    lane.want(false);
                }
            }
        });
    }

    /// A commit is part of the file; `relaxed` is its number if it may not be durable.
    pub(crate) fn commit_done(self: &Arc<Self>, order: Order, relaxed: u64) {
        let mut committed = Vec::new();
        self.update(|inner| {
            committed = inner.lane(order).data.commit_done();
            inner.relaxed = inner.relaxed.max(relaxed);
            inner.rewrites = 0;
            if inner.held_bytes() == 0 {
                inner.mtime = None;
                inner.dirty_since = None;
            }
        });
        for (place, data) in committed {
            self.core.recent.keep(place, &data);
        }
        self.progress.notify_waiters();
    }

    /// A mutation of the file with this number may not be durable; `fsync` sees to it.
    pub(crate) fn note_relaxed(&self, relaxed: u64) {
        let mut inner = self.inner.lock();
        inner.relaxed = inner.relaxed.max(relaxed);
    }

    /// Its last name was removed here.
    pub(crate) fn lost_last_name(self: &Arc<Self>) {
        self.update(|inner| {
            inner.is_nameless = true;
            if inner.handles == 0
                && let Some(error) = inner.failure.clone()
            {
                // No reader can find it any more.
                inner.give_up(Order::File, error.clone());
                inner.give_up(Order::Append, error);
            }
        });
    }

    /// A commit was refused, or nothing is known of it.
    pub(crate) fn commit_failed(self: &Arc<Self>, order: Order, error: &ClientError) {
        self.update(|inner| {
            let lane = inner.lane(order);
            lane.data.commit_failed();
            match error {
                // The file is gone: no reader can see the data any more.
                error if error.is_gone() => {
                    inner.give_up(order, error.clone());
                }
                // It may have happened, and must not happen twice.
                ClientError::Unreachable { .. } | ClientError::Fs(FsError::SessionExpired)
                    if order == Order::Append =>
                {
                    let reason = format!("whether an append was executed is unknown: {error}");
                    inner.give_up(order, ClientError::DataLost { reason });
                }
                // Its blocks are not ours any more: write the data again.
                ClientError::Fs(FsError::SessionExpired | FsError::InvalidArgument(_))
                    if inner.rewrites < REWRITES_MAX =>
                {
                    inner.rewrites += 1;
                    let lane = inner.lane(order);
                    lane.data.lost(|_| true);
                    lane.want(false);
                }
                _ => inner.failed(error),
            }
        });
        self.progress.notify_waiters();
    }

    /// Changes the state and does what follows from it.
    fn update<R>(self: &Arc<Self>, change: impl FnOnce(&mut Inner) -> R) -> R {
        let mut holds_owed = 0;
        let (result, actions, before, after) = {
            let mut inner = self.inner.lock();
            let before = inner.held_bytes();
            let result = change(&mut inner);
            let actions = self.advance(&mut inner);
            let after = inner.held_bytes();
            if after == 0 {
                holds_owed = std::mem::take(&mut inner.holds_owed);
                if std::mem::take(&mut inner.closed_early) {
                    self.core.closed_early.fetch_sub(1, Ordering::Relaxed);
                }
            }
            (result, actions, before, after)
        };
        self.core.dirty.changed(before, after);
        for _ in 0..holds_owed {
            self.hold_closed();
        }
        for (writer, jobs) in actions.jobs {
            writer.submit(jobs);
        }
        for entry in actions.commits {
            self.core.committer.submit(&self.core, entry);
        }
        result
    }
}

impl Inner {
    fn note_write(&mut self, credentials: &Credentials) {
        if self.credentials != *credentials {
            self.credentials = credentials.clone();
        }
        self.dirty_since.get_or_insert_with(Instant::now);
        self.mtime = Some(Timestamp::now());
    }

    fn want_all(&mut self) {
        self.dirty_since = None;
        self.written.want(false);
        self.appended.want(false);
    }

    /// Nothing is tried again by itself before the next flush.
    fn failed(&mut self, error: &ClientError) {
        self.failures += 1;
        self.failure = Some(error.clone());
        self.paused = true;
        self.written.wanted = None;
        self.appended.wanted = None;
        self.dirty_since.get_or_insert_with(Instant::now);
        if self.handles == 0 {
            self.failures_unseen += 1;
            if self.is_nameless || self.failures_unseen >= FAILURES_UNSEEN_MAX {
                tracing::error!(%error, "data of a closed file is given up");
                self.give_up(Order::File, error.clone());
                self.give_up(Order::Append, error.clone());
            }
        }
    }
}
