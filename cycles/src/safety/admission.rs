//! Admission of jobs that are to survive failures: task bags with backup tasks.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

use super::losses::{Domain, Losses, Probability};

/// What a bag of its own costs beside one that is there: fewer, larger bags need a smaller share of backups.
const NEW_BAG_PENALTY: f64 = 1.5;

/// Tasks of a job that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskGroup {
    /// How many.
    pub tasks: NonZeroU32,
    /// Cores of each.
    pub cores: NonZeroU32,
    /// Memory of each, in MiB.
    pub memory_mib: NonZeroU64,
}

/// A rack of servers that are alike; all of one environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RackSpec {
    /// Number of its environment.
    pub environment: u32,
    /// Servers in it.
    pub servers: u32,
    /// Cores of each.
    pub cores: u32,
    /// Memory of each, in MiB.
    pub memory_mib: u64,
}

/// How probable it is that a domain fails while the one around it does not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureRates {
    /// A server.
    pub server: Probability,
    /// A rack.
    pub rack: Probability,
    /// An environment.
    pub environment: Probability,
}

/// Which servers tasks go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Section 4 of the paper: tasks to the first servers with room; backups to a rack that the bag does not use yet,
    /// if there is none to such a server, and else to any.
    FirstFit,
    /// Tasks and backups to the environment, rack and server with the fewest tasks of the bag.
    Spread,
}

/// Why there can be no admission.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SetupError {
    /// There is no server.
    #[error("the cluster has no servers")]
    NoServer,
    /// The threshold is not a probability above 0.
    #[error("the threshold {0} is not above 0 and at most 1")]
    BadThreshold(f64),
}

/// Why a job was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Denied {
    /// It has no tasks.
    #[error("the job has no tasks")]
    NoTasks,
    /// Its tasks find no servers with room.
    #[error("{tasks} tasks of {cores} cores and {memory_mib} MiB do not fit")]
    NoRoom {
        /// How many there are.
        tasks: u32,
        /// Cores of each.
        cores: u32,
        /// Memory of each, in MiB.
        memory_mib: u64,
    },
    /// They fit, but no number of backups makes them safe, or not so many fit.
    #[error(
        "with all backups that fit ({backups}), more tasks than that are lost with probability {probability:.1e}"
    )]
    NotSafe {
        /// As many as fit, at most as many as there are tasks.
        backups: usize,
        /// How probable it is that more are lost.
        probability: f64,
    },
}

/// What became of a group of tasks that was admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admitted {
    /// Its bag, numbered from 0.
    pub bag: usize,
    /// Tasks in the bag now, backups not counted.
    pub tasks: usize,
    /// Backups of the bag now.
    pub backups: usize,
    /// How probable it is that the bag loses more tasks than it has backups.
    pub probability: f64,
}

/// Cores and MiB.
type Size = (u64, u64);

fn fits(size: Size, free: Size) -> bool {
    size.0 <= free.0 && size.1 <= free.1
}

fn less(free: Size, size: Size) -> Size {
    assert!(
        fits(size, free),
        "{size:?} cores and MiB are taken of {free:?}"
    );
    (free.0 - size.0, free.1 - size.1)
}

fn plus(free: Size, size: Size) -> Size {
    (free.0 + size.0, free.1 + size.1)
}

#[derive(Clone, Copy, Debug)]
struct Place {
    environment: usize,
    rack: usize,
}

/// Tasks that share backups.
#[derive(Clone, Debug, Default, PartialEq)]
struct Bag {
    /// Of each backup: the largest of any task.
    size: Size,
    /// Server of each task.
    tasks: Vec<usize>,
    /// Server of each backup.
    backups: Vec<usize>,
    probability: f64,
}

impl Bag {
    /// Cores and MiB that its backups reserve.
    fn reserved(&self) -> Size {
        let count = self.backups.len() as u64;
        (self.size.0 * count, self.size.1 * count)
    }

    /// `BackupCost` of what it reserves beyond what it did: resources multiplied, since they have no common unit. Backups
    /// are placed anew with each group, so a larger bag may need fewer of them or less of a resource: that costs nothing.
    fn more_than(&self, before: &Self) -> f64 {
        let (now, before) = (self.reserved(), before.reserved());
        let more = |now: u64, before: u64| now.saturating_sub(before) as f64;
        more(now.0, before.0) * more(now.1, before.1)
    }
}

/// Servers, and the bags that were admitted.
#[derive(Clone, Debug)]
pub struct Cluster {
    places: Vec<Place>,
    free: Vec<Size>,
    racks: usize,
    environments: usize,
    rates: FailureRates,
    threshold: f64,
    packing: Packing,
    bags: Vec<Bag>,
}

impl Cluster {
    /// An empty cluster. A bag is safe when it loses more tasks than it has backups with a probability below the
    /// threshold (T of T-safe).
    ///
    /// # Errors
    /// When there is no server, or no such probability.
    pub fn new(
        racks: &[RackSpec],
        rates: FailureRates,
        threshold: f64,
        packing: Packing,
    ) -> Result<Self, SetupError> {
        if !(threshold > 0.0 && threshold <= 1.0) {
            return Err(SetupError::BadThreshold(threshold));
        }
        let mut environments: BTreeMap<u32, usize> = BTreeMap::new();
        let (mut places, mut free) = (Vec::new(), Vec::new());
        for (rack, spec) in racks.iter().enumerate() {
            let next = environments.len();
            let environment = *environments.entry(spec.environment).or_insert(next);
            for _ in 0..spec.servers {
                places.push(Place { environment, rack });
                free.push((u64::from(spec.cores), spec.memory_mib));
            }
        }
        if places.is_empty() {
            return Err(SetupError::NoServer);
        }
        Ok(Self {
            places,
            free,
            racks: racks.len(),
            environments: environments.len(),
            rates,
            threshold,
            packing,
            bags: Vec::new(),
        })
    }

    /// Cores and MiB that backups reserve.
    #[must_use]
    pub fn reserved(&self) -> (u64, u64) {
        let bags = self.bags.iter();
        bags.fold((0, 0), |sum, bag| plus(sum, bag.reserved()))
    }

    /// Cores and MiB that are free on each server.
    #[must_use]
    pub fn free(&self) -> &[(u64, u64)] {
        &self.free
    }

    /// Admits a job with all its groups of tasks, or changes nothing.
    ///
    /// # Errors
    /// When tasks, or the backups that make them safe, find no room.
    pub fn admit(&mut self, job: &[TaskGroup]) -> Result<Vec<Admitted>, Denied> {
        if job.is_empty() {
            return Err(Denied::NoTasks);
        }
        let (free, bags) = (self.free.clone(), self.bags.clone());
        let mut admitted = Vec::with_capacity(job.len());
        for group in job {
            match self.bag(group) {
                Ok(one) => admitted.push(one),
                Err(denied) => {
                    (self.free, self.bags) = (free, bags);
                    return Err(denied);
                }
            }
        }
        Ok(admitted)
    }

    /// Puts a group into the bag where it costs least.
    fn bag(&mut self, group: &TaskGroup) -> Result<Admitted, Denied> {
        let mut best: Option<(f64, usize, Bag, Vec<Size>)> = None;
        let mut denied = None;
        for number in 0..=self.bags.len() {
            let before = self.bags.get(number);
            let trial = self.with(before.cloned().unwrap_or_default(), group);
            match trial {
                Ok((bag, free)) => {
                    let cost = match before {
                        Some(before) => bag.more_than(before),
                        // Of each resource.
                        None => NEW_BAG_PENALTY.powi(2) * bag.more_than(&Bag::default()),
                    };
                    if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                        best = Some((cost, number, bag, free));
                    }
                }
                // What is wrong with a bag of its own is the reason.
                Err(reason) => denied = Some(reason),
            }
        }
        let Some((_, number, bag, free)) = best else {
            return Err(denied.expect("a bag of its own was tried"));
        };
        let admitted = Admitted {
            bag: number,
            tasks: bag.tasks.len(),
            backups: bag.backups.len(),
            probability: bag.probability,
        };
        self.free = free;
        if number < self.bags.len() {
            self.bags[number] = bag;
        } else {
            self.bags.push(bag);
        }
        Ok(admitted)
    }

    /// A bag with a group more, and what is free then. Its backups are placed anew.
    fn with(&self, mut bag: Bag, group: &TaskGroup) -> Result<(Bag, Vec<Size>), Denied> {
        let size = (u64::from(group.cores.get()), group.memory_mib.get());
        let mut free = self.free.clone();
        for server in bag.backups.drain(..) {
            free[server] = plus(free[server], bag.size);
        }
        let mut counts = Counts::of(self, &bag.tasks);
        for _ in 0..group.tasks.get() {
            let server = match self.packing {
                Packing::FirstFit => free.iter().position(|&it| fits(size, it)),
                Packing::Spread => counts.fewest(self, size, &free),
            };
            let server = server.ok_or(Denied::NoRoom {
                tasks: group.tasks.get(),
                cores: group.cores.get(),
                memory_mib: group.memory_mib.get(),
            })?;
            free[server] = less(free[server], size);
            counts.add(self, server);
            bag.tasks.push(server);
        }
        bag.size = (bag.size.0.max(size.0), bag.size.1.max(size.1));
        // As many as tasks: who loses more than these has lost all of them.
        let mut order = Vec::new();
        let mut left = free.clone();
        while order.len() < bag.tasks.len() {
            let server = match self.packing {
                Packing::FirstFit => counts.unused(self, bag.size, &left),
                Packing::Spread => counts.fewest(self, bag.size, &left),
            };
            let Some(server) = server else { break };
            left[server] = less(left[server], bag.size);
            counts.add(self, server);
            order.push(server);
        }
        // One backup more is at most one loss more: the probability falls with their number.
        let probability = |backups: usize| {
            self.losses(&bag.tasks, &order[..backups])
                .more_than(backups)
        };
        let least = probability(order.len());
        if least >= self.threshold {
            return Err(Denied::NotSafe {
                backups: order.len(),
                probability: least,
            });
        }
        let (mut few, mut enough) = (0, order.len());
        while few < enough {
            let middle = usize::midpoint(few, enough);
            if probability(middle) < self.threshold {
                enough = middle;
            } else {
                few = middle + 1;
            }
        }
        bag.probability = probability(enough);
        order.truncate(enough);
        for &server in &order {
            free[server] = less(free[server], bag.size);
        }
        bag.backups = order;
        assert!(
            bag.backups.len() <= bag.tasks.len() && bag.probability < self.threshold,
            "{} backups of {} tasks, of which more are lost with probability {}, and {} is allowed",
            bag.backups.len(),
            bag.tasks.len(),
            bag.probability,
            self.threshold
        );
        Ok((bag, free))
    }

    /// How many tasks are lost together, of those on these servers.
    fn losses(&self, tasks: &[usize], backups: &[usize]) -> Losses {
        let mut by_server: BTreeMap<(usize, usize, usize), u32> = BTreeMap::new();
        for &server in tasks.iter().chain(backups) {
            let place = self.places[server];
            *by_server
                .entry((place.environment, place.rack, server))
                .or_default() += 1;
        }
        let mut by_rack: BTreeMap<(usize, usize), Vec<u32>> = BTreeMap::new();
        for ((environment, rack, _), count) in by_server {
            by_rack.entry((environment, rack)).or_default().push(count);
        }
        let mut by_environment: BTreeMap<usize, Vec<Domain>> = BTreeMap::new();
        for ((environment, _), mut counts) in by_rack {
            // Servers that hold equally many are alike: they are summed up together.
            counts.sort_unstable();
            let servers = counts.into_iter().map(|losses| Domain {
                fails: self.rates.server,
                losses,
                parts: Vec::new(),
            });
            by_environment.entry(environment).or_default().push(Domain {
                fails: self.rates.rack,
                losses: 0,
                parts: servers.collect(),
            });
        }
        let environments = by_environment.into_values().map(|racks| Domain {
            fails: self.rates.environment,
            losses: 0,
            parts: racks,
        });
        Losses::of(&Domain {
            fails: Probability::NEVER,
            losses: 0,
            parts: environments.collect(),
        })
    }
}

/// Tasks of a bag on each server, and in each rack and environment.
struct Counts {
    servers: Vec<u32>,
    racks: Vec<u32>,
    environments: Vec<u32>,
}

impl Counts {
    fn of(cluster: &Cluster, tasks: &[usize]) -> Self {
        let mut counts = Self {
            servers: vec![0; cluster.places.len()],
            racks: vec![0; cluster.racks],
            environments: vec![0; cluster.environments],
        };
        for &server in tasks {
            counts.add(cluster, server);
        }
        counts
    }

    fn add(&mut self, cluster: &Cluster, server: usize) {
        let place = cluster.places[server];
        self.servers[server] += 1;
        self.racks[place.rack] += 1;
        self.environments[place.environment] += 1;
    }

    /// The server with room whose environment, rack and itself have the fewest.
    fn fewest(&self, cluster: &Cluster, size: Size, free: &[Size]) -> Option<usize> {
        let key = |server: &usize| {
            let place = cluster.places[*server];
            let around = (self.environments[place.environment], self.racks[place.rack]);
            (around, self.servers[*server])
        };
        (0..free.len())
            .filter(|&it| fits(size, free[it]))
            .min_by_key(key)
    }

    /// The first server with room in a rack that is not used, that is not used itself, or any, in this order.
    fn unused(&self, cluster: &Cluster, size: Size, free: &[Size]) -> Option<usize> {
        let key = |server: &usize| {
            let rack = self.racks[cluster.places[*server].rack];
            (rack > 0, self.servers[*server] > 0)
        };
        (0..free.len())
            .filter(|&it| fits(size, free[it]))
            .min_by_key(key)
    }
}
