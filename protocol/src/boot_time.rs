//! The clock for leases: it only goes forward, and counts also while the machine is suspended.
//! Rust's `Instant` stops then: a machine that wakes up would believe what others changed long ago.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How long ago the machine started.
#[must_use]
pub fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec))
    else {
        panic!("the kernel says that the machine started at {time:?}");
    };
    Duration::new(seconds, nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_clock_of_the_uptime() {
        let before = since_boot();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let seconds: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let after = since_boot();
        // The file is rounded to hundredths.
        let around = before.as_secs_f64() - 0.02..=after.as_secs_f64() + 0.02;
        assert!(around.contains(&seconds), "{seconds} in {around:?}");
        assert!(before <= after);
    }
}
