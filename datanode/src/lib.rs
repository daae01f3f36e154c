//! HarvestFS datanode.
mod store;
