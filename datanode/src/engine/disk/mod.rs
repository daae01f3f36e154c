//! Judging a disk by its jobs.

pub mod health;
pub mod silence;
