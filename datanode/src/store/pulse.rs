//! Whether a disk answers. A disk may be silent for minutes because its owner keeps it busy, and come
//! back with everything on it: nothing on a silent disk is lost.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// A disk that has jobs and finished none for this long is silent: it is not asked for more.
pub const SILENT_AFTER: Duration = Duration::from_secs(5);

/// Counts the jobs of a disk.
#[derive(Debug, Default)]
pub struct Pulse {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pending: u32,
    /// When a job ended last, or the first one began to wait.
    since: Option<Instant>,
}

/// A job, until it has ended, or is withdrawn.
#[derive(Debug)]
pub struct Beat(Arc<Pulse>);

impl Pulse {
    /// A job is handed to the disk.
    pub fn begin(self: &Arc<Self>) -> Beat {
        let mut state = self.state.lock();
        if state.pending == 0 {
            state.since = Some(Instant::now());
        }
        state.pending += 1;
        drop(state);
        Beat(self.clone())
    }

    /// For how long the disk has owed an answer.
    pub fn silence(&self, now: Instant) -> Duration {
        let state = self.state.lock();
        if state.pending == 0 {
            return Duration::ZERO;
        }
        let since = state
            .since
            .expect("a disk that has jobs has them since a time");
        // A job may have ended after `now` was taken.
        now.saturating_duration_since(since)
    }
}

impl Beat {
    /// The disk has done the job. Dropped without that, it never ran, which says nothing about the disk.
    pub fn end(self) {
        self.0.state.lock().since = Some(Instant::now());
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        assert!(state.pending > 0, "a job ended and none was begun");
        state.pending -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_a_disk_that_owes_an_answer_is_silent() {
        let pulse = Arc::new(Pulse::default());
        tokio::time::advance(Duration::from_secs(100)).await;
        assert_eq!(pulse.silence(Instant::now()), Duration::ZERO);
        let (first, second) = (pulse.begin(), pulse.begin());
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(pulse.silence(Instant::now()), Duration::from_secs(4));
        first.end();
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(pulse.silence(Instant::now()), Duration::from_secs(3));
        second.end();
        assert_eq!(pulse.silence(Instant::now()), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_that_is_withdrawn_is_no_answer() {
        let pulse = Arc::new(Pulse::default());
        let (running, withdrawn) = (pulse.begin(), pulse.begin());
        tokio::time::advance(Duration::from_secs(30)).await;
        drop(withdrawn);
        assert_eq!(pulse.silence(Instant::now()), Duration::from_secs(30));
        running.end();
        assert_eq!(pulse.silence(Instant::now()), Duration::ZERO);
    }
}
