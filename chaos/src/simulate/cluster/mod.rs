//! A whole cluster on one thread, in virtual time: the production code of namenode, datanodes and
//! clients, each part on a [`Host`] of its own, over a [`Network`] of datagrams. Only in tests yet: the clocks of
//! runtimes can be paused only with tokio's feature `test-util`.

mod machine;
mod network;
mod tests;

pub use self::machine::Host;
pub use self::network::{Link, Network, Sent};
