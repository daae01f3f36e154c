//! The production engine in virtual time.
//!
//! - [`history`]: what policies know;
//! - [`durability`]: blocks lost to a year of reimages;
//! - [`availability`]: accesses that fail because primaries are busy;
//! - [`cluster`]: namenode, datanodes and clients on one thread;
//! - [`characterise`]: what a datacentre is like.

pub mod availability;
pub mod characterise;
pub mod cluster;
pub mod durability;
mod fleet;
pub mod history;
