//! What the kernel may have cached of one regular file: its size, and pages that may be stale. Pure; times are passed
//! in.
//!
//! Two rules keep reads correct (adr/0016):
//!
//! 1. *Pages are dropped before the kernel is sent a larger size.* The last page that the kernel read is padded with
//!    zeros, as is the page in which it made the file end; with a larger size, these zeros would become data.
//! 2. *A read that ends before the size that the kernel believes is answered only when the kernel repeats it.* The
//!    kernel fills the rest of the page with zeros, and reduces its size, but not if anything disturbed the file since
//!    the read was requested: attributes, a notification, a write. Then the zeros up to its old size would become
//!    data. The time of the request cannot be known, as requests take a while to arrive. So the read is refused, and
//!    everything sent to the kernel before is fenced. A page is locked while it is read: its next read was requested
//!    after the refusal, and if nothing has disturbed the file since then, that read may be answered.
//!
//! An answer of the mount to a waiting thread takes effect when that thread runs. Until the same thread is heard from
//! again, or one that has locked the inode since, the answer is *in flight*: a short read is not answered while a
//! larger size is in flight, and nothing disturbs the file while a short read is.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use harvestfs_protocol::planted::{self, Bug};
use parking_lot::Mutex;

pub use self::in_flight::{CachedWrite, Waiter};
use self::in_flight::{Effect, InFlight, page_start};

mod in_flight;
#[cfg(test)]
mod tests;

/// Maximum time that an answer is in flight: a thread that was woken has run by then.
pub const IN_FLIGHT_MAX: Duration = Duration::from_millis(250);

/// The same for an answer that causes pages to be dropped: the thread waits for pages that are being read.
pub const DROPPING_MAX: Duration = Duration::from_secs(1);

/// Maximum time from the decision to have pages dropped until that disturbs the file: the deciding thread makes the
/// call next.
const DROP_BEGINS_MAX: Duration = Duration::from_millis(20);

/// How long the kernel is left undisturbed after a refusal, so that it can repeat the read.
pub const QUIET_MAX: Duration = Duration::from_millis(50);

/// Number of refusals that are remembered. A repeated read whose refusal was forgotten is refused again.
const REFUSALS_MAX: usize = 64;

/// Number of writes bypassing pages that are remembered.
const APPENDS_MAX: usize = 64;

/// Maximum number of answers in flight to different threads that are tracked separately.
const IN_FLIGHT_ANSWERS_MAX: usize = 64;

/// No single thread: one that this process does not see, or several.
const NO_THREAD: u32 = 0;

/// The kernel's cached size and pages of one regular file; see the module.
#[derive(Debug)]
pub struct Pages {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Whether it was opened since the kernel knows it: before, the kernel has no pages of it.
    is_opened: bool,
    /// The largest size that the kernel may believe once no answer is in flight.
    size_bytes: u64,
    /// Number of answers with a larger size.
    growths: u64,
    /// The most recent of these that were due to writes bypassing pages: the number of each, and the offset from which
    /// pages are dropped.
    appends: VecDeque<(u64, u64)>,
    /// The lowest offset at which zeros made by the kernel may begin.
    zeros_from: u64,
    /// The same for pages that it may have read since it was asked to drop them.
    zeros_since_drop: u64,
    drop: Drop,
    /// Whether all pages are to be dropped, not only those with zeros.
    drop_all: bool,
    drop_began_at: Option<Instant>,
    /// Number of messages to the kernel that may disturb the file.
    disturbances: u64,
    /// Notifications in progress: they disturb the file by the time they end.
    notices: u32,
    /// Number of reads that are about to be refused, once the kernel has been notified.
    fencing: u32,
    refusals: VecDeque<Refusal>,
    /// The time of the last refusal of a read that was not repeated since.
    refused_at: Option<Instant>,
    in_flight: Vec<InFlight>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drop {
    /// No page is stale.
    Done,
    /// Pages may be stale, and the kernel has not been asked to drop them since.
    Wanted,
    /// The kernel is dropping them.
    Running,
    /// The kernel is dropping them, and some became stale since.
    RunningAndWanted,
}

/// A read that was refused when nothing was in flight that could disturb the file later.
#[derive(Debug)]
struct Refusal {
    range: Range<u64>,
    disturbances: u64,
    /// The largest size that the answers in flight at that time make the kernel believe.
    end_min: u64,
}

/// A read of pages.
#[derive(Clone, Debug)]
pub struct PageRead {
    /// The range in bytes.
    pub range: Range<u64>,
    thread: u32,
    /// The largest size that the kernel believed on arrival, and the number of answers with a larger size until then.
    believed_bytes: u64,
    growths: u64,
}

/// What to do with a read that ends before the size that the kernel believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortRead {
    /// Answer it: the kernel takes its end for the end of the file.
    Answer,
    /// Refuse it: the kernel would not take its end for the end of the file.
    Refuse,
    /// The same, but first notify the kernel that attributes are stale, and call [`Pages::refused`].
    FenceAndRefuse,
    /// Check again later: something is in flight to the kernel.
    Wait,
}

impl Pages {
    /// The state when the kernel is sent this size with an inode that it did not know.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State {
                is_opened: false,
                size_bytes,
                growths: 0,
                appends: VecDeque::new(),
                zeros_from: u64::MAX,
                zeros_since_drop: u64::MAX,
                drop: Drop::Done,
                drop_all: false,
                drop_began_at: None,
                disturbances: 0,
                notices: 0,
                fencing: 0,
                refusals: VecDeque::new(),
                refused_at: None,
                in_flight: Vec::new(),
            }),
        }
    }

    /// Records that the kernel is about to be answered that the file is open.
    pub fn opened(&self) {
        self.state.lock().is_opened = true;
    }

    /// The largest size that the kernel can be sent without dropping pages first.
    pub fn growth_max(&self) -> u64 {
        self.state.lock().zeros_from()
    }

    /// Records the arrival of a read of pages, on behalf of a thread.
    pub fn read(&self, range: Range<u64>, thread: u32) -> PageRead {
        let state = self.state.lock();
        PageRead {
            range,
            thread,
            believed_bytes: state.believed_bytes(),
            growths: state.growths,
        }
    }

    /// Records that pages may be stale, if there are any. Returns whether the caller has to have them dropped.
    #[must_use]
    pub fn want_drop(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_opened {
            return false;
        }
        state.drop_all = true;
        state.want_drop()
    }

    /// As [`Pages::want_drop`], for pages that end with zeros; the others are not stale.
    #[must_use]
    pub fn want_zeros_dropped(&self) -> bool {
        self.state.lock().want_drop()
    }

    /// Returns the offset from which the calling thread must now ask the kernel to drop pages; `None` if the file must
    /// not be disturbed now.
    #[must_use]
    pub fn begin_drop(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        if state.is_held(now) {
            return None;
        }
        assert_eq!(state.drop, Drop::Wanted, "{state:?}");
        state.drop = Drop::Running;
        state.drop_began_at = Some(now);
        let from = match std::mem::take(&mut state.drop_all) {
            true => 0,
            false => page_start(state.zeros_from()),
        };
        state.zeros_since_drop = u64::MAX;
        state.dropping();
        state.disturbances += 1;
        Some(from)
    }

    /// Records that the kernel has dropped the pages. Returns whether it has to be asked again.
    #[must_use]
    pub fn end_drop(&self) -> bool {
        let mut state = self.state.lock();
        state.zeros_from = state.zeros_since_drop;
        let again = state.drop == Drop::RunningAndWanted;
        state.drop = if again { Drop::Wanted } else { Drop::Done };
        again
    }

    /// Whether pages may be stale.
    #[must_use]
    pub fn are_old(&self) -> bool {
        self.state.lock().drop != Drop::Done
    }

    /// Whether the kernel may be sent attributes with this size: no page is stale or becomes so by them, and the file
    /// may be disturbed.
    #[must_use]
    pub fn may_tell(&self, size_bytes: u64, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_held = state.is_held(now);
        // The size would grow again later, with zeros from here on.
        let is_undone = state.largest_in_flight() > size_bytes;
        state.drop == Drop::Done && size_bytes <= state.zeros_from() && !is_held && !is_undone
    }

    /// Whether the kernel may be sent this size only after pages have been dropped, which is not yet in progress.
    #[must_use]
    pub fn needs_drop(&self, size_bytes: u64) -> bool {
        let state = self.state.lock();
        state.drop == Drop::Done && size_bytes > state.zeros_from()
    }

    /// Records that the kernel is answered with attributes with this size. It ignores them if it was notified since
    /// its request.
    pub fn tell(&self, size_bytes: u64) {
        let mut state = self.state.lock();
        state.take(size_bytes);
        state.disturbances += 1;
    }

    /// Records that a thread is answered with attributes with this size, which the kernel accepts in any case.
    pub fn impose(&self, size_bytes: u64, waiter: Waiter, now: Instant) {
        let mut state = self.state.lock();
        state.send(waiter, Effect::Size(size_bytes), now);
        state.take(size_bytes);
    }

    /// Records that a thread is answered with the size to which it changes the file; the kernel drops pages itself.
    pub fn resize(&self, size_bytes: u64, waiter: Waiter, now: Instant) {
        let mut state = self.state.lock();
        state.send(waiter, Effect::Size(size_bytes), now);
        state.shrink(size_bytes);
        state.make_zeros(size_bytes);
        // If the file grew, there is a hole before the new end.
        state.zeros_from = size_bytes;
    }

    /// Records that a thread is answered that it wrote up to `end`; returns `false` if the file must not be disturbed
    /// now, or pages have to be dropped first ([`Pages::needs_drop`]).
    #[must_use]
    pub fn write(&self, end: u64, cached: CachedWrite, thread: u32, now: Instant) -> bool {
        let mut state = self.state.lock();
        if state.short_read_is_in_flight(now) {
            return false;
        }
        let waiter = Waiter::locking(thread);
        state.arrived(waiter);
        let (zeros_from, dropped_from) = match cached {
            CachedWrite::Kept => (u64::MAX, u64::MAX),
            CachedWrite::Dropped { .. } if planted::is(Bug::TellsSizeOverZeros) => {
                (u64::MAX, u64::MAX)
            }
            CachedWrite::Dropped { from } if from > state.zeros_from() => return false,
            CachedWrite::Dropped { from } => (state.zeros_from(), from),
        };
        let effect = Effect::Write {
            end,
            zeros_from,
            dropped_from,
        };
        state.send(waiter, effect, now);
        if dropped_from < u64::MAX && end > state.size_bytes {
            state.growths += 1;
            if state.appends.len() == APPENDS_MAX {
                state.appends.pop_front();
            }
            let growth = (state.growths, dropped_from);
            state.appends.push_back(growth);
        }
        state.size_bytes = state.size_bytes.max(end);
        state.zeros_from = state.zeros_from.max(end);
        true
    }

    /// Records that a thread makes a request and waits for its answer, so that it no longer waits for an earlier one.
    pub fn heard_from(&self, thread: u32) {
        let mut state = self.state.lock();
        state.arrived_at(thread);
    }

    /// Records that the kernel is about to be notified that attributes are stale; returns `false` if the file must not
    /// be disturbed now.
    #[must_use]
    pub fn begin_notice(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let may = !state.is_held(now);
        state.notices += u32::from(may);
        may
    }

    /// As [`Pages::begin_notice`], after waiting for too long.
    pub fn force_notice(&self) {
        self.state.lock().notices += 1;
    }

    /// Records that the kernel has been notified.
    pub fn end_notice(&self) {
        let mut state = self.state.lock();
        assert!(state.notices > 0, "no notice is under way: {state:?}");
        state.notices -= 1;
        state.disturbances += 1;
    }

    /// What to do with a read that found the file's end at `end`, before the end of its range.
    #[must_use]
    pub fn short_read(&self, read: &PageRead, end: u64, now: Instant) -> ShortRead {
        let mut state = self.state.lock();
        state.expire(now);
        if planted::is(Bug::AnswersShortReads) {
            return ShortRead::Answer;
        }
        // Data written since the read arrived has a hole before it.
        let grew = state.grew_since(read.growths, end);
        if end >= state.believed_bytes() || (!grew && end >= read.believed_bytes) {
            state.make_zeros(end);
            return ShortRead::Answer;
        }
        if state.is_waited_for(&read.range) {
            return ShortRead::Refuse;
        }
        let is_disturbed = state.notices > 0 || state.fencing > 0;
        if is_disturbed || state.is_undone(end) {
            return ShortRead::Wait;
        }
        if state.was_refused(&read.range, end) {
            state.refused_at = None;
            state.send(
                Waiter::not_locking(read.thread),
                Effect::ShortRead(end),
                now,
            );
            state.shrink(end);
            state.make_zeros(end);
            return ShortRead::Answer;
        }
        if state.drop_begins(now) {
            // The kernel may wait for this read before it drops the page.
            return ShortRead::Refuse;
        }
        let is_wanted = matches!(state.drop, Drop::Wanted | Drop::RunningAndWanted);
        if is_wanted && !state.is_held(now) {
            return ShortRead::Wait;
        }
        if state.is_quiet(now) && state.is_fenced() {
            state.refuse(read, now);
            return ShortRead::Refuse;
        }
        state.fencing += 1;
        ShortRead::FenceAndRefuse
    }

    /// Records that the kernel was notified, so that attributes sent to it before can no longer disturb the file; this
    /// read, which found the file's end at `end`, is refused next.
    pub fn refused(&self, read: &PageRead, end: u64, now: Instant) {
        let mut state = self.state.lock();
        assert!(state.fencing > 0, "no read is being refused: {state:?}");
        state.fencing -= 1;
        state.disturbances += 1;
        if !state.is_undone(end) {
            state.refuse(read, now);
        }
    }
}

impl State {
    /// Records that the kernel may take this for the size.
    fn take(&mut self, size_bytes: u64) {
        if size_bytes > self.size_bytes {
            self.size_bytes = size_bytes;
            self.growths += 1;
        }
        // It may do so before the written pages are dropped.
        self.appends.clear();
        self.make_zeros(size_bytes);
    }

    /// Records that the kernel takes this for the size, before or after other answers in flight take effect.
    fn shrink(&mut self, size_bytes: u64) {
        self.size_bytes = self.largest_in_flight().max(size_bytes);
    }

    /// The largest size that an answer in flight makes the kernel take.
    fn largest_in_flight(&self) -> u64 {
        let sizes = self
            .in_flight
            .iter()
            .map(|answer| answer.effect.size_bytes());
        sizes.max().unwrap_or(0)
    }

    /// Records that the kernel may fill a page with zeros from here on.
    fn make_zeros(&mut self, from: u64) {
        self.zeros_from = self.zeros_from.min(from);
        self.zeros_since_drop = self.zeros_since_drop.min(from);
    }

    fn want_drop(&mut self) -> bool {
        let before = self.drop;
        self.drop = match before {
            Drop::Done | Drop::Wanted => Drop::Wanted,
            Drop::Running | Drop::RunningAndWanted => Drop::RunningAndWanted,
        };
        before == Drop::Done
    }

    /// The lowest offset at which zeros may begin, including zeros that a write in flight drops.
    fn zeros_from(&self) -> u64 {
        let in_flight = self.in_flight.iter();
        in_flight.fold(self.zeros_from, |from, answer| {
            from.min(answer.effect.zeros_from())
        })
    }

    /// Whether a write in flight takes effect only after pages of the range, which it drops, are unlocked.
    fn is_waited_for(&self, range: &Range<u64>) -> bool {
        let mut in_flight = self.in_flight.iter();
        in_flight.any(|answer| answer.effect.dropped_from() < range.end)
    }

    /// Records that zeros which writes in flight would drop are dropped before them.
    fn dropping(&mut self) {
        for answer in &mut self.in_flight {
            if let Effect::Write { zeros_from, .. } = &mut answer.effect {
                *zeros_from = u64::MAX;
            }
        }
    }

    /// Whether the kernel was answered with a larger size after `growths` such answers, not counting writes by which
    /// it drops the page in which the file ended at `end`.
    fn grew_since(&self, growths: u64, end: u64) -> bool {
        let appends = self.appends.iter().rev();
        let harmless = appends
            .take_while(|(growth, _)| *growth > growths)
            .filter(|(_, dropped_from)| *dropped_from <= end);
        harmless.count() as u64 != self.growths - growths
    }

    fn believed_bytes(&self) -> u64 {
        let in_flight = self.in_flight.iter().map(|answer| answer.before_bytes);
        in_flight.fold(self.size_bytes, u64::max)
    }

    /// Records that a thread has received all its earlier answers.
    fn arrived_at(&mut self, thread: u32) {
        if thread != NO_THREAD {
            self.in_flight
                .retain(|answer| answer.waiter.thread != thread);
        }
    }

    /// Records that a thread has received all its earlier answers; if it holds the lock of the inode, so has its
    /// previous holder.
    fn arrived(&mut self, waiter: Waiter) {
        self.arrived_at(waiter.thread);
        if waiter.locks_inode {
            self.in_flight.retain(|answer| !answer.waiter.locks_inode);
        }
    }

    /// Records that a thread is sent an answer.
    fn send(&mut self, waiter: Waiter, effect: Effect, now: Instant) {
        self.disturbances += 1;
        self.arrived(waiter);
        let answer = InFlight {
            waiter,
            since: now,
            before_bytes: self.believed_bytes(),
            effect,
        };
        if self.in_flight.len() < IN_FLIGHT_ANSWERS_MAX {
            self.in_flight.push(answer);
        } else {
            // Merge all into the worst case, which lasts as long as the newest answer.
            let all = self.in_flight.iter().map(|answer| answer.effect);
            let worst = all.fold(effect, |a, b| Effect::Write {
                end: a.size_bytes().max(b.size_bytes()),
                zeros_from: a.zeros_from().min(b.zeros_from()),
                dropped_from: a.dropped_from().min(b.dropped_from()),
            });
            self.in_flight[0] = InFlight {
                waiter: Waiter::not_locking(NO_THREAD),
                effect: worst,
                ..answer
            };
        }
    }

    /// Removes answers that can no longer be in flight.
    fn expire(&mut self, now: Instant) {
        self.in_flight.retain(|answer| {
            now.saturating_duration_since(answer.since) < answer.effect.in_flight_max()
        });
    }

    fn refuse(&mut self, read: &PageRead, now: Instant) {
        self.refused_at = Some(now);
        if self.refusals.len() == REFUSALS_MAX {
            self.refusals.pop_front();
        }
        self.refusals.push_back(Refusal {
            range: read.range.clone(),
            disturbances: self.disturbances,
            end_min: self.largest_in_flight(),
        });
    }

    /// Whether anything in flight would undo the kernel's reaction to a read that ends at `end`.
    fn is_undone(&self, end: u64) -> bool {
        let mut in_flight = self.in_flight.iter();
        in_flight.any(|answer| answer.effect.undoes(end))
    }

    /// Whether a page of the range was refused, and nothing has disturbed the file since that would make the end
    /// invalid.
    fn was_refused(&self, range: &Range<u64>, end: u64) -> bool {
        self.refusals.iter().any(|refusal| {
            refusal.disturbances == self.disturbances
                && refusal.end_min <= end
                && refusal.range.start < range.end
                && range.start < refusal.range.end
        })
    }

    /// Whether nothing has disturbed the file since a fence.
    fn is_fenced(&self) -> bool {
        self.refusals
            .back()
            .is_some_and(|last| last.disturbances == self.disturbances)
    }

    /// Whether a refused read is about to be repeated.
    fn is_quiet(&self, now: Instant) -> bool {
        self.refused_at
            .is_some_and(|at| now.saturating_duration_since(at) < QUIET_MAX)
    }

    fn short_read_is_in_flight(&mut self, now: Instant) -> bool {
        self.expire(now);
        let mut answers = self.in_flight.iter();
        answers.any(|answer| matches!(answer.effect, Effect::ShortRead(_)))
    }

    /// Whether the file must not be disturbed.
    fn is_held(&mut self, now: Instant) -> bool {
        self.fencing > 0 || self.is_quiet(now) || self.short_read_is_in_flight(now)
    }

    /// Whether pages are being dropped, and that may not have disturbed the file yet.
    fn drop_begins(&self, now: Instant) -> bool {
        let runs = matches!(self.drop, Drop::Running | Drop::RunningAndWanted);
        let is_new = |at| now.saturating_duration_since(at) < DROP_BEGINS_MAX;
        runs && self.drop_began_at.is_some_and(is_new)
    }
}
