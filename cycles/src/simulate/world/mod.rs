//! The events of a run: tasks end, suspended ones can resume, owners' load changes, jobs arrive.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::ControlFlow;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::fleet::{CORES, Fleet};
use super::jobs::{Jobs, Task};
use super::queries::{ARRIVAL_MEAN_S, QUERIES, exponential, queries};
use super::servers::Urn;
use super::{Options, PolicyKind, Record, SimulationError};
use crate::job::{JobType, Thresholds};
use crate::reserve::{Capacity, Container, Order, OwnerUse, Preemption, Resources, Victim};
use crate::select::{ClassId, Headrooms, RESERVE_SHARE, Selection, Server, Weights};

/// Milliseconds of a day.
const DAY_MS: u64 = 86_400_000;
/// Core-milliseconds of a core-hour.
const CORE_HOUR_MS: f64 = 3_600_000.0;

/// A container, and the task in it.
#[derive(Clone, Copy, Debug)]
struct Running {
    server: u32,
    job: u32,
    task: Task,
    started_ms: u64,
    /// Identifies it among all containers: events of containers that no longer exist are skipped.
    id: u64,
}

#[derive(Clone, Debug, Default)]
struct ServerState {
    /// Cores that containers may currently use.
    room: u32,
    /// Containers in the order of their start: indexes into [`World::containers`].
    running: Vec<u32>,
}

pub(super) struct World<'a> {
    fleet: &'a Fleet,
    options: Options<'a>,
    thresholds: Thresholds,
    rng: SmallRng,
    arrivals: SmallRng,
    now_ms: u64,
    capacity: Capacity,
    servers: Vec<ServerState>,
    /// The first server of each class, and the end of the last one.
    begins: Vec<usize>,
    urns: Vec<Urn>,
    headrooms: Headrooms,
    containers: Vec<Running>,
    unused: Vec<u32>,
    next_id: u64,
    ends: BinaryHeap<Reverse<(u64, u64, u32)>>,
    /// Suspended tasks, and when they can resume.
    suspended: BinaryHeap<Reverse<(u64, u64, u32)>>,
    suspended_tasks: Vec<Task>,
    jobs: Jobs,
    /// Jobs with tasks that wait for a core: for each class, the jobs that may use it; the last set contains those
    /// that may use any.
    waiting: Vec<BTreeSet<u32>>,
    /// How long each query took in its last run.
    last_s: [Option<f64>; QUERIES],
    running: u64,
    busy_core_ms: u64,
    busy_while_arriving_core_ms: u64,
    wasted_core_ms: u64,
    suspension_core_ms: f64,
    samples: [u64; 3],
    record: Record,
}

impl<'a> World<'a> {
    pub(super) fn new(
        fleet: &'a Fleet,
        options: Options<'a>,
        stretch: f64,
        thresholds: Thresholds,
    ) -> Self {
        let cores = std::num::NonZeroU32::new(CORES).expect("servers have cores");
        let of_server = |&class: &u32| Server {
            class: ClassId(class),
            cores,
        };
        let servers: Vec<Server> = fleet.class_of.iter().map(of_server).collect();
        let headrooms = Headrooms::new(&fleet.classes, &servers, RESERVE_SHARE);
        let mut begins = vec![0; fleet.classes.len() + 1];
        for &class in &fleet.class_of {
            begins[class as usize + 1] += 1;
        }
        for class in 0..fleet.classes.len() {
            begins[class + 1] += begins[class];
        }
        let sizes = begins.windows(2).map(|it| it[1] - it[0]);
        let all_cores = fleet.servers() as f64 * f64::from(CORES);
        let work_core_s = options.demand * all_cores * ARRIVAL_MEAN_S;
        Self {
            fleet,
            options,
            thresholds,
            rng: SmallRng::seed_from_u64(options.seed),
            arrivals: SmallRng::seed_from_u64(!options.seed),
            now_ms: 0,
            capacity: Capacity::new(Resources {
                cores: CORES,
                memory_mib: 0,
            }),
            servers: vec![ServerState::default(); servers.len()],
            urns: sizes.map(Urn::new).collect(),
            waiting: vec![BTreeSet::new(); fleet.classes.len() + 1],
            begins,
            headrooms: headrooms.expect("a fleet has classes, and no server of another one"),
            containers: Vec::new(),
            unused: Vec::new(),
            next_id: 0,
            ends: BinaryHeap::new(),
            suspended: BinaryHeap::new(),
            suspended_tasks: Vec::new(),
            jobs: Jobs::new(queries(work_core_s, stretch)),
            last_s: [None; QUERIES],
            running: 0,
            busy_core_ms: 0,
            busy_while_arriving_core_ms: 0,
            wasted_core_ms: 0,
            suspension_core_ms: 0.0,
            samples: [0; 3],
            record: Record::default(),
        }
    }

    pub(super) fn run(
        mut self,
        progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
    ) -> Result<Record, SimulationError> {
        let arriving_ms = u64::from(self.options.days) * DAY_MS;
        let mut arrival_ms = self.next_arrival_ms();
        let mut slot_ms = 0;
        let mut measured = false;
        loop {
            let end_ms = self.ends.peek().map_or(u64::MAX, |it| it.0.0);
            let resume_ms = self.suspended.peek().map_or(u64::MAX, |it| it.0.0);
            let now_ms = end_ms.min(resume_ms).min(slot_ms).min(arrival_ms);
            if now_ms >= arriving_ms && !measured {
                self.pass_until(arriving_ms);
                self.busy_while_arriving_core_ms = self.busy_core_ms;
                measured = true;
            }
            if now_ms >= 2 * arriving_ms || (measured && self.jobs.unfinished() == 0) {
                break;
            }
            self.pass_until(now_ms);
            if now_ms == end_ms {
                self.task_ends();
            } else if now_ms == resume_ms {
                self.task_can_go_on();
            } else if now_ms == slot_ms {
                if progress(now_ms as f64 / arriving_ms as f64 / 2.0).is_break() {
                    return Err(SimulationError::Interrupted);
                }
                self.load_changes(!measured);
                slot_ms += self.fleet.slot_ms;
            } else {
                self.job_arrives();
                arrival_ms = self.next_arrival_ms();
                if arrival_ms >= arriving_ms {
                    arrival_ms = u64::MAX;
                }
            }
        }
        Ok(self.recorded(arriving_ms))
    }

    fn pass_until(&mut self, now_ms: u64) {
        assert!(
            self.now_ms <= now_ms,
            "time goes back from {} to {now_ms} ms",
            self.now_ms
        );
        self.busy_core_ms += self.running * (now_ms - self.now_ms);
        self.now_ms = now_ms;
    }

    fn next_arrival_ms(&mut self) -> u64 {
        self.now_ms + (exponential(&mut self.arrivals, ARRIVAL_MEAN_S) * 1_000.0) as u64 + 1
    }

    fn class(&self, server: usize) -> usize {
        self.fleet.class_of[server] as usize
    }

    fn free_cores(&self, server: usize) -> u32 {
        let state = &self.servers[server];
        let Some(free) = state.room.checked_sub(state.running.len() as u32) else {
            panic!("containers run on server {server} for which there is no room: {state:?}");
        };
        free
    }

    /// Updates the weight with which a server is drawn after its containers or its room have changed.
    fn free_cores_changed(&mut self, server: usize) {
        let now = self.free_cores(server);
        let class = self.class(server);
        let weight = if self.options.policy.chooses_classes() {
            now
        } else {
            now.min(1)
        };
        self.urns[class].set(server - self.begins[class], weight);
    }

    fn owner(&self, server: usize, slot: usize) -> OwnerUse {
        let load = self.fleet.loads[self.fleet.owners[server] as usize][slot];
        OwnerUse {
            cores: f64::from(load) * f64::from(CORES),
            memory_bytes: 0,
        }
    }

    fn slot(&self) -> usize {
        (self.now_ms / self.fleet.slot_ms) as usize % self.fleet.slots()
    }

    fn load_changes(&mut self, count: bool) {
        let slot = self.slot();
        for server in 0..self.servers.len() {
            let owner = self.owner(server, slot);
            let taken = self.servers[server].running.len() as u32;
            let room = if self.options.policy.keeps_reserve() {
                self.capacity.harvestable(owner).cores
            } else {
                CORES
            };
            if room != self.servers[server].room {
                self.servers[server].room = room;
                if taken > room {
                    self.evict(server, owner);
                }
                self.free_cores_changed(server);
            }
            if count {
                let wanted = owner.rounded().cores + self.servers[server].running.len() as u32;
                let jobs = !self.servers[server].running.is_empty();
                self.samples[0] += 1;
                self.samples[1] +=
                    u64::from(jobs && wanted + self.capacity.reserve().cores > CORES);
                self.samples[2] += u64::from(jobs && wanted > CORES);
            }
        }
        // Place all waiting jobs in their order of arrival, and not class by class: a job that may use several
        // classes draws from all of them, as at its arrival.
        let waiting: BTreeSet<u32> = self.waiting.iter().flatten().copied().collect();
        for job in waiting {
            self.place(job);
        }
    }

    fn evict(&mut self, server: usize, owner: OwnerUse) {
        let containers: Vec<Container> = self.servers[server]
            .running
            .iter()
            .map(|&place| {
                let it = &self.containers[place as usize];
                Container {
                    id: it.id,
                    cores: std::num::NonZeroU32::MIN,
                    memory_mib: 0,
                    started_ms: it.started_ms,
                    victim: Victim {
                        progress_s: self.progress_ms(it) as f64 / 1_000.0,
                        memory_bytes: self.options.container_bytes,
                        has_checkpoint: it.task.restore_ms.is_some(),
                    },
                }
            })
            .collect();
        let order = match self.options.policy {
            PolicyKind::Checkpoint => Order::CheapestFirst(self.options.rule),
            _ => Order::YoungestFirst,
        };
        let mut queue_s = 0.0;
        for eviction in self.capacity.evict(owner, &containers, order) {
            let mut running = self.servers[server].running.iter();
            let place = running.position(|&it| self.containers[it as usize].id == eviction.id);
            let Some(place) = place else {
                panic!("{eviction:?} does not run on server {server}");
            };
            let container = self.servers[server].running.remove(place);
            let it = self.containers[container as usize];
            self.gone(container);
            let progress_ms = self.progress_ms(&it);
            match eviction.how {
                Preemption::Kill => {
                    self.record.killed_tasks += 1;
                    self.wasted_core_ms += progress_ms;
                    // It restarts from its checkpoint, if it has one: its work is what was left then.
                    self.wait_for_core(it.job, it.task);
                }
                Preemption::Suspend(costs) => {
                    self.record.suspended_tasks += 1;
                    self.suspension_core_ms += (costs.dump_s + costs.restore_s) * 1_000.0;
                    queue_s += costs.dump_s;
                    assert!(
                        progress_ms <= it.task.left_ms,
                        "{progress_ms} ms are done of {it:?}"
                    );
                    let task = Task {
                        left_ms: it.task.left_ms - progress_ms,
                        restore_ms: Some((costs.restore_s * 1_000.0) as u64),
                        ..it.task
                    };
                    let ready_ms = self.now_ms + (queue_s * 1_000.0) as u64;
                    let number = self.suspended_tasks.len() as u64;
                    self.suspended_tasks.push(task);
                    self.suspended.push(Reverse((ready_ms, number, it.job)));
                }
            }
        }
    }

    /// Returns the milliseconds of work since a container began, without the time to restore it.
    fn progress_ms(&self, it: &Running) -> u64 {
        let restored_ms = it.started_ms + it.task.restore_ms.unwrap_or(0);
        self.now_ms.saturating_sub(restored_ms)
    }

    fn gone(&mut self, container: u32) {
        let gone = &mut self.containers[container as usize];
        assert!(
            gone.id != u64::MAX && self.running > 0,
            "a container goes, of {} that run: {gone:?}",
            self.running
        );
        gone.id = u64::MAX;
        self.unused.push(container);
        self.running -= 1;
    }

    fn task_can_go_on(&mut self) {
        let next = self.suspended.pop();
        let Reverse((_, number, job)) = next.expect("its time has come");
        let task = self.suspended_tasks[number as usize];
        self.wait_for_core(job, task);
        self.place(job);
    }

    fn wait_for_core(&mut self, job: u32, task: Task) {
        self.jobs.get_mut(job).put_back(task);
        self.waits(job);
    }

    fn waits(&mut self, job: u32) {
        match &self.jobs.get(job).classes {
            Selection::None => {
                let any = self.waiting.len() - 1;
                self.waiting[any].insert(job);
            }
            selected => {
                for class in selected.classes() {
                    self.waiting[class.0 as usize].insert(job);
                }
            }
        }
    }

    fn waits_no_more(&mut self, job: u32) {
        match &self.jobs.get(job).classes {
            Selection::None => {
                let any = self.waiting.len() - 1;
                self.waiting[any].remove(&job);
            }
            selected => {
                for class in selected.classes() {
                    self.waiting[class.0 as usize].remove(&job);
                }
            }
        }
    }

    /// Returns the job that arrived first among those that wait for a core of a class.
    fn first_waiting(&self, class: usize) -> Option<u32> {
        let any = self.waiting.last().and_then(BTreeSet::first);
        match (self.waiting[class].first(), any) {
            (Some(of_class), Some(of_any)) => Some(*of_class.min(of_any)),
            (one, other) => one.or(other).copied(),
        }
    }

    /// Gives a job the free cores that it may use.
    fn place(&mut self, job: u32) {
        while self.jobs.get(job).has_waiting() {
            let classes = match &self.jobs.get(job).classes {
                Selection::None => None,
                selected => Some(selected.classes()),
            };
            let total = |class: usize| self.urns[class].total();
            let all: u64 = match classes {
                None => (0..self.urns.len()).map(total).sum(),
                Some(classes) => classes.iter().map(|it| total(it.0 as usize)).sum(),
            };
            if all == 0 {
                return;
            }
            let mut ticket = self.rng.random_range(0..all);
            let mut holds = |class: usize| {
                let of_class = total(class);
                let hit = ticket < of_class;
                if !hit {
                    ticket -= of_class;
                }
                hit
            };
            let class = match classes {
                None => (0..self.urns.len()).find(|&it| holds(it)),
                Some(classes) => classes.iter().map(|it| it.0 as usize).find(|&it| holds(it)),
            };
            let Some(class) = class else {
                panic!("of {all} free cores for job {job}, no class has the one that was drawn");
            };
            let server = self.begins[class] + self.urns[class].holder(ticket);
            self.start(job, server);
        }
    }

    /// Starts a job's next task on a server with a free core.
    fn start(&mut self, job: u32, server: usize) {
        self.start_in_free_core(job, server);
        self.free_cores_changed(server);
    }

    fn start_in_free_core(&mut self, job: u32, server: usize) {
        let spread = self.rng.random_range(0.8..1.2);
        let (task, more) = self.jobs.take(job, spread);
        if !more {
            self.waits_no_more(job);
        }
        let id = self.next_id;
        self.next_id += 1;
        let ends_ms = self.now_ms + task.restore_ms.unwrap_or(0) + task.left_ms;
        let running = Running {
            server: server as u32,
            job,
            task,
            started_ms: self.now_ms,
            id,
        };
        let place = match self.unused.pop() {
            Some(place) => {
                self.containers[place as usize] = running;
                place
            }
            None => {
                self.containers.push(running);
                self.containers.len() as u32 - 1
            }
        };
        self.servers[server].running.push(place);
        self.ends.push(Reverse((ends_ms, id, place)));
        self.running += 1;
    }

    fn task_ends(&mut self) {
        let next = self.ends.pop();
        let Reverse((_, id, place)) = next.expect("its time has come");
        let it = self.containers[place as usize];
        if it.id != id {
            return;
        }
        let server = it.server as usize;
        self.servers[server].running.retain(|&other| other != place);
        self.gone(place);
        // The core goes to the next job that waits for it, without being free in between.
        let class = self.class(server);
        match self.first_waiting(class) {
            Some(next) if self.free_cores(server) > 0 => self.start_in_free_core(next, server),
            _ => {}
        }
        self.free_cores_changed(server);
        let ended = self.jobs.task_ended(it.job, it.task.stage);
        if ended.job {
            let job = self.jobs.get(it.job);
            let length_s = (self.now_ms - job.arrived_ms) as f64 / 1_000.0;
            self.last_s[job.query] = Some(length_s);
            self.jobs.finished(it.job, length_s);
        } else if ended.more_wait {
            self.waits(it.job);
            self.place(it.job);
        }
    }

    fn job_arrives(&mut self) {
        let query = self.arrivals.random_range(0..QUERIES);
        let job_type = self.thresholds.job_type(self.last_s[query]);
        self.record.job_types[job_type as usize] += 1;
        let classes = if self.options.policy.chooses_classes() {
            self.select(query, job_type)
        } else {
            Selection::None
        };
        match classes {
            Selection::One(_) => self.record.jobs_in_one_class += 1,
            Selection::Several(_) => self.record.jobs_in_several_classes += 1,
            Selection::None => {}
        }
        let job = self.jobs.arrives(query, self.now_ms, classes);
        self.waits(job);
        self.place(job);
    }

    fn select(&mut self, query: usize, job_type: JobType) -> Selection {
        let slot = self.slot();
        for server in 0..self.servers.len() {
            let millicores = self.owner(server, slot).cores * 1_000.0;
            let of_jobs = self.servers[server].running.len() as u32 * 1_000;
            self.headrooms.uses(server, millicores as u32 + of_jobs);
        }
        let need = self.jobs.query(query).dag.max_concurrent_cores();
        let selected = self
            .headrooms
            .select(job_type, need, &Weights::default(), &mut self.rng);
        // A job that is larger than the cluster still runs, one part at a time, anywhere.
        selected.unwrap_or(Selection::None)
    }

    fn recorded(mut self, arriving_ms: u64) -> Record {
        let now_ms = self.now_ms;
        let mut lengths_s = self.jobs.lengths_s(now_ms);
        lengths_s.sort_by(f64::total_cmp);
        let jobs = lengths_s.len();
        let quantile = |share: f64| {
            let place = (share * jobs as f64).ceil() as usize;
            lengths_s
                .get(place.clamp(1, jobs.max(1)) - 1)
                .copied()
                .unwrap_or(0.0)
        };
        let all_core_ms = self.fleet.servers() as f64 * f64::from(CORES) * arriving_ms as f64;
        let wasted_ms = self.wasted_core_ms as f64 + self.suspension_core_ms;
        let [samples, taken, short] = self.samples.map(|it| it as f64);
        self.record.datacentre = self.fleet.name.clone();
        self.record.servers = self.fleet.servers() as u64;
        self.record.classes = self.urns.iter().filter(|urn| urn.servers() > 0).count() as u64;
        self.record.policy = self.options.policy.name().to_owned();
        self.record.scaling = self.fleet.scaling.name().to_owned();
        self.record.seed = self.options.seed;
        self.record.days = self.options.days;
        self.record.target_utilisation = self.fleet.target;
        self.record.owner_utilisation = self.fleet.utilisation;
        self.record.utilisation =
            self.fleet.utilisation + self.busy_while_arriving_core_ms as f64 / all_core_ms;
        self.record.demand = self.options.demand;
        self.record.jobs = jobs as u64;
        self.record.unfinished_jobs = self.jobs.unfinished() as u64;
        self.record.job_mean_s = lengths_s.iter().sum::<f64>() / jobs.max(1) as f64;
        self.record.job_median_s = quantile(0.5);
        self.record.job_p95_s = quantile(0.95);
        self.record.containers = self.next_id;
        self.record.wasted_core_hours = self.wasted_core_ms as f64 / CORE_HOUR_MS;
        self.record.suspension_core_hours = self.suspension_core_ms / CORE_HOUR_MS;
        self.record.wasted_share = wasted_ms / (self.busy_core_ms as f64).max(1.0);
        self.record.reserve_taken_share = taken / samples.max(1.0);
        self.record.owner_short_share = short / samples.max(1.0);
        self.record
    }
}

#[cfg(test)]
mod tests;
