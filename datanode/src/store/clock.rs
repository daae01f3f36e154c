//! The clock that supplies the engines with the time.

use std::time::Instant;

/// The time of the runtime's clock, which simulations control.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
