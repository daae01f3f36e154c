//! Reading ranges of blocks.

pub(crate) mod readahead;
pub(crate) mod reader;
pub(crate) mod short_circuit;
