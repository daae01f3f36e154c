//! What the kernel may hold of one regular file: its size, and pages that may be old. Pure; times are
//! passed in.
//!
//! Two rules keep reads right (adr/0016):
//!
//! 1. *Pages are dropped before the kernel gets a larger size.* The last page that the kernel read ends with
//!    zeros, as does the one in which it made the file end; with a larger size they would be data.
//! 2. *A read that ends before the size that the kernel believes is answered only when it is asked again.*
//!    The kernel fills the rest of the page with zeros, and makes its size smaller, but not if anything
//!    disturbed the file since it asked: attributes, a notification, a write. Then the zeros up to its
//!    old size would be data. When it asked cannot be known, for requests take their time. So the read is
//!    refused, and what the kernel had been sent before is fenced. A page is locked while it is read: the
//!    next read of it was asked after the refusal, and if nothing disturbed the file since then, it may be
//!    answered.
//!
//! What the mount answers to a waiting thread has its effect when that thread runs. Until the same thread
//! is heard from again, or one that has locked the inode since, the answer is *in flight*: a short read is
//! not answered while a larger size is, and nothing disturbs the file while a short read is.

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

/// How long an answer is in flight at most: a thread that was woken has run by then.
pub const IN_FLIGHT_MAX: Duration = Duration::from_millis(250);

/// The same of an answer by which pages are dropped: the thread waits for those that are being read.
pub const DROPPING_MAX: Duration = Duration::from_secs(1);

/// How long it takes at most from deciding to have pages dropped until the file is disturbed by it: the
/// thread that decides makes the call next.
const DROP_BEGINS_MAX: Duration = Duration::from_millis(20);

/// How long the kernel is left undisturbed after a refusal, for it to ask again.
pub const QUIET_MAX: Duration = Duration::from_millis(50);

/// Refusals that are remembered. A read that was refused and forgotten is refused again.
const REFUSALS_MAX: usize = 64;

/// Writes past pages that are remembered.
const APPENDS_MAX: usize = 64;

/// Answers in flight to different threads that are told apart.
const IN_FLIGHT_ANSWERS_MAX: usize = 64;

/// No thread: one that this process does not see, or several.
const NO_THREAD: u32 = 0;

/// See the module.
#[derive(Debug)]
pub struct Pages {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// It was opened since the kernel knows it: before, the kernel has no pages of it.
    is_opened: bool,
    /// The most that the kernel takes for the size once no answer is in flight.
    size_bytes: u64,
    /// How often it was answered with a larger size.
    growths: u64,
    /// Those by what was written past pages, the last ones: which they are, and from where on pages are dropped.
    appends: VecDeque<(u64, u64)>,
    /// Where zeros begin at the earliest that the kernel made.
    zeros_from: u64,
    /// The same, of pages that it may have read since it was asked to drop them.
    zeros_since_drop: u64,
    drop: Drop,
    /// What is wanted is that all pages are dropped, not only those with zeros.
    drop_all: bool,
    drop_began_at: Option<Instant>,
    /// How often the kernel was sent what may disturb the file.
    disturbances: u64,
    /// Notifications that are under way: they disturb when they end at the latest.
    notices: u32,
    /// Reads that are about to be refused, once the kernel has been notified.
    fencing: u32,
    refusals: VecDeque<Refusal>,
    /// When the last read was refused that was not asked again since.
    refused_at: Option<Instant>,
    in_flight: Vec<InFlight>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drop {
    /// No page is old.
    Done,
    /// Pages may be old, and the kernel has not been asked to drop them since they are.
    Wanted,
    /// The kernel is dropping them.
    Running,
    /// So it is, and some became old since.
    RunningAndWanted,
}

/// A read that was refused when nothing was in flight that could disturb the file later.
#[derive(Debug)]
struct Refusal {
    range: Range<u64>,
    disturbances: u64,
    /// What was in flight makes the file at most so large.
    end_min: u64,
}

/// A read of pages.
#[derive(Clone, Debug)]
pub struct PageRead {
    /// From where to where, in bytes.
    pub range: Range<u64>,
    thread: u32,
    /// The most that the kernel believed when it arrived, and how often it was answered with a larger size.
    believed_bytes: u64,
    growths: u64,
}

/// What to do with a read that ends before the size that the kernel believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortRead {
    /// The kernel takes it for the end.
    Answer,
    /// It would not: refuse it.
    Refuse,
    /// It would not: notify the kernel that attributes are old, call [`Pages::refused`], and refuse it.
    FenceAndRefuse,
    /// Something is in flight to the kernel: look again.
    Wait,
}

impl Pages {
    /// The kernel gets a size with the inode, which it did not know.
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

    /// The kernel is answered next that the file is open.
    pub fn opened(&self) {
        self.state.lock().is_opened = true;
    }

    /// The largest size that the kernel can be given without pages being dropped first.
    pub fn growth_max(&self) -> u64 {
        self.state.lock().zeros_from()
    }

    /// A read of pages arrived, on behalf of a thread.
    pub fn read(&self, range: Range<u64>, thread: u32) -> PageRead {
        let state = self.state.lock();
        PageRead {
            range,
            thread,
            believed_bytes: state.believed_bytes(),
            growths: state.growths,
        }
    }

    /// Pages may be old, if there are any. Whether the caller has to see to it that they are dropped.
    #[must_use]
    pub fn want_drop(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_opened {
            return false;
        }
        state.drop_all = true;
        state.want_drop()
    }

    /// As [`Pages::want_drop`], of pages that end with zeros; the others are not old.
    #[must_use]
    pub fn want_zeros_dropped(&self) -> bool {
        self.state.lock().want_drop()
    }

    /// From where on the calling thread asks the kernel next to drop pages; none: the file must not be disturbed
    /// now.
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

    /// The kernel has dropped what it was asked to. Whether it has to be asked again.
    #[must_use]
    pub fn end_drop(&self) -> bool {
        let mut state = self.state.lock();
        state.zeros_from = state.zeros_since_drop;
        let again = state.drop == Drop::RunningAndWanted;
        state.drop = if again { Drop::Wanted } else { Drop::Done };
        again
    }

    /// Whether pages may be old.
    #[must_use]
    pub fn are_old(&self) -> bool {
        self.state.lock().drop != Drop::Done
    }

    /// Whether the kernel may get attributes with this size: no page is old, and none becomes so by it, and
    /// the file may be disturbed.
    #[must_use]
    pub fn may_tell(&self, size_bytes: u64, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_held = state.is_held(now);
        // It would be larger again later, with zeros from here on.
        let is_undone = state.largest_in_flight() > size_bytes;
        state.drop == Drop::Done && size_bytes <= state.zeros_from() && !is_held && !is_undone
    }

    /// Whether the kernel may get this size when pages have been dropped, which they are not about to be.
    #[must_use]
    pub fn needs_drop(&self, size_bytes: u64) -> bool {
        let state = self.state.lock();
        state.drop == Drop::Done && size_bytes > state.zeros_from()
    }

    /// The kernel is answered with attributes with this size. It ignores them if it was notified since
    /// it asked.
    pub fn tell(&self, size_bytes: u64) {
        let mut state = self.state.lock();
        state.take(size_bytes);
        state.disturbances += 1;
    }

    /// A thread is answered with attributes with this size. The kernel takes them in any case.
    pub fn impose(&self, size_bytes: u64, waiter: Waiter, now: Instant) {
        let mut state = self.state.lock();
        state.send(waiter, Effect::Size(size_bytes), now);
        state.take(size_bytes);
    }

    /// A thread is answered with this size, to which it changes the file; the kernel drops pages itself.
    pub fn resize(&self, size_bytes: u64, waiter: Waiter, now: Instant) {
        let mut state = self.state.lock();
        state.send(waiter, Effect::Size(size_bytes), now);
        state.shrink(size_bytes);
        state.make_zeros(size_bytes);
        // If it grew, there is a hole before.
        state.zeros_from = size_bytes;
    }

    /// A thread is answered that it wrote up to `end`, unless the file must not be disturbed now, or pages
    /// have to be dropped first ([`Pages::needs_drop`]).
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

    /// A thread asks for something that it waits for, so that it waits for no earlier answer.
    pub fn heard_from(&self, thread: u32) {
        let mut state = self.state.lock();
        state.arrived_at(thread);
    }

    /// The kernel is notified next that attributes are old, unless the file must not be disturbed now.
    #[must_use]
    pub fn begin_notice(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let may = !state.is_held(now);
        state.notices += u32::from(may);
        may
    }

    /// As [`Pages::begin_notice`], where that waited for too long.
    pub fn force_notice(&self) {
        self.state.lock().notices += 1;
    }

    /// The kernel has been notified.
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
        // What was written since it arrived has a hole before it.
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

    /// The kernel was notified, so that attributes that it was sent before cannot disturb the file any more;
    /// this read, which found the file's end at `end`, is refused next.
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
    /// The kernel may take this for the size.
    fn take(&mut self, size_bytes: u64) {
        if size_bytes > self.size_bytes {
            self.size_bytes = size_bytes;
            self.growths += 1;
        }
        // It may be so before what was written is dropped.
        self.appends.clear();
        self.make_zeros(size_bytes);
    }

    /// The kernel takes this for the size, before what else is in flight has its effect or after.
    fn shrink(&mut self, size_bytes: u64) {
        self.size_bytes = self.largest_in_flight().max(size_bytes);
    }

    /// The largest size that anything in flight makes the kernel take.
    fn largest_in_flight(&self) -> u64 {
        let sizes = self
            .in_flight
            .iter()
            .map(|answer| answer.effect.size_bytes());
        sizes.max().unwrap_or(0)
    }

    /// The kernel may fill a page with zeros from here on.
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

    /// Where zeros begin at the earliest, those included that a write drops.
    fn zeros_from(&self) -> u64 {
        let in_flight = self.in_flight.iter();
        in_flight.fold(self.zeros_from, |from, answer| {
            from.min(answer.effect.zeros_from())
        })
    }

    /// Whether a write has no effect before pages of the range are unlocked, which it drops.
    fn is_waited_for(&self, range: &Range<u64>) -> bool {
        let mut in_flight = self.in_flight.iter();
        in_flight.any(|answer| answer.effect.dropped_from() < range.end)
    }

    /// What writes in flight leave of zeros is dropped before them.
    fn dropping(&mut self) {
        for answer in &mut self.in_flight {
            if let Effect::Write { zeros_from, .. } = &mut answer.effect {
                *zeros_from = u64::MAX;
            }
        }
    }

    /// Whether the kernel was answered with a larger size after so many times, but for writes by which it drops the
    /// page in which the file ended at `end`.
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

    /// A thread has all its earlier answers.
    fn arrived_at(&mut self, thread: u32) {
        if thread != NO_THREAD {
            self.in_flight
                .retain(|answer| answer.waiter.thread != thread);
        }
    }

    /// A thread has all its earlier answers, and if it has the lock of the inode, so has the one before it.
    fn arrived(&mut self, waiter: Waiter) {
        self.arrived_at(waiter.thread);
        if waiter.locks_inode {
            self.in_flight.retain(|answer| !answer.waiter.locks_inode);
        }
    }

    /// A thread gets an answer.
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
            // The worst of them, for as long as the last.
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

    /// Answers are not in flight for ever.
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

    /// Whether anything is in flight that would undo what a read that ends at `end` makes the kernel do.
    fn is_undone(&self, end: u64) -> bool {
        let mut in_flight = self.in_flight.iter();
        in_flight.any(|answer| answer.effect.undoes(end))
    }

    /// Whether a page of the range was refused, and nothing disturbed the file since so that it would not be
    /// the end.
    fn was_refused(&self, range: &Range<u64>, end: u64) -> bool {
        self.refusals.iter().any(|refusal| {
            refusal.disturbances == self.disturbances
                && refusal.end_min <= end
                && refusal.range.start < range.end
                && range.start < refusal.range.end
        })
    }

    /// Whether nothing disturbed the file since a fence.
    fn is_fenced(&self) -> bool {
        self.refusals
            .back()
            .is_some_and(|last| last.disturbances == self.disturbances)
    }

    /// Whether a refused read is about to be asked for again.
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

    /// Whether pages are being dropped, and the kernel may not have been disturbed by it yet.
    fn drop_begins(&self, now: Instant) -> bool {
        let runs = matches!(self.drop, Drop::Running | Drop::RunningAndWanted);
        let is_new = |at| now.saturating_duration_since(at) < DROP_BEGINS_MAX;
        runs && self.drop_began_at.is_some_and(is_new)
    }
}
