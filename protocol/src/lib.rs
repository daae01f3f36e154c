//! The protocol that the parts of HarvestFS speak with each other: identifiers, messages, errors, limits, block
//! tokens, and the one transport that carries them (QUIC with mutual TLS).
//!
//! - [`rpc`]: requests to the namenode, from clients ([`meta`]), datanodes ([`node`]) and
//!   operators ([`admin`], [`history`]);
//! - [`data`]: block streams to datanodes;
//! - [`request_id`]: the id that connects the log lines of all parts that served one request;
//! - [`codec`]: frames; [`transport`]: connections, streams, request multiplexing;
//! - [`identity`]: the certificate authority of a cluster and the certificates of its parts;
//! - [`timeline`]: which namenode sent a message, and how much it had seen by then;
//! - [`version`]: which message exists since which version, and which version two releases have in common;
//! - [`durable`]: small files that survive a power loss;
//! - [`settings`]: errors in files that a user wrote.
//!
//! Messages are encoded with postcard, whose format is specified and stable. A released message is never
//! changed ([`version`]).

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

/// The first word of the line that a part prints on standard output once it serves. The process that started it
/// waits for this line.
pub const READY: &str = "ready";
