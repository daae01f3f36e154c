//! The clocks of the namenode: one that only goes forward, for leases and timeouts, and the wall
//! clock, for history and tokens.

use std::time::Duration;

use harvestfs_protocol::since_boot;

/// Milliseconds since the namenode started. Never goes backwards. Time during which the machine is suspended counts,
/// as it does for clients.
#[derive(Debug)]
pub(crate) struct Clock {
    started: Duration,
    paused_ms: u64,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            started: since_boot(),
            paused_ms: 0,
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        let elapsed = since_boot().saturating_sub(self.started);
        let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        elapsed_ms.saturating_sub(self.paused_ms)
    }

    /// Takes out time in which the namenode did not run (stopped, suspended, waiting for its disk):
    /// clients that could not reach it then were not silent.
    pub(crate) fn take_out(&mut self, paused_ms: u64) {
        self.paused_ms += paused_ms;
    }
}

/// The wall clock in milliseconds since 1970, as in tokens.
pub(crate) fn unix_now_ms() -> u64 {
    harvestfs_protocol::unix_now_ms().unwrap_or(0)
}

/// The wall clock in seconds since 1970, as in history; saturates in 2106.
pub(crate) fn unix_now_s() -> u32 {
    u32::try_from(unix_now_ms() / 1_000).unwrap_or(u32::MAX)
}
