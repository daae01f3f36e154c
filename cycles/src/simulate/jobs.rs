//! Unfinished jobs: their stages, and their waiting tasks.

use super::queries::Query;
use crate::select::Selection;

/// A task that is running or will run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub stage: u16,
    /// Its remaining work in milliseconds, as of its beginning or its last checkpoint.
    pub left_ms: u64,
    /// Time to restore it; none without a checkpoint.
    pub restore_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct StageState {
    /// Tasks that have not begun.
    waiting: u32,
    /// Tasks that have not ended.
    left: u32,
    /// Stages that have to end first.
    inputs_left: u32,
}

/// A job that has arrived.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub query: usize,
    pub arrived_ms: u64,
    pub classes: Selection,
    stages: Vec<StageState>,
    stages_left: usize,
    /// Stages with waiting tasks.
    ready: Vec<u16>,
    /// Tasks that were killed or suspended: they come next.
    put_back: Vec<Task>,
    length_s: Option<f64>,
}

impl Job {
    pub(super) fn has_waiting(&self) -> bool {
        !(self.ready.is_empty() && self.put_back.is_empty())
    }

    pub(super) fn put_back(&mut self, task: Task) {
        self.put_back.push(task);
    }
}

/// The effects of the end of a task on its job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    /// The job has ended.
    pub job: bool,
    /// Tasks of further stages are now waiting.
    pub more_wait: bool,
}

/// All jobs, in their order of arrival.
#[derive(Clone, Debug)]
pub(super) struct Jobs {
    queries: Vec<Query>,
    jobs: Vec<Job>,
    unfinished: usize,
}

impl Jobs {
    pub(super) fn new(queries: Vec<Query>) -> Self {
        Self {
            queries,
            jobs: Vec::new(),
            unfinished: 0,
        }
    }

    pub(super) fn query(&self, query: usize) -> &Query {
        &self.queries[query]
    }

    pub(super) fn get(&self, job: u32) -> &Job {
        &self.jobs[job as usize]
    }

    pub(super) fn get_mut(&mut self, job: u32) -> &mut Job {
        &mut self.jobs[job as usize]
    }

    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Adds a job that has just arrived; its first tasks are waiting.
    pub(super) fn arrives(&mut self, query: usize, now_ms: u64, classes: Selection) -> u32 {
        let of_query = &self.queries[query];
        let state = |(stage, &tasks): (usize, &u32)| StageState {
            waiting: tasks,
            left: tasks,
            inputs_left: of_query.dag.inputs(stage).len() as u32,
        };
        let first = of_query.dag.waves().first();
        self.jobs.push(Job {
            query,
            arrived_ms: now_ms,
            classes,
            stages: of_query.tasks.iter().enumerate().map(state).collect(),
            stages_left: of_query.tasks.len(),
            ready: first
                .into_iter()
                .flatten()
                .map(|&stage| stage as u16)
                .collect(),
            put_back: Vec::new(),
            length_s: None,
        });
        self.unfinished += 1;
        self.jobs.len() as u32 - 1
    }

    /// Takes the next task of a job that has one, `spread` times as long as its stage's mean; also returns whether
    /// more are waiting.
    pub(super) fn take(&mut self, job: u32, spread: f64) -> (Task, bool) {
        let job = &mut self.jobs[job as usize];
        if let Some(task) = job.put_back.pop() {
            return (task, job.has_waiting());
        }
        let stage = *job
            .ready
            .last()
            .expect("a job that waits for a core has a task");
        let state = &mut job.stages[usize::from(stage)];
        assert!(
            state.waiting > 0 && state.waiting <= state.left && state.inputs_left == 0,
            "a task of stage {stage} of query {} begins: {state:?}",
            job.query
        );
        state.waiting -= 1;
        if state.waiting == 0 {
            job.ready.pop();
        }
        let mean_ms = self.queries[job.query].task_ms[usize::from(stage)];
        let task = Task {
            stage,
            left_ms: (mean_ms * spread) as u64 + 1,
            restore_ms: None,
        };
        (task, job.has_waiting())
    }

    /// Handles the end of a task.
    pub(super) fn task_ended(&mut self, job: u32, stage: u16) -> Ended {
        let job = &mut self.jobs[job as usize];
        let state = &mut job.stages[usize::from(stage)];
        assert!(
            state.left > state.waiting,
            "a task of stage {stage} of query {} ends, and none has begun: {state:?}",
            job.query
        );
        state.left -= 1;
        let mut more_wait = false;
        if state.left == 0 {
            job.stages_left -= 1;
            for &output in self.queries[job.query].dag.outputs(usize::from(stage)) {
                let reader = &mut job.stages[output];
                reader.inputs_left -= 1;
                if reader.inputs_left == 0 {
                    job.ready.push(output as u16);
                    more_wait = true;
                }
            }
        }
        Ended {
            job: job.stages_left == 0,
            more_wait,
        }
    }

    /// Handles the end of a job.
    pub(super) fn finished(&mut self, job: u32, length_s: f64) {
        let finished = &mut self.jobs[job as usize];
        assert!(
            finished.stages_left == 0 && !finished.has_waiting() && finished.length_s.is_none(),
            "job {job} has ended: {finished:?}"
        );
        finished.length_s = Some(length_s);
        self.unfinished -= 1;
    }

    /// Returns how long every job took, or has taken so far.
    pub(super) fn lengths_s(&self, now_ms: u64) -> Vec<f64> {
        let until_now = |job: &Job| (now_ms - job.arrived_ms) as f64 / 1_000.0;
        let jobs = self.jobs.iter();
        jobs.map(|job| job.length_s.unwrap_or_else(|| until_now(job)))
            .collect()
    }
}
