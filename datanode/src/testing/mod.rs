//! What several tests share.

pub mod disks;
