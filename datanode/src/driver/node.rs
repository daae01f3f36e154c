//! What all tasks of a datanode share.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::future::join_all;
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::{BlockId, ClusterId, NodeId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::node::NodeRegistered;
use harvestfs_protocol::timeline::{Authority, Position};
use harvestfs_protocol::token::{BlockToken, Right, TokenKey};
use harvestfs_protocol::transport::{ConnectionPool, FrameReceiver, FrameSender};
use harvestfs_protocol::types::{NodeInfo, VolumeStatus};
use harvestfs_protocol::unix_now_ms;
use harvestfs_protocol::watch;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Mutex as AsyncMutex;

use crate::driver::busy::BusySignal;
use crate::driver::late::Late;
use crate::driver::metrics::{Metrics, Sample};
use crate::driver::obedience::Obedience;
use crate::driver::short_circuit::ShortCircuit;
use crate::driver::tokens::Tokens;
use crate::engine::link::LinkId;
use crate::engine::link::obedience::Refusal;
use crate::engine::link::standing::Standing;
use crate::store::{BlockStore, Double, Found, Volume};

/// When to retry a request to a datanode that has just started.
const UNREGISTERED_RETRY_MS: u32 = 200;
/// How long a writer waits for the first registration.
const REGISTRATION_DEADLINE: Duration = Duration::from_secs(5);
/// The pause between attempts to make a volume that joins late part of the cluster.
const CLAIM_INTERVAL: Duration = Duration::from_secs(5);

/// The namenode's reply to the last registration.
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
    /// Whether the server is to be left to its primary tenant.
    pub busy: BusySignal,
    /// Which namenode is obeyed.
    pub obedience: Obedience,
    /// The socket on which files are lent to readers on this host, if there is one.
    pub short_circuit: Option<ShortCircuit>,
    /// Volumes that are still being opened.
    pub late: Late,
    /// Number of block streams in progress.
    pub active_streams: AtomicU32,
    /// The metrics.
    pub metrics: Metrics,
    /// Held while the volumes join a cluster, as two namenodes may name it at the same time. Contains the cluster
    /// named last.
    claiming: AsyncMutex<Option<ClusterId>>,
    tokens: RwLock<Tokens>,
    standing: Mutex<Standing>,
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
        late: Late,
        links_max: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            claiming: AsyncMutex::default(),
            tokens: RwLock::new(Tokens::new(links_max)),
            standing: Mutex::new(Standing::new(links_max)),
            obedience: Obedience::new(store.obeyed_at_start(store.cluster()), links_max),
            store,
            connections,
            busy,
            short_circuit,
            late,
            active_streams: AtomicU32::new(0),
            metrics: Metrics::new(),
            registration: watch::Sender::new(None),
            stopping: watch::Sender::new(false),
            known: watch::Sender::new(false),
        })
    }

    /// Notes that there is a link to a namenode from now on.
    pub fn begin(&self, link: LinkId) {
        self.note(|standing| standing.begin(link));
        self.store.changes().of(link).begin();
    }

    /// Notes that the link has ended: tokens signed by its namenode are no longer accepted.
    pub fn end(&self, link: LinkId) {
        self.store.changes().of(link).end();
        self.set_keys(link, &[]);
        self.note(|standing| standing.end(link));
    }

    /// Whether a namenode is obeyed, as far as this datanode knows.
    pub fn has_leader(&self) -> bool {
        self.standing.lock().has_leader()
    }

    /// Decides whether to obey the namenode on a link, at this address, given the authority that it claims. Returns
    /// the position that is obeyed now.
    ///
    /// # Errors
    /// Why the namenode is not obeyed.
    pub fn obey(
        &self,
        link: LinkId,
        addr: SocketAddr,
        authority: &Authority,
    ) -> Result<Position, Refusal> {
        let is_only = self.standing.lock().has_only_one();
        let result = self.obedience.obey(link, addr, authority, is_only);
        self.note(|standing| standing.heard(link, result.is_ok()));
        result
    }

    /// Takes note that a namenode, which was told this position, is of this cluster, on which the volumes did not agree
    /// when it was asked. Only now it is known which of them tell what was obeyed before the start: returns whether the
    /// namenode has to know that, since it may lack some of it.
    pub async fn recall(&self, cluster: ClusterId, told: Option<Position>) -> bool {
        let order = |it: Position| (it.epoch.number, it.record);
        let obeyed = self.store.obeyed_at_start(Some(cluster));
        let Some(obeyed) = obeyed.filter(|&it| Some(order(it)) > told.map(order)) else {
            return false;
        };
        self.obedience.recalled(obeyed);
        // From here on the registration names the cluster.
        self.claim(cluster).await;
        true
    }

    /// Makes the volumes part of a cluster. Volumes of another cluster are taken down.
    pub async fn claim(&self, cluster: ClusterId) {
        let mut claimed = self.claiming.lock().await;
        *claimed = Some(cluster);
        self.store.claim(cluster).await;
    }

    /// Makes volumes whose disks did not respond at the registration part of the cluster once they do respond.
    pub async fn claim_rest(&self) {
        // The lock is not held any longer: registrations wait for it, and a disk may be slow again.
        let claimed = *self.claiming.lock().await;
        let Some(cluster) = claimed else {
            return;
        };
        let volumes = self.store.volumes();
        let is_left = |it: &&Arc<Volume>| it.cluster().is_none() && it.check_usable().is_ok();
        let rest: Vec<_> = volumes.iter().filter(is_left).collect();
        join_all(rest.iter().map(|it| it.join_cluster(cluster))).await;
    }

    /// Adds a volume that was opened after the others, with the replicas found on it. Returns its files that do not
    /// count, because another volume has the block; `None` if the store already has this volume.
    pub async fn join(&self, volume: &Arc<Volume>, found: Vec<Found>) -> Option<Vec<Double>> {
        // The cluster of the other volumes is known from the first registration on. Nothing is served before that.
        if self.store.cluster().is_none() {
            let mut registrations = self.registration.subscribe();
            // The sender lives as long as `self`.
            let _ = registrations.wait_for(Option::is_some).await;
        }
        let _alone = loop {
            // As at a registration: a volume of another cluster is taken down before anything on it is reported. This
            // runs without the lock, for which registrations wait: the disk may be slow again.
            while let Some(cluster) = self.to_claim(volume) {
                volume.join_cluster(cluster).await;
                if self.to_claim(volume).is_some() {
                    tokio::time::sleep(CLAIM_INTERVAL).await;
                }
            }
            let alone = self.claiming.lock().await;
            if self.to_claim(volume).is_none() {
                break alone;
            }
        };
        // Namenodes do not register a server that has a volume twice.
        let is_same = |it: &Arc<Volume>| it.storage() == volume.storage();
        if self.store.volumes().iter().any(is_same) {
            return None;
        }
        if let Some(obeyed) = volume.obeyed_at_start()
            && volume.health.is_good()
            // Otherwise it may be about another cluster's namenodes.
            && volume.cluster() == self.store.cluster()
        {
            self.obedience.found(obeyed);
        }
        let doubles = self.store.join(volume, found);
        self.obedience.has_joined();
        self.late.has_joined();
        Some(doubles)
    }

    /// Returns the cluster of the other volumes if this volume can be used and is not part of it yet.
    fn to_claim(&self, volume: &Volume) -> Option<ClusterId> {
        let cluster = self.store.cluster()?;
        let is_unclaimed = volume.health.is_good() && volume.cluster() != Some(cluster);
        is_unclaimed.then_some(cluster)
    }

    /// The status of the volumes for the namenodes, including volumes that are still being opened.
    pub fn volumes(&self) -> Vec<VolumeStatus> {
        let mut volumes = self.store.status();
        self.late.add_to(&mut volumes);
        volumes
    }

    /// Takes note of a namenode's reply to a registration.
    pub fn registered(&self, link: LinkId, registered: &NodeRegistered) {
        self.set_keys(link, &registered.keys);
        self.note(|standing| standing.gave_keys(link));
        let registration = Registration {
            id: registered.node,
            block_bytes: registered.block_bytes.min(BLOCK_BYTES_MAX),
        };
        // The values from a standby may be old.
        let is_old = registered.authority.recovering;
        self.registration.send_if_modified(|known| {
            let is_news = known.is_none() || !is_old;
            if is_news {
                *known = Some(registration);
            }
            is_news
        });
    }

    /// Accepts tokens signed with these keys of the namenode on a link, and with no other keys of that namenode.
    pub fn set_keys(&self, link: LinkId, keys: &[TokenKey]) {
        self.tokens.write().set_keys(link, keys);
    }

    /// The namenode's reply to the last registration, if there was one.
    pub fn registration(&self) -> Option<Registration> {
        *self.registration.borrow()
    }

    /// The same, but waits a short time for the first registration: `None` if there is none by then, or the datanode
    /// stops.
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
    /// [`DataError::BadToken`] or [`DataError::TokenExpired`]; [`DataError::Busy`] until the namenode, or the leader
    /// if there are several, has sent the keys to accept.
    pub fn check_token(
        &self,
        token: &BlockToken,
        block: BlockId,
        right: Right,
    ) -> Result<(), DataError> {
        let unregistered = DataError::Busy {
            retry_after_ms: UNREGISTERED_RETRY_MS,
        };
        if self.registration().is_none() {
            return Err(unregistered);
        }
        // With a clock before 1970, every token would look valid for long; such a clock is not trusted.
        let now_unix_ms = unix_now_ms().unwrap_or(u64::MAX);
        let verified = self.tokens.read().verify(token, block, right, now_unix_ms);
        match verified {
            Err(DataError::BadToken(_)) if !self.standing.lock().has_keys_of_leader() => {
                Err(unregistered)
            }
            result => result,
        }
    }

    /// Opens a block stream to another datanode.
    ///
    /// # Errors
    /// Why the datanode cannot be reached.
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

    /// Takes note that a namenode knows this datanode and its replicas.
    pub fn reported(&self, link: LinkId) {
        self.note(|standing| standing.reported(link));
    }

    /// Takes note that the connection to a namenode is lost.
    pub fn lost(&self, link: LinkId) {
        self.note(|standing| standing.lost(link));
    }

    fn note(&self, change: impl FnOnce(&mut Standing)) {
        let mut standing = self.standing.lock();
        change(&mut standing);
        if standing.is_known() {
            self.known
                .send_if_modified(|known| !std::mem::replace(known, true));
        }
    }

    /// Completes once the leader knows, or has known, this datanode and its replicas.
    pub async fn known(&self) {
        // The sender lives as long as `self`.
        let _ = self.known.subscribe().wait_for(|known| *known).await;
    }

    /// The metrics in Prometheus text format. Never waits.
    pub fn metrics_text(&self) -> String {
        let registered = self.standing.lock().is_known();
        self.metrics.text(&Sample {
            busy: self.busy.denial().is_some(),
            registered,
            streams: self.active_streams.load(Ordering::Relaxed),
            primary: self.busy.primary(),
            volumes: self.volumes(),
            without_status: self.late.without_status(),
        })
    }

    /// Signals all tasks to end.
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
