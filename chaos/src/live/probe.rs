//! A primary tenant that only computes: its speed shows how much HarvestFS slows it down.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, Pid, gettid, sched_setaffinity};

use super::LiveError;

/// How long it computes before it rests.
const BURST: Duration = Duration::from_millis(20);
/// The primary that is measured computes for a tenth of the time, so that it is not a load itself.
const PRIMARY_REST: Duration = Duration::from_millis(180);
const PRIMARY_ALONE: Duration = Duration::from_secs(3);

/// Threads that compute, with the priority of the thread that starts them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Probe {
    progress: Arc<Progress>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// The ids of the threads.
    ids: Vec<Pid>,
}

/// The progress of all threads together.
#[derive(Debug, Default)]
struct Progress {
    steps: AtomicU64,
    /// Time during which they wanted to compute, in nanoseconds.
    wanted_ns: AtomicU64,
}

/// The progress at one time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    steps: u64,
    wanted_ns: u64,
}

impl Reading {
    /// Steps per nanosecond of computing until a later reading; `None` if it did not compute.
    pub fn rate_until(self, later: Self) -> Option<f64> {
        let wanted_ns = later.wanted_ns - self.wanted_ns;
        (wanted_ns > 0).then(|| (later.steps - self.steps) as f64 / wanted_ns as f64)
    }
}

/// By how many percent `loaded` is slower than `alone`; negative when it is faster, which is noise.
pub(crate) fn slowdown_percent(alone: f64, loaded: f64) -> f64 {
    100.0 * (1.0 - loaded / alone)
}

impl Probe {
    /// Starts `threads` threads, which rest for `rest` after each burst of 20 ms.
    pub fn start(threads: usize, rest: Duration) -> Result<Self, LiveError> {
        let progress = Arc::new(Progress::default());
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, ids) = mpsc::channel();
        let start = |number: usize| {
            let (progress, stop) = (Arc::clone(&progress), Arc::clone(&stop));
            let sender = sender.clone();
            thread::Builder::new()
                .name(format!("primary-{number}"))
                .spawn(move || {
                    // `start` waits for this.
                    let _ = sender.send(gettid());
                    compute(&progress, &stop, rest);
                })
                .map_err(LiveError::io("start a thread"))
        };
        let threads: Vec<_> = (0..threads).map(start).collect::<Result<_, _>>()?;
        let ids = ids.iter().take(threads.len()).collect();
        Ok(Self {
            progress,
            stop,
            threads,
            ids,
        })
    }

    /// Binds each thread to one of these CPUs.
    pub fn bind(&self, cpus: impl Iterator<Item = usize>) -> Result<(), LiveError> {
        for (&id, cpu) in self.ids.iter().zip(cpus) {
            let mut only = CpuSet::new();
            only.set(cpu);
            sched_setaffinity(Some(id), &only).map_err(LiveError::io("choose a CPU"))?;
        }
        Ok(())
    }

    /// Reads the progress.
    pub fn read(&self) -> Reading {
        Reading {
            steps: self.progress.steps.load(Ordering::Relaxed),
            wanted_ns: self.progress.wanted_ns.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

fn compute(progress: &Progress, stop: &AtomicBool, rest: Duration) {
    let mut state = 1_u64;
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let mut steps = 0;
        let mut took = Duration::ZERO;
        while took < BURST {
            for _ in 0..4_096 {
                state = black_box(state.wrapping_mul(0x5851_F42D_4C95_7F2D).rotate_left(17) ^ 1);
            }
            steps += 1;
            took = began.elapsed();
        }
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        progress.steps.fetch_add(steps, Ordering::Relaxed);
        progress.wanted_ns.fetch_add(took_ns, Ordering::Relaxed);
        thread::sleep(rest);
    }
}

/// A primary on this machine, and its speed when alone.
pub(crate) struct Primary {
    probe: Probe,
    alone: Option<f64>,
    /// The progress when it ceased to be alone.
    since: Reading,
}

impl Primary {
    /// Starts a primary and measures it alone.
    pub async fn alone() -> Result<Self, LiveError> {
        let probe = Probe::start(1, PRIMARY_REST)?;
        let began = probe.read();
        tokio::time::sleep(PRIMARY_ALONE).await;
        let since = probe.read();
        let alone = began.rate_until(since);
        Ok(Self {
            probe,
            alone,
            since,
        })
    }

    /// Notes that it is no longer alone.
    pub fn has_company(&mut self) {
        self.since = self.probe.read();
    }

    /// By how much it has been slowed down since it ceased to be alone, in percent.
    pub fn slowdown_percent(&self) -> Option<f64> {
        let loaded = self.since.rate_until(self.probe.read())?;
        Some(slowdown_percent(self.alone?, loaded))
    }
}
