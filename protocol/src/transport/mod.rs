//! The one transport of HarvestFS: QUIC with mutual TLS between all parts.
//!
//! An [`Endpoint`] is one UDP socket that dials and, if its role allows, accepts. On a [`Connection`], the peer
//! ([`crate::identity::Peer`]) is authenticated, and both sides have agreed on a version of the protocol. It carries
//! streams of frames ([`crate::codec`]): one stream per block transfer ([`FrameSender`], [`FrameReceiver`]), and one
//! long-lived stream on which many requests are in flight ([`RpcClient`], [`RpcServer`]).
//!
//! Between two processes on one host, streams bypass the network (`local`).
//!
//! Every wait has a deadline, every queue a limit. This is the only module that uses quinn directly.

mod config;
mod connection;
mod counts;
mod datagrams;
mod endpoint;
mod error;
mod local;
mod pool;
mod reset;
mod rpc;
mod socket;
mod stream;
mod system_socket;
#[cfg(test)]
mod tests;

pub use config::TransportOptions;
pub use connection::Connection;
pub use counts::{ConnectionCounts, CountedConnection};
pub use datagrams::DatagramSocket;
pub use endpoint::{Endpoint, Incoming};
pub use error::{CloseCode, RpcError, StreamCode, TransportError};
pub use pool::ConnectionPool;
pub use rpc::{
    CALLS_IN_FLIGHT_MAX, NOTICES_QUEUED_MAX, NoticeSender, QUEUED_BYTES_MAX, RequestFrame,
    Responder, RpcClient, RpcServer, ServerFrame,
};
pub use stream::{FrameReceiver, FrameSender};

/// Waits for `future` no longer than `deadline`.
pub(crate) async fn within<T, E: Into<TransportError>>(
    deadline: std::time::Duration,
    what: &'static str,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, TransportError> {
    match tokio::time::timeout(deadline, future).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(TransportError::Deadline { what, deadline }),
    }
}
