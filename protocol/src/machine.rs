//! The machine that a part runs on: its clocks, its randomness, its network and its threads.
//!
//! In production it is the real one. A simulation runs the parts of many machines on one thread, each part
//! while its machine is [entered](enter): then clocks are virtual, randomness comes from a seed, datagrams go
//! through [`Machine::bind`], and work that would be handed to another thread is done immediately
//! ([`is_simulated`]), so that one seed decides everything.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rand::distr::{Distribution, StandardUniform};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::time::{ClockId, clock_gettime};

use crate::transport::DatagramSocket;

/// A machine of a simulation.
pub trait Machine {
    /// Returns the time since it started.
    fn since_boot(&self) -> Duration;

    /// Returns its wall clock, in milliseconds since 1970; none if the clock is before that.
    fn unix_now_ms(&self) -> Option<u64>;

    /// Returns the next random number, which depends only on the seed.
    fn random(&self) -> u64;

    /// Returns how long the next operation of its disk takes.
    fn disk_latency(&self) -> Duration;

    /// Opens a socket for datagrams; port 0 means any port.
    ///
    /// # Errors
    /// The port is in use.
    fn bind(&self, addr: SocketAddr) -> io::Result<Arc<dyn DatagramSocket>>;
}

thread_local! {
    static ENTERED: RefCell<Option<Rc<dyn Machine>>> = const { RefCell::new(None) };
}

/// A guard: until it is dropped, this thread acts on a machine of a simulation.
#[must_use]
pub struct Entered {
    before: Option<Rc<dyn Machine>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.with(|entered| *entered.borrow_mut() = self.before.take());
    }
}

/// Enters a simulated machine.
pub fn enter(machine: Rc<dyn Machine>) -> Entered {
    let before = ENTERED.with(|entered| entered.borrow_mut().replace(machine));
    Entered { before }
}

/// Returns the simulated machine that this thread has entered, if any.
pub(crate) fn entered() -> Option<Rc<dyn Machine>> {
    ENTERED.with(|entered| entered.borrow().clone())
}

/// Whether this thread is on a simulated machine. Threads that it would start are not decided by a seed, so it
/// does their work itself.
#[must_use]
pub fn is_simulated() -> bool {
    ENTERED.with(|entered| entered.borrow().is_some())
}

/// Returns the time since the machine started: the clock for leases. It never goes backwards, and also advances
/// while the machine is suspended. Rust's `Instant` stops then: a machine that wakes up would still believe
/// data that others changed long ago.
#[must_use]
pub fn since_boot() -> Duration {
    if let Some(machine) = entered() {
        return machine.since_boot();
    }
    let time = clock_gettime(ClockId::Boottime);
    let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec))
    else {
        panic!("the kernel says that the machine started at {time:?}");
    };
    Duration::new(seconds, nanoseconds)
}

/// Returns the wall clock in milliseconds since 1970, the unit of tokens and stored deadlines; none if the
/// clock is before 1970.
#[must_use]
pub fn unix_now_ms() -> Option<u64> {
    if let Some(machine) = entered() {
        return machine.unix_now_ms();
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.ok()?.as_millis()).ok()
}

/// Returns how long the next operation of a simulated disk takes. Zero on a real machine, whose disk takes its
/// own time.
#[must_use]
pub fn disk_latency() -> Duration {
    entered().map_or(Duration::ZERO, |machine| machine.disk_latency())
}

/// Returns a random value.
#[must_use]
pub fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    match entered() {
        Some(machine) => StdRng::seed_from_u64(machine.random()).random(),
        None => rand::random(),
    }
}

/// Returns a new, randomly seeded generator.
#[must_use]
pub fn rng() -> StdRng {
    match entered() {
        Some(machine) => StdRng::seed_from_u64(machine.random()),
        None => rand::make_rng(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Still;

    impl Machine for Still {
        fn since_boot(&self) -> Duration {
            Duration::from_secs(7)
        }

        fn unix_now_ms(&self) -> Option<u64> {
            Some(8)
        }

        fn random(&self) -> u64 {
            9
        }

        fn disk_latency(&self) -> Duration {
            Duration::from_secs(10)
        }

        fn bind(&self, _: SocketAddr) -> io::Result<Arc<dyn DatagramSocket>> {
            Err(io::ErrorKind::AddrInUse.into())
        }
    }

    #[test]
    fn the_clock_is_that_of_the_uptime() {
        let before = since_boot();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let seconds: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let after = since_boot();
        // The file is rounded to hundredths.
        let around = before.as_secs_f64() - 0.02..=after.as_secs_f64() + 0.02;
        assert!(around.contains(&seconds), "{seconds} in {around:?}");
        assert!(before <= after);
    }

    #[test]
    fn a_machine_of_a_simulation_is_left_again() {
        {
            let _still = enter(Rc::new(Still));
            assert!(is_simulated());
            assert_eq!(
                (since_boot(), unix_now_ms()),
                (Duration::from_secs(7), Some(8))
            );
            assert_eq!(disk_latency(), Duration::from_secs(10));
            assert_eq!(random::<u64>(), random());
        }
        assert!(!is_simulated());
        assert_eq!(disk_latency(), Duration::ZERO);
        assert_ne!(random::<u64>(), random());
        assert!(unix_now_ms() > Some(8));
    }
}
