//! A recorded series replayed as the primary tenant, in real or scaled time.

use std::time::{Duration, Instant};

use super::{SampleError, Sampler};
use crate::gate::Load;
use crate::traces::Series;

/// A series that is replayed; after its end it starts over.
///
/// A sample holds for its whole period. In a gap, the last sample before it holds (or the first one, if there is none
/// before). Values over 100 % count as 100 %. Time is that of the monotonic clock, which does not jump; if it went
/// backwards nevertheless, an earlier sample would be shown.
#[derive(Clone, Debug)]
pub struct TraceReplay {
    /// One for each period, with gaps filled.
    shares: Vec<f32>,
    period_s: f64,
    speed: f64,
    /// How much of the series has passed at `began`, in seconds of the trace.
    skipped_s: f64,
    began: Instant,
}

/// Why a series cannot be replayed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// It has no samples.
    #[error("the series `{0}` has no samples")]
    Empty(String),
    /// The speed is not a positive number.
    #[error("a trace is replayed at a speed above 0 and at most {SPEED_MAX}")]
    Speed,
}

/// At this speed, a month takes a quarter of a minute.
const SPEED_MAX: f64 = 200_000.0;

impl TraceReplay {
    /// Replays a series from its start at `began`, `speed` times as fast as it was recorded. `skipped` of real time
    /// have already passed by then (in a replay that others began earlier).
    ///
    /// # Errors
    /// [`ReplayError`].
    pub fn new(
        series: &Series,
        speed: f64,
        began: Instant,
        skipped: Duration,
    ) -> Result<Self, ReplayError> {
        if !(speed > 0.0 && speed <= SPEED_MAX) {
            return Err(ReplayError::Speed);
        }
        let first = (0..series.len()).find_map(|index| series.share(index));
        let Some(mut last) = first else {
            return Err(ReplayError::Empty(series.name.clone()));
        };
        let mut shares = Vec::with_capacity(series.len());
        for index in 0..series.len() {
            last = series.share(index).unwrap_or(last);
            shares.push(last);
        }
        Ok(Self {
            shares,
            period_s: f64::from(series.period_s),
            speed,
            skipped_s: skipped.as_secs_f64() * speed,
            began,
        })
    }

    /// Returns the share at a time.
    #[must_use]
    pub fn share(&self, now: Instant) -> f64 {
        let elapsed_s = now.saturating_duration_since(self.began).as_secs_f64();
        let periods = (self.skipped_s + elapsed_s * self.speed) / self.period_s;
        // A position beyond 2^52 samples, after ages, loses its fraction but stays in range.
        let index = periods.rem_euclid(self.shares.len() as f64) as usize;
        f64::from(self.shares[index.min(self.shares.len() - 1)])
    }
}

impl Sampler for TraceReplay {
    fn sample(&mut self, now: Instant) -> Result<Load, SampleError> {
        Ok(Load {
            cpu_share: Some(self.share(now)),
            ..Load::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(percents: &[Option<f32>], speed: f64, skipped_s: u64) -> TraceReplay {
        let series = Series::new("s", 300, percents.iter().copied());
        let skipped = Duration::from_secs(skipped_s);
        TraceReplay::new(&series, speed, Instant::now(), skipped).unwrap()
    }

    fn at(replay: &TraceReplay, seconds: f64) -> f64 {
        replay.share(replay.began + Duration::from_secs_f64(seconds))
    }

    #[test]
    fn samples_follow_each_other_in_scaled_time() {
        let percents = [Some(10.0), Some(50.0), Some(90.0)];
        let one = replay(&percents, 1.0, 0);
        let scaled = replay(&percents, 300.0, 0);
        let later = replay(&percents, 300.0, 2);
        for (second, expected) in [(0.5, 0.1), (1.5, 0.5), (2.5, 0.9), (3.5, 0.1)] {
            assert!((at(&scaled, second) - expected).abs() < 1e-6);
            assert!((at(&one, second * 300.0) - expected).abs() < 1e-6);
            assert_eq!(at(&later, second), at(&scaled, second + 2.0));
        }
        let earlier = scaled.began.checked_sub(Duration::from_secs(5));
        if let Some(earlier) = earlier {
            assert_eq!(scaled.share(earlier), at(&scaled, 0.0));
        }
    }

    #[test]
    fn gaps_and_values_over_100_percent_are_bridged() {
        let percents = [None, Some(20.0), None, None, Some(180.0)];
        let replay = replay(&percents, 300.0, 0);
        let shares: Vec<f64> = (0..5)
            .map(|second| at(&replay, f64::from(second) + 0.5))
            .collect();
        let expected = [0.2, 0.2, 0.2, 0.2, 1.0];
        for (share, expected) in shares.iter().zip(expected) {
            assert!((share - expected).abs() < 1e-6, "{shares:?}");
        }
    }

    #[test]
    fn what_cannot_be_replayed_is_refused() {
        let now = Instant::now();
        let new = |percents: Vec<Option<f32>>, speed| {
            let series = Series::new("s", 300, percents);
            TraceReplay::new(&series, speed, now, Duration::ZERO).err()
        };
        assert_eq!(new(vec![], 1.0), Some(ReplayError::Empty("s".into())));
        assert_eq!(new(vec![None], 1.0), Some(ReplayError::Empty("s".into())));
        for speed in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            assert_eq!(new(vec![Some(1.0)], speed), Some(ReplayError::Speed));
        }
    }
}
