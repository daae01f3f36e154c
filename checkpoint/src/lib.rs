//! Checkpoints of preempted jobs: their contents, how a new one shares pages with its predecessor,
//! when to take one instead of killing a job, and a simulation of that decision.
//!
//! The images are CRIU's, stored as ordinary files; nothing here depends on HarvestFS. A HarvestFS
//! mount is the right place for them because `copy_file_range` shares blocks instead of copying them,
//! and because any node can restore what another one stored.

#![forbid(unsafe_code)]

pub mod adaptive;
pub mod compare;
pub mod criu;
pub mod guard;
pub mod image;
pub mod intake;
pub mod manifest;
pub mod node;
pub mod page;
pub mod page_message;
pub mod page_server;
pub mod pagemap;
pub mod pages_file;
mod pieces;
pub mod process;
pub mod simulate;
pub mod store;
pub mod tracking;
pub mod trust;
pub mod verdict;
