//! What several tests share.

pub mod cluster;
pub mod data_client;
pub mod disks;
pub mod fake_namenode;
pub mod primary;

/// A moment, for what is tested in virtual time.
pub fn some_time() -> std::time::Instant {
    std::time::Instant::now()
}
