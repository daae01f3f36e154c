//! Reading: what a range of a file consists of, what is in memory of it, and from where and when the
//! rest is read.

pub(crate) mod ahead;
pub(crate) mod attempts;
pub(crate) mod loans;
pub(crate) mod recent;
pub(crate) mod replicas;
pub(crate) mod sections;
pub(crate) mod times;
