//! Attempts to reach a namenode: which address is next, and after which pause.

use std::time::Duration;

/// Pauses between attempts.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Attempts, one after the other, for ever.
#[derive(Debug)]
pub struct Attempts {
    begun: usize,
    backoff: Duration,
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            begun: 0,
            backoff: BACKOFF_MIN,
        }
    }
}

impl Attempts {
    /// Which of the addresses, of which there is one at least, is tried next.
    pub fn next<T: Copy>(&mut self, addresses: &[T]) -> T {
        assert!(
            !addresses.is_empty(),
            "attempt {} has no address to try",
            self.begun
        );
        let index = self.begun % addresses.len();
        self.begun += 1;
        addresses[index]
    }

    /// The attempt led to a registration.
    pub fn registered(&mut self) {
        self.backoff = BACKOFF_MIN;
    }

    /// The attempt failed, or the connection is lost. Returns the pause before the next one, spread by
    /// `chance` from 0 to 1, so that a restarted namenode is not met by all datanodes at once.
    pub fn pause(&mut self, chance: f64) -> Duration {
        assert!(
            (0.0..=1.0).contains(&chance),
            "a pause of about {:?} is spread by {chance}",
            self.backoff
        );
        // A pause of nothing is never doubled: all datanodes would try without an end.
        assert!(
            (BACKOFF_MIN..=BACKOFF_MAX).contains(&self.backoff),
            "attempt {} is followed by a pause of {:?}",
            self.begun,
            self.backoff
        );
        let pause = self.backoff.mul_f64(0.5 + chance);
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        pause
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn all_addresses_are_tried_and_pauses_are_bounded(
            addresses in 1usize..5,
            outcomes in prop::collection::vec((any::<bool>(), 0.0f64..1.0), 1..100),
        ) {
            let addresses: Vec<usize> = (0..addresses).collect();
            let mut attempts = Attempts::default();
            let mut failures = 0;
            for (attempt, (is_registered, chance)) in outcomes.into_iter().enumerate() {
                prop_assert_eq!(attempts.next(&addresses), attempt % addresses.len());
                if is_registered {
                    attempts.registered();
                    failures = 0;
                }
                let pause = attempts.pause(chance);
                let middle = BACKOFF_MAX.min(BACKOFF_MIN * 2u32.pow(failures.min(10)));
                prop_assert!(pause >= middle / 2 && pause <= middle * 3 / 2, "{pause:?}");
                failures += 1;
            }
        }
    }
}
