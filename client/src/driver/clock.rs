//! The clock that supplies the engines with the time.

use std::time::Instant;

/// Returns the time by the clock of the runtime, which simulations control.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
