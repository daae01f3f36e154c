//! What preemption costs, simulated: figures 3 to 6 and table 3 of the paper.

pub mod cluster;
pub mod jobs;

use crate::adaptive::Bandwidth;
use cluster::{Cluster, Outcome, Policy};
use jobs::{Job, Load};

/// A kind of storage, with what table 3 of the paper measured on it: seconds to checkpoint 5 GB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Storage {
    /// Its name.
    pub name: &'static str,
    /// The first checkpoint, of everything.
    pub paper_first_s: f64,
    /// The second one, after 10 % were changed.
    pub paper_second_s: f64,
}

/// What table 3 checkpoints.
pub const TABLE_3_BYTES: f64 = 5e9;
/// What of it is changed in between.
pub const CHANGED_SHARE: f64 = 0.1;

/// Disk, SSD and memory, as the paper measured them.
pub const STORAGE: [Storage; 3] = [
    Storage {
        name: "disk",
        paper_first_s: 169.18,
        paper_second_s: 15.34,
    },
    Storage {
        name: "ssd",
        paper_first_s: 43.73,
        paper_second_s: 4.08,
    },
    Storage {
        name: "memory",
        paper_first_s: 2.92,
        paper_second_s: 0.28,
    },
];

/// The network of the time: 10 Gbit/s.
const NETWORK_BYTES_PER_S: f64 = 1.25e9;

impl Storage {
    /// What a node's checkpoints move per second on it.
    #[must_use]
    pub fn bandwidth(&self) -> Bandwidth {
        let bytes_per_s = TABLE_3_BYTES / self.paper_first_s;
        Bandwidth {
            write_bytes_per_s: bytes_per_s,
            read_bytes_per_s: bytes_per_s,
            network_bytes_per_s: NETWORK_BYTES_PER_S,
        }
    }
}

/// How large the simulation is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Machines.
    pub nodes: usize,
    /// Cores of each.
    pub cores_per_node: usize,
    /// Hours in which jobs arrive.
    pub hours: f64,
    /// Random numbers follow from it.
    pub seed: u64,
}

/// A run.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Record {
    /// The storage; of killing alone, none.
    pub storage: Option<&'static str>,
    /// What happens to preempted tasks.
    pub policy: Policy,
    /// What came of it.
    pub outcome: Outcome,
}

/// Figures 3 and 5: killing, then checkpointing and deciding on each storage.
#[must_use]
pub fn policies(scale: &Scale) -> Vec<Record> {
    let load = Load {
        cores: u32::try_from(scale.nodes * scale.cores_per_node).unwrap_or(u32::MAX),
        duration_s: scale.hours * 3600.0,
        offered_share: 0.7,
        seed: scale.seed,
    };
    let jobs = jobs::generate(&load);
    let run = |storage: &Storage, policy| {
        let cluster = Cluster {
            nodes: scale.nodes,
            cores_per_node: scale.cores_per_node,
            bandwidth: storage.bandwidth(),
            changed_share: CHANGED_SHARE,
        };
        cluster::run(&cluster, policy, &jobs, scale.seed)
    };
    let mut records = vec![Record {
        storage: None,
        policy: Policy::Kill,
        outcome: run(&STORAGE[0], Policy::Kill),
    }];
    for policy in [Policy::Checkpoint, Policy::Adaptive] {
        for storage in &STORAGE {
            records.push(Record {
                storage: Some(storage.name),
                policy,
                outcome: run(storage, policy),
            });
        }
    }
    records
}

/// Figures 4 and 6: two jobs of a minute and 5 GB on one core; the second one has priority and
/// arrives after 30 s.
#[must_use]
pub fn two_jobs(bytes_per_s: f64, policy: Policy) -> Outcome {
    let job = |arrival_s, priority| Job {
        arrival_s,
        priority,
        tasks: 1,
        work_s: 60.0,
        memory_bytes: TABLE_3_BYTES,
    };
    let jobs = [
        job(0.0, jobs::Priority::Low),
        job(30.0, jobs::Priority::High),
    ];
    let cluster = Cluster {
        nodes: 1,
        cores_per_node: 1,
        bandwidth: Bandwidth {
            write_bytes_per_s: bytes_per_s,
            read_bytes_per_s: bytes_per_s,
            network_bytes_per_s: NETWORK_BYTES_PER_S,
        },
        changed_share: CHANGED_SHARE,
    };
    cluster::run(&cluster, policy, &jobs, 0)
}
