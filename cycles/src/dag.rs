//! The stages of a job: a directed acyclic graph.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

/// The description of a stage: tasks that do the same work on different data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Its name, unique in the job.
    pub name: String,
    /// Number of tasks, each in its own container.
    pub tasks: NonZeroU32,
    /// Cores of each container.
    pub cores_per_task: NonZeroU32,
    /// Names of the stages whose output it reads: it begins once all of them have ended.
    pub inputs: Vec<String>,
}

/// The reason why stages do not form a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DagError {
    /// There are no stages.
    #[error("the job has no stage")]
    NoStage,
    /// Two stages have the same name.
    #[error("the job has two stages `{0}`")]
    Duplicate(String),
    /// An input does not exist.
    #[error("stage `{stage}` reads the output of `{input}`, which is no stage of the job")]
    UnknownStage {
        /// The stage with the unknown input.
        stage: String,
        /// The name of the input.
        input: String,
    },
    /// Stages wait for each other.
    #[error("stages wait for each other: {}", .0.join(" <- "))]
    Cycle(Vec<String>),
}

/// The stages of a job, known to be acyclic. Stages are numbered by their position in the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dag {
    inputs: Vec<Vec<usize>>,
    outputs: Vec<Vec<usize>>,
    waves: Vec<Vec<usize>>,
    max_concurrent_cores: NonZeroU64,
}

impl Dag {
    /// Checks the stages.
    ///
    /// # Errors
    /// If there is no stage, a name occurs twice, an input is unknown, or stages wait for each other.
    pub fn new(stages: &[Stage]) -> Result<Self, DagError> {
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        for (number, stage) in stages.iter().enumerate() {
            if numbers.insert(&stage.name, number).is_some() {
                return Err(DagError::Duplicate(stage.name.clone()));
            }
        }
        let mut inputs: Vec<Vec<usize>> = Vec::with_capacity(stages.len());
        let mut outputs: Vec<Vec<usize>> = vec![Vec::new(); stages.len()];
        for (number, stage) in stages.iter().enumerate() {
            let mut of_stage = Vec::with_capacity(stage.inputs.len());
            for input in &stage.inputs {
                let unknown = || DagError::UnknownStage {
                    stage: stage.name.clone(),
                    input: input.clone(),
                };
                of_stage.push(*numbers.get(input.as_str()).ok_or_else(unknown)?);
            }
            of_stage.sort_unstable();
            of_stage.dedup();
            for &input in &of_stage {
                outputs[input].push(number);
            }
            inputs.push(of_stage);
        }
        let waves = waves(&inputs, &outputs).map_err(|cycle| {
            let names = cycle.into_iter().map(|stage| stages[stage].name.clone());
            DagError::Cycle(names.collect())
        })?;
        let cores = |stage: &usize| {
            let stage = &stages[*stage];
            u64::from(stage.tasks.get()) * u64::from(stage.cores_per_task.get())
        };
        let of_wave = |wave: &Vec<usize>| wave.iter().map(cores).sum::<u64>();
        let most = waves.iter().map(of_wave).max().and_then(NonZeroU64::new);
        Ok(Self {
            inputs,
            outputs,
            waves,
            max_concurrent_cores: most.ok_or(DagError::NoStage)?,
        })
    }

    /// Returns the number of stages.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the stages whose output a stage reads, in order.
    #[must_use]
    pub fn inputs(&self, stage: usize) -> &[usize] {
        &self.inputs[stage]
    }

    /// Returns the stages that read a stage's output, in order.
    #[must_use]
    pub fn outputs(&self, stage: usize) -> &[usize] {
        &self.outputs[stage]
    }

    /// Returns the waves of a breadth-first traversal: the stages without inputs, then those whose inputs are in
    /// earlier waves, and so on.
    #[must_use]
    pub fn waves(&self) -> &[Vec<usize>] {
        &self.waves
    }

    /// Returns `J.req` of Algorithm 1: the cores of the largest wave, an estimate of the job's maximum concurrent
    /// use.
    #[must_use]
    pub fn max_concurrent_cores(&self) -> NonZeroU64 {
        self.max_concurrent_cores
    }
}

/// Divides stages into waves; returns the stages of a cycle if there is one.
fn waves(inputs: &[Vec<usize>], outputs: &[Vec<usize>]) -> Result<Vec<Vec<usize>>, Vec<usize>> {
    let mut missing: Vec<usize> = inputs.iter().map(Vec::len).collect();
    let mut waves = Vec::new();
    let mut seen = 0;
    let is_first = |stage: &usize| inputs[*stage].is_empty();
    let mut wave: Vec<usize> = (0..inputs.len()).filter(is_first).collect();
    while !wave.is_empty() {
        seen += wave.len();
        let mut next = Vec::new();
        for &output in wave.iter().flat_map(|&stage| &outputs[stage]) {
            assert!(
                missing[output] > 0,
                "stage {output} begins before the end of all that it reads: {inputs:?}"
            );
            missing[output] -= 1;
            if missing[output] == 0 {
                next.push(output);
            }
        }
        next.sort_unstable();
        waves.push(std::mem::replace(&mut wave, next));
    }
    if seen == inputs.len() {
        return Ok(waves);
    }
    // Each remaining stage waits for a remaining one, so following these leads to a cycle.
    let mut path: Vec<usize> = Vec::new();
    let mut at = (0..inputs.len()).find(|&stage| missing[stage] > 0);
    while let Some(stage) = at {
        if let Some(first) = path.iter().position(|&it| it == stage) {
            return Err(path.split_off(first));
        }
        path.push(stage);
        let mut left = inputs[stage].iter().copied();
        at = left.find(|&input| missing[input] > 0);
    }
    unreachable!("stages {path:?} wait for none, but were in no wave: inputs {inputs:?}")
}
