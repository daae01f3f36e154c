//! Locations of blocks, the tokens to read them, and connections to datanodes.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::{InodeId, NodeId};
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::{MetaReply, query};
use harvestfs_protocol::transport::{
    CloseCode, Connection, ConnectionPool, Endpoint, TransportError,
};
use harvestfs_protocol::types::{Credentials, FileBlock, NodeInfo};
use harvestfs_protocol::unix_now_ms;
use parking_lot::{Mutex, MutexGuard};

use crate::driver::clock;
use crate::driver::session::Session;
use crate::engine::read::replicas::{Location, Replicas};
use crate::error::ClientError;

const DIAL_DEADLINE: Duration = Duration::from_secs(2);
/// Maximum number of connections to datanodes that are kept.
const CONNECTIONS_MAX: usize = 512;

/// The known locations, and the connections to their datanodes.
pub(crate) struct Locations {
    replicas: Mutex<Replicas>,
    connections: ConnectionPool,
    endpoint: Endpoint,
}

impl Locations {
    pub(crate) fn new(session: &Session) -> Self {
        let endpoint = session.endpoint.clone();
        Self {
            replicas: Mutex::default(),
            connections: ConnectionPool::new(endpoint.clone(), DIAL_DEADLINE, CONNECTIONS_MAX),
            endpoint,
        }
    }

    /// Locks the known replicas and datanodes.
    pub(crate) fn replicas(&self) -> MutexGuard<'_, Replicas> {
        self.replicas.lock()
    }

    /// Returns the location of a block of a file. If the namenode has to be asked, `others` are located too.
    ///
    /// # Errors
    /// [`ClientError::LeftFile`] when the extents that named it are out of date;
    /// [`ClientError::NoReplica`]; the error that keeps the namenode from answering.
    pub(crate) async fn locate(
        &self,
        session: &Session,
        credentials: &Credentials,
        (ino, at): (InodeId, FileBlock),
        others: impl FnOnce() -> Vec<FileBlock>,
    ) -> Result<Arc<Location>, ClientError> {
        let block = at.block;
        let known = self.replicas().known(block, unix_now_ms().unwrap_or(0));
        if let Some(location) = known {
            return Ok(location);
        }
        let mut blocks = others();
        blocks.retain(|other| other.block != block);
        blocks.truncate(BLOCKS_PER_REQUEST_MAX - 1);
        blocks.insert(0, at);
        let locate = query::Locate { ino, blocks };
        let MetaReply::Located(located) = session.query(credentials, locate).await? else {
            return Err(ClientError::UnexpectedReply(query::Locate::NAME));
        };
        self.replicas().learn(&located);
        if located.blocks.iter().all(|info| info.block != block) {
            return Err(ClientError::LeftFile { block, ino });
        }
        let found = self.replicas().get(block);
        match found {
            Some(location) if !location.replicas.is_empty() => Ok(location),
            _ => Err(ClientError::NoReplica {
                block,
                reason: "the namenode knows of none".into(),
            }),
        }
    }

    /// Notes that a datanode failed. The next request to it uses a new connection.
    pub(crate) fn note_failure(&self, node: NodeId) {
        let known = self.replicas().note_failure(node, clock::now());
        if let Some(node) = known
            && let Ok(peer) = peer(&node)
        {
            self.connections.forget(node.data_addr, &peer);
        }
    }

    /// Notes that a datanode refused a request.
    pub(crate) fn note_refusal(&self, node: NodeId, error: &DataError) {
        match error {
            DataError::Busy { retry_after_ms } => {
                self.replicas()
                    .note_busy(node, *retry_after_ms, clock::now());
            }
            _ => self.note_failure(node),
        }
    }

    /// Returns a connection to a datanode.
    pub(crate) async fn connect(&self, node: &NodeInfo) -> Result<Connection, TransportError> {
        self.connections.get(node.data_addr, &peer(node)?).await
    }

    /// Whether a datanode accepts a new connection.
    pub(crate) async fn probe(&self, node: &NodeInfo) -> Result<(), TransportError> {
        let connection = self
            .endpoint
            .connect(node.data_addr, &peer(node)?, DIAL_DEADLINE)
            .await?;
        connection.close(CloseCode::DONE, "probed");
        Ok(())
    }
}

fn peer(node: &NodeInfo) -> Result<Peer, TransportError> {
    Peer::new(Role::Datanode, node.name.clone()).map_err(|error| TransportError::Identity {
        reason: error.to_string(),
    })
}

/// Returns the error for a datanode that ended a stream too early.
pub(crate) fn ended_early() -> DataError {
    DataError::Protocol("the datanode ended the stream without a word".into())
}
