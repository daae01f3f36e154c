//! One file with written data in memory: what is sent and committed next, what a flush waits for,
//! and how failures are handled.

mod advance;
mod attributes;
mod cut;
mod refused;
mod rules;
#[cfg(test)]
mod tests;
mod unanswered;

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::PACKET_BYTES_MAX;
use harvestfs_protocol::meta::FileCommit;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{Credentials, PlacementRules, Timestamp};

pub(crate) use self::attributes::Uncommitted;
pub(crate) use self::rules::Question;
use self::rules::Rules;
use super::writeback::{Epoch, Order, PieceId, Place, TakenPiece, Writeback};
use crate::engine::session::call::Unanswered;
use crate::error::ClientError;

/// How often a refused commit is retried with its data in other blocks.
const REWRITES_MAX: u32 = 3;

/// Failures of a file that no handle has open before its data is given up: no caller is left to
/// receive the error, and the memory is needed.
const FAILURES_UNSEEN_MAX: u32 = 5;

/// A file with written data in memory. After each event, [`DirtyFile::advance`] returns what is to be done.
pub(crate) struct DirtyFile {
    ino: InodeId,
    handles: usize,
    written: Lane,
    appended: Lane,
    rules: Rules,
    /// Whether it is written in bulk, into blocks of its own.
    bulk: bool,
    dirty_since: Option<Instant>,
    mtime: Option<Timestamp>,
    /// Number of failures so far, and the last one while anything is in memory. Data that failed
    /// stays there and is retried.
    failures: u64,
    failure: Option<ClientError>,
    /// Number of times data was given up so far, and the last reason.
    losses: u64,
    loss: Option<ClientError>,
    /// Why data was given up while no handle was open, if no `fsync` has reported it since.
    unseen_loss: Option<ClientError>,
    rewrites: u32,
    /// Whether its `close` returned before the commit.
    closed_early: bool,
    /// Number of closed handles that are released at the namenode once nothing is in memory.
    holds_owed: u32,
    /// Whether this session removed its last name.
    is_nameless: bool,
    /// Failures since the last handle was closed, or since the last successful commit.
    failures_unseen: u32,
    /// Whether something failed and no caller has begun a flush since: data is sent and committed
    /// only for flushes until one does.
    paused: bool,
    /// How often data was refused since any data of the file was last stored.
    refusals: u32,
    /// The last flush in which appends were refused.
    refused_through: Option<Epoch>,
    /// Whether the file is about to be truncated: no commit begins.
    holds_commits: bool,
    /// The first piece of the last commit of appends that was not answered in time.
    unanswered: Option<PieceId>,
}

/// The data of one of the two orders of writing.
struct Lane {
    data: Writeback,
    /// The flush that is requested.
    wanted: Option<Epoch>,
    durable: bool,
    /// The request that caused the last flush.
    request: RequestId,
    /// The last epoch with data of users other than root, and the last of these users.
    others: Option<(Epoch, Credentials)>,
}

/// A flush that waits for everything written before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flush {
    written: Epoch,
    appended: Epoch,
    /// The numbers of failures and losses when it began.
    failures: u64,
    losses: u64,
}

/// What is to be done after an event.
#[derive(Default)]
pub(crate) struct Actions {
    pub(crate) sends: Vec<Send>,
    pub(crate) commits: Vec<Commit>,
    /// Data that a flush waits for cannot be sent before placement rules are known: see [`DirtyFile::rules_found`].
    pub(crate) needs_rules: Option<Question>,
    /// Set when nothing is in memory any more: the number of closed handles to release,
    pub(crate) holds_owed: u32,
    /// and whether the file ceases to be one that was closed early.
    pub(crate) is_no_longer_early: bool,
}

/// Pieces to be sent, at least one.
pub(crate) struct Send {
    pub(crate) order: Order,
    /// Whether they go into blocks of the file's own, instead of blocks that all files share.
    pub(crate) bulk: bool,
    pub(crate) rules: PlacementRules,
    pub(crate) pieces: Vec<TakenPiece>,
    /// Whether the last piece must be on stable storage when it is acknowledged.
    pub(crate) sync: bool,
    /// The request that waits for it.
    pub(crate) request: RequestId,
}

/// Extents to become part of the file.
pub(crate) struct Commit {
    pub(crate) order: Order,
    /// Its first piece, which is in no other commit in flight.
    pub(crate) first: PieceId,
    pub(crate) commit: FileCommit,
    pub(crate) credentials: Credentials,
    pub(crate) durable: bool,
    /// The request that waits for it.
    pub(crate) request: RequestId,
}

/// Whether a `close` may return before the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Early {
    No,
    /// It may; a flush must follow soon.
    First,
    /// An earlier one did, and its flush is still to come.
    Again,
}

impl Lane {
    fn new(order: Order) -> Self {
        Self {
            data: Writeback::new(order),
            wanted: None,
            durable: false,
            request: RequestId::NONE,
            others: None,
        }
    }

    /// Requests that everything in memory is flushed.
    fn want(&mut self, durable: bool, request: RequestId) -> Epoch {
        let flush = self.data.begin_flush();
        self.wanted = Some(flush);
        self.durable |= durable;
        self.request = request;
        flush
    }
}

impl DirtyFile {
    pub(crate) fn new(ino: InodeId) -> Self {
        Self {
            ino,
            handles: 0,
            written: Lane::new(Order::File),
            appended: Lane::new(Order::Append),
            rules: Rules::default(),
            bulk: false,
            dirty_since: None,
            mtime: None,
            failures: 0,
            failure: None,
            losses: 0,
            loss: None,
            unseen_loss: None,
            rewrites: 0,
            closed_early: false,
            holds_owed: 0,
            is_nameless: false,
            failures_unseen: 0,
            paused: false,
            refusals: 0,
            refused_through: None,
            holds_commits: false,
            unanswered: None,
        }
    }

    pub(crate) fn is_dirty_for(&self, age: Duration, now: Instant) -> bool {
        let since = self.dirty_since;
        since.is_some_and(|since| now.saturating_duration_since(since) >= age)
    }

    /// Returns the number of bytes in memory.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.written.data.held_bytes() + self.appended.data.held_bytes()
    }

    pub(crate) fn has_appends(&self) -> bool {
        !self.appended.data.is_empty()
    }

    /// Whether data of this order may come in. Data of the other order has to be stored first: each order is
    /// committed separately, so the later data could become part of the file before the earlier.
    pub(crate) fn takes(&self, order: Order) -> bool {
        let other = match order {
            Order::File => &self.appended,
            Order::Append => &self.written,
        };
        other.data.is_empty() && !self.takes_no_more()
    }

    /// Returns how often data was given up so far, and the last reason.
    pub(crate) fn losses(&self) -> (u64, Option<ClientError>) {
        (self.losses, self.loss.clone())
    }

    /// Takes the reason why data was given up while no handle was open, to be reported once.
    pub(crate) fn take_unseen_loss(&mut self) -> Option<ClientError> {
        self.unseen_loss.take()
    }

    /// Notes that an earlier state of this file had given up data that way.
    pub(crate) fn had_unseen_loss(&mut self, reason: ClientError) {
        self.unseen_loss = Some(reason);
    }

    pub(crate) fn handle_opened(&mut self) {
        self.handles += 1;
        self.failures_unseen = 0;
    }

    /// Notes that a handle was closed; returns whether it was the last.
    pub(crate) fn handle_closed(&mut self) -> bool {
        assert!(self.handles > 0, "{} is closed, and not open", self.ino);
        self.handles -= 1;
        self.handles == 0
    }

    /// Whether the state is no longer needed.
    pub(crate) fn is_unused(&self) -> bool {
        self.handles == 0 && self.held_bytes() == 0
    }

    /// Whether a closed handle is to be released at the namenode immediately; otherwise that
    /// follows once no data in memory is left that is to go into the file.
    pub(crate) fn may_release_hold(&mut self) -> bool {
        let may = self.held_bytes() == 0;
        self.holds_owed += u32::from(!may);
        may
    }

    /// Takes in data at an offset.
    pub(crate) fn write(&mut self, offset: u64, data: Bytes, by: &Credentials, when: Moment) {
        self.written.data.write(offset, data);
        self.note_write(Order::File, by, when);
    }

    /// Takes in data to be appended.
    pub(crate) fn append(&mut self, data: Bytes, by: &Credentials, when: Moment) {
        self.appended.data.append(data);
        self.note_write(Order::Append, by, when);
    }

    /// Returns the data in memory of a range, in order, and the end of everything in memory.
    pub(crate) fn overlay(&mut self, range: Range<u64>) -> (Vec<(u64, Bytes)>, u64) {
        (self.written.data.overlay(range), self.written.data.end())
    }

    /// Requests a flush of everything in memory that no caller waits for. Data that failed before is
    /// sent with it, but the file stays paused: what fails then is not retried by itself.
    pub(crate) fn want_all(&mut self, request: RequestId) {
        self.dirty_since = None;
        self.written.want(false, request);
        self.appended.want(false, request);
    }

    /// Begins a flush of everything in memory, and retries what failed.
    pub(crate) fn begin_flush(&mut self, durable: bool, request: RequestId) -> Flush {
        self.dirty_since = None;
        self.paused = false;
        Flush {
            written: self.written.want(durable, request),
            appended: self.appended.want(durable, request),
            failures: self.failures,
            losses: self.losses,
        }
    }

    /// Returns the result of a flush; `None` while it continues.
    pub(crate) fn flushed(&self, flush: &Flush) -> Option<Result<(), ClientError>> {
        assert!(
            flush.losses <= self.losses && flush.failures <= self.failures,
            "{}: {} losses and {} failures, less than before {flush:?}",
            self.ino,
            self.losses,
            self.failures
        );
        let since =
            |count, before, error: &Option<ClientError>| error.clone().filter(|_| count > before);
        if let Some(loss) = since(self.losses, flush.losses, &self.loss) {
            return Some(Err(loss));
        }
        if self.written.data.is_flushed(flush.written)
            && self.appended.data.is_flushed(flush.appended)
        {
            return Some(Ok(()));
        }
        since(self.failures, flush.failures, &self.failure).map(Err)
    }

    /// Decides whether a `close` may return before the commit: one commit must be enough to make
    /// everything visible, and there must be no reason to expect it to fail.
    pub(crate) fn close_early(&mut self) -> Early {
        let one_packet = PACKET_BYTES_MAX as u64;
        if self.failure.is_some()
            || !self.appended.data.is_empty()
            || !self.written.data.is_one_dirty_segment(one_packet)
        {
            return Early::No;
        }
        if std::mem::replace(&mut self.closed_early, true) {
            return Early::Again;
        }
        Early::First
    }

    /// Whether it was closed with data in memory that is not committed yet.
    pub(crate) fn is_closed_early(&self) -> bool {
        self.closed_early
    }

    /// Ends the use of blocks of the file's own, as no more bulk data will come. Returns whether there were any.
    pub(crate) fn end_bulk(&mut self) -> bool {
        std::mem::take(&mut self.bulk)
    }

    /// Notes that all datanodes of a block acknowledged a piece.
    pub(crate) fn piece_written(&mut self, order: Order, id: PieceId, place: Place) {
        self.lane(order).data.written(id, place);
    }

    /// Notes that pieces could not be written anywhere, which counts as one failure. Pieces that the
    /// file does not need any more, because they were cut off, given up or sent again, do not count.
    pub(crate) fn pieces_failed(
        &mut self,
        pieces: &[(Order, PieceId)],
        error: &ClientError,
        now: Instant,
    ) {
        let mut any = false;
        for &(order, id) in pieces {
            any |= self.lane(order).data.failed(id);
        }
        if any {
            self.failed(error, now);
        }
    }

    /// Notes that blocks with uncommitted pieces are lost: their data is written elsewhere.
    pub(crate) fn blocks_lost(&mut self, is_lost: impl Fn(BlockId) -> bool, request: RequestId) {
        for lane in [&mut self.written, &mut self.appended] {
            if lane.data.lost(&is_lost) {
                lane.want(false, request);
            }
        }
    }

    /// Notes that a commit is part of the file. Returns the data that left the memory, with its place.
    pub(crate) fn commit_done(&mut self, order: Order) -> Vec<(Place, Bytes)> {
        let committed = self.lane(order).data.commit_done();
        self.rewrites = 0;
        self.refusals = 0;
        self.failures_unseen = 0;
        if self.held_bytes() == 0 {
            self.emptied();
        }
        committed
    }

    /// Notes that a commit was refused, or that its outcome is unknown.
    pub(crate) fn commit_failed(
        &mut self,
        order: Order,
        given_up: &Unanswered,
        request: RequestId,
        now: Instant,
    ) {
        let error = &given_up.error;
        if error.is_gone() {
            // No reader can see the data any more.
            self.give_up(order, error.clone());
            return;
        }
        let lane = self.lane(order);
        if given_up.maybe_executed && order == Order::Append {
            // It may have been executed, and must not be executed twice. Later appends are retried.
            let bytes = lane.data.commit_given_up();
            let is_all = lane.data.is_empty();
            let reason = format!("whether an append was executed is unknown: {error}");
            self.gave_up(bytes, ClientError::DataLost { reason });
            if is_all {
                return;
            }
        } else {
            lane.data.commit_failed();
        }
        match error {
            // The session no longer owns the blocks: write the data again.
            ClientError::Fs(FsError::SessionExpired | FsError::InvalidArgument(_))
                if self.rewrites < REWRITES_MAX =>
            {
                self.rewrites += 1;
                let lane = self.lane(order);
                lane.data.lost(|_| true);
                lane.want(false, request);
            }
            _ => self.failed(error, now),
        }
    }

    /// Notes that this session removed the file's last name.
    pub(crate) fn lost_last_name(&mut self) {
        self.is_nameless = true;
        if self.handles == 0
            && let Some(error) = self.failure.clone()
        {
            // No reader can find it any more.
            self.give_up_all(&error);
        }
    }

    /// Notes that acknowledged data was lost before it was stable.
    pub(crate) fn lost(&mut self, reason: ClientError) {
        self.losses += 1;
        self.loss = Some(reason);
    }

    /// Notes a failure. Nothing is retried before the next flush.
    fn failed(&mut self, error: &ClientError, now: Instant) {
        self.failures += 1;
        self.failure = Some(error.clone());
        self.refusals = match error.refuses_data() {
            // Data that was sent together may fail in several steps.
            true if self.paused && !self.is_wanted() => self.refusals.max(1),
            true => self.refusals.saturating_add(1),
            false => 0,
        };
        if error.refuses_data() {
            self.refused_through = self.refused_through.max(self.appended.wanted);
        }
        self.paused = true;
        self.written.wanted = None;
        self.appended.wanted = None;
        self.dirty_since.get_or_insert(now);
        // A namenode in recovery refuses immediately, until an operator has decided.
        let counts = !matches!(error, ClientError::Fs(FsError::Recovery(_)));
        self.failures_unseen += u32::from(self.handles == 0 && counts);
        // Data of a commit in flight may still become part of the file: it is given up only when
        // the commit asks whether it is still wanted.
        if self.is_nameless || !self.appended.data.is_committing() {
            self.give_up_unseen(error);
        }
    }

    /// Gives up the data of a closed file if it has failed too often or no reader can find it.
    fn give_up_unseen(&mut self, error: &ClientError) {
        let is_hopeless = self.is_nameless || self.failures_unseen >= FAILURES_UNSEEN_MAX;
        if self.handles == 0 && is_hopeless {
            tracing::error!(%error, "data of a closed file is given up");
            self.give_up_all(error);
        }
    }

    /// Whether a flush is requested.
    fn is_wanted(&self) -> bool {
        self.written.wanted.is_some() || self.appended.wanted.is_some()
    }

    fn give_up_all(&mut self, reason: &ClientError) {
        self.give_up(Order::File, reason.clone());
        self.give_up(Order::Append, reason.clone());
    }

    fn give_up(&mut self, order: Order, reason: ClientError) {
        let bytes = self.lane(order).data.discard();
        self.gave_up(bytes, reason);
    }

    /// Notes that bytes were removed from memory without becoming part of the file.
    fn gave_up(&mut self, bytes: u64, reason: ClientError) {
        if bytes > 0 && self.handles == 0 && !self.is_nameless && !reason.is_gone() {
            self.unseen_loss = Some(reason.clone());
        }
        self.lost(reason);
        if self.held_bytes() == 0 {
            self.emptied();
        }
    }

    /// Resets the state when nothing is in memory any more, and therefore nothing that has failed.
    fn emptied(&mut self) {
        self.mtime = None;
        self.dirty_since = None;
        self.failure = None;
        self.paused = false;
        self.refusals = 0;
        // Data that root writes next may belong to the same flush.
        self.written.others = None;
        self.appended.others = None;
    }

    fn lane(&mut self, order: Order) -> &mut Lane {
        match order {
            Order::File => &mut self.written,
            Order::Append => &mut self.appended,
        }
    }
}

/// When data was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) now: Instant,
    /// The modification time that it gives the file.
    pub(crate) wall_clock: Timestamp,
}
