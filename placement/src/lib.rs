//! HarvestFS placement.
