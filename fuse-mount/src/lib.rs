//! Mounts a HarvestFS cluster: a thin adapter from the kernel's FUSE protocol to
//! [`harvestfs_client`]. Nothing here decides what the file system does; it translates, and keeps
//! the kernel's caches true to the client's.
//!
//! The threads that read requests from the kernel never wait for the network: what the client's
//! cache or buffers can answer is answered at once, everything else in a task.

#![forbid(unsafe_code)]

mod adapter;
mod caller;
mod convert;
mod credentials;
mod directory;
mod errno;
mod guard;
mod handles;
mod inner;
mod invalidations;
mod kernel_cache;
pub mod kernel_options;
pub mod metrics;
mod mount;
pub mod mount_table;
mod nodes;
mod notices;
mod pages;
mod read;
mod read_ahead;
mod reply;
mod serve;
mod shared;
mod submounts;
mod unmount;
mod write;
mod write_buffers;

pub use self::mount::{Mount, MountError, MountOptions};
pub use self::unmount::{asked_by_mount, remove_dead};
