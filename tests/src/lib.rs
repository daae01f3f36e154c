//! Common code of the tests of whole clusters: real processes, real disks, real mounts.
//!
//! A [`Cluster`] is a namenode, datanodes and mounts, each a process of the `harvestfs` binary that
//! a test can kill and start again. Everything is in one temporary directory, which is removed when the
//! cluster is dropped, even after a panic.

#![forbid(unsafe_code)]

mod binary;
mod browser;
mod cluster;
mod data;
mod group;
mod kill_on_drop;
mod mounts;
mod ports;
mod process;
mod prometheus;
mod replicas;
mod requirements;
mod store_on_drop;
mod up;

use std::thread::sleep;
use std::time::{Duration, Instant};

pub use self::binary::{copy_harvestfs, harvestfs};
pub use self::browser::Browser;
pub use self::cluster::{Cluster, ClusterOptions, init_datanode};
pub use self::data::{
    Pattern, assert_same_tree, copy_directory, count_files, library_sources, make_source_tree,
};
pub use self::kill_on_drop::KillOnDrop;
pub use self::mounts::remove as unmount;
pub use self::ports::free_address;
pub use self::process::Process;
pub use self::prometheus::{Prometheus, Server, Target, TargetAccess};
pub use self::requirements::{
    can_mount, criu, free_bytes, hadoop, have_program, have_space, postgresql, skip,
};
pub use self::store_on_drop::StoreOnDrop;
pub use self::up::{DownOnDrop, is_closed_to_others, run_on, supervisor_of};

/// Waits until `condition` holds.
///
/// # Panics
/// When it does not hold within `deadline`; `what` describes the condition in the message.
pub fn wait_until(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + deadline;
    while !condition() {
        assert!(
            Instant::now() < end,
            "{what}: not within {} s",
            deadline.as_secs()
        );
        sleep(Duration::from_millis(50));
    }
}
