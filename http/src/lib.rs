//! HTTP services of the parts of HarvestFS: metrics, and the namenode's status page.
//!
//! Everything is read-only: only `GET` and `HEAD` are answered. An [`Access`] determines which clients may make
//! requests: with TLS under the cluster's certificate, those that present an administrator's certificate or the
//! endpoint's [`Token`]; or, on loopback only and when configured so, without TLS those that present the token, or any
//! client on this machine.
//!
//! Resources are bounded: the number of connections, in total and from one address; the time for a handshake, for a
//! request's head, for producing an answer and for receiving it; and the size of a head. Request bodies are not read.
//! A connection ends with the first request that is refused.
//!
//! [`client`] is the client side: commands use it to query services run by others.

#![forbid(unsafe_code)]

mod access;
mod answer;
pub mod client;
mod endpoint;
mod places;
mod prompt;
mod site;
mod token;

pub use access::Access;
pub use answer::{Answer, Get};
pub use endpoint::{Endpoint, HttpError};
pub use site::{MetricsSite, Site};
pub use token::{Token, TokenError};
