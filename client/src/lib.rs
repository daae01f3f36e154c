//! HarvestFS client.
