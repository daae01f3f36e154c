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
    /// Of a client, first.
    OpenSession(OpenSession),
    /// Of a client, every [`crate::limits::KEEPALIVE_INTERVAL`].
    KeepAlive,
    /// Of a client: the caches have forgotten what the notice named.
    AckInvalidation {
        /// The notice.
        id: u64,
    },
    /// Of a client: everything was committed or given up; end the session.
    CloseSession,
    /// Of a client.
    Meta(MetaCall),
    /// Of a datanode.
    Node(NodeRequest),
    /// Of an operator.
    Admin(AdminRequest),
    /// Of another namenode of the group.
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

/// What the namenode answers.
pub type Response = Result<Reply, FsError>;
