//! Helpers shared by several tests.

pub mod cluster;
pub mod data_client;
pub mod disks;
pub mod fake_namenode;
pub mod primary;

/// An instant, for tests in virtual time.
pub fn some_time() -> std::time::Instant {
    std::time::Instant::now()
}
