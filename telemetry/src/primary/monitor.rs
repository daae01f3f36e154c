//! Sampling on its own thread, so that nothing else ever waits for the kernel's files.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{SampleError, Sampler};
use crate::gate::{BusyGate, GateOptions, Load, Verdict};

/// Time between samples. A primary that becomes active in the middle of one interval is fully visible in the next
/// one: within 0.8 s.
pub const DEFAULT_INTERVAL: Duration = Duration::from_millis(400);
/// How old a sample may be to be reported as the primary's current usage.
const FRESH: Duration = Duration::from_secs(5);

/// A running sampler, and the gate that it controls. The thread ends some time after this is dropped; dropping the
/// monitor does not wait for it, because it may hang in a read.
#[derive(Debug)]
pub struct Monitor {
    shared: Arc<Shared>,
    here: Option<Mutex<Here>>,
}

/// A sampler that runs on the calling thread.
struct Here {
    sampler: Box<dyn Sampler>,
    interval: Duration,
}

/// What is known about the primary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// The verdict of the gate.
    pub verdict: Verdict,
    /// The last sample, unless it is old.
    pub load: Option<Load>,
}

#[derive(Debug)]
struct Shared {
    /// Times of the gate are counted from here.
    origin: Instant,
    state: Mutex<State>,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct State {
    gate: BusyGate,
    last: Option<(Instant, Load)>,
}

impl Monitor {
    /// Starts sampling on a new thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(
        mut sampler: Box<dyn Sampler>,
        gate: GateOptions,
        interval: Duration,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(Instant::now(), gate));
        let thread = shared.clone();
        std::thread::Builder::new()
            .name("primary".to_owned())
            .spawn(move || thread.run(&mut *sampler, interval))?;
        Ok(Self { shared, here: None })
    }

    /// Samples without a thread: [`Monitor::status`] takes the samples, `interval` apart. For simulations, whose
    /// samplers do not hang.
    #[must_use]
    pub fn start_here(
        sampler: Box<dyn Sampler>,
        gate: GateOptions,
        interval: Duration,
        now: Instant,
    ) -> Self {
        Self {
            shared: Arc::new(Shared::new(now, gate)),
            here: Some(Mutex::new(Here { sampler, interval })),
        }
    }

    /// Returns what is currently known; never waits for the thread to take a sample.
    #[must_use]
    pub fn status(&self, now: Instant) -> Status {
        if let Some(here) = &self.here {
            self.shared.sample_here(&mut here.lock(), now);
        }
        let state = self.shared.state.lock();
        let fresh = |(at, _): &(Instant, Load)| now.saturating_duration_since(*at) <= FRESH;
        Status {
            verdict: state.gate.verdict(self.shared.since_start(now)),
            load: state.last.filter(fresh).map(|(_, load)| load),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
    }
}

impl fmt::Debug for Here {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Here").finish_non_exhaustive()
    }
}

impl Shared {
    fn new(origin: Instant, gate: GateOptions) -> Self {
        Self {
            origin,
            state: Mutex::new(State {
                gate: BusyGate::new(gate),
                last: None,
            }),
            stopped: AtomicBool::new(false),
        }
    }

    fn sample_here(&self, here: &mut Here, now: Instant) {
        let last = self.state.lock().last;
        if last.is_none_or(|(at, _)| now.saturating_duration_since(at) >= here.interval)
            && let Ok(load) = here.sampler.sample(now)
        {
            self.observe(now, load);
        }
    }

    fn observe(&self, now: Instant, load: Load) {
        let mut state = self.state.lock();
        state.gate.observe(self.since_start(now), load);
        state.last = Some((now, load));
    }

    fn run(&self, sampler: &mut dyn Sampler, interval: Duration) {
        let mut failing = false;
        while !self.stopped.load(Ordering::Relaxed) {
            let asked = Instant::now();
            let sample = sampler.sample(asked);
            self.note_health(&sample, &mut failing);
            if let Ok(load) = sample
                && !load.is_unknown()
            {
                // If the read hung, the time is later than when it was requested.
                self.observe(Instant::now(), load);
            }
            std::thread::sleep(interval.saturating_sub(asked.elapsed()).max(interval / 4));
        }
    }

    /// Logs once that the source fails, and once that it works again.
    fn note_health(&self, sample: &Result<Load, SampleError>, failing: &mut bool) {
        match sample {
            Err(error) if !*failing => {
                *failing = true;
                tracing::warn!(%error, "the primary cannot be sampled");
            }
            Ok(load) if *failing && !load.is_unknown() => {
                *failing = false;
                tracing::info!("the primary can be sampled again");
            }
            _ => {}
        }
    }

    fn since_start(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.origin)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Scripted(mpsc::Receiver<f64>);

    impl Sampler for Scripted {
        /// Hangs until the test sets the usage.
        fn sample(&mut self, _: Instant) -> Result<Load, SampleError> {
            let cpu_share = self.0.recv().ok();
            Ok(Load {
                cpu_share,
                ..Load::default()
            })
        }
    }

    /// A usage that a test sets.
    struct Set(Arc<Mutex<f64>>);

    impl Sampler for Set {
        fn sample(&mut self, _: Instant) -> Result<Load, SampleError> {
            Ok(Load {
                cpu_share: Some(*self.0.lock()),
                ..Load::default()
            })
        }
    }

    #[test]
    fn without_a_thread_samples_are_taken_when_they_are_due() {
        let share = Arc::new(Mutex::new(0.9));
        let began = Instant::now();
        let interval = DEFAULT_INTERVAL;
        let sampler = Box::new(Set(share.clone()));
        let monitor = Monitor::start_here(sampler, GateOptions::default(), interval, began);
        assert!(monitor.status(began).verdict.is_busy());
        *share.lock() = 0.0;
        let load = |at: Duration| monitor.status(began + at).load.unwrap().cpu_share;
        assert_eq!(load(interval / 2), Some(0.9));
        assert_eq!(load(interval), Some(0.0));
        let settled = interval + GateOptions::default().settle;
        assert!(!monitor.status(began + settled).verdict.is_busy());
    }

    fn wait_until(mut condition: impl FnMut() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_hangs_in_a_read_delays_nobody() {
        let (say, hear) = mpsc::channel();
        let interval = Duration::from_millis(1);
        let sampler = Box::new(Scripted(hear));
        let monitor = Monitor::start(sampler, GateOptions::default(), interval).unwrap();
        let now = Instant::now();
        assert_eq!(monitor.status(now).load, None);
        assert!(!monitor.status(now).verdict.is_busy());
        say.send(0.9).unwrap();
        wait_until(|| monitor.status(Instant::now()).verdict.is_busy());
        assert_eq!(
            monitor.status(Instant::now()).load.unwrap().cpu_share,
            Some(0.9)
        );
        // The next read hangs for minutes.
        let later = Instant::now() + Duration::from_secs(30);
        assert!(monitor.status(later).verdict.is_busy());
        assert_eq!(monitor.status(later).load, None);
        let much_later = Instant::now() + Duration::from_secs(100);
        assert!(!monitor.status(much_later).verdict.is_busy());
    }
}
