//! What several tests share.

pub mod cluster;
pub mod data_client;
pub mod disks;
pub mod fake_namenode;
pub mod primary;
