//! Detection of disks that do not respond. A disk may be silent for minutes because its primary tenant keeps it busy,
//! and come back with all its data: nothing on a silent disk is lost.

use std::time::{Duration, Instant};

/// A disk that has had jobs for this long and finished none is silent: it is given no more.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// A disk that is silent for this long is given up, together with its volume: everything on it counts as lost then.
/// Primary tenants keep disks busy for minutes; hung drivers do not recover.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(15 * 60);

/// The jobs of a disk.
#[derive(Debug, Default)]
pub struct Pulse {
    pending: u32,
    /// When the last job ended, or the first one began to wait.
    since: Option<Instant>,
}

impl Pulse {
    /// Records that a job is handed to the disk.
    pub fn begun(&mut self, now: Instant) {
        if self.pending == 0 {
            self.since = Some(now);
        }
        self.pending += 1;
    }

    /// Records that the disk has done a job.
    pub fn answered(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// Records that a job no longer waits. If the disk did not answer it, the job never ran, which says nothing about
    /// the disk.
    pub fn ended(&mut self) {
        assert!(self.pending > 0, "a job ended and none was begun");
        self.pending -= 1;
    }

    /// Whether the disk has owed an answer for so long that it is to be left alone.
    pub fn is_silent(&self, now: Instant) -> bool {
        self.silence(now) >= SILENT_AFTER
    }

    /// Whether the disk is to be given up.
    pub fn is_over(&self, now: Instant) -> bool {
        self.silence(now) >= GIVE_UP_AFTER
    }

    /// How long the disk has owed an answer.
    fn silence(&self, now: Instant) -> Duration {
        if self.pending == 0 {
            return Duration::ZERO;
        }
        let since = self
            .since
            .expect("a disk that has jobs has them since a time");
        // A job may have ended after `now` was taken.
        now.saturating_duration_since(since)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    #[test]
    fn only_a_disk_that_owes_an_answer_is_silent() {
        let seconds = Duration::from_secs;
        let mut pulse = Pulse::default();
        let now = some_time() + seconds(100);
        assert_eq!(pulse.silence(now), Duration::ZERO);
        pulse.begun(now);
        pulse.begun(now);
        assert_eq!(pulse.silence(now + seconds(4)), seconds(4));
        pulse.answered(now + seconds(4));
        pulse.ended();
        assert_eq!(pulse.silence(now + seconds(7)), seconds(3));
        pulse.answered(now + seconds(7));
        pulse.ended();
        assert_eq!(pulse.silence(now + seconds(100)), Duration::ZERO);
    }

    #[test]
    fn a_job_that_is_withdrawn_is_no_answer() {
        let now = some_time();
        let mut pulse = Pulse::default();
        pulse.begun(now);
        pulse.begun(now);
        let later = now + GIVE_UP_AFTER;
        pulse.ended();
        assert!(pulse.is_silent(later) && pulse.is_over(later));
        pulse.answered(later);
        pulse.ended();
        assert!(!pulse.is_silent(later) && !pulse.is_over(later));
    }

    proptest! {
        /// Whatever jobs arrive, end or are withdrawn: the disk is silent exactly if there is a job, and none has been
        /// answered for too long.
        #[test]
        fn it_is_as_old_as_the_first_job_without_an_answer(
            steps in prop::collection::vec((0u8..3, 0u64..4_000), 1..100),
        ) {
            let mut pulse = Pulse::default();
            let mut now = some_time();
            // When each of the jobs began to wait; of those, the disk owes the answer to some job.
            let mut jobs: Vec<Instant> = Vec::new();
            let mut first_wait = now;
            for (what, pause_ms) in steps {
                now += Duration::from_millis(pause_ms);
                match what {
                    0 => {
                        if jobs.is_empty() {
                            first_wait = now;
                        }
                        jobs.push(now);
                        pulse.begun(now);
                    }
                    1 if !jobs.is_empty() => {
                        jobs.pop();
                        first_wait = now;
                        pulse.answered(now);
                        pulse.ended();
                    }
                    2 if !jobs.is_empty() => {
                        jobs.pop();
                        pulse.ended();
                    }
                    _ => {}
                }
                let owed = now - first_wait;
                let is_silent = !jobs.is_empty() && owed >= SILENT_AFTER;
                prop_assert_eq!(pulse.is_silent(now), is_silent);
            }
        }
    }
}
