//! HarvestFS namenode.

pub mod engine;
pub mod journal;
