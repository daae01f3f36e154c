//! The load of a tenant: CPU use of its average server over a month.

use std::f64::consts::TAU;
use std::sync::Arc;

use harvestfs_telemetry::profile::Pattern;
use rand::RngExt;
use rand::rngs::SmallRng;

use super::DAYS_PER_MONTH;
use crate::random::{exponential, lognormal, normal, stream};

/// Seconds that one sample covers.
pub const SLOT_S: u64 = 300;
/// Samples per day.
pub const SLOTS_PER_DAY: usize = (super::DAY_S / SLOT_S) as usize;
const SLOTS_PER_MONTH: usize = SLOTS_PER_DAY * DAYS_PER_MONTH as usize;
/// Correlation of the noise from one sample to the next: it decays within an hour.
const NOISE_MEMORY: f64 = 0.9;

/// A model of a tenant's load. Levels are shares of all cores, 0 to 1.
#[derive(Clone, Debug)]
pub enum LoadModel {
    /// High by day, low by night, lower at the weekend.
    Periodic {
        /// Mean on a working day.
        level: f64,
        /// Difference between day and mean, as a share of the mean.
        swing: f64,
        /// The hour of the peak, 0 to 24.
        peak_hour: f64,
        /// Factor of the level at the weekend.
        weekend: f64,
        /// Decides the noise.
        seed: u64,
    },
    /// Nearly constant.
    Constant {
        /// Mean.
        level: f64,
        /// Decides the noise.
        seed: u64,
    },
    /// Episodes of hours, each with a level of its own.
    Unpredictable {
        /// Median level of an episode.
        level: f64,
        /// Decides episodes and noise.
        seed: u64,
    },
    /// As recorded: samples of [`SLOT_S`], repeated from the start when they end.
    Recorded {
        /// The samples.
        samples: Arc<[f32]>,
        /// By how many samples this tenant is ahead of the recording; may be negative.
        shift_slots: i64,
    },
}

impl LoadModel {
    /// Draws a load with the given pattern.
    pub(super) fn draw(rng: &mut SmallRng, pattern: Pattern) -> Self {
        let seed = rng.random();
        match pattern {
            Pattern::Periodic => Self::Periodic {
                level: lognormal(rng, 0.22, 0.4).clamp(0.06, 0.5),
                swing: rng.random_range(0.35..0.75),
                // Most users are awake at the same time.
                peak_hour: (14.0 + 3.0 * normal(rng)).rem_euclid(24.0),
                weekend: rng.random_range(0.6..1.0),
                seed,
            },
            Pattern::Constant => Self::Constant {
                level: lognormal(rng, 0.06, 1.0).clamp(0.003, 0.6),
                seed,
            },
            Pattern::Unpredictable => Self::Unpredictable {
                level: lognormal(rng, 0.15, 0.5).clamp(0.08, 0.4),
                seed,
            },
        }
    }

    /// CPU use of the average server in a month of the history, sample by sample, 0 to 1.
    #[must_use]
    pub fn month(&self, month: u32) -> Vec<f32> {
        let noise_of = |seed: u64| Noise::new(stream(seed, &format!("load of month {month}")));
        match self {
            Self::Periodic {
                level,
                swing,
                peak_hour,
                weekend,
                seed,
            } => {
                let mut noise = noise_of(*seed);
                let first_day = u64::from(month) * DAYS_PER_MONTH;
                samples(|slot| {
                    let hour = (slot % SLOTS_PER_DAY) as f64 * 24.0 / SLOTS_PER_DAY as f64;
                    let day = first_day + (slot / SLOTS_PER_DAY) as u64;
                    let factor = if day % 7 >= 5 { *weekend } else { 1.0 };
                    let wave = ((hour - peak_hour) / 24.0 * TAU).cos();
                    level * factor * (1.0 + swing * wave + 0.08 * noise.next())
                })
            }
            Self::Constant { level, seed } => {
                let mut noise = noise_of(*seed);
                // The spread of half-hour means stays below two points.
                let spread = (0.15 * level).min(0.015);
                samples(|_| level + spread * noise.next())
            }
            Self::Unpredictable { level, seed } => {
                let mut noise = noise_of(*seed);
                let (mut left, mut now) = (0.0, *level);
                samples(|_| {
                    if left <= 0.0 {
                        left = exponential(&mut noise.rng, 8.0 * 3600.0 / SLOT_S as f64);
                        now = lognormal(&mut noise.rng, *level, 0.7);
                    }
                    left -= 1.0;
                    now * (1.0 + 0.1 * noise.next())
                })
            }
            Self::Recorded {
                samples,
                shift_slots,
            } => {
                let len = samples.len().max(1) as i64;
                let start = i64::from(month) * SLOTS_PER_MONTH as i64 + shift_slots;
                (0..SLOTS_PER_MONTH as i64)
                    .map(|slot| {
                        let at = (start + slot).rem_euclid(len) as usize;
                        samples.get(at).copied().unwrap_or(0.0)
                    })
                    .collect()
            }
        }
    }
}

fn samples(mut at: impl FnMut(usize) -> f64) -> Vec<f32> {
    (0..SLOTS_PER_MONTH)
        .map(|slot| at(slot).clamp(0.0, 1.0) as f32)
        .collect()
}

/// Noise with mean 0 and variance 1 in which neighbouring samples are correlated.
pub(crate) struct Noise {
    rng: SmallRng,
    now: f64,
}

impl Noise {
    pub(crate) fn new(mut rng: SmallRng) -> Self {
        let now = normal(&mut rng);
        Self { rng, now }
    }

    pub(crate) fn next(&mut self) -> f64 {
        let fresh = normal(&mut self.rng);
        self.now = NOISE_MEMORY * self.now + (1.0 - NOISE_MEMORY * NOISE_MEMORY).sqrt() * fresh;
        self.now
    }
}
