//! What passes between the datanode and its namenodes, on one link to each of them.

pub mod attempts;
pub mod changes;
pub mod heartbeats;
pub mod members;
pub mod obedience;
pub mod reports;
pub mod standing;

/// The link to one of the namenodes: the place of its address in the configuration, or one behind, which
/// may be that of another namenode later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkId(pub usize);
