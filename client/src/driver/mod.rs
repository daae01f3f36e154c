//! What carries out the decisions of the [engine](crate::engine): tasks, sockets, clocks and chance.

pub(crate) mod core;
pub(crate) mod locations;
pub(crate) mod read;
pub(crate) mod session;
pub(crate) mod write;
