//! The space of mostly unused blocks is reclaimed while files are read and written.

use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, StoreOnDrop, wait_until};

const FILES: u64 = 400;
const FILE_BYTES: u64 = 40_000;
const DEADLINE: Duration = Duration::from_secs(120);

fn used_bytes(cluster: &Cluster) -> u64 {
    let status = cluster.output_of(&["admin", "status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    status["used_bytes"].as_u64().expect("a number")
}

#[test]
fn the_space_of_mostly_unused_blocks_comes_back() {
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        replication: 2,
        block_size: "4MiB",
        ..ClusterOptions::default()
    }) else {
        return;
    };
    let path = |seed: u64| mount.join(format!("f{seed}"));
    for seed in 0..FILES {
        let content = Pattern { seed }.bytes(FILE_BYTES as usize);
        fs::write(path(seed), content).expect("write");
    }
    // With two replicas, as reported by heartbeats.
    let before = 2 * FILES * FILE_BYTES;
    wait_until("the space is used", DEADLINE, || {
        used_bytes(&cluster) >= before
    });
    // Every tenth file stays, so that each block keeps a little data.
    for seed in (0..FILES).filter(|seed| seed % 10 != 0) {
        fs::remove_file(path(seed)).expect("remove");
    }
    // Unmounting seals every block.
    cluster.stop("mnt");
    let mount = cluster.mount("mnt");
    let kept: Vec<u64> = (0..FILES).step_by(10).collect();
    let times: Vec<_> = kept
        .iter()
        .map(|&seed| {
            fs::metadata(path(seed))
                .and_then(|m| m.modified())
                .expect("stat")
        })
        .collect();

    // A reader that keeps files open, and a writer, continue in the meantime.
    let over = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        let _over = StoreOnDrop(&over);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for &seed in &kept {
                    let file = File::open(path(seed)).expect("open");
                    Pattern { seed }.check(&file, 0, FILE_BYTES as usize);
                }
            }
        });
        scope.spawn(|| {
            let mut round = 0;
            while !over.load(Ordering::Relaxed) {
                round += 1;
                fs::write(mount.join("busy"), format!("{round}").repeat(1000)).expect("write");
            }
        });
        cluster.output_of(&["fs", "compact"])
    });
    assert!(output.contains(" moved ("), "{output}");
    assert!(!output.starts_with("0 pieces"), "{output}");

    wait_until("space comes back", DEADLINE, || {
        used_bytes(&cluster) < before / 3
    });
    for (&seed, &time) in kept.iter().zip(&times) {
        Pattern { seed }.check_file(&path(seed), FILE_BYTES);
        let now = fs::metadata(path(seed)).and_then(|m| m.modified());
        assert_eq!(now.expect("stat"), time, "f{seed}");
    }
    cluster.wait_healthy();
    // It survives a restart of everything.
    cluster.stop("mnt");
    cluster.kill("namenode");
    cluster.start_namenode();
    let mount = cluster.mount("mnt");
    for &seed in &kept {
        Pattern { seed }.check_file(&mount.join(format!("f{seed}")), FILE_BYTES);
    }
}
