//! Writing: moves the data of a file from memory into blocks, and into the file.

pub(crate) mod block;
pub(crate) mod commits;
pub(crate) mod file;
pub(crate) mod overlay;
pub(crate) mod packet;
pub(crate) mod queue;
pub(crate) mod stock;
pub(crate) mod trouble;
pub(crate) mod writeback;
