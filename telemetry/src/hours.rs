//! The hours of the week in which a tenant was busy.

use serde::{Deserialize, Serialize};

use crate::profile::BUSY_ABOVE;

const HOUR_S: u64 = 3_600;
const HOURS: u64 = 7 * 24;

/// A set of hours of the week, counted from the hour in which 1970 began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeekHours([u64; HOURS.div_ceil(64) as usize]);

impl WeekHours {
    /// No hour.
    pub const NONE: Self = Self([0; 3]);
    /// All of them.
    pub const ALL: Self = Self([u64::MAX, u64::MAX, (1 << (HOURS % 64)) - 1]);

    /// Returns the hours in which at least one of the samples was above [`BUSY_ABOVE`]. Samples are shares of all
    /// cores, one every `period_s` seconds (at least 1), the first at `start_s`.
    pub fn busy(start_s: u64, period_s: u32, samples: impl Iterator<Item = Option<f32>>) -> Self {
        let mut hours = Self::NONE;
        for (index, sample) in samples.enumerate() {
            if sample.is_some_and(|share| f64::from(share) > BUSY_ABOVE) {
                hours.insert(start_s + index as u64 * u64::from(period_s.max(1)));
            }
        }
        hours
    }

    /// Adds the hour of a time in seconds.
    pub fn insert(&mut self, at_s: u64) {
        let hour = at_s / HOUR_S % HOURS;
        self.0[(hour / 64) as usize] |= 1 << (hour % 64);
    }

    /// Returns the hours in both sets.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        let [a, b, c] = self.0;
        let [d, e, f] = other.0;
        Self([a & d, b & e, c & f])
    }

    /// Returns the number of hours, up to 168.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.iter().map(|hours| hours.count_ones()).sum()
    }

    /// Whether it contains no hour.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_folds_into_a_week() {
        // Busy for five minutes at the start of the third hour of each day.
        let day = |index: u64| index % 288;
        let samples = (0..30 * 288).map(|index| Some(if day(index) == 24 { 0.7 } else { 0.6 }));
        let mornings = WeekHours::busy(0, 300, samples);
        assert_eq!(mornings.count(), 7);
        let samples = (0..30 * 288).map(|index| (day(index) >= 144).then_some(1.0));
        let afternoons = WeekHours::busy(0, 300, samples);
        assert_eq!(afternoons.count(), 7 * 12);
        assert!(mornings.common(afternoons).is_empty());
        // The same ten hours later.
        let samples = (0..30 * 288).map(|index| Some(if day(index) == 24 { 0.7 } else { 0.6 }));
        let evenings = WeekHours::busy(10 * 3_600, 300, samples);
        assert_eq!(evenings.common(afternoons), evenings);
    }

    #[test]
    fn all_hours_are_those_of_a_week() {
        let mut hours = WeekHours::NONE;
        for hour in 1_000..1_168 {
            assert_ne!(hours, WeekHours::ALL);
            hours.insert(hour * 3_600);
        }
        assert_eq!(hours, WeekHours::ALL);
        assert_eq!(hours.count(), 168);
        assert_eq!(WeekHours::ALL.common(hours), hours);
    }
}
