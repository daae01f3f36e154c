//! Whether a disk can be trusted.

use std::time::{Duration, Instant};

/// A disk with this many errors within [`ERROR_WINDOW`] is given up. One bad sector causes one or two errors, as its
/// replica is no longer used after that.
const ERRORS_MAX: u32 = 5;
const ERROR_WINDOW: Duration = Duration::from_secs(600);

/// What is known about a disk. Once bad, it stays bad until the datanode is restarted.
#[derive(Debug, Default)]
pub struct Health {
    failure: Option<String>,
    errors: u32,
    window_start: Option<Instant>,
}

impl Health {
    /// The reason that the disk cannot be used, if there is one.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Gives the disk up; returns `false` if it had been given up before.
    pub fn fail(&mut self, reason: &str) -> bool {
        let is_first = self.failure.is_none();
        if is_first {
            self.failure = Some(reason.to_owned());
        }
        is_first
    }

    /// Records that the disk could not read or write something. Returns whether there have been too many errors now.
    pub fn has_error(&mut self, now: Instant) -> bool {
        assert_eq!(
            self.errors > 0,
            self.window_start.is_some(),
            "{} errors since {:?}",
            self.errors,
            self.window_start
        );
        match self.window_start {
            Some(start) if now.saturating_duration_since(start) < ERROR_WINDOW => self.errors += 1,
            _ => {
                self.window_start = Some(now);
                self.errors = 1;
            }
        }
        self.errors >= ERRORS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::some_time;

    #[test]
    fn single_errors_are_forgiven_and_repeated_ones_are_not() {
        let mut health = Health::default();
        let now = some_time();
        for _ in 1..ERRORS_MAX {
            assert!(!health.has_error(now));
        }
        assert!(health.has_error(now + ERROR_WINDOW / 2));
    }

    #[test]
    fn errors_long_ago_do_not_count() {
        let mut health = Health::default();
        let start = some_time();
        for _ in 1..ERRORS_MAX {
            assert!(!health.has_error(start));
        }
        assert!(!health.has_error(start + ERROR_WINDOW));
    }

    #[test]
    fn the_first_reason_stays() {
        let mut health = Health::default();
        assert!(health.failure().is_none());
        assert!(health.fail("it is gone"));
        assert!(!health.fail("it is gone for good"));
        assert_eq!(health.failure(), Some("it is gone"));
    }
}
