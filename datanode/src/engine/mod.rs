//! The datanode's decisions. Nothing here does I/O or reads a clock or a source of randomness: events arrive as calls,
//! with the time and random numbers where they matter, and the actions to take are returned.

pub mod budget;
pub mod busy;
pub mod disk;
pub mod link;
pub mod quota;
pub mod removal;
pub mod repair;
pub mod scrub;
pub mod write;
