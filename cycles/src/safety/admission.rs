//! Admission of jobs that must survive failures: task bags with backup tasks.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

use super::losses::{Domain, Losses, Probability};

/// Penalty of a new bag compared with an existing one: fewer, larger bags need a smaller share of backups.
const NEW_BAG_PENALTY: f64 = 1.5;

/// Identical tasks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskGroup {
    /// Number of tasks.
    pub tasks: NonZeroU32,
    /// Cores of each.
    pub cores: NonZeroU32,
    /// Memory of each, in MiB.
    pub memory_mib: NonZeroU64,
}

/// A rack of identical servers, all in one environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RackSpec {
    /// Number of its environment.
    pub environment: u32,
    /// Number of its servers.
    pub servers: u32,
    /// Cores of each.
    pub cores: u32,
    /// Memory of each, in MiB.
    pub memory_mib: u64,
}

/// The probability that a domain fails while the one around it does not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureRates {
    /// Probability for a server.
    pub server: Probability,
    /// Probability for a rack.
    pub rack: Probability,
    /// Probability for an environment.
    pub environment: Probability,
}

/// The choice of servers for tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Section 4 of the paper: tasks go to the first servers with room; backups go to a rack that the bag does not
    /// use yet, or else to a server that it does not use yet, or else to any.
    FirstFit,
    /// Tasks and backups to the environment, rack and server with the fewest tasks of the bag.
    Spread,
}

/// The reason why there can be no admission.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SetupError {
    /// There is no server.
    #[error("the cluster has no servers")]
    NoServer,
    /// The threshold is not a probability above 0.
    #[error("the threshold {0} is not above 0 and at most 1")]
    BadThreshold(f64),
}

/// The reason why a job was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Denied {
    /// It has no tasks.
    #[error("the job has no tasks")]
    NoTasks,
    /// There are no servers with room for its tasks.
    #[error("{tasks} tasks of {cores} cores and {memory_mib} MiB do not fit")]
    NoRoom {
        /// Number of tasks.
        tasks: u32,
        /// Cores of each.
        cores: u32,
        /// Memory of each, in MiB.
        memory_mib: u64,
    },
    /// The tasks fit, but no number of backups makes them safe, or not enough backups fit.
    #[error(
        "with all backups that fit ({backups}), more tasks than that are lost with probability {probability:.1e}"
    )]
    NotSafe {
        /// As many as fit, at most the number of tasks.
        backups: usize,
        /// The probability that more tasks are lost.
        probability: f64,
    },
}

/// The result for a group of tasks that was admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admitted {
    /// Its bag, numbered from 0.
    pub bag: usize,
    /// Number of tasks now in the bag, without backups.
    pub tasks: usize,
    /// Number of backups now in the bag.
    pub backups: usize,
    /// The probability that the bag loses more tasks than it has backups.
    pub probability: f64,
}

/// Cores, and memory in MiB.
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
    /// Size of each backup: the largest size of any task.
    size: Size,
    /// Server of each task.
    tasks: Vec<usize>,
    /// Server of each backup.
    backups: Vec<usize>,
    probability: f64,
}

impl Bag {
    /// Returns the cores and MiB that its backups reserve.
    fn reserved(&self) -> Size {
        let count = self.backups.len() as u64;
        (self.size.0 * count, self.size.1 * count)
    }

    /// Returns `BackupCost` of the additional reservation: the resources are multiplied, since they have no common
    /// unit. Backups are placed from scratch with each group, so a larger bag may need fewer of them or less of a
    /// resource: that costs nothing.
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
    /// Creates an empty cluster. A bag is safe when the probability of losing more tasks than it has backups is below
    /// the threshold (T of T-safe).
    ///
    /// # Errors
    /// If there is no server, or the threshold is not a probability above 0.
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

    /// Returns the cores and MiB that backups reserve.
    #[must_use]
    pub fn reserved(&self) -> (u64, u64) {
        let bags = self.bags.iter();
        bags.fold((0, 0), |sum, bag| plus(sum, bag.reserved()))
    }

    /// Returns the cores and MiB that are free on each server.
    #[must_use]
    pub fn free(&self) -> &[(u64, u64)] {
        &self.free
    }

    /// Admits a job with all its groups of tasks, or changes nothing.
    ///
    /// # Errors
    /// If there is no room for tasks, or for the backups that make them safe.
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

    /// Adds a group to the bag where it costs least.
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
                        // Once for each resource.
                        None => NEW_BAG_PENALTY.powi(2) * bag.more_than(&Bag::default()),
                    };
                    if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                        best = Some((cost, number, bag, free));
                    }
                }
                // The error of a new bag is the reported reason.
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

    /// Returns a bag with a further group, and the resources that are then free. Its backups are placed from scratch.
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
        // At most as many backups as tasks are considered.
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
        // One more backup adds at most one more loss, so the probability falls with their number.
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

    /// Returns the distribution of the number of tasks lost together, of those on these servers.
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
            // Servers with equal counts are identical, and are summed together.
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

/// Number of a bag's tasks on each server, and in each rack and environment.
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

    /// Returns the server with room for which environment, rack and the server itself have the fewest tasks.
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

    /// Returns the first server with room: preferably in an unused rack, else an unused server, else any.
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
