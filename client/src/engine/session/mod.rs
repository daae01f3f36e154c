//! The session with the namenode: how long it lasts, what it grants, and how each request is
//! executed only once.

pub(crate) mod answered;
pub(crate) mod call;
pub(crate) mod connection;
pub(crate) mod delegations;
pub(crate) mod holds;
pub(crate) mod lease;
pub(crate) mod namenodes;
pub(crate) mod search;
pub(crate) mod sequences;
