//! The pattern of a tenant's CPU utilisation, derived from its spectrum (OSDI'16, section 3.2).
//!
//! A series is cut into half-hour means, to which a Fourier transform is applied over whole days:
//!
//! - *constant*: the standard deviation of the means is less than [`CONSTANT_BELOW_PERCENT`] points;
//! - *periodic*: daily cycles and their harmonics account for at least [`PERIODIC_SHARE`] of the variance, and the
//!   strongest cycle is one of them, or the weekly one;
//! - *unpredictable*: the rest.
//!
//! Values over 100 % count as 100 %. Gaps count as the mean of the existing samples. A series of less than
//! [`DAYS_MIN`] days cannot be recognised as periodic, and one that is mostly gaps has no pattern.

use std::sync::Arc;

use rustfft::num_complex::Complex;
use rustfft::{Fft, FftPlanner};

use crate::profile::{BUSY_ABOVE, Pattern};

/// Number of half-hours in a day.
const HALF_HOURS_PER_DAY: usize = 48;
/// Length of a half-hour in seconds.
const HALF_HOUR_S: u64 = 1_800;
/// Most half-hours of a series, about twenty years: bounds the memory that a file with a wrong period can take.
const HALF_HOURS_MAX: usize = 20 * 365 * HALF_HOURS_PER_DAY;

/// A series whose half-hour means deviate by less than this, in percentage points, is constant.
pub const CONSTANT_BELOW_PERCENT: f64 = 2.0;
/// Least share of the variance that the cycles of a periodic series account for.
pub const PERIODIC_SHARE: f64 = 0.2;
/// Days below which nothing counts as periodic: with two days, every second cycle is a daily one.
pub const DAYS_MIN: usize = 7;
/// Share of half-hours with a sample below which there is no pattern.
pub const COVERAGE_MIN: f64 = 0.5;
/// The peak is the quantile of the samples at this level: a single odd sample in a month is no peak, and this
/// predicts next month's peak better (measured: see `docs/OPERATIONS.md`).
pub const PEAK_QUANTILE: f64 = 0.99;

/// The characteristics of a series. Shares are of all cores, 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Its pattern; none when too many samples are missing.
    pub pattern: Option<Pattern>,
    /// Mean of its samples.
    pub average: f64,
    /// The [`PEAK_QUANTILE`] of its samples.
    pub peak: f64,
    /// Share of the samples above [`BUSY_ABOVE`], 0 to 1.
    pub busy_share: f64,
    /// Standard deviation of the half-hour means.
    pub deviation: f64,
    /// Share of the variance that daily cycles and their harmonics account for, 0 to 1.
    pub daily_share: f64,
    /// Share of the half-hours that have a sample, 0 to 1.
    pub coverage: f64,
    /// Mean of each half-hour of the day, counted from the first sample; the average where there is none.
    pub day: [f64; HALF_HOURS_PER_DAY],
}

/// Computes shapes; keeps the plan of a transform for the next series of the same length.
#[derive(Default)]
pub struct Spectra {
    planner: FftPlannerBox,
    buffer: Vec<Complex<f64>>,
    levels: Vec<u32>,
}

/// A planner that implements `Default`.
struct FftPlannerBox(FftPlanner<f64>);

impl Default for FftPlannerBox {
    fn default() -> Self {
        FftPlannerBox(FftPlanner::new())
    }
}

/// Number of steps in which samples are counted to find the peak: 0.01 % each.
const LEVELS: usize = 10_001;

impl Spectra {
    /// Analyses a series of shares (0 to 1, larger ones count as 1), one every `period_s` seconds, at least 1. `None`
    /// when it has no sample at all, or is longer than twenty years. Only the newest whole days are transformed.
    pub fn shape(
        &mut self,
        period_s: u32,
        samples: impl IntoIterator<Item = Option<f32>>,
    ) -> Option<Shape> {
        let mut halves: Vec<Half> = Vec::new();
        self.levels.clear();
        self.levels.resize(LEVELS, 0);
        let mut all = Half::default();
        let mut busy: u32 = 0;
        for (index, sample) in samples.into_iter().enumerate() {
            let at = index as u64 * u64::from(period_s.max(1)) / HALF_HOUR_S;
            let at = usize::try_from(at).ok().filter(|&at| at < HALF_HOURS_MAX)?;
            if at >= halves.len() {
                halves.resize(at + 1, Half::default());
            }
            let Some(share) = sample.filter(|share| !share.is_nan()) else {
                continue;
            };
            let share = f64::from(share.clamp(0.0, 1.0));
            halves[at].add(share);
            all.add(share);
            busy += u32::from(share > BUSY_ABOVE);
            self.levels[(share * (LEVELS - 1) as f64).round() as usize] += 1;
        }
        let average = all.mean()?;
        let days = halves.len() / HALF_HOURS_PER_DAY;
        let mut shape = Shape {
            pattern: None,
            average,
            peak: self.quantile(all.count),
            busy_share: f64::from(busy) / f64::from(all.count),
            deviation: 0.0,
            daily_share: 0.0,
            coverage: 0.0,
            day: day_of(&halves, average),
        };
        // Take the newest days if the series is not a whole number of days.
        let halves = &halves[halves.len() - days * HALF_HOURS_PER_DAY..];
        let present = halves.iter().filter(|half| half.count > 0).count();
        if present == 0 {
            return Some(shape);
        }
        shape.coverage = present as f64 / halves.len() as f64;
        let strongest_is_cycle = self.transform(halves, days, present, &mut shape);
        if shape.coverage >= COVERAGE_MIN {
            shape.pattern = Some(if shape.deviation * 100.0 < CONSTANT_BELOW_PERCENT {
                Pattern::Constant
            } else if days >= DAYS_MIN && shape.daily_share >= PERIODIC_SHARE && strongest_is_cycle
            {
                Pattern::Periodic
            } else {
                Pattern::Unpredictable
            });
        }
        Some(shape)
    }

    fn quantile(&self, count: u32) -> f64 {
        let wanted = (f64::from(count) * PEAK_QUANTILE).ceil() as u64;
        let mut seen = 0u64;
        for (level, &samples) in self.levels.iter().enumerate() {
            seen += u64::from(samples);
            if seen >= wanted {
                return level as f64 / (LEVELS - 1) as f64;
            }
        }
        1.0
    }

    /// Fills in deviation and daily share. Returns whether the strongest cycle is daily, a harmonic of a daily one,
    /// or weekly.
    fn transform(
        &mut self,
        halves: &[Half],
        days: usize,
        present: usize,
        shape: &mut Shape,
    ) -> bool {
        let means = halves.iter().filter_map(Half::mean);
        let mean = means.clone().sum::<f64>() / present as f64;
        let variance = means.map(|m| (m - mean).powi(2)).sum::<f64>() / present as f64;
        shape.deviation = variance.sqrt();
        self.buffer.clear();
        let filled = halves.iter().map(|half| half.mean().unwrap_or(mean) - mean);
        self.buffer
            .extend(filled.map(|value| Complex::new(value, 0.0)));
        let fft: Arc<dyn Fft<f64>> = self.planner.0.plan_fft_forward(halves.len());
        fft.process(&mut self.buffer);
        // The input is real, so the second half mirrors the first.
        let powers = self.buffer[..=halves.len() / 2]
            .iter()
            .map(Complex::norm_sqr);
        let (mut total, mut daily, mut strongest) = (0.0, 0.0, (0, 0.0));
        for (cycles, power) in powers.enumerate().skip(1) {
            total += power;
            if cycles % days == 0 {
                daily += power;
            }
            if power > strongest.1 {
                strongest = (cycles, power);
            }
        }
        if total > 0.0 {
            shape.daily_share = daily / total;
        }
        let weeks = (days as f64 / 7.0).round() as usize;
        strongest.0 > 0 && (strongest.0 % days == 0 || strongest.0 == weeks)
    }
}

/// Sum and number of the samples in a half-hour.
#[derive(Clone, Copy, Default)]
struct Half {
    sum: f64,
    count: u32,
}

impl Half {
    fn add(&mut self, share: f64) {
        self.sum += share;
        self.count += 1;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

fn day_of(halves: &[Half], average: f64) -> [f64; HALF_HOURS_PER_DAY] {
    let mut day = [Half::default(); HALF_HOURS_PER_DAY];
    for (index, mean) in halves.iter().map(Half::mean).enumerate() {
        if let Some(mean) = mean {
            day[index % HALF_HOURS_PER_DAY].add(mean);
        }
    }
    day.map(|half| half.mean().unwrap_or(average))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Thirty days, a sample every five minutes.
    fn month(share: impl Fn(f64) -> f64) -> Vec<Option<f32>> {
        let days = (0..8640).map(|index| f64::from(index) / 288.0);
        days.map(|day| Some(share(day) as f32)).collect()
    }

    fn shape(samples: Vec<Option<f32>>) -> Shape {
        Spectra::default().shape(300, samples).unwrap()
    }

    fn wave(cycles: f64) -> f64 {
        (cycles * std::f64::consts::TAU).sin()
    }

    #[test]
    fn days_and_weeks_are_periodic() {
        let daily = shape(month(|day| 0.4 + 0.2 * wave(day)));
        assert_eq!(daily.pattern, Some(Pattern::Periodic));
        assert!((daily.average - 0.4).abs() < 0.001 && (daily.peak - 0.6).abs() < 0.001);
        assert_eq!(daily.busy_share, 0.0);
        assert!(daily.daily_share > 0.99);
        assert!((daily.day[12] - 0.6).abs() < 0.01 && (daily.day[36] - 0.2).abs() < 0.01);
        let hourly = shape(month(|day| 0.4 + 0.2 * wave(day * 6.0)));
        assert_eq!(hourly.pattern, Some(Pattern::Periodic));
        let weekly = shape(month(|day| 0.4 + 0.2 * wave(day / 7.5) + 0.15 * wave(day)));
        assert_eq!(weekly.pattern, Some(Pattern::Periodic));
    }

    #[test]
    fn little_change_is_constant_and_the_rest_unpredictable() {
        let constant = shape(month(|day| 0.4 + 0.02 * wave(day)));
        assert_eq!(constant.pattern, Some(Pattern::Constant));
        let flat = shape(month(|_| 3.0));
        assert_eq!(
            (flat.pattern, flat.average, flat.peak, flat.busy_share),
            (Some(Pattern::Constant), 1.0, 1.0, 1.0)
        );
        let step = shape(month(|day| {
            if (11.0..14.0).contains(&day) {
                0.9
            } else {
                0.1
            }
        }));
        assert_eq!(step.pattern, Some(Pattern::Unpredictable));
    }

    #[test]
    fn gaps_are_passed_over_and_many_leave_no_pattern() {
        let mut samples = month(|day| 0.4 + 0.2 * wave(day));
        for (index, sample) in samples.iter_mut().enumerate() {
            if index % 288 < 80 {
                *sample = None;
            }
        }
        let some = shape(samples.clone());
        assert_eq!(some.pattern, Some(Pattern::Periodic));
        assert!((some.coverage - 0.73).abs() < 0.01);
        samples[..6000].fill(None);
        assert_eq!(shape(samples.clone()).pattern, None);
        samples.fill(Some(f32::NAN));
        assert_eq!(Spectra::default().shape(300, samples), None);
    }

    #[test]
    fn a_few_days_are_never_periodic() {
        let samples = month(|day| 0.4 + 0.2 * wave(day));
        assert_eq!(
            shape(samples[..3 * 288].to_vec()).pattern,
            Some(Pattern::Unpredictable)
        );
        // Not even one day: an average, but no pattern.
        let hours = shape(samples[..100].to_vec());
        assert_eq!((hours.pattern, hours.coverage), (None, 0.0));
        assert!(hours.average > 0.4);
    }

    #[test]
    fn a_series_of_centuries_takes_no_memory() {
        let years = |count: u32| {
            let samples = (0..=count).map(|_| Some(0.5));
            Spectra::default().shape(365 * 86_400, samples)
        };
        assert!(years(19).is_some());
        assert_eq!(years(200), None);
    }

    proptest! {
        #[test]
        fn any_series_has_shares_between_0_and_1(
            period_s in 0..10_000u32,
            samples in proptest::collection::vec(proptest::option::of(any::<f32>()), 0..3000),
        ) {
            if let Some(shape) = Spectra::default().shape(period_s, samples) {
                for share in [shape.average, shape.peak, shape.deviation, shape.daily_share, shape.coverage] {
                    prop_assert!((0.0..=1.0 + 1e-9).contains(&share), "{shape:?}");
                }
                prop_assert!(shape.day.iter().all(|mean| (0.0..=1.0).contains(mean)));
            }
        }
    }
}
