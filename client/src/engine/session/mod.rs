//! The session with the namenode: the lease, and what the namenode has granted.

pub(crate) mod delegations;
pub(crate) mod lease;
