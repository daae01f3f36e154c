//! Multiplexed requests on one long-lived stream.
//!
//! Requests carry an id; answers arrive in any order and name it; between them, the server may push notices. Frames
//! that are queued while another one is being written go out together.

mod client;
mod outgoing;
mod server;

pub use client::RpcClient;
pub use server::{NoticeSender, Responder, RpcServer};

use serde::{Deserialize, Serialize};

use crate::request_id::RequestId;

/// Most unanswered requests of one connection. Beyond 64 in flight, throughput no longer grows; this many serve a
/// mount whose kernel queues are all full.
pub const CALLS_IN_FLIGHT_MAX: usize = 1024;

/// Most bytes of frames that wait to be written. Beyond it, a client's calls wait, and a server reads no further
/// request.
pub const QUEUED_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Most notices that wait to be written to one client. A client that reads so slowly is disconnected: it has to
/// reconnect and start from scratch anyway.
pub const NOTICES_QUEUED_MAX: usize = 4096;

/// Most bytes of answers and notices that a server keeps for a client that does not read them before it disconnects
/// the client. Above [`QUEUED_BYTES_MAX`], only requests that were already read can add to them.
const UNREAD_BYTES_MAX: usize = 256 * 1024 * 1024;

/// A frame that a client sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestFrame<Req> {
    /// Chosen by the client, unique among its requests in flight.
    pub id: u64,
    /// The request.
    pub body: Req,
    /// The id of the request for which it is made.
    pub request: RequestId,
}

/// A frame that a server sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerFrame<Resp, Notice> {
    /// The answer to a request.
    Response {
        /// The request's id.
        id: u64,
        /// The answer.
        body: Resp,
    },
    /// There will be no answer to a request.
    Abandoned {
        /// The request's id.
        id: u64,
    },
    /// A message that the client did not request.
    Notice(Notice),
}
