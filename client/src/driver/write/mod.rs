//! The tasks that bring written data into blocks and make it part of files.

pub(crate) mod allocator;
pub(crate) mod committer;
pub(crate) mod file_state;
pub(crate) mod pipeline;
pub(crate) mod requests;
pub(crate) mod seal;
pub(crate) mod writer;
