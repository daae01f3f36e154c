//! The busy gate: whether a server is to be left to its owner, judged from samples of the primary tenant's resource
//! usage. Pure: it has no clock and reads nothing.
//!
//! It closes with the first sample above a limit, and opens once all samples of the settling time were clearly below:
//! a primary whose usage fluctuates around the limit keeps it closed.
//!
//! When samples stop arriving, something on the server hangs. The gate keeps its verdict for
//! [`GateOptions::silence_max`], then closes, for the owner's sake, and opens after [`GateOptions::blind_max`],
//! because a broken sensor must not deny access to the data forever.

use std::time::Duration;

/// The primary tenant's usage of its server, as shares from 0 to 1; `None` where unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Share of all cores.
    pub cpu_share: Option<f64>,
    /// Share of the memory.
    pub memory_share: Option<f64>,
    /// Share of the time in which some of its tasks waited for CPU, memory or a disk, whichever was worst.
    pub stalled_share: Option<f64>,
}

impl Load {
    /// Returns the load with every share limited to 0 to 1; NaN becomes unknown.
    #[must_use]
    pub fn clamped(self) -> Self {
        let clamp = |share: Option<f64>| {
            share
                .filter(|share| !share.is_nan())
                .map(|share| share.clamp(0.0, 1.0))
        };
        Self {
            cpu_share: clamp(self.cpu_share),
            memory_share: clamp(self.memory_share),
            stalled_share: clamp(self.stalled_share),
        }
    }

    /// Whether nothing is known.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.cpu_share.is_none() && self.memory_share.is_none() && self.stalled_share.is_none()
    }
}

/// How much is reserved for the owner, and how the gate moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateOptions {
    /// Share of the cores that must be left to the primary on top of what it uses.
    pub cpu_reserve_share: f64,
    /// Share of the memory that must be left to the primary on top of what it uses.
    pub memory_reserve_share: f64,
    /// Largest share of the time in which tasks of the primary may wait for something; `None` for no limit.
    pub stalled_max_share: Option<f64>,
    /// How far below a limit the usage has to be for the gate to open.
    pub hysteresis_share: f64,
    /// How long the usage has to stay there.
    pub settle: Duration,
    /// Without a sample for this long, the gate closes.
    pub silence_max: Duration,
    /// Without a sample for this long, the gate opens.
    pub blind_max: Duration,
}

impl Default for GateOptions {
    /// One third of the cores and of the memory is the owner's reserve, as in the paper.
    fn default() -> Self {
        Self {
            cpu_reserve_share: 1.0 / 3.0,
            memory_reserve_share: 1.0 / 3.0,
            stalled_max_share: None,
            hysteresis_share: 0.05,
            settle: Duration::from_secs(2),
            silence_max: Duration::from_secs(5),
            blind_max: Duration::from_secs(60),
        }
    }
}

/// Why the gate is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The primary uses too much CPU.
    Cpu,
    /// The primary uses too much memory.
    Memory,
    /// The primary's tasks wait too much.
    Stalled,
    /// No samples arrive.
    Silence,
}

/// The verdict of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The server may be used.
    Free,
    /// The server may not be used.
    Busy {
        /// Why.
        reason: Reason,
        /// The earliest time after which it may be free.
        retry_after: Duration,
    },
}

impl Verdict {
    /// Whether the server is to be left alone.
    #[must_use]
    pub fn is_busy(self) -> bool {
        matches!(self, Self::Busy { .. })
    }
}

/// Shortest time after which it makes sense to ask again.
const RETRY_MIN: Duration = Duration::from_millis(100);

/// The busy gate of a server. Times are counted from any fixed moment; one that lies before an earlier one counts as
/// the earlier one.
#[derive(Clone, Debug)]
pub struct BusyGate {
    options: GateOptions,
    /// The latest time that was observed.
    now: Duration,
    /// Time of the last sample with a known load, or of the start.
    sampled: Duration,
    /// Why it is closed, judging by samples.
    closed: Option<Reason>,
    /// Since when all samples have been clearly below the limits.
    low_since: Option<Duration>,
}

impl BusyGate {
    /// Creates an open gate.
    #[must_use]
    pub fn new(options: GateOptions) -> Self {
        Self {
            options,
            now: Duration::ZERO,
            sampled: Duration::ZERO,
            closed: None,
            low_since: None,
        }
    }

    /// Observes a sample. One without any known value does not count.
    pub fn observe(&mut self, now: Duration, load: Load) {
        let now = self.advance(now);
        let load = load.clamped();
        if load.is_unknown() {
            return;
        }
        self.sampled = now;
        if let Some(reason) = self.exceeded(&load, 0.0) {
            self.closed = Some(reason);
            self.low_since = None;
        } else if self.closed.is_some() {
            if self
                .exceeded(&load, self.options.hysteresis_share)
                .is_some()
            {
                self.low_since = None;
            } else {
                let since = *self.low_since.get_or_insert(now);
                if now - since >= self.options.settle {
                    self.closed = None;
                    self.low_since = None;
                }
            }
        }
    }

    /// Returns the verdict at a time.
    #[must_use]
    pub fn verdict(&self, now: Duration) -> Verdict {
        let now = now.max(self.now);
        let silent = now - self.sampled;
        let options = &self.options;
        if silent >= options.blind_max {
            return Verdict::Free;
        }
        if silent >= options.silence_max {
            return Verdict::Busy {
                reason: Reason::Silence,
                retry_after: options.settle.max(RETRY_MIN),
            };
        }
        match self.closed {
            None => Verdict::Free,
            Some(reason) => {
                let settled = self.low_since.map_or(Duration::ZERO, |since| now - since);
                Verdict::Busy {
                    reason,
                    retry_after: options.settle.saturating_sub(settled).max(RETRY_MIN),
                }
            }
        }
    }

    fn advance(&mut self, now: Duration) -> Duration {
        self.now = self.now.max(now);
        self.now
    }

    /// Returns the first limit that a load exceeds, with all limits lowered by `margin`, but at most by half.
    fn exceeded(&self, load: &Load, margin: f64) -> Option<Reason> {
        let above = |share: Option<f64>, limit: f64| {
            share.is_some_and(|share| share > limit - margin.min(limit / 2.0))
        };
        let options = &self.options;
        if above(load.cpu_share, 1.0 - options.cpu_reserve_share) {
            return Some(Reason::Cpu);
        }
        if above(load.memory_share, 1.0 - options.memory_reserve_share) {
            return Some(Reason::Memory);
        }
        match options.stalled_max_share {
            Some(limit) if above(load.stalled_share, limit) => Some(Reason::Stalled),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cpu(share: f64) -> Load {
        Load {
            cpu_share: Some(share),
            ..Load::default()
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn two_thirds_of_the_cores_are_the_limit() {
        let mut gate = BusyGate::new(GateOptions::default());
        gate.observe(ms(0), cpu(0.666));
        assert_eq!(gate.verdict(ms(0)), Verdict::Free);
        gate.observe(ms(400), cpu(0.667));
        let busy = gate.verdict(ms(400));
        assert!(
            matches!(
                busy,
                Verdict::Busy {
                    reason: Reason::Cpu,
                    ..
                }
            ),
            "{busy:?}"
        );
    }

    #[test]
    fn it_opens_only_after_a_quiet_time() {
        let mut gate = BusyGate::new(GateOptions::default());
        gate.observe(ms(0), cpu(0.9));
        // Below the limit, but not clearly.
        for at in 1..20 {
            gate.observe(ms(at * 400), cpu(0.64));
            assert!(gate.verdict(ms(at * 400)).is_busy());
        }
        gate.observe(ms(8000), cpu(0.5));
        gate.observe(ms(9600), cpu(0.5));
        let busy = gate.verdict(ms(9600));
        let retry_after = ms(400);
        assert_eq!(
            busy,
            Verdict::Busy {
                reason: Reason::Cpu,
                retry_after
            }
        );
        // A peak in between restarts the settling time.
        gate.observe(ms(9800), cpu(0.7));
        gate.observe(ms(10_000), cpu(0.1));
        gate.observe(ms(11_900), cpu(0.1));
        assert!(gate.verdict(ms(11_900)).is_busy());
        gate.observe(ms(12_000), cpu(0.1));
        assert_eq!(gate.verdict(ms(12_000)), Verdict::Free);
    }

    #[test]
    fn memory_and_stalls_count_where_they_are_known() {
        let stalled_max_share = Some(0.5);
        let mut gate = BusyGate::new(GateOptions {
            stalled_max_share,
            ..GateOptions::default()
        });
        let stalled = Load {
            stalled_share: Some(0.6),
            ..cpu(0.1)
        };
        gate.observe(ms(0), stalled);
        assert!(gate.verdict(ms(0)).is_busy());
        let mut gate = BusyGate::new(GateOptions::default());
        gate.observe(ms(0), stalled);
        assert!(!gate.verdict(ms(0)).is_busy());
        let memory = Load {
            memory_share: Some(0.7),
            ..Load::default()
        };
        gate.observe(ms(400), memory);
        assert!(gate.verdict(ms(400)).is_busy());
    }

    #[test]
    fn silence_closes_and_blindness_opens() {
        let mut gate = BusyGate::new(GateOptions::default());
        gate.observe(ms(0), cpu(0.1));
        assert!(!gate.verdict(ms(4_999)).is_busy());
        assert!(gate.verdict(ms(5_000)).is_busy());
        // Samples without known values do not help.
        gate.observe(ms(6_000), cpu(f64::NAN));
        gate.observe(ms(6_000), Load::default());
        assert!(gate.verdict(ms(59_999)).is_busy());
        assert!(!gate.verdict(ms(60_000)).is_busy());
        gate.observe(ms(61_000), cpu(0.1));
        assert!(!gate.verdict(ms(61_000)).is_busy());
    }

    #[test]
    fn a_clock_that_jumps_back_stands_still() {
        let mut gate = BusyGate::new(GateOptions::default());
        gate.observe(ms(100_000), cpu(0.9));
        gate.observe(ms(0), cpu(0.1));
        assert!(gate.verdict(ms(0)).is_busy());
        gate.observe(ms(1_000), cpu(0.1));
        assert!(gate.verdict(ms(100_000)).is_busy());
        gate.observe(ms(102_000), cpu(0.1));
        assert!(!gate.verdict(ms(102_000)).is_busy());
    }

    proptest! {
        /// The definition, sample by sample: above a limit it is closed; it opens no sooner than the
        /// settling time after the last sample that was not clearly below.
        #[test]
        fn it_is_closed_above_and_opens_late(
            samples in prop::collection::vec((0u64..1500, prop_oneof![
                0.0..1.5f64, Just(f64::NAN), Just(f64::INFINITY), 0.6..0.7f64
            ]), 1..200),
            reserve in 0.0..=1.0f64,
        ) {
            let options = GateOptions { cpu_reserve_share: reserve, ..GateOptions::default() };
            let mut gate = BusyGate::new(options);
            let mut now = 0;
            let mut was_high: Option<u64> = None;
            let mut closed = false;
            for (step, share) in samples {
                now += step;
                gate.observe(ms(now), cpu(share));
                if share.is_nan() {
                    continue;
                }
                let share = share.clamp(0.0, 1.0);
                if share > 1.0 - reserve {
                    closed = true;
                }
                let limit = 1.0 - reserve;
                if closed && share > limit - options.hysteresis_share.min(limit / 2.0) {
                    was_high = Some(now);
                }
                let busy = gate.verdict(ms(now)).is_busy();
                if share > 1.0 - reserve {
                    prop_assert!(busy);
                }
                if !busy {
                    closed = false;
                    if let Some(high) = was_high.take() {
                        prop_assert!(now - high >= 2000);
                    }
                }
                // Nothing closes it that was never above the limit.
                prop_assert!(closed || !busy);
            }
        }
    }
}
