//! Scaling the load of a datacentre to another mean (OSDI'16, section 6.1).

use std::fmt;
use std::str::FromStr;

/// A method of scaling load; samples are shares of all cores, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// Multiplies every sample by a factor, limited to 100 %.
    Linear,
    /// Raises every sample to a power: an n-th root, where n need not be a whole number.
    Root,
}

impl Scaling {
    /// Both methods.
    pub const ALL: [Self; 2] = [Self::Linear, Self::Root];

    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Root => "root",
        }
    }

    fn scaled(self, sample: f64, strength: f64) -> f64 {
        match self {
            Self::Linear => (sample * strength).min(1.0),
            Self::Root => sample.powf(1.0 / strength),
        }
    }

    /// Scales samples by the result of [`Scaling::strength`].
    pub fn apply(self, samples: &mut [f32], strength: f64) {
        for sample in samples {
            *sample = self.scaled(f64::from(*sample), strength) as f32;
        }
    }

    /// Returns the factor, or the n of the root, with which the mean over all servers comes as close as possible to
    /// `target` (0 to 1). `loads`: samples, and how many servers follow them.
    pub fn strength<'a>(
        self,
        loads: impl IntoIterator<Item = (&'a [f32], u32)>,
        target: f64,
    ) -> f64 {
        // Counting how often each level occurs makes trying a strength cheap.
        const LEVELS: usize = 4_096;
        let mut counts = vec![0.0; LEVELS + 1];
        for (samples, servers) in loads {
            for &sample in samples {
                let level = (f64::from(sample) * LEVELS as f64).round() as usize;
                counts[level.min(LEVELS)] += f64::from(servers);
            }
        }
        let all: f64 = counts.iter().sum();
        let mean = |strength: f64| -> f64 {
            let levels = counts.iter().enumerate();
            let sum: f64 = levels
                .map(|(level, count)| count * self.scaled(level as f64 / LEVELS as f64, strength))
                .sum();
            sum / all.max(1.0)
        };
        // The mean increases with the strength.
        let (mut low, mut high) = (1e-3, 1e6);
        for _ in 0..60 {
            let middle: f64 = f64::sqrt(low * high);
            if mean(middle) < target {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }
}

/// Returns the mean over all servers, each of which follows its tenant: samples, and how many servers follow them.
pub fn mean<'a>(loads: impl IntoIterator<Item = (&'a [f32], u32)>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for (samples, servers) in loads {
        let of_tenant: f64 = samples.iter().map(|&sample| f64::from(sample)).sum();
        sum += of_tenant * f64::from(servers);
        count += samples.len() as f64 * f64::from(servers);
    }
    sum / f64::max(count, 1.0)
}

/// A scaling of an unknown name was requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown scaling `{0}`; accepted: linear, root")]
pub struct UnknownScaling(String);

impl FromStr for Scaling {
    type Err = UnknownScaling;

    fn from_str(name: &str) -> Result<Self, UnknownScaling> {
        let known = Self::ALL.into_iter().find(|it| it.name() == name);
        known.ok_or_else(|| UnknownScaling(name.to_owned()))
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_scalings_reach_the_mean_asked_for() {
        let loads: Vec<Vec<f32>> = vec![vec![0.1, 0.3, 0.5], vec![0.05, 0.06, 0.05]];
        let servers = [10, 30];
        for scaling in Scaling::ALL {
            for target in [0.1, 0.2, 0.5, 0.8] {
                let weighted = || loads.iter().map(Vec::as_slice).zip(servers);
                let strength = scaling.strength(weighted(), target);
                let mut scaled = loads.clone();
                for samples in &mut scaled {
                    scaling.apply(samples, strength);
                }
                let reached = mean(scaled.iter().map(Vec::as_slice).zip(servers));
                assert!(
                    (reached - target).abs() < 0.01,
                    "{scaling} {target} {reached}"
                );
            }
        }
    }
}
