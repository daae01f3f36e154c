//! A whole cluster on one thread, in virtual time: the production code of namenode, datanodes and
//! clients, each part on a [`Host`] of its own, over a [`Network`] of datagrams.

mod machine;
mod network;
#[cfg(test)]
mod tests;

pub use self::machine::Host;
pub use self::network::{Link, Network};
