//! One file with written data in memory: what is sent and committed next, what a flush waits for, and
//! what becomes of failures.

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

/// Times that a refused commit is tried with its data in other blocks.
const REWRITES_MAX: u32 = 3;

/// Flushes of a file that no handle has open, before its data is given up: no caller is left to get
/// the error, and memory is needed.
const FAILURES_UNSEEN_MAX: u32 = 5;

/// See the module. After each event, [`DirtyFile::advance`] says what is to be done.
pub(crate) struct DirtyFile {
    ino: InodeId,
    handles: usize,
    written: Lane,
    appended: Lane,
    rules: Rules,
    /// It is written in bulk, into blocks of its own.
    bulk: bool,
    dirty_since: Option<Instant>,
    mtime: Option<Timestamp>,
    /// Failures so far, and the last one while anything is in memory. What failed stays there and is tried again.
    failures: u64,
    failure: Option<ClientError>,
    /// Data that was given up so far, and why.
    losses: u64,
    loss: Option<ClientError>,
    /// Why data was given up while no handle was open, if no `fsync` has said so since.
    unseen_loss: Option<ClientError>,
    rewrites: u32,
    /// Its `close` returned before the commit.
    closed_early: bool,
    /// Closed handles that the namenode hears of once nothing is in memory.
    holds_owed: u32,
    /// Its last name was removed here.
    is_nameless: bool,
    /// Failures since the last handle was closed, or a commit was done.
    failures_unseen: u32,
    /// Something failed, and no flush was wanted since: data stays in memory until one is.
    paused: bool,
    /// How often data was refused since something of the file was stored.
    refusals: u32,
    /// Up to which flush appends were refused.
    refused_through: Option<Epoch>,
    /// The file is about to be cut: no commit begins.
    holds_commits: bool,
    /// The last commit of appends that was not answered in time, by its first piece.
    unanswered: Option<PieceId>,
}

/// One of the two ways of writing.
struct Lane {
    data: Writeback,
    /// The flush that is wanted.
    wanted: Option<Epoch>,
    durable: bool,
    /// What wanted the last one.
    request: RequestId,
    /// Up to which flush others than root have written, and who did last.
    others: Option<(Epoch, Credentials)>,
}

/// A flush that waits for everything written before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flush {
    written: Epoch,
    appended: Epoch,
    /// What had failed and was lost before.
    failures: u64,
    losses: u64,
}

/// What is to be done after an event.
#[derive(Default)]
pub(crate) struct Actions {
    pub(crate) sends: Vec<Send>,
    pub(crate) commits: Vec<Commit>,
    /// What is wanted waits until it is known how its blocks are to be placed: [`DirtyFile::rules_found`].
    pub(crate) needs_rules: Option<Question>,
    /// Nothing is in memory any more: so many closed handles are to be released,
    pub(crate) holds_owed: u32,
    /// and the file is not one any more that was closed early.
    pub(crate) is_no_longer_early: bool,
}

/// Pieces to be sent, at least one.
pub(crate) struct Send {
    pub(crate) order: Order,
    /// Into blocks of the file's own, or of those that all files share.
    pub(crate) bulk: bool,
    pub(crate) rules: PlacementRules,
    pub(crate) pieces: Vec<TakenPiece>,
    /// The last one is to be on stable storage when it is acknowledged.
    pub(crate) sync: bool,
    /// The request that waits for it.
    pub(crate) request: RequestId,
}

/// Extents to become part of the file.
pub(crate) struct Commit {
    pub(crate) order: Order,
    /// Its first piece, which is in no other commit that is in flight.
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
    /// It may; a flush is to follow soon.
    First,
    /// Another one did so before, and the flush is to come.
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

    /// Wants everything in memory flushed.
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

    /// Bytes in memory.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.written.data.held_bytes() + self.appended.data.held_bytes()
    }

    pub(crate) fn has_appends(&self) -> bool {
        !self.appended.data.is_empty()
    }

    /// Whether data may come in that is committed in this order. What came in for the other has to be stored
    /// first: each order is committed by itself, and the later data could become part of the file before the earlier.
    pub(crate) fn takes(&self, order: Order) -> bool {
        let other = match order {
            Order::File => &self.appended,
            Order::Append => &self.written,
        };
        other.data.is_empty() && !self.takes_no_more()
    }

    /// Data that was given up so far, and the last reason.
    pub(crate) fn losses(&self) -> (u64, Option<ClientError>) {
        (self.losses, self.loss.clone())
    }

    /// Why data was given up while no handle was open; to be said once.
    pub(crate) fn take_unseen_loss(&mut self) -> Option<ClientError> {
        self.unseen_loss.take()
    }

    /// So it was given up before this state of the file was.
    pub(crate) fn had_unseen_loss(&mut self, reason: ClientError) {
        self.unseen_loss = Some(reason);
    }

    pub(crate) fn handle_opened(&mut self) {
        self.handles += 1;
        self.failures_unseen = 0;
    }

    /// A handle is gone; whether it was the last.
    pub(crate) fn handle_closed(&mut self) -> bool {
        assert!(self.handles > 0, "{} is closed, and not open", self.ino);
        self.handles -= 1;
        self.handles == 0
    }

    /// Nothing needs it.
    pub(crate) fn is_unused(&self) -> bool {
        self.handles == 0 && self.held_bytes() == 0
    }

    /// Whether the namenode is to hear at once of a handle that is gone; else it does once nothing is
    /// in memory that is to go into the file.
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

    /// Takes in data for the end.
    pub(crate) fn append(&mut self, data: Bytes, by: &Credentials, when: Moment) {
        self.appended.data.append(data);
        self.note_write(Order::Append, by, when);
    }

    /// What is in memory of a range, in order, and where everything in memory ends.
    pub(crate) fn overlay(&mut self, range: Range<u64>) -> (Vec<(u64, Bytes)>, u64) {
        (self.written.data.overlay(range), self.written.data.end())
    }

    /// Wants everything in memory flushed; no caller waits for it. What failed before stays as it is.
    pub(crate) fn want_all(&mut self, request: RequestId) {
        self.dirty_since = None;
        self.written.want(false, request);
        self.appended.want(false, request);
    }

    /// Wants everything in memory flushed, and tries again what failed.
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

    /// How a flush ended; none: it goes on.
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

    /// A `close` that is to return before the commit, if nothing speaks against it here: one commit
    /// will make everything visible, and there is no reason to fear that it fails.
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

    /// Whether it was closed with something in memory that is not committed yet.
    pub(crate) fn is_closed_early(&self) -> bool {
        self.closed_early
    }

    /// The blocks of the file's own end: no data in bulk will come. Whether there are any.
    pub(crate) fn end_bulk(&mut self) -> bool {
        std::mem::take(&mut self.bulk)
    }

    /// A piece was acknowledged by all datanodes of a block.
    pub(crate) fn piece_written(&mut self, order: Order, id: PieceId, place: Place) {
        self.lane(order).data.written(id, place);
    }

    /// Pieces could not be written anywhere: one failure, however many they are. None, if the file needs none of them
    /// any more: they were cut off, given up, or sent again.
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

    /// Blocks with pieces that were not committed are gone: their data goes elsewhere.
    pub(crate) fn blocks_lost(&mut self, is_lost: impl Fn(BlockId) -> bool, request: RequestId) {
        for lane in [&mut self.written, &mut self.appended] {
            if lane.data.lost(&is_lost) {
                lane.want(false, request);
            }
        }
    }

    /// A commit is part of the file. Returns what left the memory, and where it is.
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

    /// A commit was refused, or nothing is known of it.
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
            // It may have happened, and must not happen twice. What was appended after it is tried again.
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
            // Its blocks are not ours any more: write the data again.
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

    /// Its last name was removed here.
    pub(crate) fn lost_last_name(&mut self) {
        self.is_nameless = true;
        if self.handles == 0
            && let Some(error) = self.failure.clone()
        {
            // No reader can find it any more.
            self.give_up_all(&error);
        }
    }

    /// What was acknowledged and not made stable is lost.
    pub(crate) fn lost(&mut self, reason: ClientError) {
        self.losses += 1;
        self.loss = Some(reason);
    }

    /// Nothing is tried again by itself before the next flush.
    fn failed(&mut self, error: &ClientError, now: Instant) {
        self.failures += 1;
        self.failure = Some(error.clone());
        self.refusals = match error.refuses_data() {
            // What was sent together may fail one after the other.
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
        // A namenode in recovery says so at once, until an operator has decided.
        let counts = !matches!(error, ClientError::Fs(FsError::Recovery(_)));
        self.failures_unseen += u32::from(self.handles == 0 && counts);
        // What a commit has that is on its way may be in the file yet: it is given up only when that is asked whether it is
        // still wanted.
        if self.is_nameless || !self.appended.data.is_committing() {
            self.give_up_unseen(error);
        }
    }

    /// Gives up the data of a closed file, if it has failed too often or nobody can find it.
    fn give_up_unseen(&mut self, error: &ClientError) {
        let is_hopeless = self.is_nameless || self.failures_unseen >= FAILURES_UNSEEN_MAX;
        if self.handles == 0 && is_hopeless {
            tracing::error!(%error, "data of a closed file is given up");
            self.give_up_all(error);
        }
    }

    /// Whether a flush is wanted.
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

    /// So many bytes are in memory no more, and not in the file either.
    fn gave_up(&mut self, bytes: u64, reason: ClientError) {
        if bytes > 0 && self.handles == 0 && !self.is_nameless && !reason.is_gone() {
            self.unseen_loss = Some(reason.clone());
        }
        self.lost(reason);
        if self.held_bytes() == 0 {
            self.emptied();
        }
    }

    /// Nothing is in memory any more, and so nothing that has failed.
    fn emptied(&mut self) {
        self.mtime = None;
        self.dirty_since = None;
        self.failure = None;
        self.paused = false;
        self.refusals = 0;
        // What root writes next may belong to the same flush.
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

/// When something was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) now: Instant,
    /// The modification time that it gives the file.
    pub(crate) wall_clock: Timestamp,
}
