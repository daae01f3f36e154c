//! HarvestFS namenode.

pub mod journal;
