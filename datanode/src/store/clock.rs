//! The clock that engines are told the time by.

use std::time::Instant;

/// The time by the clock of the runtime, which simulations set.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
