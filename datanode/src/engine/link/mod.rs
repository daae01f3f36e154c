//! Communication of the datanode with its namenodes, on one link to each of them.

pub mod attempts;
pub mod changes;
pub mod heartbeats;
pub mod members;
pub mod obedience;
pub mod reports;
pub mod standing;

/// The link to one of the namenodes: the index of its address in the configuration, or a higher index, which may be
/// reused for another namenode later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkId(pub usize);
