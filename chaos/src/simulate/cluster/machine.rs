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

/// What the wall clocks of all machines say when a simulation begins, in milliseconds since 1970.
const BEGAN_UNIX_MS: u64 = 1_800_000_000_000;

/// See the module.
pub struct Host {
    clocks: Rc<Clocks>,
    /// None: it crashed.
    running: Option<Running>,
    is_stopped: bool,
}

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
        Some(BEGAN_UNIX_MS + elapsed_ms)
    }

    fn random(&self) -> u64 {
        self.rng.borrow_mut().random()
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
            }),
            running: None,
            is_stopped: false,
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

    /// Its clock goes on by `time`, and what is to happen by then happens.
    pub fn run_for(&mut self, time: Duration) {
        if let Some(running) = self.running.as_ref().filter(|_| !self.is_stopped) {
            let _entered = machine::enter(self.clocks.clone());
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
