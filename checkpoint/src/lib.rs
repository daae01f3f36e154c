//! Checkpoints of preempted jobs: what they consist of, how a new one shares pages with the one
//! before, when to make one instead of killing a job, and a simulation of that.
//!
//! The images are CRIU's, stored as ordinary files; nothing here knows HarvestFS. What makes a
//! mount of it the right place is that `copy_file_range` shares blocks instead of copying them,
//! and that any node can restore what another one stored.

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
