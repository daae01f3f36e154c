//! HarvestFS tests.
