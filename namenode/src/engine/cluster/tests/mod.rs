//! Tests of the cluster engine.
//!
//! [`world`] and [`writers`] are what really is: datanodes with disks, a namespace with clients, and
//! messages that can be late or lost. [`model`] runs random histories in it.

mod balance;
mod datanode;
mod liveness;
mod model;
mod places;
mod removal;
mod repair;
mod replicas;
mod salvage;
mod small;
mod taken_back;
mod watching;
mod world;
mod writers;
