//! A real namenode in a temporary directory, and clients, datanodes and operators that speak to it
//! over the real transport.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod backup;
mod delegations;
mod group;
mod harness;
mod history;
mod leases;
mod nodes;
mod operations;
mod recorded;
mod recovery;
mod replay;
mod restored;
mod sessions;
mod shown;
mod upgrade;
