//! The API for programs.

pub(crate) mod client;
pub(crate) mod compaction;
pub(crate) mod counters;
pub(crate) mod file;
mod namespace;
mod path;
pub(crate) mod walk;
