//! Attempts to reach a namenode: the pause before the next attempt, and whether a failure deserves a warning.

use std::time::Duration;

/// Pauses between attempts.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// The longest pause after a failure that passes by itself.
const PASSING_BACKOFF_MAX: Duration = Duration::from_millis(400);
/// After more than this many passing failures in a row, the problem has not passed: several seconds have gone by.
const PASSING_MAX: u32 = 20;

/// A namenode that registers the server and refuses something only after this long has accepted it.
const ACCEPTED_AFTER: Duration = BACKOFF_MAX;

/// Attempts, one after the other, forever.
#[derive(Debug)]
pub struct Attempts {
    backoff: Duration,
    /// Number of consecutive failures that pass by themselves.
    passing: u32,
    /// Whether the attempt before led to a registration, soon after which something was refused.
    was_refused: bool,
}

/// Why an attempt failed, or a connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The namenode cannot be reached, or does not work.
    Lasting,
    /// One of several namenodes does not know the server yet, or does not know yet that another one leads. Both pass
    /// soon.
    Passing,
}

/// The consequence of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// The pause before the next attempt.
    pub pause: Duration,
    /// Whether to warn the operator.
    pub is_warned_of: bool,
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            backoff: BACKOFF_MIN,
            passing: 0,
            was_refused: false,
        }
    }
}

impl Attempts {
    /// Records that the attempt led to a registration, and that its connection lasted for so long, until the namenode
    /// refused something (`is_refused`) or it was lost. If something is soon refused each time, the attempts have
    /// failed: otherwise a namenode that refuses whatever follows would be sent a registration and full reports again
    /// and again, almost without pause.
    pub fn registered(&mut self, lasted: Duration, is_refused: bool) {
        let is_soon = is_refused && lasted < ACCEPTED_AFTER;
        if !(is_soon && self.was_refused) {
            *self = Self::default();
        }
        self.was_refused = is_soon;
    }

    /// Records that the attempt failed, or the connection was lost. The pause is randomized by `chance` from 0 to 1,
    /// so that the datanodes do not all return to a restarted namenode at the same time.
    pub fn failed(&mut self, failure: Failure, chance: f64) -> After {
        assert!(
            (0.0..=1.0).contains(&chance),
            "a pause of about {:?} is spread by {chance}",
            self.backoff
        );
        // A zero pause would never be doubled: all datanodes would retry without pause.
        assert!(
            (BACKOFF_MIN..=BACKOFF_MAX).contains(&self.backoff),
            "a failed attempt is followed by a pause of {:?}",
            self.backoff
        );
        self.passing = match failure {
            Failure::Lasting => 0,
            Failure::Passing => self.passing.saturating_add(1),
        };
        let passes = (1..=PASSING_MAX).contains(&self.passing);
        if passes {
            self.backoff = self.backoff.min(PASSING_BACKOFF_MAX);
        }
        let pause = self.backoff.mul_f64(0.5 + chance);
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        After {
            pause,
            is_warned_of: !passes,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pauses_are_bounded(
            outcomes in prop::collection::vec((any::<bool>(), 0.0f64..1.0), 1..100),
        ) {
            let mut attempts = Attempts::default();
            let mut failures = 0;
            for (is_registered, chance) in outcomes {
                if is_registered {
                    attempts.registered(Duration::ZERO, false);
                    failures = 0;
                }
                let After { pause, is_warned_of } = attempts.failed(Failure::Lasting, chance);
                let middle = BACKOFF_MAX.min(BACKOFF_MIN * 2u32.pow(failures.min(10)));
                prop_assert!(pause >= middle / 2 && pause <= middle * 3 / 2, "{pause:?}");
                prop_assert!(is_warned_of);
                failures += 1;
            }
        }
    }

    #[test]
    fn what_passes_is_tried_again_soon_and_quietly_but_not_for_ever() {
        let mut attempts = Attempts::default();
        for _ in 0..10 {
            attempts.failed(Failure::Lasting, 0.5);
        }
        for attempt in 1..=PASSING_MAX + 10 {
            let After {
                pause,
                is_warned_of,
            } = attempts.failed(Failure::Passing, 0.5);
            assert_eq!(is_warned_of, attempt > PASSING_MAX);
            assert!(is_warned_of || pause <= PASSING_BACKOFF_MAX, "{pause:?}");
        }
        assert_eq!(attempts.failed(Failure::Passing, 0.5).pause, BACKOFF_MAX);
        attempts.registered(Duration::ZERO, false);
        let after = attempts.failed(Failure::Passing, 0.5);
        assert_eq!(after.pause, BACKOFF_MIN);
        assert!(!after.is_warned_of);
    }

    #[test]
    fn one_that_soon_refuses_what_follows_is_asked_ever_more_rarely() {
        let mut attempts = Attempts::default();
        // It was away for long, which is over.
        for _ in 0..10 {
            attempts.failed(Failure::Lasting, 0.5);
        }
        let mut registered_for = |lasted| {
            attempts.registered(lasted, true);
            attempts.failed(Failure::Lasting, 0.5).pause
        };
        assert_eq!(registered_for(Duration::ZERO), BACKOFF_MIN);
        assert_eq!(registered_for(ACCEPTED_AFTER / 2), BACKOFF_MIN * 2);
        for _ in 0..10 {
            registered_for(Duration::ZERO);
        }
        assert_eq!(registered_for(Duration::ZERO), BACKOFF_MAX);
        assert_eq!(registered_for(ACCEPTED_AFTER), BACKOFF_MIN);
    }
}
