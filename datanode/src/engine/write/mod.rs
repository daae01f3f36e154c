//! One datanode of a pipeline: which packets are taken, and what may be acknowledged of them.

pub mod packet;
pub mod progress;
