//! Draws from the distributions that the generator and the simulator need.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

/// A generator for one purpose, independent of those for other purposes of the same seed.
pub(crate) fn stream(seed: u64, purpose: &str) -> SmallRng {
    // FNV-1a: spreads names that differ in one letter, and never changes with a library.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for byte in purpose.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    SmallRng::seed_from_u64(hash)
}

/// The standard normal distribution (Box and Muller).
pub(crate) fn normal(rng: &mut impl Rng) -> f64 {
    // 1 - u lies in (0, 1]: its logarithm is finite.
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

/// Lognormal with the given median; `sigma` is the standard deviation of the logarithm.
pub(crate) fn lognormal(rng: &mut impl Rng, median: f64, sigma: f64) -> f64 {
    median * (sigma * normal(rng)).exp()
}

/// Exponential with the given mean.
pub(crate) fn exponential(rng: &mut impl Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.random::<f64>()).ln()
}

/// A random length from 0 to `max`, which must not be 0: small and large magnitudes are equally likely.
pub(crate) fn length(rng: &mut impl Rng, max: usize) -> usize {
    let magnitude = rng.random_range(0..=max.ilog2());
    rng.random_range(0..=(1_usize << magnitude).min(max))
}

/// Number of trials up to and including the first success (geometric with the given mean), at most `max`.
pub(crate) fn geometric(rng: &mut impl Rng, mean: f64, max: u32) -> u32 {
    let mut trials = 1;
    while trials < max && rng.random::<f64>() > 1.0 / mean {
        trials += 1;
    }
    trials
}

/// `count` different members of a list, in random order; all of them when it has no more.
pub(crate) fn sample<T: Copy>(rng: &mut impl Rng, from: &[T], count: usize) -> Vec<T> {
    let mut all = from.to_vec();
    let count = count.min(all.len());
    for position in 0..count {
        let other = rng.random_range(position..all.len());
        all.swap(position, other);
    }
    all.truncate(count);
    all
}

/// Puts a list into random order.
pub(crate) fn shuffle<T: Copy>(rng: &mut impl Rng, list: &mut Vec<T>) {
    *list = sample(rng, list, list.len());
}

/// The indices of the weights in random order, heavy ones early: as if drawn one by one without
/// replacement, each with a probability in proportion to its weight. Weights that are not positive are left
/// out.
pub(crate) fn weighted_order(rng: &mut impl Rng, weights: &[f64]) -> Vec<usize> {
    // The waiting times of independent exponential clocks come in exactly this order.
    let mut times: Vec<(f64, usize)> = Vec::new();
    for (number, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            times.push((exponential(rng, 1.0 / weight), number));
        }
    }
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    times.into_iter().map(|(_, number)| number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_have_their_moments() {
        let mut rng = stream(1, "test");
        let count = 100_000;
        let mut draw = |draw: &dyn Fn(&mut SmallRng) -> f64| {
            let mut values: Vec<f64> = (0..count).map(|_| draw(&mut rng)).collect();
            values.sort_by(f64::total_cmp);
            let mean = values.iter().sum::<f64>() / f64::from(count);
            (mean, values[count as usize / 2])
        };
        let (mean, median) = draw(&|rng| normal(rng));
        assert!(mean.abs() < 0.02 && median.abs() < 0.02);
        let (_, median) = draw(&|rng| lognormal(rng, 3.0, 1.0));
        assert!((median - 3.0).abs() < 0.1);
        let (mean, _) = draw(&|rng| exponential(rng, 5.0));
        assert!((mean - 5.0).abs() < 0.1);
        let (mean, _) = draw(&|rng| f64::from(geometric(rng, 4.0, 1_000)));
        assert!((mean - 4.0).abs() < 0.1);
    }

    #[test]
    fn samples_are_distinct_members() {
        let mut rng = stream(2, "test");
        let mut drawn = sample(&mut rng, &[5, 6, 7, 8], 3);
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 3);
        assert_eq!(sample(&mut rng, &[1, 2], 9).len(), 2);
    }

    #[test]
    fn heavy_weights_come_first_more_often() {
        let mut rng = stream(3, "test");
        let first = (0..10_000)
            .filter(|_| weighted_order(&mut rng, &[3.0, 0.0, 1.0])[0] == 0)
            .count();
        assert!((7_300..7_700).contains(&first), "{first}");
    }
}
