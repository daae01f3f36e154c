//! What the jobs on a disk say about it.

pub mod health;
pub mod silence;
