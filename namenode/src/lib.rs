//! HarvestFS namenode.
