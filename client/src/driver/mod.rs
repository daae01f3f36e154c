//! The part of the client that carries out the decisions of the [engine](crate::engine): tasks, sockets,
//! clocks and randomness. From the bottom up: the session with the namenode, the datanodes, writing and
//! reading, and the core that combines them. Each layer uses only those below it; the outcome of writes is
//! reported upwards through [`write::pipeline::Source`], and recalls of the namenode through a channel.
//!
//! Functions at the boundary to `api` return boxed futures. An `async fn` is compiled again in each
//! crate that awaits it, together with everything that it awaits. (Without boxes here and in the
//! other parts, the program's own crate was half as large again: 1.69 instead of 1.15 million lines
//! of LLVM IR.) A box costs one allocation per operation that waits for the network anyway.

pub(crate) mod clock;
mod cluster;
pub(crate) mod core;
mod locations;
pub(crate) mod read;
pub(crate) mod session;
pub(crate) mod write;
