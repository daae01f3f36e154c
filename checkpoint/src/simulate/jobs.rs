//! Generates jobs like those of Google's cluster in section 2 of the paper: most tasks have low
//! priority; a few have high priority and arrive in bursts that need much of the cluster
//! simultaneously.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

/// The priority of a job, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// Runs on cores that no other job wants (the trace's 0 and 1).
    Low,
    /// The trace's 2 to 8.
    Medium,
    /// Production (the trace's 9 to 11).
    High,
}

impl Priority {
    /// All priorities, the lowest first.
    pub const ALL: [Self; 3] = [Self::Low, Self::Medium, Self::High];
}

/// A group of identical tasks that arrive together; the job is done when the last task is.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Arrival time in seconds since the start.
    pub arrival_s: f64,
    /// Its priority.
    pub priority: Priority,
    /// Number of tasks, each of which needs one core.
    pub tasks: u32,
    /// Work of each task in seconds.
    pub work_s: f64,
    /// Memory of each task in bytes.
    pub memory_bytes: f64,
}

/// Share of all tasks that has each priority: 28.4, 17.3 and 1.7 million of 47.4 (table 1).
pub const TASK_SHARES: [f64; 3] = [0.599, 0.365, 0.036];

/// Parameters of the generated load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Number of cores of the cluster.
    pub cores: u32,
    /// Seconds during which jobs arrive.
    pub duration_s: f64,
    /// Arriving work as a share of what the cores can do in that time.
    pub offered_share: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Minimum and maximum share of the cores that a burst of production tasks wants simultaneously; 3 % of
/// Facebook's jobs wanted more than half of a cluster.
const BURST_SHARE: (f64, f64) = (0.2, 0.6);
/// Mean time in seconds between bursts; the paper cites 500 s at peak times.
const BURST_EVERY_S: f64 = 1500.0;

/// Generates the jobs, in order of arrival.
#[must_use]
pub fn generate(load: &Load) -> Vec<Job> {
    let mut random = Random(Xoshiro256PlusPlus::seed_from_u64(load.seed));
    let mut jobs = Vec::new();
    let work_s = f64::from(load.cores) * load.duration_s * load.offered_share;
    // Median work and mean number of tasks of a job, by priority. Low-priority jobs are long, as they are
    // the ones that lose work when they are killed.
    let kinds = [
        (Priority::Low, 900.0, 12.0),
        (Priority::Medium, 240.0, 12.0),
    ];
    let production_s = production(load, &mut random, &mut jobs);
    let rest_s = (work_s - production_s).max(0.0);
    let weight = |median_s: f64, share: f64| median_s * share;
    let total: f64 = kinds
        .iter()
        .zip(TASK_SHARES)
        .map(|((_, median_s, _), share)| weight(*median_s, share))
        .sum();
    for ((priority, median_s, tasks), share) in kinds.into_iter().zip(TASK_SHARES) {
        let mut left_s = rest_s * weight(median_s, share) / total;
        while left_s > 0.0 {
            let job = Job {
                arrival_s: random.share() * load.duration_s,
                priority,
                tasks: 1 + (random.exponential(tasks) as u32).min(load.cores / 8),
                work_s: random.log_normal(median_s, 0.8).min(load.duration_s / 8.0),
                memory_bytes: random.log_normal(1e9, 0.9).min(8e9),
            };
            left_s -= f64::from(job.tasks) * job.work_s;
            jobs.push(job);
        }
    }
    jobs.sort_by(|one, other| one.arrival_s.total_cmp(&other.arrival_s));
    jobs
}

/// Adds bursts of production jobs. Returns their total work in seconds.
fn production(load: &Load, random: &mut Random, jobs: &mut Vec<Job>) -> f64 {
    let (mut at_s, mut total_s) = (0.0, 0.0);
    loop {
        at_s += random.exponential(BURST_EVERY_S);
        if at_s >= load.duration_s {
            return total_s;
        }
        let share = BURST_SHARE.0 + random.share() * (BURST_SHARE.1 - BURST_SHARE.0);
        let job = Job {
            arrival_s: at_s,
            priority: Priority::High,
            tasks: ((f64::from(load.cores) * share) as u32).max(1),
            work_s: random.log_normal(120.0, 0.5),
            memory_bytes: random.log_normal(1e9, 0.5).min(8e9),
        };
        total_s += f64::from(job.tasks) * job.work_s;
        jobs.push(job);
    }
}

/// Draws from distributions; a seed gives the same sequence on every machine.
pub(super) struct Random(pub Xoshiro256PlusPlus);

impl Random {
    /// Draws uniformly from 0 (inclusive) to 1 (exclusive).
    fn share(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws an integer below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.share() * end as f64) as usize
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.share()).ln()
    }

    /// Draws from a log-normal distribution; `sigma` is the standard deviation of the logarithm.
    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.share()).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.share();
        median * (sigma * radius * angle.cos()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load {
        cores: 400,
        duration_s: 86_400.0,
        offered_share: 0.8,
        seed: 1,
    };

    #[test]
    fn one_seed_gives_the_same_jobs() {
        assert_eq!(generate(&LOAD), generate(&LOAD));
        assert_ne!(generate(&LOAD), generate(&Load { seed: 2, ..LOAD }));
    }

    #[test]
    fn the_jobs_offer_what_was_asked_for() {
        let jobs = generate(&LOAD);
        let work_s: f64 = jobs
            .iter()
            .map(|job| f64::from(job.tasks) * job.work_s)
            .sum();
        let share = work_s / (f64::from(LOAD.cores) * LOAD.duration_s);
        assert!((share - 0.8).abs() < 0.05, "{share}");
        assert!(jobs.is_sorted_by(|one, other| one.arrival_s <= other.arrival_s));
    }

    #[test]
    fn most_tasks_have_low_priority_and_fewest_high() {
        let jobs = generate(&LOAD);
        let tasks = |priority| -> u32 {
            let jobs = jobs.iter().filter(|job| job.priority == priority);
            jobs.map(|job| job.tasks).sum()
        };
        let [low, medium, high] = Priority::ALL.map(tasks);
        assert!(low > medium && medium > high, "{low} {medium} {high}");
    }
}
