//! One datanode of a pipeline: which packets are accepted, and which may be acknowledged.

pub mod packet;
pub mod progress;
