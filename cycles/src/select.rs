//! Algorithm 1 of OSDI'16: the choice of utilisation classes for a job's tasks.

use std::num::{NonZeroU32, NonZeroU64};

use harvestfs_telemetry::profile::Pattern;
use rand::{Rng, RngExt};

use crate::job::JobType;

/// Share of a server's cores that its owner can always burst into (the paper: 4 of 12).
pub const RESERVE_SHARE: f64 = 1.0 / 3.0;

/// A utilisation class: an index into the classes given to [`Headrooms::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

/// The history of a class. Shares are of all cores, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassHistory {
    /// The pattern of its tenants.
    pub pattern: Pattern,
    /// Their average CPU utilisation.
    pub average_cpu_share: f64,
    /// Their peak CPU utilisation.
    pub peak_cpu_share: f64,
}

/// A server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    /// The class of its tenant.
    pub class: ClassId,
    /// Its cores.
    pub cores: NonZeroU32,
}

/// How strongly a job of each type prefers classes of each pattern: `W` of Algorithm 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    by_rank: [f64; 3],
}

/// Weights out of order.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("weights must be above 0 and finite, that of the best rank first: {0:?}")]
pub struct BadWeights([f64; 3]);

impl Default for Weights {
    /// The paper gives the order of the ranks but no numbers; see adr/0024.
    fn default() -> Self {
        Self {
            by_rank: [9.0, 3.0, 1.0],
        }
    }
}

impl Weights {
    /// Creates the weights of the first, second and third rank; [`JobType::preferred`] defines the ranks.
    ///
    /// # Errors
    /// Unless they are above 0 and finite, and none is above the previous one.
    pub fn new(by_rank: [f64; 3]) -> Result<Self, BadWeights> {
        let [first, second, third] = by_rank;
        if first.is_finite() && first >= second && second >= third && third > 0.0 {
            Ok(Self { by_rank })
        } else {
            Err(BadWeights(by_rank))
        }
    }

    /// Returns the weight of a pattern for a type of job.
    #[must_use]
    pub fn of(&self, job_type: JobType, pattern: Pattern) -> f64 {
        let mut ranks = job_type.preferred().into_iter().zip(self.by_rank);
        match ranks.find(|(preferred, _)| *preferred == pattern) {
            Some((_, weight)) => weight,
            None => panic!("{pattern:?} has no rank for {job_type:?} jobs"),
        }
    }
}

/// The result of the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The job fits into this class.
    One(ClassId),
    /// It fits into these classes together: two or more, in the order in which they were drawn.
    Several(Vec<ClassId>),
    /// It currently fits nowhere.
    None,
}

impl Selection {
    /// Returns the chosen classes.
    #[must_use]
    pub fn classes(&self) -> &[ClassId] {
        match self {
            Self::One(class) => std::slice::from_ref(class),
            Self::Several(classes) => classes,
            Self::None => &[],
        }
    }
}

/// The job can never run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the job uses {need_cores} cores at the same time; without the reserve the cluster has {cluster_cores}"
)]
pub struct LargerThanCluster {
    /// Cores that the job needs.
    pub need_cores: NonZeroU64,
    /// Cores of all servers except their owners' reserve.
    pub cluster_cores: u64,
}

/// The reason why classes and servers do not form a cluster.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// There is no class: no daily analysis has found one yet.
    #[error("there are no utilisation classes")]
    NoClasses,
    /// A server's class does not exist.
    #[error("server {server} is of class {}, of {classes} classes", .class.0)]
    UnknownClass {
        /// Index of the server in the input.
        server: usize,
        /// Its class.
        class: ClassId,
        /// Number of classes.
        classes: usize,
    },
    /// A share is not from 0 to 1.
    #[error("the average, peak or reserve of {0} is not from 0 to 1")]
    BadShare(f64),
}

#[derive(Clone, Copy, Debug)]
struct Class {
    history: ClassHistory,
    cores: u64,
    used_millicores: u64,
}

/// The room in each class, updated as servers report their usage.
#[derive(Clone, Debug)]
pub struct Headrooms {
    classes: Vec<Class>,
    servers: Vec<(Server, u32)>,
    reserve_share: f64,
}

impl Headrooms {
    /// Creates the headrooms of idle servers. `reserve_share` of each class is not given to jobs: with 0, Algorithm 1
    /// is as printed.
    ///
    /// # Errors
    /// If there are no classes, a server has an unknown class, or a share is not from 0 to 1.
    pub fn new(
        classes: &[ClassHistory],
        servers: &[Server],
        reserve_share: f64,
    ) -> Result<Self, ClusterError> {
        if classes.is_empty() {
            return Err(ClusterError::NoClasses);
        }
        let shares = classes
            .iter()
            .flat_map(|it| [it.average_cpu_share, it.peak_cpu_share]);
        let bad = |share: &f64| !(0.0..=1.0).contains(share);
        if let Some(share) = shares.chain([reserve_share]).find(bad) {
            return Err(ClusterError::BadShare(share));
        }
        let idle = |&history: &ClassHistory| Class {
            history,
            cores: 0,
            used_millicores: 0,
        };
        let mut headrooms = Self {
            classes: classes.iter().map(idle).collect(),
            servers: servers.iter().map(|&server| (server, 0)).collect(),
            reserve_share,
        };
        for (number, server) in servers.iter().enumerate() {
            let class = headrooms.classes.get_mut(server.class.0 as usize);
            let class = class.ok_or(ClusterError::UnknownClass {
                server: number,
                class: server.class,
                classes: classes.len(),
            })?;
            class.cores += u64::from(server.cores.get());
        }
        Ok(headrooms)
    }

    /// Notes the current usage of a server, given by its index in the input, in thousandths of a core: its owner and
    /// harvesting jobs together. More than all its cores counts as all of them. An unknown server is ignored.
    pub fn uses(&mut self, server: usize, millicores: u32) {
        let Some((server, used)) = self.servers.get_mut(server) else {
            return;
        };
        let now = millicores.min(server.cores.get().saturating_mul(1_000));
        let class = &mut self.classes[server.class.0 as usize];
        let before = u64::from(*used);
        assert!(
            before <= class.used_millicores && class.used_millicores <= class.cores * 1_000,
            "a server used {before} thousandths of a core, of {} that its class used of {} cores",
            class.used_millicores,
            class.cores
        );
        class.used_millicores = class.used_millicores - before + u64::from(now);
        *used = now;
    }

    /// Returns `Headroom(type, c)`: the share of a class that is expected to be free while a job of this type runs. 0
    /// for a class without servers and for an unknown one.
    #[must_use]
    pub fn headroom(&self, job_type: JobType, class: ClassId) -> f64 {
        let class = self.classes.get(class.0 as usize);
        class.map_or(0.0, |class| headroom(job_type, class))
    }

    /// Returns the cores of a class that jobs of this type may use: its headroom less the reserve.
    #[must_use]
    pub fn room_cores(&self, job_type: JobType, class: ClassId) -> f64 {
        let class = self.classes.get(class.0 as usize);
        class.map_or(0.0, |class| self.room(job_type, class))
    }

    fn room(&self, job_type: JobType, class: &Class) -> f64 {
        (headroom(job_type, class) - self.reserve_share).max(0.0) * class.cores as f64
    }

    /// Returns the number of all cores except the reserve.
    #[must_use]
    pub fn cluster_cores(&self) -> u64 {
        let cores: u64 = self.classes.iter().map(|class| class.cores).sum();
        (cores as f64 * (1.0 - self.reserve_share)).floor() as u64
    }

    /// Runs Algorithm 1 for a job of this type that uses at most this many cores concurrently. One random number is
    /// drawn for each class that is picked.
    ///
    /// # Errors
    /// If not even an idle cluster has room for it.
    pub fn select(
        &self,
        job_type: JobType,
        need_cores: NonZeroU64,
        weights: &Weights,
        rng: &mut impl Rng,
    ) -> Result<Selection, LargerThanCluster> {
        let cluster_cores = self.cluster_cores();
        if need_cores.get() > cluster_cores {
            return Err(LargerThanCluster {
                need_cores,
                cluster_cores,
            });
        }
        let need = need_cores.get() as f64;
        // (class, room, weighted room) of the classes with any room.
        let mut candidates: Vec<(ClassId, f64, f64)> = Vec::with_capacity(self.classes.len());
        for (number, class) in self.classes.iter().enumerate() {
            let room = self.room(job_type, class);
            if room > 0.0 {
                let weighted = room * weights.of(job_type, class.history.pattern);
                candidates.push((ClassId(number as u32), room, weighted));
            }
        }
        let fitting: Vec<_> = candidates
            .iter()
            .filter(|it| it.1 >= need)
            .copied()
            .collect();
        if let Some(place) = draw(&fitting, rng) {
            return Ok(Selection::One(fitting[place].0));
        }
        if candidates.iter().map(|it| it.1).sum::<f64>() < need {
            return Ok(Selection::None);
        }
        let (mut picked, mut room) = (Vec::new(), 0.0);
        while room < need
            && let Some(place) = draw(&candidates, rng)
        {
            let (class, of_class, _) = candidates.remove(place);
            picked.push(class);
            room += of_class;
        }
        assert!(
            picked.len() > 1,
            "{need} cores were picked in {picked:?} alone, which has room for {room}"
        );
        Ok(Selection::Several(picked))
    }
}

fn headroom(job_type: JobType, class: &Class) -> f64 {
    if class.cores == 0 {
        return 0.0;
    }
    let current = class.used_millicores as f64 / (class.cores as f64 * 1_000.0);
    1.0 - match job_type {
        JobType::Short => current,
        JobType::Medium => class.history.average_cpu_share.max(current),
        JobType::Long => class.history.peak_cpu_share.max(current),
    }
}

/// Draws a position with probability proportional to the last number of its entry; none if there are no entries.
fn draw(candidates: &[(ClassId, f64, f64)], rng: &mut impl Rng) -> Option<usize> {
    let last = candidates.len().checked_sub(1)?;
    let all: f64 = candidates.iter().map(|it| it.2).sum();
    let mut left = rng.random::<f64>() * all;
    let hit = candidates.iter().position(|it| {
        left -= it.2;
        left < 0.0
    });
    // Rounding may leave a small remainder after the last entry.
    Some(hit.unwrap_or(last))
}
