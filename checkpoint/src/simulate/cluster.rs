//! Simulates, in virtual time, a cluster that schedules by priority and preempts. The decisions are
//! those of [`crate::adaptive`], which the command also uses.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::SeedableRng;

use super::jobs::{Job, Priority, Random};
use crate::adaptive::{Bandwidth, Preemption, Resumption, Site, Victim, resume};

/// What happens to tasks whose cores are needed by tasks of higher priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// They keep their cores, and the others wait.
    Wait,
    /// They are killed.
    Kill,
    /// They are checkpointed.
    Checkpoint,
    /// They are killed or checkpointed, as Algorithms 1 and 2 decide.
    Adaptive,
}

/// Parameters of a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// Number of machines.
    pub nodes: usize,
    /// Number of tasks that each machine runs at the same time.
    pub cores_per_node: usize,
    /// Bandwidth of each node's checkpoints.
    pub bandwidth: Bandwidth,
    /// Share of its memory that a task has changed when it is checkpointed again.
    pub changed_share: f64,
}

/// Power of an idle machine in watts, and what each busy core adds.
const IDLE_W: f64 = 100.0;
const CORE_W: f64 = 10.0;

/// Result of a simulation.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Outcome {
    /// Core seconds of work that counted.
    pub useful_s: f64,
    /// Core seconds of work that was lost to killing.
    pub lost_s: f64,
    /// Core seconds spent on storing and reading checkpoints, and on waiting for that.
    pub overhead_s: f64,
    /// Energy in joules used until the last job was done.
    pub energy_j: f64,
    /// Mean time in seconds from arrival to end of the jobs of each priority, the lowest priority first.
    pub response_s: [f64; 3],
    /// Number of times that a task was killed.
    pub kills: u64,
    /// Number of times that a task was checkpointed.
    pub checkpoints: u64,
    /// Number of times that a task was resumed on another node than that of its checkpoint.
    pub remote_resumes: u64,
}

impl Outcome {
    /// Share of the used core time that was lost or spent on checkpoints.
    #[must_use]
    pub fn wasted_share(&self) -> f64 {
        let wasted_s = self.lost_s + self.overhead_s;
        wasted_s / (wasted_s + self.useful_s)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Waiting,
    /// Has been reading its checkpoint since `since_s`.
    Restoring {
        node: usize,
        since_s: f64,
    },
    Running {
        node: usize,
        since_s: f64,
    },
    /// Holds its core until its checkpoint is stored.
    Dumping {
        node: usize,
        since_s: f64,
    },
    Done,
}

#[derive(Clone, Debug)]
struct Task {
    job: usize,
    state: State,
    /// Seconds of work that its checkpoint preserves.
    saved_s: f64,
    /// Seconds of work, including the saved ones, that it had done when it last started to run.
    done_s: f64,
    checkpoint_node: Option<usize>,
    /// Counts its states: events of an earlier state are ignored.
    epoch: u32,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Arrive(usize),
    /// The task's state ends.
    Next {
        task: usize,
        epoch: u32,
    },
}

#[derive(Clone, Copy, Debug)]
struct Event {
    at_s: f64,
    /// Keeps simultaneous events in the order in which they were created.
    number: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// Orders the earliest event as the greatest, as the heap returns the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        let earlier = other.at_s.total_cmp(&self.at_s);
        earlier.then(other.number.cmp(&self.number))
    }
}

#[derive(Clone, Debug)]
struct Node {
    free_cores: usize,
    /// Time until which its storage is busy with checkpoints and restores.
    storage_until_s: f64,
    running: Vec<usize>,
}

struct World<'a> {
    cluster: &'a Cluster,
    policy: Policy,
    jobs: &'a [Job],
    tasks: Vec<Task>,
    tasks_left: Vec<u32>,
    nodes: Vec<Node>,
    /// Waiting tasks, by priority.
    queues: [VecDeque<usize>; 3],
    /// Cores that checkpoints in progress are about to free, by the priority for which they are freed.
    promised: [usize; 3],
    events: BinaryHeap<Event>,
    events_made: u64,
    now_s: f64,
    random: Random,
    ended_s: Vec<f64>,
    outcome: Outcome,
}

/// Runs all jobs to their end.
#[must_use]
pub fn run(cluster: &Cluster, policy: Policy, jobs: &[Job], seed: u64) -> Outcome {
    let mut world = World {
        cluster,
        policy,
        jobs,
        tasks: Vec::new(),
        tasks_left: jobs.iter().map(|job| job.tasks).collect(),
        nodes: vec![
            Node {
                free_cores: cluster.cores_per_node,
                storage_until_s: 0.0,
                running: Vec::new(),
            };
            cluster.nodes
        ],
        queues: Default::default(),
        promised: [0; 3],
        events: BinaryHeap::new(),
        events_made: 0,
        now_s: 0.0,
        random: Random(Xoshiro256PlusPlus::seed_from_u64(seed)),
        ended_s: vec![0.0; jobs.len()],
        outcome: Outcome::default(),
    };
    for (number, job) in jobs.iter().enumerate() {
        world.at(job.arrival_s, What::Arrive(number));
    }
    while let Some(event) = world.events.pop() {
        world.now_s = event.at_s;
        match event.what {
            What::Arrive(job) => world.arrive(job),
            What::Next { task, epoch } if world.tasks[task].epoch == epoch => world.next(task),
            What::Next { .. } => continue,
        }
        world.schedule();
    }
    world.finish()
}

impl World<'_> {
    fn at(&mut self, at_s: f64, what: What) {
        self.events_made += 1;
        self.events.push(Event {
            at_s,
            number: self.events_made,
            what,
        });
    }

    fn job(&self, task: usize) -> &Job {
        &self.jobs[self.tasks[task].job]
    }

    fn priority(&self, task: usize) -> usize {
        self.job(task).priority as usize
    }

    fn arrive(&mut self, job: usize) {
        for _ in 0..self.jobs[job].tasks {
            self.queues[self.jobs[job].priority as usize].push_back(self.tasks.len());
            self.tasks.push(Task {
                job,
                state: State::Waiting,
                saved_s: 0.0,
                done_s: 0.0,
                checkpoint_node: None,
                epoch: 0,
            });
        }
    }

    /// Handles the regular end of a task's state.
    fn next(&mut self, task: usize) {
        match self.tasks[task].state {
            State::Restoring { node, since_s } => {
                self.outcome.overhead_s += self.now_s - since_s;
                self.start(task, node);
            }
            State::Running { node, since_s } => {
                let job = self.tasks[task].job;
                self.outcome.useful_s += self.jobs[job].work_s;
                let worked_s = self.tasks[task].done_s + self.now_s - since_s;
                assert!(
                    worked_s > 0.0,
                    "task {task} ended after {worked_s} s of work"
                );
                self.enter(task, State::Done);
                self.leave(task, node);
                self.tasks_left[job] -= 1;
                if self.tasks_left[job] == 0 {
                    self.ended_s[job] = self.now_s;
                }
            }
            State::Dumping { node, since_s } => {
                self.outcome.overhead_s += self.now_s - since_s;
                self.leave(task, node);
                let of = &mut self.tasks[task];
                of.saved_s = of.done_s;
                of.checkpoint_node = Some(node);
                self.requeue(task);
                // The core was freed for a task of a higher priority, which gets it now.
                let priority = self.priority(task);
                if let Some(promised) = self.promised[priority + 1..]
                    .iter_mut()
                    .rev()
                    .find(|promised| **promised > 0)
                {
                    *promised -= 1;
                }
            }
            State::Waiting | State::Done => {}
        }
    }

    fn enter(&mut self, task: usize, state: State) {
        let of = &mut self.tasks[task];
        of.state = state;
        of.epoch += 1;
    }

    fn leave(&mut self, task: usize, node: usize) {
        let node = &mut self.nodes[node];
        node.free_cores += 1;
        node.running.retain(|&other| other != task);
    }

    fn requeue(&mut self, task: usize) {
        self.enter(task, State::Waiting);
        // It has already waited once, so it goes ahead of tasks of its priority that have not started.
        let priority = self.priority(task);
        self.queues[priority].push_front(task);
    }

    fn start(&mut self, task: usize, node: usize) {
        let since_s = self.now_s;
        self.enter(task, State::Running { node, since_s });
        let left_s = self.job(task).work_s - self.tasks[task].done_s;
        let epoch = self.tasks[task].epoch;
        self.at(self.now_s + left_s, What::Next { task, epoch });
    }

    /// Assigns free cores to the next tasks, and preempts for the rest.
    fn schedule(&mut self) {
        for priority in (0..3).rev() {
            while !self.queues[priority].is_empty() {
                let Some(node) = self.node_for(self.queues[priority][0]) else {
                    break;
                };
                if let Some(task) = self.queues[priority].pop_front() {
                    self.place(task, node);
                }
            }
            if self.policy == Policy::Wait {
                continue;
            }
            while self.queues[priority].len() > self.promised[priority] {
                let Some(victim) = self.victim(priority) else {
                    break;
                };
                if !self.preempt(victim, priority)
                    && let Some(node) = self.node_for(self.queues[priority][0])
                    && let Some(task) = self.queues[priority].pop_front()
                {
                    self.place(task, node);
                }
            }
        }
    }

    /// Chooses a node with a free core for a task: the one whose storage is free soonest or, if free, that of the
    /// task's checkpoint. The adaptive policy decides between these two by Algorithm 2.
    fn node_for(&self, task: usize) -> Option<usize> {
        let free = |&number: &usize| self.nodes[number].free_cores > 0;
        let other = (0..self.nodes.len()).filter(free).min_by(|&one, &other| {
            let until = |number: usize| self.nodes[number].storage_until_s;
            until(one).total_cmp(&until(other))
        })?;
        let Some(local) = self.tasks[task].checkpoint_node.filter(free) else {
            return Some(other);
        };
        let bytes = self.job(task).memory_bytes;
        let is_first = self.policy != Policy::Adaptive;
        match resume(
            Some(bytes),
            &self.site(task, local),
            Some(&self.site(task, other)),
        ) {
            Resumption::Remote if !is_first => Some(other),
            _ => Some(local),
        }
    }

    fn site(&self, task: usize, node: usize) -> Site {
        let is_there = self.tasks[task].checkpoint_node == Some(node);
        let missing_bytes = if is_there {
            0.0
        } else {
            self.job(task).memory_bytes
        };
        Site {
            bandwidth: self.cluster.bandwidth,
            missing_bytes,
            queue_s: self.queue_s(node),
        }
    }

    fn queue_s(&self, node: usize) -> f64 {
        (self.nodes[node].storage_until_s - self.now_s).max(0.0)
    }

    fn place(&mut self, task: usize, node: usize) {
        self.nodes[node].free_cores -= 1;
        self.nodes[node].running.push(task);
        let of = &mut self.tasks[task];
        of.done_s = of.saved_s;
        let Some(from) = of.checkpoint_node else {
            self.start(task, node);
            return;
        };
        self.outcome.remote_resumes += u64::from(from != node);
        let ready_s = self.now_s
            + self
                .site(task, node)
                .overhead_s(self.job(task).memory_bytes);
        self.nodes[node].storage_until_s = ready_s;
        let since_s = self.now_s;
        self.enter(task, State::Restoring { node, since_s });
        let epoch = self.tasks[task].epoch;
        self.at(ready_s, What::Next { task, epoch });
    }

    /// Describes a running task as a victim, and returns its node; `None` when the task does not run.
    fn look_at(&self, task: usize) -> Option<(Victim, usize)> {
        let State::Running { node, since_s } = self.tasks[task].state else {
            return None;
        };
        let of = &self.tasks[task];
        let bytes = self.job(task).memory_bytes;
        let has_checkpoint = of.checkpoint_node.is_some();
        let share = if has_checkpoint {
            self.cluster.changed_share
        } else {
            1.0
        };
        let victim = Victim {
            dump_bytes: bytes * share,
            restore_bytes: bytes,
            progress_s: of.done_s - of.saved_s + self.now_s - since_s,
            has_checkpoint,
        };
        Some((victim, node))
    }

    /// Chooses the task to preempt among those of the lowest priority: the cheapest with the adaptive policy,
    /// a random one otherwise.
    fn victim(&mut self, for_priority: usize) -> Option<usize> {
        let mut candidates: Vec<usize> = Vec::new();
        let mut lowest = for_priority;
        for &task in self.nodes.iter().flat_map(|node| &node.running) {
            let priority = self.priority(task);
            if priority > lowest
                || priority == for_priority
                || !matches!(self.tasks[task].state, State::Running { .. })
            {
                continue;
            }
            if priority < lowest {
                lowest = priority;
                candidates.clear();
            }
            candidates.push(task);
        }
        if candidates.is_empty() {
            return None;
        }
        if self.policy != Policy::Adaptive {
            return Some(candidates[self.random.below(candidates.len())]);
        }
        let cost_s = |&task: &usize| {
            self.look_at(task).map_or(f64::INFINITY, |(victim, node)| {
                victim.cost_s(&self.cluster.bandwidth, self.queue_s(node))
            })
        };
        candidates
            .into_iter()
            .min_by(|one, other| cost_s(one).total_cmp(&cost_s(other)))
    }

    /// Takes the core away from a running task. Returns whether that takes time.
    fn preempt(&mut self, task: usize, for_priority: usize) -> bool {
        let Some((victim, node)) = self.look_at(task) else {
            return false;
        };
        let queue_s = self.queue_s(node);
        let bandwidth = self.cluster.bandwidth;
        let decision = match self.policy {
            Policy::Adaptive => victim.preempt(&bandwidth, queue_s),
            Policy::Checkpoint => victim.checkpoint(),
            Policy::Kill | Policy::Wait => Preemption::Kill,
        };
        if decision == Preemption::Kill {
            self.outcome.kills += 1;
            self.outcome.lost_s += victim.progress_s;
            self.leave(task, node);
            self.requeue(task);
            return false;
        }
        self.outcome.checkpoints += 1;
        let of = &mut self.tasks[task];
        of.done_s = of.saved_s + victim.progress_s;
        let since_s = self.now_s;
        let stored_s = self.now_s + queue_s + victim.dump_bytes / bandwidth.write_bytes_per_s;
        self.nodes[node].storage_until_s = stored_s;
        self.enter(task, State::Dumping { node, since_s });
        let epoch = self.tasks[task].epoch;
        self.at(stored_s, What::Next { task, epoch });
        self.promised[for_priority] += 1;
        true
    }

    fn finish(mut self) -> Outcome {
        let busy_s = self.outcome.useful_s + self.outcome.lost_s + self.outcome.overhead_s;
        self.outcome.energy_j = IDLE_W * self.cluster.nodes as f64 * self.now_s + CORE_W * busy_s;
        for priority in Priority::ALL {
            let (mut total_s, mut jobs) = (0.0, 0.0);
            for (job, ended_s) in self.jobs.iter().zip(&self.ended_s) {
                if job.priority == priority {
                    total_s += ended_s - job.arrival_s;
                    jobs += 1.0;
                }
            }
            self.outcome.response_s[priority as usize] =
                if jobs > 0.0 { total_s / jobs } else { 0.0 };
        }
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(bytes_per_s: f64) -> Cluster {
        Cluster {
            nodes: 1,
            cores_per_node: 1,
            bandwidth: Bandwidth {
                write_bytes_per_s: bytes_per_s,
                read_bytes_per_s: bytes_per_s,
                network_bytes_per_s: bytes_per_s,
            },
            changed_share: 0.1,
        }
    }

    /// Section 3.3.3: a low-priority job of one minute and 5 GB is preempted after 30 s by a high-priority one.
    fn two_jobs() -> Vec<Job> {
        [(0.0, Priority::Low), (30.0, Priority::High)]
            .map(|(arrival_s, priority)| Job {
                arrival_s,
                priority,
                tasks: 1,
                work_s: 60.0,
                memory_bytes: 5e9,
            })
            .into()
    }

    fn responses(bytes_per_s: f64, policy: Policy) -> (f64, f64) {
        let outcome = run(&cluster(bytes_per_s), policy, &two_jobs(), 1);
        (outcome.response_s[2], outcome.response_s[0])
    }

    #[test]
    fn two_jobs_take_what_one_can_work_out_by_hand() {
        assert_eq!(responses(1e9, Policy::Wait), (90.0, 60.0));
        assert_eq!(responses(1e9, Policy::Kill), (60.0, 150.0));
        // 5 s to store, 5 s to read.
        assert_eq!(responses(1e9, Policy::Checkpoint), (65.0, 130.0));
        assert_eq!(responses(1e9, Policy::Adaptive), (65.0, 130.0));
        // At 0.1 GB/s a checkpoint costs 100 s and saves 30 s.
        assert_eq!(responses(1e8, Policy::Checkpoint), (110.0, 220.0));
        assert_eq!(responses(1e8, Policy::Adaptive), (60.0, 150.0));
    }

    #[test]
    fn every_job_ends_under_each_policy() {
        let load = super::super::jobs::Load {
            cores: 16,
            duration_s: 20_000.0,
            offered_share: 0.7,
            seed: 3,
        };
        let jobs = super::super::jobs::generate(&load);
        let work_s: f64 = jobs
            .iter()
            .map(|job| f64::from(job.tasks) * job.work_s)
            .sum();
        let cluster = Cluster {
            nodes: 4,
            cores_per_node: 4,
            ..cluster(1e8)
        };
        for policy in [
            Policy::Wait,
            Policy::Kill,
            Policy::Checkpoint,
            Policy::Adaptive,
        ] {
            let outcome = run(&cluster, policy, &jobs, 1);
            let share = outcome.useful_s / work_s;
            assert!((share - 1.0).abs() < 1e-9, "{policy:?}: {share}");
            assert_eq!(outcome, run(&cluster, policy, &jobs, 1), "{policy:?} twice");
            assert_eq!(
                outcome.kills > 0,
                matches!(policy, Policy::Kill | Policy::Adaptive)
            );
        }
    }
}
