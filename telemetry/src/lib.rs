//! HarvestFS telemetry.
