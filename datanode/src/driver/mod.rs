//! Carries out the engine's decisions: tasks, sockets, timers, and the disk jobs that they request from the store.

mod budget;
mod busy;
mod datanode;
mod guard;
mod late;
mod leftovers;
mod link;
mod metrics;
mod node;
mod obedience;
mod opening;
mod read_stream;
mod repair;
mod scrubber;
mod service;
mod short_circuit;
mod shrinker;
mod tokens;
mod write_stream;

pub use self::datanode::Datanode;
