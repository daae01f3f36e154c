//! What all tasks of a datanode share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::node::NodeRegistered;
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenVerifier};
use harvestfs_protocol::transport::{ConnectionPool, FrameReceiver, FrameSender};
use harvestfs_protocol::types::NodeInfo;
use harvestfs_protocol::unix_now_ms;
use harvestfs_protocol::watch;
use parking_lot::RwLock;

use crate::driver::busy::BusySignal;
use crate::driver::metrics::{Metrics, Sample};
use crate::driver::obedience::Obedience;
use crate::driver::short_circuit::ShortCircuit;
use crate::store::BlockStore;

/// When to ask again a datanode that has just started.
const UNREGISTERED_RETRY_MS: u32 = 200;
/// How long a writer waits for the first registration.
const REGISTRATION_DEADLINE: Duration = Duration::from_secs(5);

/// What the namenode said at the last registration.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// This datanode's number.
    pub id: NodeId,
    /// Largest block in bytes.
    pub block_bytes: u64,
}

/// What all tasks of a datanode share.
pub struct Node {
    /// The replicas.
    pub store: BlockStore,
    /// Connections to other datanodes.
    pub connections: ConnectionPool,
    /// Whether the server is to be left to its owner.
    pub busy: BusySignal,
    /// Which namenode is obeyed.
    pub obedience: Obedience,
    /// Where files are lent to readers on this host, if anywhere.
    pub short_circuit: Option<ShortCircuit>,
    /// Block streams under way.
    pub active_streams: AtomicU32,
    /// What is measured.
    pub metrics: Metrics,
    tokens: RwLock<TokenVerifier>,
    /// `None` before the first one.
    registration: watch::Sender<Option<Registration>>,
    stopping: watch::Sender<bool>,
    known: watch::Sender<bool>,
}

impl Node {
    pub fn new(
        store: BlockStore,
        connections: ConnectionPool,
        busy: BusySignal,
        short_circuit: Option<ShortCircuit>,
    ) -> Arc<Self> {
        Arc::new(Self {
            obedience: Obedience::new(store.read_obeyed()),
            store,
            connections,
            busy,
            short_circuit,
            active_streams: AtomicU32::new(0),
            metrics: Metrics::new(),
            tokens: RwLock::default(),
            registration: watch::Sender::new(None),
            stopping: watch::Sender::new(false),
            known: watch::Sender::new(false),
        })
    }

    /// Takes note of what the namenode said at registration.
    pub fn registered(&self, registered: &NodeRegistered) {
        self.set_keys(&registered.keys);
        self.registration.send_replace(Some(Registration {
            id: registered.node,
            block_bytes: registered.block_bytes.min(BLOCK_BYTES_MAX),
        }));
    }

    /// Accepts tokens signed with these keys and no others.
    pub fn set_keys(&self, keys: &[TokenKey]) {
        let verifier = TokenVerifier::new(keys);
        *self.tokens.write() = verifier;
    }

    /// What the namenode said at the last registration, if there was one.
    pub fn registration(&self) -> Option<Registration> {
        *self.registration.borrow()
    }

    /// The same; the first one is waited for, not for long: `None` if it does not come, or the datanode stops.
    pub async fn wait_for_registration(&self) -> Option<Registration> {
        let mut registrations = self.registration.subscribe();
        let registered = async {
            // The sender lives as long as `self`.
            let registration = registrations.wait_for(Option::is_some).await.ok()?;
            *registration
        };
        tokio::select! {
            biased;
            registration = registered => registration,
            () = tokio::time::sleep(REGISTRATION_DEADLINE) => None,
            () = self.stopping() => None,
        }
    }

    /// Checks the right to a block.
    ///
    /// # Errors
    /// [`DataError::BadToken`] or [`DataError::TokenExpired`]; [`DataError::Busy`] as long as the
    /// namenode has not yet sent the keys to accept.
    pub fn check_token(
        &self,
        token: &BlockToken,
        block: BlockId,
        right: Right,
    ) -> Result<(), DataError> {
        if self.registration().is_none() {
            return Err(DataError::Busy {
                retry_after_ms: UNREGISTERED_RETRY_MS,
            });
        }
        // A clock before 1970 makes every token look valid for long; it is not trusted.
        let now_unix_ms = unix_now_ms().unwrap_or(u64::MAX);
        let tokens = self.tokens.read();
        tokens.verify(token, block, right, now_unix_ms)
    }

    /// Opens a block stream to another datanode.
    ///
    /// # Errors
    /// Why it cannot be reached.
    pub async fn open_stream(
        &self,
        node: &NodeInfo,
    ) -> Result<(FrameSender, FrameReceiver), String> {
        let peer = Peer::new(Role::Datanode, node.name.clone()).map_err(|e| e.to_string())?;
        let connection = self
            .connections
            .get(node.data_addr, &peer)
            .await
            .map_err(|error| error.to_string())?;
        connection
            .open_stream(StreamKind::Data)
            .await
            .map_err(|error| error.to_string())
    }

    /// Takes note that the namenode knows this datanode and its replicas.
    pub fn set_known(&self) {
        self.known.send_replace(true);
    }

    /// Completes once the namenode knows, or has known, this datanode and its replicas.
    pub async fn known(&self) {
        // The sender lives as long as `self`.
        let _ = self.known.subscribe().wait_for(|known| *known).await;
    }

    /// The metrics in the text format of Prometheus. Waits for nothing.
    pub fn metrics_text(&self) -> String {
        self.metrics.text(&Sample {
            busy: self.busy.denial().is_some(),
            registered: *self.known.borrow(),
            streams: self.active_streams.load(Ordering::Relaxed),
            primary: self.busy.primary(),
            volumes: self.store.status(),
        })
    }

    /// Tells all tasks to come to an end.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Whether the datanode is stopping.
    pub fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Completes when the datanode is stopping.
    pub async fn stopping(&self) {
        // The sender lives as long as `self`.
        let _ = self.stopping.subscribe().wait_for(|stop| *stop).await;
    }
}

/// Counts a block stream as long as it lives.
pub struct StreamCount(Arc<Node>);

impl StreamCount {
    pub fn new(node: Arc<Node>) -> Self {
        node.active_streams.fetch_add(1, Ordering::Relaxed);
        Self(node)
    }
}

impl Drop for StreamCount {
    fn drop(&mut self) {
        self.0.active_streams.fetch_sub(1, Ordering::Relaxed);
    }
}
