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

/// What the wall clocks of all machines say when a simulation begins, in milliseconds since 1970.
pub const BEGAN_UNIX_MS: u64 = 1_800_000_000_000;

/// See the module.
pub struct Host {
    clocks: Rc<Clocks>,
    /// None: it crashed.
    running: Option<Running>,
    is_stopped: bool,
    /// How much faster than time its clocks go, in millionths.
    drift_ppm: i64,
    /// Time by which they have to go on, but less than a step of timers.
    owed_ns: i64,
}

/// Timers go in steps of this.
const STEP_NS: i64 = 1_000_000;

struct Running {
    tasks: LocalSet,
    runtime: Runtime,
}

struct Clocks {
    ip: IpAddr,
    network: Arc<Network>,
    rng: RefCell<SmallRng>,
    /// The runtime's clock when it started, and how long the machine had run by then.
    started: Cell<Option<tokio::time::Instant>>,
    ran_before: Cell<Duration>,
    /// Since it started, it was suspended so long.
    slept: Cell<Duration>,
    elapsed: Cell<Duration>,
    /// How far its wall clock is from those of others, in milliseconds.
    wall_offset_ms: Cell<i64>,
    /// The shortest and the longest that an operation of its disk takes.
    disk_latency: Cell<(Duration, Duration)>,
    disk_rng: RefCell<SmallRng>,
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
        if min == max {
            return max;
        }
        // Most take little of it.
        let share: f64 = self.disk_rng.borrow_mut().random();
        min + (max - min).mul_f64(share.powi(4))
    }

    fn bind(&self, addr: SocketAddr) -> io::Result<Arc<dyn DatagramSocket>> {
        self.network.bind(SocketAddr::new(self.ip, addr.port()))
    }
}

impl Host {
    /// A machine on which nothing runs yet.
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
            }),
            running: None,
            is_stopped: false,
            drift_ppm: 0,
            owed_ns: 0,
        };
        host.boot()?;
        Ok(host)
    }

    /// Starts it (again).
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
        self.running = Some(Running {
            tasks: LocalSet::new(),
            runtime,
        });
        Ok(())
    }

    /// Everything that runs on it ends at once.
    pub fn crash(&mut self) {
        let _entered = machine::enter(self.clocks.clone());
        if let Some(Running { tasks, runtime }) = self.running.take() {
            let _context = runtime.enter();
            drop(tasks);
        }
        self.clocks.started.set(None);
    }

    /// Does something as what runs on it would.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _entered = machine::enter(self.clocks.clone());
        work()
    }

    /// Runs something on it, beside what runs there.
    pub fn spawn<T: 'static>(
        &self,
        work: impl Future<Output = T> + 'static,
    ) -> Option<JoinHandle<T>> {
        let running = self.running.as_ref()?;
        let _context = running.runtime.enter();
        Some(running.tasks.spawn_local(work))
    }

    /// Nothing on it runs any more, until [`Host::go_on`] or [`Host::wake_up`].
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// What runs on it goes on after `stopped`, late for everything that was to happen meanwhile.
    pub fn go_on(&mut self, stopped: Duration) {
        self.is_stopped = false;
        if let Some(running) = &self.running {
            let _entered = machine::enter(self.clocks.clone());
            running.runtime.block_on(tokio::time::advance(stopped));
        }
    }

    /// What runs on it goes on after `slept`. Of its clocks, that since its start and the wall clock have gone on,
    /// timers have not.
    pub fn wake_up(&mut self, slept: Duration) {
        self.is_stopped = false;
        self.clocks.slept.set(self.clocks.slept.get() + slept);
    }

    /// Whether something can run on it, or go on to.
    pub fn is_up(&self) -> bool {
        self.running.is_some()
    }

    /// Its clocks go faster than time from now on by so many millionths, or slower.
    pub fn set_drift(&mut self, ppm: i64) {
        self.drift_ppm = ppm;
    }

    /// Its wall clock jumps, and is so far from those of others from now on.
    pub fn set_wall_offset(&self, ms: i64) {
        self.clocks.wall_offset_ms.set(ms);
    }

    /// Operations of its disk take so long from now on, at least and at most.
    pub fn set_disk_latency(&self, min: Duration, max: Duration) {
        self.clocks.disk_latency.set((min, max));
    }

    /// How far its clocks go on in `time`.
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

    /// Time goes on by `time`, its clocks as they do, and what is to happen by then happens.
    pub fn run_for(&mut self, time: Duration) {
        let time = self.drifted(time);
        if time.is_zero() {
            return;
        }
        if let Some(running) = self.running.as_ref().filter(|_| !self.is_stopped) {
            let _entered = machine::enter(self.clocks.clone());
            // Of tasks that may run on any thread, as openraft's, some start others that may not.
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
