//! Writing: the data of a file on its way from memory into blocks, and into the file.

pub(crate) mod overlay;
pub(crate) mod packet;
pub(crate) mod writeback;
