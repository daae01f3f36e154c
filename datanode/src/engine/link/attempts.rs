//! Attempts to reach a namenode: after which pause comes the next, and when is a failure worth a
//! warning.

use std::time::Duration;

/// Pauses between attempts.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// The longest pause after what passes by itself.
const PASSING_BACKOFF_MAX: Duration = Duration::from_millis(400);
/// What fails more often than this in a row did not pass: several seconds are over.
const PASSING_MAX: u32 = 20;

/// Attempts, one after the other, for ever.
#[derive(Debug)]
pub struct Attempts {
    backoff: Duration,
    /// How many failed in a row with what passes by itself.
    passing: u32,
}

/// Why an attempt failed, or a connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The namenode cannot be reached, or does not work.
    Lasting,
    /// Of several namenodes, this one does not know the server yet, or does not know yet that
    /// another one leads. Both pass soon.
    Passing,
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// The pause before the next attempt.
    pub pause: Duration,
    /// Whether the operator should hear of it.
    pub is_warned_of: bool,
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            backoff: BACKOFF_MIN,
            passing: 0,
        }
    }
}

impl Attempts {
    /// The attempt led to a registration.
    pub fn registered(&mut self) {
        *self = Self::default();
    }

    /// The attempt failed, or the connection is lost. The pause is spread by `chance` from 0 to 1,
    /// so that a restarted namenode is not met by all datanodes at once.
    pub fn failed(&mut self, failure: Failure, chance: f64) -> After {
        assert!(
            (0.0..=1.0).contains(&chance),
            "a pause of about {:?} is spread by {chance}",
            self.backoff
        );
        // A pause of nothing is never doubled: all datanodes would try without an end.
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
                    attempts.registered();
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
        attempts.registered();
        let after = attempts.failed(Failure::Passing, 0.5);
        assert_eq!(after.pause, BACKOFF_MIN);
        assert!(!after.is_warned_of);
    }
}
