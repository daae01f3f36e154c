//! The tasks that write data into blocks and make it part of files.

mod allocator;
pub(crate) mod files;
pub(crate) mod pipeline;
mod requests;
mod seal;
mod writer;
