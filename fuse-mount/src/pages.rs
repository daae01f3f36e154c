//! What the kernel may hold of one regular file: its size, and pages that may be old. Pure; times are
//! passed in.
//!
//! Two rules keep reads right (adr/0016):
//!
//! 1. *Pages are dropped before the kernel gets a larger size.* The last page that the kernel read ends with
//!    zeros; with a larger size they would be data.
//! 2. *A read that ends early is answered only if the kernel takes it for the end.* The kernel fills the
//!    rest of the page with zeros, and makes its size smaller, but not if it was disturbed after it
//!    asked: by attributes, a notification, or a write. Then the zeros up to its old size would be data.
//!    Such a read is refused; the kernel asks again for what it read ahead, and is not disturbed until
//!    that is answered.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a request takes at most from the kernel's deciding on it until it is read here, as far as
/// that matters. A longer delay needs a change of the file by another mount in just that time to do
/// harm.
const ON_ITS_WAY_MAX: Duration = Duration::from_millis(20);

/// How long it takes at most from deciding to notify the kernel until it is disturbed by it.
const DISTURBING_MAX: Duration = Duration::from_millis(5);

/// How long the kernel is left undisturbed after a refusal, for it to ask again.
pub const QUIET_MAX: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Debug)]
pub struct Pages {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The most that the kernel may take for the size.
    size_bytes: u64,
    drop: Drop,
    disturbed_at: Option<Instant>,
    refused_at: Option<Instant>,
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

/// What to do with a read that ends before the size that the kernel believes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortRead {
    /// The kernel takes it for the end.
    Answer,
    /// It would not.
    Refuse,
    /// It would not, and it is about to be disturbed again: refuse it after that.
    RefuseLater,
}

impl Pages {
    /// The kernel gets a size with the inode, which it did not know.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State {
                size_bytes,
                drop: Drop::Done,
                disturbed_at: None,
                refused_at: None,
            }),
        }
    }

    /// The most that the kernel may take for the size.
    pub fn size_bytes(&self) -> u64 {
        self.state.lock().size_bytes
    }

    /// Pages may be old. Whether somebody has to see to it that they are dropped.
    #[must_use]
    pub fn want_drop(&self) -> bool {
        let mut state = self.state.lock();
        let before = state.drop;
        state.drop = match before {
            Drop::Done | Drop::Wanted => Drop::Wanted,
            Drop::Running | Drop::RunningAndWanted => Drop::RunningAndWanted,
        };
        before == Drop::Done
    }

    /// The kernel is to be asked to drop pages, unless it must not be disturbed now.
    #[must_use]
    pub fn begin_drop(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        if state.is_quiet(now) {
            return false;
        }
        state.drop = Drop::Running;
        state.disturbed_at = Some(now);
        true
    }

    /// The kernel has dropped all pages. Whether it has to be asked again.
    #[must_use]
    pub fn end_drop(&self) -> bool {
        let mut state = self.state.lock();
        let again = state.drop == Drop::RunningAndWanted;
        state.drop = if again { Drop::Wanted } else { Drop::Done };
        again
    }

    /// Whether pages may be old.
    #[must_use]
    pub fn are_old(&self) -> bool {
        self.state.lock().drop != Drop::Done
    }

    /// Whether the kernel may get attributes with this size: no page is old, and none becomes so by it. The
    /// kernel is not to be disturbed before.
    #[must_use]
    pub fn may_tell(&self, size_bytes: u64, now: Instant) -> bool {
        let state = self.state.lock();
        state.drop == Drop::Done && size_bytes <= state.size_bytes && !state.is_quiet(now)
    }

    /// Whether a size needs pages to be dropped first that nobody asked to drop yet.
    #[must_use]
    pub fn grows_unasked(&self, size_bytes: u64) -> bool {
        let state = self.state.lock();
        state.drop == Drop::Done && size_bytes > state.size_bytes
    }

    /// All pages were dropped after this size was known: the kernel may get it.
    pub fn grow(&self, size_bytes: u64) {
        let mut state = self.state.lock();
        state.size_bytes = state.size_bytes.max(size_bytes);
    }

    /// The kernel gets attributes with a size, which it need not believe; or it wrote up to here.
    pub fn tell(&self, size_bytes: u64, now: Instant) {
        let mut state = self.state.lock();
        state.size_bytes = state.size_bytes.max(size_bytes);
        state.disturbed_at = Some(now);
    }

    /// The kernel sets its size to this itself, at the answer to its request.
    pub fn resize(&self, size_bytes: u64, now: Instant) {
        let mut state = self.state.lock();
        state.size_bytes = size_bytes;
        state.disturbed_at = Some(now);
    }

    /// Other attributes change in the kernel.
    pub fn disturb(&self, now: Instant) {
        self.state.lock().disturbed_at = Some(now);
    }

    /// A read that was asked for at `asked_at`, when the kernel believed in at most `believed_bytes`,
    /// found the file's end at `end`.
    #[must_use]
    pub fn short_read(
        &self,
        end: u64,
        believed_bytes: u64,
        asked_at: Instant,
        now: Instant,
    ) -> ShortRead {
        let mut state = self.state.lock();
        if end >= state.size_bytes.min(believed_bytes) {
            return ShortRead::Answer;
        }
        let undisturbed_since = |at: Instant| state.disturbed_at.is_none_or(|last| last < at);
        let asked_again = state.is_quiet(now)
            && state
                .refused_at
                .is_some_and(|refused_at| asked_at >= refused_at && undisturbed_since(refused_at));
        let decided_at = asked_at.checked_sub(ON_ITS_WAY_MAX);
        let settled = state.drop == Drop::Done && decided_at.is_some_and(undisturbed_since);
        if asked_again || settled {
            state.refused_at = None;
            state.size_bytes = end;
            state.disturbed_at = Some(now);
            return ShortRead::Answer;
        }
        let waits = matches!(state.drop, Drop::Wanted | Drop::RunningAndWanted);
        let begins = state.drop == Drop::Running && !undisturbed_since_before(&state, now);
        if (waits || begins) && !state.is_quiet(now) {
            return ShortRead::RefuseLater;
        }
        state.refused_at = Some(now);
        ShortRead::Refuse
    }
}

/// Whether the last disturbance has surely reached the kernel.
fn undisturbed_since_before(state: &State, now: Instant) -> bool {
    state
        .disturbed_at
        .is_none_or(|last| now.saturating_duration_since(last) >= DISTURBING_MAX)
}

impl State {
    /// Whether a refused read is about to be asked for again.
    fn is_quiet(&self, now: Instant) -> bool {
        self.refused_at
            .is_some_and(|at| now.saturating_duration_since(at) < QUIET_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Longer than requests are on their way.
    const MS: Duration = Duration::from_millis(10);

    #[test]
    fn a_larger_size_waits_for_pages_to_be_dropped() {
        let now = Instant::now();
        let pages = Pages::new(10);
        assert!(pages.may_tell(10, now) && pages.may_tell(3, now));
        assert!(!pages.may_tell(11, now));
        assert!(pages.grows_unasked(11));

        assert!(pages.want_drop());
        assert!(!pages.want_drop(), "it is wanted already");
        assert!(!pages.grows_unasked(11) && !pages.may_tell(10, now));
        assert!(pages.begin_drop(now));
        assert!(!pages.want_drop(), "the task that drops them goes on");
        assert!(pages.end_drop(), "some became old meanwhile");
        assert!(!pages.may_tell(10, now));
        assert!(pages.begin_drop(now));
        assert!(!pages.end_drop());
        pages.grow(11);
        assert!(pages.may_tell(11, now));
    }

    #[test]
    fn what_this_mount_writes_needs_no_drop() {
        let now = Instant::now();
        let pages = Pages::new(0);
        pages.tell(4_096, now);
        assert!(pages.may_tell(4_096, now));
        pages.resize(100, now);
        assert_eq!(pages.size_bytes(), 100);
    }

    #[test]
    fn the_end_is_no_early_end() {
        let now = Instant::now();
        let pages = Pages::new(10);
        assert_eq!(pages.short_read(10, 10, now, now), ShortRead::Answer);
        pages.tell(20, now);
        assert_eq!(
            pages.short_read(10, 10, now, now),
            ShortRead::Answer,
            "it was written after the kernel asked: a hole is zeros"
        );
        assert_eq!(pages.size_bytes(), 20);
    }

    #[test]
    fn an_early_end_of_an_undisturbed_kernel_is_the_end() {
        let now = Instant::now();
        let pages = Pages::new(10);
        pages.disturb(now);
        let asked_at = now + 10 * MS;
        assert_eq!(
            pages.short_read(4, 10, asked_at, asked_at),
            ShortRead::Answer
        );
        assert_eq!(pages.size_bytes(), 4);
    }

    #[test]
    fn an_early_end_is_refused_until_the_kernel_was_disturbed_and_asks_again() {
        let start = Instant::now();
        let pages = Pages::new(10);
        assert!(pages.want_drop());
        let asked_at = start + MS;
        assert_eq!(
            pages.short_read(4, 10, asked_at, asked_at),
            ShortRead::RefuseLater
        );
        assert!(pages.begin_drop(start + 2 * MS));
        assert_eq!(
            pages.short_read(4, 10, asked_at, start + 2 * MS),
            ShortRead::RefuseLater
        );
        let refused_at = start + 3 * MS;
        assert_eq!(
            pages.short_read(4, 10, asked_at, refused_at),
            ShortRead::Refuse
        );
        assert!(!pages.may_tell(4, refused_at), "it is left undisturbed");
        assert!(!pages.begin_drop(refused_at));

        let again = refused_at + MS;
        assert_eq!(pages.short_read(4, 10, again, again), ShortRead::Answer);
        assert_eq!(pages.size_bytes(), 4);
        assert!(pages.begin_drop(again));
    }

    #[test]
    fn a_disturbance_after_the_refusal_needs_another_one() {
        let start = Instant::now();
        let pages = Pages::new(10);
        pages.disturb(start);
        assert_eq!(pages.short_read(4, 10, start, start), ShortRead::Refuse);
        pages.tell(3, start + MS);
        let again = start + MS + MS / 2;
        assert_eq!(pages.short_read(4, 10, again, again), ShortRead::Refuse);
    }

    #[test]
    fn the_quiet_ends_by_itself() {
        let now = Instant::now();
        let pages = Pages::new(10);
        pages.disturb(now);
        assert_eq!(pages.short_read(4, 10, now, now), ShortRead::Refuse);
        assert!(pages.want_drop());
        assert!(pages.begin_drop(now + QUIET_MAX));
    }
}
