//! The cost to a mount of measuring and naming one request, with the default log settings:
//!
//!     cargo run --release -p harvestfs-fuse-mount --example recording_cost

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use harvestfs_fuse_mount::metrics::{Metrics, Operation};

const REQUESTS: u32 = 5_000_000;

fn main() {
    println!("| threads | ns for each request |\n|---|---|");
    for threads in [1, 2] {
        let metrics = Arc::new(Metrics::new());
        let began = Instant::now();
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..REQUESTS {
                        let observed = metrics.begin(black_box(Operation::Read));
                        metrics.read.inc_by(black_box(4_096));
                        drop(observed);
                    }
                });
            }
        });
        let ns = began.elapsed().as_nanos() / u128::from(REQUESTS);
        println!("| {threads} | {ns} |");
    }
}
