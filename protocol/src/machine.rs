//! The machine that a part runs on: its clocks, its chance, its network and its threads.
//!
//! In production it is this one. A simulation runs the parts of many machines on one thread, each part
//! while its machine is [entered](enter): then clocks are virtual, chance comes from a seed, datagrams go
//! through [`Machine::bind`], and what would be handed to a thread is done at once
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
    /// How long ago it started.
    fn since_boot(&self) -> Duration;

    /// Its wall clock, in milliseconds since 1970; none when it is before.
    fn unix_now_ms(&self) -> Option<u64>;

    /// A number that nothing but the seed decides, another one each time.
    fn random(&self) -> u64;

    /// How long the next operation of its disk takes.
    fn disk_latency(&self) -> Duration;

    /// Opens a socket for datagrams; port 0: any.
    ///
    /// # Errors
    /// The port is in use.
    fn bind(&self, addr: SocketAddr) -> io::Result<Arc<dyn DatagramSocket>>;
}

thread_local! {
    static ENTERED: RefCell<Option<Rc<dyn Machine>>> = const { RefCell::new(None) };
}

/// What this thread does is done on a machine of a simulation until this is dropped.
#[must_use]
pub struct Entered {
    before: Option<Rc<dyn Machine>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.with(|entered| *entered.borrow_mut() = self.before.take());
    }
}

/// Enters a machine of a simulation.
pub fn enter(machine: Rc<dyn Machine>) -> Entered {
    let before = ENTERED.with(|entered| entered.borrow_mut().replace(machine));
    Entered { before }
}

/// The machine of a simulation on which this thread is.
pub(crate) fn entered() -> Option<Rc<dyn Machine>> {
    ENTERED.with(|entered| entered.borrow().clone())
}

/// Whether this thread is on a machine of a simulation: threads that it would start decide nothing by a
/// seed, so that it does their work itself.
#[must_use]
pub fn is_simulated() -> bool {
    ENTERED.with(|entered| entered.borrow().is_some())
}

/// How long ago the machine started: the clock for leases. It only goes forward, and counts also while the
/// machine is suspended. Rust's `Instant` stops then: a machine that wakes up would believe what others
/// changed long ago.
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

/// The wall clock in milliseconds since 1970, as tokens and deadlines that are kept count; none when it
/// is before.
#[must_use]
pub fn unix_now_ms() -> Option<u64> {
    if let Some(machine) = entered() {
        return machine.unix_now_ms();
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.ok()?.as_millis()).ok()
}

/// How long the next operation of a simulated disk takes. None elsewhere: real ones take their time themselves.
#[must_use]
pub fn disk_latency() -> Duration {
    entered().map_or(Duration::ZERO, |machine| machine.disk_latency())
}

/// A random value.
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

/// A generator of its own, seeded with chance.
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
