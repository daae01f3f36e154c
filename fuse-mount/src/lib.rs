//! HarvestFS fuse-mount.
