//! A machine: a runtime with a clock of its own, on which parts of the cluster run.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::machine::{self, Machine};
use harvestfs_protocol::transport::DatagramSocket;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, LocalSet};

use super::network::Network;
use crate::random;

/// The time of all wall clocks when a simulation begins, in milliseconds since 1970.
pub const BEGAN_UNIX_MS: u64 = 1_800_000_000_000;

/// A machine: a runtime with a clock of its own.
pub struct Host {
    clocks: Rc<Clocks>,
    /// `None` after a crash.
    running: Option<Running>,
    is_stopped: bool,
    /// How much faster than virtual time its clocks run, in millionths.
    drift_ppm: i64,
    /// Time by which its clocks are still to advance: less than a step of timers.
    owed_ns: i64,
}

/// The resolution of timers.
const STEP_NS: i64 = 1_000_000;

struct Running {
    tasks: LocalSet,
    runtime: Runtime,
}

struct Clocks {
    ip: IpAddr,
    network: Arc<Network>,
    rng: RefCell<SmallRng>,
    /// The runtime's clock when it started.
    started: Cell<Option<tokio::time::Instant>>,
    /// How long the machine had run by then.
    ran_before: Cell<Duration>,
    /// How long it has been suspended since it started.
    slept: Cell<Duration>,
    elapsed: Cell<Duration>,
    /// How far its wall clock is ahead of those of others, in milliseconds.
    wall_offset_ms: Cell<i64>,
    /// The shortest and the longest time that an operation of its disk takes.
    disk_latency: Cell<(Duration, Duration)>,
    disk_rng: RefCell<SmallRng>,
    /// How long the machine will have run when all operations of its disk that have begun are done.
    disk_done: Cell<Duration>,
}

impl Machine for Clocks {
    fn since_boot(&self) -> Duration {
        match (self.started.get(), tokio::runtime::Handle::try_current()) {
            (Some(started), Ok(_)) => self.ran_before.get() + self.slept.get() + started.elapsed(),
            _ => self.elapsed.get(),
        }
    }

    fn unix_now_ms(&self) -> Option<u64> {
        let elapsed_ms = u64::try_from(self.since_boot().as_millis()).ok()?;
        (BEGAN_UNIX_MS + elapsed_ms).checked_add_signed(self.wall_offset_ms.get())
    }

    fn random(&self) -> u64 {
        self.rng.borrow_mut().random()
    }

    fn disk_latency(&self) -> Duration {
        let (min, max) = self.disk_latency.get();
        let latency = if min == max {
            max
        } else {
            // Most operations are near the minimum.
            let share: f64 = self.disk_rng.borrow_mut().random();
            min + (max - min).mul_f64(share.powi(4))
        };
        if !latency.is_zero() {
            let done = self.since_boot() + latency;
            self.disk_done.set(self.disk_done.get().max(done));
        }
        latency
    }

    fn bind(&self, addr: SocketAddr) -> io::Result<Arc<dyn DatagramSocket>> {
        self.network.bind(SocketAddr::new(self.ip, addr.port()))
    }
}

impl Host {
    /// Creates a machine on which nothing runs yet.
    ///
    /// # Errors
    /// When the system gives no runtime.
    pub fn new(ip: IpAddr, seed: u64, network: &Arc<Network>) -> io::Result<Self> {
        let mut host = Self {
            clocks: Rc::new(Clocks {
                ip,
                network: Arc::clone(network),
                rng: RefCell::new(SmallRng::seed_from_u64(seed)),
                started: Cell::new(None),
                ran_before: Cell::new(Duration::ZERO),
                slept: Cell::new(Duration::ZERO),
                elapsed: Cell::new(Duration::ZERO),
                wall_offset_ms: Cell::new(0),
                disk_latency: Cell::default(),
                disk_rng: RefCell::new(random::stream(seed, "disk latency")),
                disk_done: Cell::new(Duration::ZERO),
            }),
            running: None,
            is_stopped: false,
            drift_ppm: 0,
            owed_ns: 0,
        };
        host.boot()?;
        Ok(host)
    }

    /// Starts the machine (again).
    ///
    /// # Errors
    /// When the system gives no runtime.
    pub fn boot(&mut self) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()?;
        let started = runtime.block_on(async { tokio::time::Instant::now() });
        self.clocks.started.set(Some(started));
        self.clocks.ran_before.set(self.clocks.elapsed.get());
        self.clocks.slept.set(Duration::ZERO);
        self.clocks.disk_done.set(Duration::ZERO);
        self.running = Some(Running {
            tasks: LocalSet::new(),
            runtime,
        });
        Ok(())
    }

    /// Ends everything that runs on the machine immediately.
    pub fn crash(&mut self) {
        let _entered = machine::enter(self.clocks.clone());
        if let Some(Running { tasks, runtime }) = self.running.take() {
            let _context = runtime.enter();
            drop(tasks);
        }
        self.clocks.started.set(None);
    }

    /// Calls `work` with the machine's clocks, randomness and network, as a program on it would.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _entered = machine::enter(self.clocks.clone());
        work()
    }

    /// Spawns a task on the machine. Returns `None` if the machine is down.
    pub fn spawn<T: 'static>(
        &self,
        work: impl Future<Output = T> + 'static,
    ) -> Option<JoinHandle<T>> {
        let running = self.running.as_ref()?;
        let _context = running.runtime.enter();
        Some(running.tasks.spawn_local(work))
    }

    /// Stops everything on the machine, until [`Host::go_on`] or [`Host::wake_up`].
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Resumes the machine after it was stopped for `stopped`: timers that were due in the meantime fire late.
    pub fn go_on(&mut self, stopped: Duration) {
        self.is_stopped = false;
        if let Some(running) = &self.running {
            let _entered = machine::enter(self.clocks.clone());
            running.runtime.block_on(tokio::time::advance(stopped));
        }
    }

    /// Resumes the machine after it was suspended for `slept`. Its clock since boot and its wall clock have advanced,
    /// its timers have not.
    pub fn wake_up(&mut self, slept: Duration) {
        self.is_stopped = false;
        self.clocks.slept.set(self.clocks.slept.get() + slept);
    }

    /// Whether the machine is started, be it stopped or not.
    pub fn is_up(&self) -> bool {
        self.running.is_some()
    }

    /// Makes its clocks run faster (or slower, if negative) than virtual time by so many millionths from now on.
    pub fn set_drift(&mut self, ppm: i64) {
        self.drift_ppm = ppm;
    }

    /// Makes its wall clock jump, so that it is this far ahead of those of others from now on.
    pub fn set_wall_offset(&self, ms: i64) {
        self.clocks.wall_offset_ms.set(ms);
    }

    /// Sets how long operations of its disk take from now on, at least and at most.
    pub fn set_disk_latency(&self, min: Duration, max: Duration) {
        self.clocks.disk_latency.set((min, max));
    }

    /// Whether an operation of its disk has begun and is not done: it takes as long as it was to take when it began, also
    /// if the disk has become faster since.
    pub fn is_disk_at_work(&self) -> bool {
        self.clocks.since_boot() < self.clocks.disk_done.get()
    }

    /// How far its clocks advance in `time`.
    fn drifted(&mut self, time: Duration) -> Duration {
        if (self.drift_ppm, self.owed_ns) == (0, 0) {
            return time;
        }
        let time_ns = time.as_nanos() as i64;
        self.owed_ns += time_ns + time_ns * self.drift_ppm / 1_000_000;
        let whole_ns = self.owed_ns - self.owed_ns % STEP_NS;
        self.owed_ns -= whole_ns;
        Duration::from_nanos(whole_ns as u64)
    }

    /// Runs the machine for `time` (subject to the drift of its clocks), with everything that is due in it.
    pub fn run_for(&mut self, time: Duration) {
        let time = self.drifted(time);
        if time.is_zero() {
            return;
        }
        if let Some(running) = self.running.as_ref().filter(|_| !self.is_stopped) {
            let _entered = machine::enter(self.clocks.clone());
            // Some tasks that may run on any thread, such as openraft's, start others that may not.
            let _local = running.tasks.enter();
            let until = tokio::time::sleep;
            running
                .runtime
                .block_on(running.tasks.run_until(async move { until(time).await }));
        }
        self.clocks.elapsed.set(self.clocks.elapsed.get() + time);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.crash();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stuck_disk_has_begun_outlasts_the_fault() {
        let network = Network::new(1, Duration::ZERO);
        let mut host = Host::new([10, 0, 0, 1].into(), 1, &network).unwrap();
        let seconds = Duration::from_secs;
        host.set_disk_latency(seconds(10), seconds(10));
        assert!(!host.is_disk_at_work());
        host.spawn(async { tokio::time::sleep(machine::disk_latency()).await });
        host.run_for(seconds(1));
        host.set_disk_latency(Duration::ZERO, Duration::ZERO);
        host.spawn(async { tokio::time::sleep(machine::disk_latency()).await });
        host.run_for(seconds(8));
        assert!(host.is_disk_at_work());
        host.run_for(seconds(2));
        assert!(!host.is_disk_at_work());
        // What runs on a machine ends with it.
        host.set_disk_latency(seconds(10), seconds(10));
        host.spawn(async { tokio::time::sleep(machine::disk_latency()).await });
        host.run_for(seconds(1));
        assert!(host.is_disk_at_work());
        host.crash();
        host.boot().unwrap();
        assert!(!host.is_disk_at_work());
    }
}
