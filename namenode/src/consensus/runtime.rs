//! The machine's clock, tasks and randomness for openraft: in a simulation, elections too depend on its seed.

use std::future::Future;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::time::Duration;

use harvestfs_protocol::machine;
use openraft::OptionalSend;
use openraft::async_runtime::AsyncRuntime;
use openraft::impls::TokioRuntime;
use rand::rngs::StdRng;

use super::watched::InOrder;

/// Tokio, with the clock and the randomness of the machine.
#[derive(Debug)]
pub struct MachineRuntime(tokio::runtime::Runtime);

/// Time since the machine started: the leases of leaders run on while it is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SinceBoot(Duration);

impl SinceBoot {
    fn left(self) -> Duration {
        self.0.saturating_sub(machine::since_boot())
    }
}

impl Add<Duration> for SinceBoot {
    type Output = Self;
    fn add(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }
}

impl AddAssign<Duration> for SinceBoot {
    fn add_assign(&mut self, later: Duration) {
        *self = *self + later;
    }
}

impl Sub<Duration> for SinceBoot {
    type Output = Self;
    fn sub(self, earlier: Duration) -> Self {
        Self(self.0.saturating_sub(earlier))
    }
}

impl Sub<Self> for SinceBoot {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl SubAssign<Duration> for SinceBoot {
    fn sub_assign(&mut self, earlier: Duration) {
        *self = *self - earlier;
    }
}

impl openraft::Instant for SinceBoot {
    fn now() -> Self {
        Self(machine::since_boot())
    }
}

impl AsyncRuntime for MachineRuntime {
    type JoinError = tokio::task::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = tokio::task::JoinHandle<T>;
    type Sleep = tokio::time::Sleep;
    type Instant = SinceBoot;
    type TimeoutError = tokio::time::error::Elapsed;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = tokio::time::Timeout<T>;
    type ThreadLocalRng = StdRng;
    type Mpsc = <TokioRuntime as AsyncRuntime>::Mpsc;
    type Watch = InOrder;
    type Oneshot = <TokioRuntime as AsyncRuntime>::Oneshot;
    type Mutex<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::Mutex<T>;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        tokio::spawn(future)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        tokio::time::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        tokio::time::sleep(deadline.left())
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(
        duration: Duration,
        future: F,
    ) -> Self::Timeout<R, F> {
        tokio::time::timeout(duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        tokio::time::timeout(deadline.left(), future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        join_error.is_panic()
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        machine::rng()
    }

    /// Only openraft's own tests create a runtime; the namenode runs in one already.
    fn new(_threads: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread();
        Self({ runtime }.enable_all().build().expect("a runtime"))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }
}
