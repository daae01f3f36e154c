//! What passes between the datanode and its namenode.

pub mod obedience;
