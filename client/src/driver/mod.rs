//! What carries out the decisions of the [engine](crate::engine): tasks, sockets, clocks and chance.
//! From below: the session with the namenode, the datanodes, writing and reading, and what puts them
//! together. Each uses only what is below it; what became of written data is told upwards through
//! [`write::pipeline::Source`], and what the namenode recalls through a channel.
//!
//! Functions at the border to `api` return boxed futures. An `async fn` is compiled again in each crate that awaits it, with
//! everything that it awaits. (Without boxes here and in the other parts, the program's own crate was half as large again: 1.69
//! instead of 1.15 million lines of LLVM.) A box costs an allocation for what waits for the network anyway.

pub(crate) mod clock;
mod cluster;
pub(crate) mod core;
mod locations;
pub(crate) mod read;
pub(crate) mod session;
pub(crate) mod write;
