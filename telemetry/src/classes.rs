//! Utilisation classes: tenants whose average servers have similar CPU utilisation (OSDI'16, section 4.1).
//!
//! Tenants of one pattern are grouped into classes by k-means over their typical day: the mean of each half-hour of
//! the day, the average, the peak and the deviation. Each class is labelled with its pattern, average and peak.

use std::collections::BTreeMap;

use linfa::DatasetBase;
use linfa::traits::{Fit, Predict};
use linfa_clustering::{KMeans, KMeansInit};
use ndarray::Array2;
use rand_xoshiro::Xoshiro256Plus;
use rand_xoshiro::rand_core::SeedableRng;

use crate::profile::Pattern;
use crate::spectrum::Shape;

/// Most classes of one pattern (the paper found 13, 5 and 5 in DC-9).
pub const CLASSES_PER_PATTERN_MAX: usize = 13;
/// Seed of the initial centres: the same history gives the same classes.
const SEED: u64 = 0x4856_4643_4c53;
/// Number of runs, of which the best is kept.
const RUNS: usize = 4;
/// Most iterations of one run.
const STEPS_MAX: u64 = 100;
/// Features of a tenant: the half-hours of a day, average, peak, deviation.
const FEATURES: usize = 51;
/// Factor on average, peak and deviation: in the squared distance, each of them counts as much as 16 half-hours.
const LEVEL_WEIGHT: f64 = 4.0;

/// Tenants whose average servers have similar CPU utilisation.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// The pattern of all its tenants.
    pub pattern: Pattern,
    /// Mean of their averages, a share of all cores.
    pub average_cpu_share: f64,
    /// Mean of their peaks, a share of all cores.
    pub peak_cpu_share: f64,
    /// The tenants, by their index in the input.
    pub members: Vec<usize>,
}

/// Groups tenants into classes. Tenants without a pattern belong to none. Within a pattern, classes are in order of
/// their average.
pub fn classes(shapes: &[Option<Shape>]) -> Vec<Class> {
    let mut by_pattern: BTreeMap<Pattern, Vec<usize>> = BTreeMap::new();
    for (index, shape) in shapes.iter().enumerate() {
        if let Some(pattern) = shape.as_ref().and_then(|shape| shape.pattern) {
            by_pattern.entry(pattern).or_default().push(index);
        }
    }
    let mut all = Vec::new();
    for (pattern, members) in by_pattern {
        let groups = cluster(shapes, &members);
        let mut classes: Vec<Class> = groups
            .into_values()
            .map(|members| class_of(shapes, pattern, members))
            .collect();
        classes.sort_by(|a, b| a.average_cpu_share.total_cmp(&b.average_cpu_share));
        all.extend(classes);
    }
    all
}

/// Returns the number of classes for this many tenants: the square root of half of it (a common rule of thumb: as
/// many classes as tenants in each would be too many to tell apart), at most the paper's 13.
fn class_count(members: usize) -> usize {
    let count = (members as f64 / 2.0).sqrt().round() as usize;
    count.clamp(1, CLASSES_PER_PATTERN_MAX)
}

fn cluster(shapes: &[Option<Shape>], members: &[usize]) -> BTreeMap<usize, Vec<usize>> {
    let features = Array2::from_shape_fn((members.len(), FEATURES), |(row, column)| {
        let Some(shape) = shapes.get(members[row]).and_then(Option::as_ref) else {
            return 0.0;
        };
        match column {
            48 => shape.average * LEVEL_WEIGHT,
            49 => shape.peak * LEVEL_WEIGHT,
            50 => shape.deviation * LEVEL_WEIGHT,
            half_hour => shape.day[half_hour],
        }
    });
    let data = DatasetBase::from(features);
    let rng = Xoshiro256Plus::seed_from_u64(SEED);
    let fitted = KMeans::params_with_rng(class_count(members.len()), rng)
        .init_method(KMeansInit::KMeansPlusPlus)
        .n_runs(RUNS)
        .max_n_iterations(STEPS_MAX)
        .tolerance(1e-4)
        .fit(&data);
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    match fitted {
        Ok(model) => {
            let labels = model.predict(&data);
            for (&member, &label) in members.iter().zip(labels.iter()) {
                groups.entry(label).or_default().push(member);
            }
        }
        // It did not converge: one class for this pattern is better than none.
        Err(error) => {
            tracing::warn!(%error, "tenants were not clustered; those of one pattern are one class");
            groups.insert(0, members.to_vec());
        }
    }
    groups
}

fn class_of(shapes: &[Option<Shape>], pattern: Pattern, members: Vec<usize>) -> Class {
    let mean = |pick: fn(&Shape) -> f64| {
        let shares = members
            .iter()
            .filter_map(|&member| shapes[member].as_ref().map(pick));
        shares.sum::<f64>() / members.len().max(1) as f64
    };
    Class {
        pattern,
        average_cpu_share: mean(|shape| shape.average),
        peak_cpu_share: mean(|shape| shape.peak),
        members,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spectrum::Spectra;

    fn shape(level: f32, swing: f32) -> Option<Shape> {
        let samples = (0..30 * 288).map(|index| {
            let day = index as f32 / 288.0;
            Some(level + swing * (day * std::f32::consts::TAU).sin())
        });
        Spectra::default().shape(300, samples)
    }

    #[test]
    fn alike_tenants_share_a_class() {
        let mut shapes = Vec::new();
        for number in 0..10 {
            let little = number as f32 / 1000.0;
            shapes.push(shape(0.1 + little, 0.0));
            shapes.push(shape(0.8 + little, 0.0));
            shapes.push(shape(0.5 + little, 0.3));
        }
        shapes.push(None);
        let classes = classes(&shapes);
        assert_eq!(classes, super::classes(&shapes));
        let class_of = |member: usize| classes.iter().position(|c| c.members.contains(&member));
        assert_eq!(class_of(30), None);
        for member in 0..30 {
            let class = &classes[class_of(member).unwrap()];
            // Never together with a tenant of another kind.
            assert!(class.members.iter().all(|other| other % 3 == member % 3));
        }
        let periodic = &classes[class_of(2).unwrap()];
        assert_eq!(periodic.pattern, Pattern::Periodic);
        assert!((periodic.average_cpu_share - 0.5).abs() < 0.02);
        assert!((periodic.peak_cpu_share - 0.8).abs() < 0.02);
        assert_eq!(classes.iter().map(|c| c.members.len()).sum::<usize>(), 30);
    }

    #[test]
    fn few_tenants_and_equal_ones_have_a_class_too() {
        assert_eq!(classes(&[]), []);
        assert_eq!(classes(&[None]), []);
        let one = classes(&[shape(0.5, 0.0)]);
        assert_eq!(one[0].members, [0]);
        let same = vec![shape(0.5, 0.0); 50];
        let members: usize = classes(&same).iter().map(|c| c.members.len()).sum();
        assert_eq!(members, 50);
    }
}
