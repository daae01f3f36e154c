//! Reading: what a range of a file consists of, which part is in memory, and from which replica and
//! when the rest is read.

pub(crate) mod ahead;
pub(crate) mod attempts;
pub(crate) mod loans;
pub(crate) mod recent;
pub(crate) mod replicas;
pub(crate) mod sections;
pub(crate) mod times;
