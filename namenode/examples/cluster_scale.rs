//! Memory use and speed of the cluster engine with millions of blocks.
//!
//! `cargo run --release -p harvestfs-namenode --example cluster_scale [BLOCKS] [NODES]`

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::time::Instant;

use harvestfs_namenode::engine::cluster::{Cluster, ClusterOptions};
use harvestfs_namenode::engine::namespace::BlockChange;
use harvestfs_placement::Stock;
use harvestfs_protocol::ids::{BlockId, NodeId, SessionId, StorageId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::node::{
    BlockReport, Heartbeat, IncrementalReport, ReplicaChange, ReplicaReport, ServerDescription,
};
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass, VolumeStatus};
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Number of blocks whose replicas are reported together.
const BATCH: usize = 16_384;

const RULES: PlacementRules = PlacementRules {
    replication: 3,
    durability: Durability::Strict,
    class: None,
};

fn volume(node: u32, reimages: u32) -> VolumeStatus {
    VolumeStatus {
        storage: StorageId((u128::from(reimages) << 32) | u128::from(node)),
        class: StorageClass::Disk,
        quota_bytes: 1_000_000 * BLOCK_BYTES_MAX,
        used_bytes: 0,
        healthy: true,
        shrinks_in_ms: None,
    }
}

fn server(node: u32) -> ServerDescription {
    ServerDescription {
        name: format!("s{node}"),
        rack: format!("r{}", node % 40),
        environment: format!("e{}", node % 10),
        machine_function: "f".into(),
        data_addr: (std::net::Ipv4Addr::from_bits(node), 7000).into(),
    }
}

fn resident_bytes() -> u64 {
    // The second field of statm is the resident set in pages of 4 KiB.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|field| field.parse().ok());
    pages.unwrap_or(0u64) * 4096
}

fn timed<T>(what: &str, count: u64, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    let elapsed = start.elapsed();
    let each = elapsed.as_nanos() / u128::from(count.max(1));
    println!(
        "{what:<44} {:>9.3} s {each:>8} ns each",
        elapsed.as_secs_f64()
    );
    result
}

/// What the nodes report about some blocks, each of which is on three nodes.
fn changes_of(blocks: Range<u64>, nodes: u32) -> BTreeMap<u32, Vec<(StorageId, ReplicaChange)>> {
    let mut changes: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for number in blocks {
        let replica = ReplicaReport {
            block: BlockId(number),
            length_bytes: BLOCK_BYTES_MAX,
            sealed: true,
        };
        let first = number.wrapping_mul(2_654_435_761) >> 7;
        for step in 0..3 {
            let node = (first + step * (1 + first % 11)) % u64::from(nodes);
            let change = (volume(node as u32, 0).storage, ReplicaChange::Have(replica));
            changes.entry(node as u32).or_default().push(change);
        }
    }
    changes
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (blocks, nodes) = (number(4_000_000)?, u32::try_from(number(100)?)?);
    println!("{blocks} blocks of 3 replicas on {nodes} nodes");

    let mut cluster = Cluster::new(ClusterOptions::default(), Box::new(Stock), 0);
    let mut rng = SmallRng::seed_from_u64(1);
    for node in 0..nodes {
        cluster.register(0, NodeId(node), &server(node), &[volume(node, 0)]);
    }
    let beat = |cluster: &mut Cluster, now_ms: u64| {
        for node in 0..nodes {
            let volumes = vec![volume(node, u32::from(node == 0 && now_ms >= 40_000))];
            let heartbeat = Heartbeat {
                volumes,
                busy: false,
                primary: None,
                active_streams: 0,
                unix_ms: 0,
                denials: 0,
                removable_bytes: u64::MAX,
            };
            let heard = cluster.heartbeat(now_ms, NodeId(node), &heartbeat);
            assert_eq!(heard, Ok(()));
        }
    };
    let empty = resident_bytes();

    timed("the namespace's blocks, at a start", blocks, || {
        for number in 0..blocks {
            let block = BlockId(number);
            cluster.apply_change(
                0,
                &BlockChange::Allocated {
                    block,
                    rules: RULES,
                    writer: SessionId(1),
                },
            );
            cluster.apply_change(
                0,
                &BlockChange::Sealed {
                    block,
                    length_bytes: BLOCK_BYTES_MAX,
                },
            );
        }
    });

    for node in 0..nodes {
        let report = BlockReport {
            storage: volume(node, 0).storage,
            part: 0,
            last: true,
            replicas: Vec::new(),
        };
        assert_eq!(cluster.block_report(0, NodeId(node), &report), Ok(()));
    }
    timed("reports, per replica", 3 * blocks, || {
        for first in (0..blocks).step_by(BATCH) {
            let batch = first..blocks.min(first + BATCH as u64);
            for (node, changes) in changes_of(batch, nodes) {
                let report = IncrementalReport { changes };
                let taken = cluster.incremental_report(0, NodeId(node), &report);
                assert_eq!(taken, Ok(()));
            }
        }
    });
    println!(
        "{:<44} {:>9} bytes per block estimated by the engine, {} resident",
        "memory",
        cluster.summary(0).engine_bytes / blocks.max(1),
        (resident_bytes() - empty) / blocks.max(1),
    );

    let mut now_ms = 0;
    timed("heartbeats of all nodes", u64::from(nodes), || {
        beat(&mut cluster, 3_000)
    });
    let mut longest = std::time::Duration::ZERO;
    timed("ticks for 30 s, settling every block", 300, || {
        for _ in 0..300 {
            now_ms += 100;
            if now_ms % 3_000 == 0 {
                beat(&mut cluster, now_ms);
            }
            let start = Instant::now();
            cluster.tick(now_ms, &mut rng);
            longest = longest.max(start.elapsed());
        }
    });
    println!(
        "{:<44} {:>9.3} ms",
        "longest tick",
        longest.as_secs_f64() * 1e3
    );

    now_ms = 40_000;
    cluster.register(now_ms, NodeId(0), &server(0), &[volume(0, 1)]);
    longest = std::time::Duration::ZERO;
    timed("ticks for 60 s after a reimage", 600, || {
        for _ in 0..600 {
            now_ms += 100;
            if now_ms % 3_000 == 0 {
                beat(&mut cluster, now_ms);
            }
            let start = Instant::now();
            cluster.tick(now_ms, &mut rng);
            longest = longest.max(start.elapsed());
        }
    });
    println!(
        "{:<44} {:>9.3} ms",
        "longest tick",
        longest.as_secs_f64() * 1e3
    );
    let summary = cluster.summary(now_ms);
    println!(
        "{} under-replicated, {} waiting, {} under way",
        summary.under_replicated_blocks, summary.repairs_waiting, summary.repairs_under_way
    );
    timed("placing 1,000,000 blocks", 1_000_000, || {
        for _ in 0..1_000 {
            let placed = cluster.place(now_ms, 1_000, &RULES, &[], None, &mut rng);
            assert!(placed.is_ok());
        }
    });
    timed("fsck", blocks, || std::hint::black_box(cluster.fsck()));
    Ok(())
}
