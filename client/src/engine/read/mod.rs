//! Reading: what a range of a file consists of, and what is in memory of it.

pub(crate) mod recent;
pub(crate) mod sections;
