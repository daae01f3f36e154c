//! The production engine in virtual time.
//!
//! - [`history`]: what placement policies know;
//! - [`durability`]: blocks lost to a year of reimages;
//! - [`availability`]: accesses that fail because primaries are busy;
//! - [`cluster`]: namenodes, datanodes, clients and mounts on one thread;
//! - [`characterise`]: the statistics of a datacentre.

pub mod availability;
pub mod characterise;
pub mod cluster;
pub mod durability;
mod fleet;
pub mod history;
