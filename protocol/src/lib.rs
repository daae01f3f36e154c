//! What the parts of HarvestFS say to each other: identifiers, messages, errors, limits, block
//! tokens, and the one transport that carries them (QUIC with mutual TLS).
//!
//! - [`rpc`]: requests to the namenode, from clients ([`meta`]), datanodes ([`node`]) and
//!   operators ([`admin`], [`history`]);
//! - [`data`]: block streams to datanodes;
//! - [`request_id`]: what connects the logs of all parts that served one request;
//! - [`codec`]: frames; [`transport`]: connections, streams, request multiplexing;
//! - [`identity`]: the certificate authority of a cluster and the certificates of its parts;
//! - [`timeline`]: which namenode says something, and how much it had seen;
//! - [`version`]: what exists since when, and what two releases have in common;
//! - [`durable`]: small files that survive a power loss;
//! - [`settings`]: what is wrong with a file that a user wrote.
//!
//! Messages are encoded with postcard, whose format is written down and stable. What was released is
//! never changed ([`version`]).

pub mod admin;
pub mod backup;
pub mod classes;
pub mod codec;
pub mod data;
pub mod durable;
pub mod error;
pub mod group;
pub mod harvest;
pub mod history;
pub mod identity;
pub mod ids;
pub mod limits;
pub mod machine;
pub mod meta;
pub mod name;
pub mod node;
pub mod outlook;
pub mod panics;
pub mod peer;
pub mod placement;
pub mod planted;
pub mod replica_layout;
pub mod request_id;
pub mod rpc;
pub mod settings;
pub mod short_circuit;
pub mod timeline;
mod timestamp;
pub mod token;
pub mod transport;
pub mod types;
pub mod upgrade;
pub mod version;
pub mod watch;

pub use machine::{since_boot, unix_now_ms};

/// The first word of the line that a part prints on standard output once it serves: the process
/// that started it waits for that.
pub const READY: &str = "ready";
