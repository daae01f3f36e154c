//! A job on dedicated nodes and volunteers, step by step.

use super::INTERVAL_S;
use super::controller::{Controller, Goal, Interval, Rates};

/// Length of a step in seconds.
const STEP_S: f64 = 10.0;
/// Seconds until an added volunteer works.
const START_S: f64 = 10.0;
/// Number of past seconds whose mean predicts an owner's usage.
const HISTORY_S: f64 = 300.0;
/// How sharply productivity levels off where disks are saturated: the measured curves have a knee, not a corner.
const SHARPNESS: f64 = 8.0;
/// A job that takes longer than a week counts as endless.
const LENGTH_MAX_S: f64 = 7.0 * 86_400.0;

/// A kind of job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    /// Its work in core-seconds.
    pub work_core_s: f64,
    /// The share of a disk's bandwidth that one core working for it uses.
    pub disk_share_per_core: f64,
    /// How evenly the disks of the dedicated nodes are used: the mean divided by that of the busiest, 0 to 1.
    pub balance: f64,
    /// Containers that fit into the memory that owners leave on a volunteer: the most cores that the job uses there.
    pub slots: f64,
}

/// Workloads like those of the paper, from much I/O to none. It does not give their requirements: these are chosen
/// such that volunteers save what its figure 4 shows, 20 to 40 %.
pub const WORKLOADS: [Workload; 4] = [
    Workload {
        name: "wordcount",
        work_core_s: 130_000.0,
        disk_share_per_core: 0.075,
        balance: 0.9,
        slots: 4.0,
    },
    Workload {
        name: "grep",
        work_core_s: 80_000.0,
        disk_share_per_core: 0.09,
        balance: 0.85,
        slots: 4.0,
    },
    Workload {
        name: "pi",
        work_core_s: 180_000.0,
        disk_share_per_core: 0.001,
        balance: 1.0,
        slots: 4.0,
    },
    Workload {
        name: "co-occurrence",
        work_core_s: 150_000.0,
        disk_share_per_core: 0.05,
        balance: 0.8,
        slots: 3.0,
    },
];

/// Nodes that hold the data, and servers of owners.
#[derive(Clone, Debug)]
pub struct Nodes {
    dedicated: usize,
    cores: f64,
    period_s: f64,
    owners: Vec<Vec<f32>>,
}

/// The reason why nodes are invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum NodesError {
    /// There are no dedicated nodes, which hold the data.
    #[error("there are no dedicated nodes, or they have no cores")]
    NoDedicated,
    /// A series is empty, or the period of its samples is not positive.
    #[error("the owner of server {0} has no samples")]
    NoSamples(usize),
}

impl Nodes {
    /// Creates this many dedicated nodes of this many cores, and servers of the same size whose owners use these
    /// shares, one every `period_s` seconds; series that end are repeated.
    ///
    /// # Errors
    /// If there is no dedicated node, or an owner without samples.
    pub fn new(
        dedicated: usize,
        cores: u32,
        period_s: f64,
        owners: Vec<Vec<f32>>,
    ) -> Result<Self, NodesError> {
        if dedicated == 0 || cores == 0 {
            return Err(NodesError::NoDedicated);
        }
        let none = |it: &Vec<f32>| it.is_empty() || period_s.is_nan() || period_s <= 0.0;
        if let Some(server) = owners.iter().position(none) {
            return Err(NodesError::NoSamples(server));
        }
        Ok(Self {
            dedicated,
            cores: f64::from(cores),
            period_s,
            owners,
        })
    }

    /// Returns the number of servers of owners.
    #[must_use]
    pub fn volunteers(&self) -> usize {
        self.owners.len()
    }

    /// Returns what an owner leaves at a time, in cores that the job can use (equation 1).
    fn potential(&self, server: usize, at_s: f64, workload: &Workload) -> f64 {
        let samples = &self.owners[server];
        let share = f64::from(samples[(at_s / self.period_s) as usize % samples.len()]);
        (self.cores * (1.0 - share.clamp(0.0, 1.0))).min(workload.slots)
    }

    /// Returns the servers and their predicted potentials, the largest first: the mean of the last minutes.
    fn predicted(&self, at_s: f64, workload: &Workload) -> Vec<(usize, f64)> {
        let steps = (HISTORY_S / STEP_S) as u32;
        let mean = |server: usize| {
            // The time before the job began counts, too: it is the end of the series, which is repeated.
            let series_s = self.period_s * self.owners[server].len() as f64;
            let past = (1..=steps).map(|step| at_s - f64::from(step) * STEP_S);
            let sum: f64 = past
                .map(|past_s| past_s.rem_euclid(series_s))
                .map(|past_s| self.potential(server, past_s, workload))
                .sum();
            sum / f64::from(steps)
        };
        let mut predicted: Vec<(usize, f64)> =
            (0..self.owners.len()).map(|it| (it, mean(it))).collect();
        predicted.sort_by(|a, b| b.1.total_cmp(&a.1));
        predicted
    }
}

/// The number of volunteers that a job uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// Always this many.
    Fixed(usize),
    /// As many as the controller decides every minute.
    Decided(Goal),
}

/// The result of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Its length in seconds.
    pub length_s: f64,
    /// Its costs, in the unit of the rates.
    pub cost: f64,
    /// The mean number of volunteers that it used.
    pub volunteers: f64,
}

/// Runs a job. The rates determine both the costs and the decisions.
#[must_use]
pub fn simulate(nodes: &Nodes, workload: &Workload, rates: &Rates, size: Size) -> Outcome {
    let goal = match size {
        Size::Decided(goal) => goal,
        Size::Fixed(_) => Goal::Cost,
    };
    let mut controller = Controller::new(goal, *rates, nodes.dedicated, nodes.cores);
    let (mut now_s, mut done, mut cost, mut volunteer_s) = (0.0, 0.0, 0.0, 0.0);
    let mut used: Vec<usize> = Vec::new();
    while done < workload.work_core_s && now_s < LENGTH_MAX_S {
        let predicted = nodes.predicted(now_s, workload);
        let potentials: Vec<f64> = predicted.iter().map(|it| it.1).collect();
        let count = match size {
            Size::Fixed(count) => count.min(predicted.len()),
            Size::Decided(_) => controller.decide(&potentials),
        };
        let before = std::mem::take(&mut used);
        used.extend(predicted.iter().take(count).map(|it| it.0));
        assert_eq!(
            used.len(),
            count,
            "volunteers are used, of {}",
            predicted.len()
        );
        let mut means = [0.0; 4];
        let mut in_interval_s = 0.0;
        while in_interval_s < INTERVAL_S && done < workload.work_core_s {
            let starting = |server: &usize| in_interval_s < START_S && !before.contains(server);
            let working = used.iter().filter(|server| !starting(server));
            let of_volunteers: f64 = working
                .map(|&it| nodes.potential(it, now_s, workload))
                .sum();
            let potential = nodes.dedicated as f64 * nodes.cores + of_volunteers;
            let limit = nodes.dedicated as f64 * workload.balance / workload.disk_share_per_core;
            let level = (1.0 + (potential / limit).powf(SHARPNESS)).powf(1.0 / SHARPNESS);
            let actual = potential / level;
            let step_s = STEP_S.min((workload.work_core_s - done) / actual);
            done += actual * step_s;
            now_s += step_s;
            in_interval_s += step_s;
            volunteer_s += used.len() as f64 * step_s;
            cost += rates.per_h(nodes.dedicated, used.len(), actual) * step_s / 3_600.0;
            // The demand on the disks, which they cannot serve where they are saturated.
            let asked = [
                potential,
                actual,
                potential / limit,
                actual / limit * workload.balance,
            ];
            for (mean, value) in means.iter_mut().zip(asked) {
                *mean += value * step_s;
            }
        }
        assert!(
            in_interval_s > 0.0,
            "nothing is done from {now_s} s on, with {done} of {} core-seconds done",
            workload.work_core_s
        );
        let [potential, actual, busiest, disk] = means.map(|sum| sum / in_interval_s);
        controller.observe(&Interval {
            potential,
            actual,
            busiest_disk_share: busiest.min(1.0),
            disk_share: disk,
            done_share: done / workload.work_core_s,
        });
    }
    Outcome {
        length_s: now_s,
        cost,
        volunteers: volunteer_s / now_s.max(STEP_S),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prediction_is_the_mean_of_the_last_minutes() {
        // Series of many lengths: a week is a multiple of some of them, but not of others.
        for samples in 1..=13 {
            let owner = |sample: usize| sample as f32 / 16.0;
            let series = (0..samples).map(owner).collect();
            let nodes = Nodes::new(1, 4, HISTORY_S, vec![series]).expect("an owner with samples");
            for sample in 0..2 * samples {
                let at_s = sample as f64 * HISTORY_S;
                let before = (sample + samples - 1) % samples;
                let expected = 4.0 * (1.0 - f64::from(owner(before)));
                let predicted = nodes.predicted(at_s, &WORKLOADS[0]);
                assert_eq!(predicted, [(0, expected)], "{samples} {sample}");
            }
        }
    }
}
