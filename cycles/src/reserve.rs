//! The owner's reserve: what a server does not give to harvesting jobs, and which containers are evicted when the
//! owner needs it (OSDI'16, section 5.3).

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

/// Bytes of a MiB.
pub(crate) const MIB: u64 = 1 << 20;

/// Cores and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Cores.
    pub cores: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
}

impl Resources {
    fn plus(self, other: Self) -> Self {
        Self {
            cores: self.cores + other.cores,
            memory_mib: self.memory_mib + other.memory_mib,
        }
    }

    /// Returns the smaller amount of each.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self {
            cores: self.cores.min(other.cores),
            memory_mib: self.memory_mib.min(other.memory_mib),
        }
    }

    /// Returns the larger amount of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            cores: self.cores.max(other.cores),
            memory_mib: self.memory_mib.max(other.memory_mib),
        }
    }

    /// Returns what is left without `other`; 0 where there is less.
    fn less(self, other: Self) -> Self {
        Self {
            cores: self.cores.saturating_sub(other.cores),
            memory_mib: self.memory_mib.saturating_sub(other.memory_mib),
        }
    }

    fn is_none(self) -> bool {
        self == Self::default()
    }
}

/// The measured usage of the owner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnerUse {
    /// Cores, at least 0.
    pub cores: f64,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

impl OwnerUse {
    /// Returns the usage rounded up to whole cores and MiB.
    #[must_use]
    pub fn rounded(self) -> Resources {
        Resources {
            // NaN counts as 0, and a number that is too large as the largest.
            cores: self.cores.ceil() as u32,
            memory_mib: self.memory_bytes.div_ceil(MIB),
        }
    }
}

/// A server and its reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    total: Resources,
    reserve: Resources,
}

impl Capacity {
    /// Creates the capacity of a server, with a reserve of a third of cores and memory, rounded up.
    #[must_use]
    pub fn new(total: Resources) -> Self {
        Self {
            total,
            reserve: Resources {
                cores: total.cores.div_ceil(3),
                memory_mib: total.memory_mib.div_ceil(3),
            },
        }
    }

    /// Returns what the owner can burst into at any time.
    #[must_use]
    pub fn reserve(&self) -> Resources {
        self.reserve
    }

    /// Returns what all containers together may use with this usage of the owner.
    #[must_use]
    pub fn harvestable(&self, owner: OwnerUse) -> Resources {
        self.total.less(self.reserve).less(owner.rounded())
    }

    /// Returns which containers must be evicted to restore the reserve, and how, in the order of eviction. Returns
    /// all of them if that is not enough.
    #[must_use]
    pub fn evict(
        &self,
        owner: OwnerUse,
        containers: &[Container],
        order: Order<'_>,
    ) -> Vec<Eviction> {
        let used = |containers: &mut dyn Iterator<Item = &Container>| {
            containers.fold(Resources::default(), |sum, it| sum.plus(it.size()))
        };
        let mut missing = used(&mut containers.iter()).less(self.harvestable(owner));
        if missing.is_none() {
            return Vec::new();
        }
        let mut sorted: Vec<&Container> = containers.iter().collect();
        let youngest_first =
            |it: &&Container| (std::cmp::Reverse(it.started_ms), std::cmp::Reverse(it.id));
        sorted.sort_by_key(youngest_first);
        if let Order::CheapestFirst(rule) = order {
            sorted.sort_by(|a, b| {
                rule.cost_s(&a.victim, 0.0)
                    .total_cmp(&rule.cost_s(&b.victim, 0.0))
            });
        }
        let mut going = Vec::new();
        for container in sorted {
            if missing.is_none() {
                break;
            }
            missing = missing.less(container.size());
            going.push(container);
        }
        assert!(
            missing.is_none(),
            "{missing:?} are missing when all of {} containers are gone",
            containers.len()
        );
        let rule = match order {
            Order::YoungestFirst => &Kills as &dyn PreemptionRule,
            Order::CheapestFirst(rule) => {
                spare(
                    &mut going,
                    used(&mut containers.iter()).less(self.harvestable(owner)),
                );
                rule
            }
        };
        let kept_back = used(&mut containers.iter()).less(used(&mut going.iter().copied()));
        assert!(
            kept_back.less(self.harvestable(owner)).is_none(),
            "{kept_back:?} stay in use of {:?}, when {} of {} containers go",
            self.harvestable(owner),
            going.len(),
            containers.len()
        );
        let mut queue_s = 0.0;
        let evictions = going.into_iter().map(|container| {
            let how = rule.preempt(&container.victim, queue_s);
            if let Preemption::Suspend(costs) = how {
                queue_s += costs.dump_s;
            }
            Eviction {
                id: container.id,
                how,
            }
        });
        evictions.collect()
    }
}

/// Removes the containers whose eviction is not necessary, the most expensive first: with two resources, the cheapest
/// ones may have freed the wrong one.
fn spare(going: &mut Vec<&Container>, missing: Resources) {
    for place in (0..going.len()).rev() {
        let others = going
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != place);
        let given = others.fold(Resources::default(), |sum, it| sum.plus(it.1.size()));
        if missing.less(given).is_none() {
            going.remove(place);
        }
    }
}

/// A running container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Container {
    /// Its number.
    pub id: u64,
    /// Its cores.
    pub cores: NonZeroU32,
    /// Its memory in MiB.
    pub memory_mib: u64,
    /// When it began, in milliseconds of any clock.
    pub started_ms: u64,
    /// What would be lost with it.
    pub victim: Victim,
}

impl Container {
    fn size(&self) -> Resources {
        Resources {
            cores: self.cores.get(),
            memory_mib: self.memory_mib,
        }
    }
}

/// What is lost with a container, or has to be stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Victim {
    /// Seconds of work since it began, or since its last checkpoint.
    pub progress_s: f64,
    /// Memory that a checkpoint of it would store, in bytes.
    pub memory_bytes: f64,
    /// Whether an earlier checkpoint of it exists.
    pub has_checkpoint: bool,
}

/// How a container is evicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Preemption {
    /// It restarts from its last checkpoint, or from the beginning.
    Kill,
    /// It is stored, and resumes elsewhere.
    Suspend(SuspensionCosts),
}

/// The costs of a suspension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuspensionCosts {
    /// Seconds to store it.
    pub dump_s: f64,
    /// Seconds until it runs again after being resumed.
    pub restore_s: f64,
}

/// Decides between killing and suspending, with the local costs of checkpoints.
pub trait PreemptionRule {
    /// Decides about a container, with `queue_s` seconds of other checkpoints before it on its server.
    fn preempt(&self, victim: &Victim, queue_s: f64) -> Preemption;

    /// Returns the costs of this decision in seconds, by which containers are ordered.
    fn cost_s(&self, victim: &Victim, queue_s: f64) -> f64 {
        match self.preempt(victim, queue_s) {
            Preemption::Kill => victim.progress_s,
            Preemption::Suspend(costs) => costs.dump_s + costs.restore_s + queue_s,
        }
    }
}

/// Never suspends.
#[derive(Clone, Copy, Debug)]
pub struct Kills;

impl PreemptionRule for Kills {
    fn preempt(&self, _victim: &Victim, _queue_s: f64) -> Preemption {
        Preemption::Kill
    }
}

/// The order of evictions.
#[derive(Clone, Copy)]
pub enum Order<'a> {
    /// As in the paper: containers are killed from the youngest to the oldest.
    YoungestFirst,
    /// The containers whose killing or suspension costs least come first.
    CheapestFirst(&'a dyn PreemptionRule),
}

/// An eviction of a container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Eviction {
    /// The number of the container.
    pub id: u64,
    /// How it is evicted.
    pub how: Preemption,
}
