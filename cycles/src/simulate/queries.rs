//! Jobs: 52 queries, each a graph of stages, like the paper's 52 queries of TPC-DS.
//!
//! The paper gives their number, that query 19 uses at most 469 containers, that a job arrives every 300 s, and that
//! 173 s and 433 s divide them into short, medium and long ones. The rest is drawn at random, but always the same:
//! scans that are joined one after the other, aggregated and written.

use std::num::NonZeroU32;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::dag::{Dag, Stage};

/// Number of queries.
pub const QUERIES: usize = 52;
/// Mean time between two jobs.
pub const ARRIVAL_MEAN_S: f64 = 300.0;
/// Seed of the queries.
const SEED: u64 = 0x0054_5043_4453;
/// Median length of a query on an otherwise idle cluster: between the thresholds, so that there are jobs of all
/// types.
const LENGTH_MEDIAN_S: f64 = 270.0;
/// Standard deviation of the logarithm of lengths.
const LENGTH_SIGMA: f64 = 0.9;

/// A query, scaled to a cluster.
#[derive(Clone, Debug)]
pub(super) struct Query {
    pub dag: Dag,
    /// Number of tasks of each stage.
    pub tasks: Vec<u32>,
    /// Mean length of a task of each stage in milliseconds.
    pub task_ms: Vec<f64>,
}

/// A query as drawn, before scaling.
struct Drawn {
    tasks: Vec<f64>,
    task_s: Vec<f64>,
    inputs: Vec<Vec<usize>>,
}

impl Drawn {
    fn work_core_s(&self) -> f64 {
        let stages = self.tasks.iter().zip(&self.task_s);
        stages.map(|(tasks, task_s)| tasks * task_s).sum()
    }
}

/// Returns all queries, with `mean_work_core_s` core-seconds of work on average; each task takes `stretch` times as
/// long as on the testbed.
pub(super) fn queries(mean_work_core_s: f64, stretch: f64) -> Vec<Query> {
    let mut rng = SmallRng::seed_from_u64(SEED);
    let drawn: Vec<Drawn> = (0..QUERIES).map(|_| draw(&mut rng)).collect();
    let work: f64 = drawn.iter().map(Drawn::work_core_s).sum::<f64>() * stretch / QUERIES as f64;
    let more = mean_work_core_s / work;
    drawn.iter().map(|it| scaled(it, more, stretch)).collect()
}

fn draw(rng: &mut SmallRng) -> Drawn {
    let scans: usize = rng.random_range(1..6);
    let (mut tasks, mut inputs) = (Vec::new(), Vec::new());
    for _ in 0..scans {
        tasks.push(lognormal(rng, 40.0, 1.0));
        inputs.push(Vec::new());
    }
    let mut last = 0;
    for scan in 1..scans {
        tasks.push(lognormal(rng, 25.0, 0.8));
        inputs.push(vec![last, scan]);
        last = tasks.len() - 1;
    }
    for _ in 0..rng.random_range(0..3) {
        tasks.push(lognormal(rng, 10.0, 0.8));
        inputs.push(vec![last]);
        last = tasks.len() - 1;
    }
    tasks.push(1.0);
    inputs.push(vec![last]);
    let mut task_s: Vec<f64> = tasks.iter().map(|_| rng.random_range(0.3..1.0)).collect();
    // The longest path through the stages becomes the length of the query. Inputs come before their readers.
    let mut ends_s = vec![0.0_f64; tasks.len()];
    for stage in 0..tasks.len() {
        assert!(
            inputs[stage].iter().all(|&input| input < stage),
            "stage {stage} reads {:?}",
            inputs[stage]
        );
        let begins_s = inputs[stage].iter().map(|&it: &usize| ends_s[it]);
        ends_s[stage] = begins_s.fold(0.0, f64::max) + task_s[stage];
    }
    let length_s = lognormal(rng, LENGTH_MEDIAN_S, LENGTH_SIGMA).clamp(30.0, 3_000.0);
    let factor = length_s / ends_s[tasks.len() - 1];
    for seconds in &mut task_s {
        *seconds *= factor;
    }
    Drawn {
        tasks,
        task_s,
        inputs,
    }
}

fn scaled(drawn: &Drawn, more: f64, stretch: f64) -> Query {
    let count =
        |tasks: f64| NonZeroU32::new((tasks * more).round() as u32).unwrap_or(NonZeroU32::MIN);
    let stages: Vec<Stage> = drawn
        .tasks
        .iter()
        .zip(&drawn.inputs)
        .enumerate()
        .map(|(number, (&tasks, inputs))| Stage {
            name: number.to_string(),
            tasks: count(tasks),
            cores_per_task: NonZeroU32::MIN,
            inputs: inputs.iter().map(usize::to_string).collect(),
        })
        .collect();
    let dag = Dag::new(&stages);
    Query {
        dag: dag.expect("a stage reads from stages that were drawn before it"),
        tasks: stages.iter().map(|stage| stage.tasks.get()).collect(),
        task_ms: drawn
            .task_s
            .iter()
            .map(|it| it * stretch * 1_000.0)
            .collect(),
    }
}

/// Draws from a lognormal distribution with the given median; `sigma` is the standard deviation of the logarithm.
fn lognormal(rng: &mut SmallRng, median: f64, sigma: f64) -> f64 {
    // The standard normal distribution (Box and Muller); 1 - u is in (0, 1], so its logarithm is finite.
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * rng.random::<f64>()).cos();
    median * (sigma * normal).exp()
}

/// Draws from an exponential distribution with the given mean.
pub(super) fn exponential(rng: &mut SmallRng, mean: f64) -> f64 {
    -mean * (1.0 - rng.random::<f64>()).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobType, Thresholds};

    #[test]
    fn queries_are_of_all_types_and_have_the_work_asked_for() {
        let queries = queries(100_000.0, 2.0);
        assert_eq!(queries.len(), QUERIES);
        let work = |query: &Query| -> f64 {
            let stages = query.tasks.iter().zip(&query.task_ms);
            stages
                .map(|(&tasks, ms)| f64::from(tasks) * ms / 1_000.0)
                .sum()
        };
        let mean = queries.iter().map(work).sum::<f64>() / QUERIES as f64;
        assert!((mean - 100_000.0).abs() < 2_000.0, "{mean}");
        let thresholds = Thresholds::PAPER.times(2.0).unwrap();
        let mut counts = [0; 3];
        for query in &queries {
            let mut ends_ms = vec![0.0_f64; query.tasks.len()];
            for wave in query.dag.waves() {
                for &stage in wave {
                    let begins = query.dag.inputs(stage).iter().map(|&it| ends_ms[it]);
                    ends_ms[stage] = begins.fold(0.0, f64::max) + query.task_ms[stage];
                }
            }
            let length_s = ends_ms.into_iter().fold(0.0, f64::max) / 1_000.0;
            let job_type = thresholds.job_type(Some(length_s));
            counts[JobType::ALL.iter().position(|it| *it == job_type).unwrap()] += 1;
        }
        assert!(counts.iter().all(|&count| count >= 10), "{counts:?}");
    }
}
