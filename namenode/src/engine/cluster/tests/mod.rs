//! Tests of the cluster engine.
//!
//! [`world`] is what really is: datanodes with disks, a namespace, and messages between them and
//! the engine that can be late or lost. [`model`] runs random histories in it.

mod liveness;
mod model;
mod removal;
mod repair;
mod replicas;
mod world;
