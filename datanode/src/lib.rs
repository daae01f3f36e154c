//! HarvestFS datanode.
