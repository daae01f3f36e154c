//! Simulates what preemption costs: figures 3 to 6 and table 3 of the paper.

pub mod cluster;
pub mod jobs;

use crate::adaptive::Bandwidth;
use cluster::{Cluster, Outcome, Policy};
use jobs::{Job, Load};

/// A kind of storage, with the seconds that a checkpoint of 5 GB took on it in table 3 of the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Storage {
    /// Its name.
    pub name: &'static str,
    /// Seconds for the first checkpoint, of everything.
    pub paper_first_s: f64,
    /// Seconds for the second one, after 10 % were changed.
    pub paper_second_s: f64,
}

/// Bytes checkpointed in table 3.
pub const TABLE_3_BYTES: f64 = 5e9;
/// Share of them that is changed between the two checkpoints.
pub const CHANGED_SHARE: f64 = 0.1;

/// Disk, SSD and memory, as measured in the paper.
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
    /// The bandwidth of a node's checkpoints on this storage.
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

/// Size of a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Number of machines.
    pub nodes: usize,
    /// Number of cores of each machine.
    pub cores_per_node: usize,
    /// Hours during which jobs arrive.
    pub hours: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Result of one run.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Record {
    /// The storage; `None` when tasks are only killed.
    pub storage: Option<&'static str>,
    /// What happens to preempted tasks.
    pub policy: Policy,
    /// The result.
    pub outcome: Outcome,
}

/// Simulates figures 3 and 5: killing, then on each storage always checkpointing and deciding adaptively.
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

/// Simulates figures 4 and 6: two jobs of one minute and 5 GB each on one core; the second one has a
/// higher priority and arrives after 30 s.
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
