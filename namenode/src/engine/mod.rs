//! The namenode as a state machine without I/O: no sockets, no clock, no global random generator.
//!
//! - [`cluster`]: soft state, which may be forgotten: nodes, replicas, repair.
//! - [`namespace`]: hard state, which must survive. It changes only by [`namespace::Command`]s, which
//!   the journal keeps; applying the same commands gives the same state, byte for byte.

pub mod cluster;
mod count;
pub mod namespace;
