//! The requests on the multiplexed stream between a namenode and all other parts.

use serde::{Deserialize, Serialize};

use crate::admin::{AdminReply, AdminRequest};
use crate::error::FsError;
use crate::meta::{MetaCall, MetaReply, Mutated, OpenSession, SessionOpened};
use crate::node::{NodeReply, NodeRequest};
use crate::peer::{PeerAnswer, PeerCall};

/// A request to the namenode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// From a client: the first request.
    OpenSession(OpenSession),
    /// From a client: sent every [`crate::limits::KEEPALIVE_INTERVAL`].
    KeepAlive,
    /// From a client: its caches have dropped what the notice named.
    AckInvalidation {
        /// The id of the notice.
        id: u64,
    },
    /// From a client: everything was committed or given up; end the session.
    CloseSession,
    /// From a client.
    Meta(MetaCall),
    /// From a datanode.
    Node(NodeRequest),
    /// From an operator.
    Admin(AdminRequest),
    /// From another namenode of the group.
    Peer(PeerCall),
}

/// The namenode's reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `OpenSession`.
    SessionOpened(SessionOpened),
    /// To `KeepAlive`, `AckInvalidation` and `CloseSession`.
    Done,
    /// To `Meta` with a query or housekeeping.
    Meta(MetaReply),
    /// To `Meta` with a mutation.
    Mutated(Mutated),
    /// To `Node`.
    Node(NodeReply),
    /// To `Admin`.
    Admin(AdminReply),
    /// To `Peer`.
    Peer(PeerAnswer),
}

/// The namenode's answer to a request.
pub type Response = Result<Reply, FsError>;
