//! Where blocks are, the right to read them, and which datanodes answered lately.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::{BlockId, InodeId, NodeId};
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::{MetaReply, query};
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::transport::{
    CloseCode, Connection, ConnectionPool, Endpoint, TransportError,
};
use harvestfs_protocol::types::{Credentials, FileBlock, Located, NodeInfo};
use harvestfs_protocol::unix_now_ms;
use parking_lot::Mutex;

use crate::driver::session::Session;
use crate::error::ClientError;

/// Blocks remembered, in two generations of half of it.
const BLOCKS_MAX: usize = 65_536;
/// How long a datanode that failed is asked last, and not written to.
const AVOID: Duration = Duration::from_secs(15);
/// Bounds of how long a busy datanode is left alone, even if it asks for another time.
const BUSY_MIN: Duration = Duration::from_secs(1);
const BUSY_MAX: Duration = Duration::from_secs(10);
/// A token that ends sooner is renewed before it is used.
const TOKEN_MARGIN: Duration = Duration::from_secs(60);
const DIAL_DEADLINE: Duration = Duration::from_secs(2);
/// Connections to datanodes that are kept.
const CONNECTIONS_MAX: usize = 512;

/// A block, and where it can be read.
#[derive(Debug)]
pub(crate) struct Location {
    pub(crate) token: BlockToken,
    /// Best first.
    pub(crate) replicas: Vec<Arc<NodeInfo>>,
}

/// See the module.
pub(crate) struct Locations {
    inner: Mutex<Inner>,
    connections: ConnectionPool,
    endpoint: Endpoint,
}

#[derive(Default)]
struct Inner {
    young: FxHashMap<BlockId, Arc<Location>>,
    old: FxHashMap<BlockId, Arc<Location>>,
    nodes: FxHashMap<NodeId, Arc<NodeInfo>>,
    failed: FxHashMap<NodeId, Instant>,
    /// Until when a datanode is probably busy.
    busy: FxHashMap<NodeId, Instant>,
    /// How often a datanode said that it is.
    denials: u64,
}

impl Locations {
    pub(crate) fn new(session: &Session) -> Self {
        let endpoint = session.endpoint.clone();
        Self {
            inner: Mutex::default(),
            connections: ConnectionPool::new(endpoint.clone(), DIAL_DEADLINE, CONNECTIONS_MAX),
            endpoint,
        }
    }

    /// Remembers what the namenode answered.
    pub(crate) fn learn(&self, located: &Located) {
        let mut inner = self.inner.lock();
        for node in &located.nodes {
            let known = inner.nodes.get(&node.node);
            if known.is_none_or(|known| **known != *node) {
                inner.nodes.insert(node.node, Arc::new(node.clone()));
            }
        }
        for block in &located.blocks {
            let replicas = block
                .replicas
                .iter()
                .filter_map(|node| inner.nodes.get(node).cloned())
                .collect();
            let location = Location {
                token: block.token,
                replicas,
            };
            inner.insert(block.block, Arc::new(location));
        }
    }

    /// A block's pipeline lost some datanodes.
    pub(crate) fn narrow(&self, block: BlockId, nodes: &[NodeId]) {
        let mut inner = self.inner.lock();
        if let Some(location) = inner.get(block) {
            let kept = location.replicas.iter();
            let replicas = kept.filter(|replica| nodes.contains(&replica.node));
            let location = Location {
                token: location.token,
                replicas: replicas.cloned().collect(),
            };
            inner.insert(block, Arc::new(location));
        }
    }

    /// A replica turned out to be bad. It is not asked again while there are others.
    pub(crate) fn drop_replica(&self, block: BlockId, bad: NodeId) {
        let known = self.inner.lock().get(block);
        if let Some(location) = known.filter(|location| location.replicas.len() > 1) {
            let others = location.replicas.iter().map(|replica| replica.node);
            let others: Vec<NodeId> = others.filter(|node| *node != bad).collect();
            self.narrow(block, &others);
        }
    }

    pub(crate) fn forget(&self, block: BlockId) {
        let mut inner = self.inner.lock();
        inner.young.remove(&block);
        inner.old.remove(&block);
    }

    /// Where a block is, if that is remembered and the token is good for a while.
    pub(crate) fn known(&self, block: BlockId) -> Option<Arc<Location>> {
        let location = self.inner.lock().get(block)?;
        let enough = unix_now_ms().unwrap_or(0) + TOKEN_MARGIN.as_millis() as u64;
        (location.token.expires_unix_ms() > enough && !location.replicas.is_empty())
            .then_some(location)
    }

    /// Where a block of a file is. When it has to be asked for, `others` are asked for with it.
    ///
    /// # Errors
    /// [`ClientError::LeftFile`] when the extents that named it are out of date;
    /// [`ClientError::NoReplica`]; what keeps the namenode from answering.
    pub(crate) async fn locate(
        &self,
        session: &Session,
        credentials: &Credentials,
        (ino, at): (InodeId, FileBlock),
        others: impl FnOnce() -> Vec<FileBlock>,
    ) -> Result<Arc<Location>, ClientError> {
        let block = at.block;
        if let Some(location) = self.known(block) {
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
        self.learn(&located);
        if located.blocks.iter().all(|info| info.block != block) {
            return Err(ClientError::LeftFile { block, ino });
        }
        let found = self.inner.lock().get(block);
        match found {
            Some(location) if !location.replicas.is_empty() => Ok(location),
            _ => Err(ClientError::NoReplica {
                block,
                reason: "the namenode knows of none".into(),
            }),
        }
    }

    /// A block's replicas: first the ones that answered lately, last the ones that failed.
    pub(crate) fn in_order(&self, location: &Location, now: Instant) -> Vec<Arc<NodeInfo>> {
        let inner = self.inner.lock();
        let mut replicas = location.replicas.clone();
        replicas.sort_by_key(|node| {
            (
                inner.has_failed(node.node, now),
                inner.is_busy(node.node, now),
            )
        });
        replicas
    }

    /// Datanodes that failed lately or are busy.
    pub(crate) fn avoided(&self, now: Instant) -> Vec<NodeId> {
        let mut inner = self.inner.lock();
        inner
            .failed
            .retain(|_, failed| now.saturating_duration_since(*failed) < AVOID);
        inner.busy.retain(|_, until| now < *until);
        let mut avoided: Vec<NodeId> = inner.failed.keys().copied().collect();
        avoided.extend(
            inner
                .busy
                .keys()
                .filter(|node| !inner.failed.contains_key(node)),
        );
        avoided
    }

    pub(crate) fn node(&self, node: NodeId) -> Option<Arc<NodeInfo>> {
        self.inner.lock().nodes.get(&node).cloned()
    }

    /// A datanode failed. It is dialled anew when it is asked again.
    pub(crate) fn note_failure(&self, node: NodeId, now: Instant) {
        let known = {
            let mut inner = self.inner.lock();
            inner.failed.insert(node, now);
            inner.nodes.get(&node).cloned()
        };
        if let Some(node) = known
            && let Ok(peer) = peer(&node)
        {
            self.connections.forget(node.data_addr, &peer);
        }
    }

    /// A datanode's owner needs it.
    pub(crate) fn note_busy(&self, node: NodeId, retry_after_ms: u32, now: Instant) {
        let wait = Duration::from_millis(retry_after_ms.into()).clamp(BUSY_MIN, BUSY_MAX);
        let mut inner = self.inner.lock();
        inner.busy.insert(node, now + wait);
        inner.denials += 1;
    }

    /// How often a datanode said that its owner needs it.
    pub(crate) fn denials(&self) -> u64 {
        self.inner.lock().denials
    }

    /// A datanode would not take or give what it was asked for.
    pub(crate) fn note_refusal(&self, node: NodeId, error: &DataError, now: Instant) {
        match error {
            DataError::Busy { retry_after_ms } => self.note_busy(node, *retry_after_ms, now),
            _ => self.note_failure(node, now),
        }
    }

    pub(crate) fn note_success(&self, node: NodeId) {
        let mut inner = self.inner.lock();
        if !inner.failed.is_empty() {
            inner.failed.remove(&node);
        }
        if !inner.busy.is_empty() {
            inner.busy.remove(&node);
        }
    }

    /// A connection to a datanode.
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

impl Inner {
    fn get(&mut self, block: BlockId) -> Option<Arc<Location>> {
        if let Some(location) = self.young.get(&block) {
            return Some(location.clone());
        }
        let location = self.old.remove(&block)?;
        self.insert(block, location.clone());
        Some(location)
    }

    fn insert(&mut self, block: BlockId, location: Arc<Location>) {
        if self.young.len() >= BLOCKS_MAX / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(block, location);
    }

    fn is_busy(&self, node: NodeId, now: Instant) -> bool {
        self.busy.get(&node).is_some_and(|until| now < *until)
    }

    fn has_failed(&self, node: NodeId, now: Instant) -> bool {
        self.failed
            .get(&node)
            .is_some_and(|failed| now.saturating_duration_since(*failed) < AVOID)
    }
}

fn peer(node: &NodeInfo) -> Result<Peer, TransportError> {
    Peer::new(Role::Datanode, node.name.clone()).map_err(|error| TransportError::Identity {
        reason: error.to_string(),
    })
}
