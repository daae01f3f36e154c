//! What the parts of HarvestFS serve over HTTP: metrics, and the namenode a page to look at.
//!
//! Everything is read-only: only `GET` and `HEAD` are answered. An [`Access`] says which clients may ask: with TLS
//! under the cluster's certificate, those that show the certificate of an administrator or the
//! endpoint's [`Token`]; or, on loopback only and when configured so, without TLS those that show the token, or
//! anyone on this machine.
//!
//! Bounded: connections, in all and from one address, the time for a handshake, for a request's head, for an answer and
//! for taking it, and the size of a head. A request's body is not read. A connection ends with the first request that
//! is refused.

//! [`client`] is the other end: what commands ask of the programs that others run.

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
