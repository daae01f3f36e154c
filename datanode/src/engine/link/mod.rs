//! What passes between the datanode and its namenode.

pub mod attempts;
pub mod changes;
pub mod heartbeats;
pub mod obedience;
pub mod reports;
