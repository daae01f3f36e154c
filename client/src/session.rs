//! The session with the namenode: connecting, resuming, leases, notices.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::time::Instant;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::KEEPALIVE_INTERVAL;
use harvestfs_protocol::meta::{Notice, OpenSession, SessionOpened};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::since_boot;
use harvestfs_protocol::timeline::Epoch;
use harvestfs_protocol::transport::{
    CloseCode, Connection, Endpoint, NOTICES_QUEUED_MAX, RpcClient, RpcError, TransportError,
    TransportOptions,
};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};

use crate::cache::MetaCache;
use crate::client::{CacheListener, Invalidation};
use crate::core::Core;
use crate::delegations::Delegations;
use crate::error::ClientError;
use crate::holds::Holds;
use crate::lease::Lease;
use crate::options::ClientOptions;
use crate::sequences::{Sequences, Unconfirmed};

/// Dialling one address and the version exchange.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);
/// The answer to `OpenSession` may wait for the namenode's journal.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);
/// A keepalive that takes longer makes the client try a new connection, well before its lease ends.
const KEEPALIVE_DEADLINE: Duration = Duration::from_secs(4);
/// How often the lease is checked between two keepalives: timers stop while the machine is
/// suspended, and the lease does not.
const LEASE_LOOKS: u32 = 5;
const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(20);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);

pub(crate) type Rpc = RpcClient<Request, Response, Notice>;

/// A working connection within a session.
pub(crate) struct Link {
    pub(crate) rpc: Rpc,
    pub(crate) opened: SessionOpened,
    /// Counts sessions: blocks and sequence numbers of an older one mean nothing any more.
    pub(crate) generation: u64,
    /// When the session was asked for, since the machine started: its lease counts from here.
    asked: Duration,
}

/// Whether the namenode can be asked.
#[derive(Clone)]
pub(crate) enum LinkState {
    Up(Arc<Link>),
    Down { reason: String },
    Closed,
}

/// See the module.
pub(crate) struct Session {
    pub(crate) options: ClientOptions,
    pub(crate) endpoint: Endpoint,
    pub(crate) cache: MetaCache,
    pub(crate) holds: Holds,
    pub(crate) delegations: Delegations,
    /// Commits what the namenode recalls.
    pub(crate) core: OnceLock<Weak<Core>>,
    pub(crate) runtime: Handle,
    pub(crate) sequences: Sequences,
    pub(crate) unconfirmed: Unconfirmed,
    link: watch::Sender<LinkState>,
    namenode: Peer,
    lease: Lease,
    listener: Mutex<Option<Arc<dyn CacheListener>>>,
    /// The generation of the last session that the namenode is known to have ended.
    expired: AtomicU64,
    /// The number of the epoch in which the namenode was at the last connection.
    epoch: AtomicU32,
    stop: Notify,
}

/// Why a connection attempt failed, and whether trying again can help.
struct ConnectFailure {
    error: ClientError,
    hopeless: bool,
}

impl Session {
    /// Connects and starts the tasks that keep the session alive.
    pub(crate) async fn connect(options: ClientOptions) -> Result<Arc<Self>, ClientError> {
        let namenode =
            Peer::new(Role::Namenode, options.namenode_name.clone()).map_err(|error| {
                ClientError::Connect(TransportError::Identity {
                    reason: error.to_string(),
                })
            })?;
        let endpoint = Endpoint::bind(
            options.bind_addr(),
            &options.identity,
            TransportOptions::default(),
        )?;
        let session = Arc::new(Self {
            cache: MetaCache::new(options.cache_entries_max),
            holds: Holds::new(options.idle_holds_max),
            delegations: Delegations::default(),
            core: OnceLock::new(),
            runtime: Handle::current(),
            sequences: Sequences::default(),
            unconfirmed: Unconfirmed::default(),
            link: watch::Sender::new(LinkState::Down {
                reason: "not connected yet".into(),
            }),
            namenode,
            lease: Lease::default(),
            listener: Mutex::default(),
            expired: AtomicU64::new(0),
            epoch: AtomicU32::new(0),
            stop: Notify::new(),
            endpoint,
            options,
        });
        let started = Instant::now();
        let mut pause = RECONNECT_PAUSE_MIN;
        let (link, notices) = loop {
            match session.try_connect(None).await {
                Ok(connected) => break connected,
                Err(failure) if failure.hopeless => return Err(failure.error),
                Err(failure) => {
                    if started.elapsed() >= session.options.unreachable_timeout {
                        return Err(ClientError::Unreachable {
                            waited: started.elapsed(),
                            reason: failure.error.to_string(),
                        });
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
        };
        let link = session.publish(link);
        tokio::spawn(maintain(session.clone(), link, notices));
        tokio::spawn(crate::holds::release_closed(session.clone()));
        Ok(session)
    }

    /// The connection, once there is one.
    pub(crate) async fn link(&self, wait_max: Duration) -> Result<Arc<Link>, ClientError> {
        if let LinkState::Up(link) = &*self.link.borrow() {
            return Ok(link.clone());
        }
        let started = Instant::now();
        let mut changes = self.link.subscribe();
        let ready = changes.wait_for(|state| !matches!(state, LinkState::Down { .. }));
        // Two steps, so that the guard of the watch is not held across an await.
        let state = match tokio::time::timeout(wait_max, ready).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) => LinkState::Closed,
            Err(_) => self.link.borrow().clone(),
        };
        match state {
            LinkState::Up(link) => Ok(link),
            LinkState::Closed => Err(ClientError::Closed),
            LinkState::Down { reason } => Err(ClientError::Unreachable {
                waited: started.elapsed(),
                reason,
            }),
        }
    }

    /// Returns once there was no connection for as long as an operation waits for one.
    pub(crate) async fn unreachable(&self) -> ClientError {
        let mut changes = self.link.subscribe();
        loop {
            let lost = changes.wait_for(|state| !matches!(state, LinkState::Up(_)));
            if lost.await.is_err() {
                return ClientError::Closed;
            }
            if let Err(error) = self.link(self.options.unreachable_timeout).await {
                return error;
            }
        }
    }

    /// Connections as they come and go.
    pub(crate) fn watch_link(&self) -> watch::Receiver<LinkState> {
        self.link.subscribe()
    }

    /// The current session's number, also while the connection is down.
    pub(crate) fn generation(&self) -> u64 {
        self.sequences.generation()
    }

    /// Whether the namenode has begun another epoch since it allocated a block. Nothing more goes into
    /// such a block: a namenode that is put back from a copy of before knows the block, but not
    /// how much is in it.
    pub(crate) fn is_of_earlier_epoch(&self, block: BlockId) -> bool {
        Epoch::number_of(block) < self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn lease_remaining(&self) -> Duration {
        self.lease.remaining()
    }

    /// The cache, while it is valid.
    pub(crate) fn valid_cache(&self) -> Option<&MetaCache> {
        (!self.lease.remaining().is_zero()).then_some(&self.cache)
    }

    /// As if the lease had run out.
    #[cfg(test)]
    pub(crate) fn end_lease(&self) {
        self.lease.end();
    }

    pub(crate) fn set_listener(&self, listener: Arc<dyn CacheListener>) {
        *self.listener.lock() = Some(listener);
    }

    /// The namenode reports that the session of this link is over.
    pub(crate) fn session_expired(&self, link: &Link) {
        self.expired.fetch_max(link.generation, Ordering::AcqRel);
        link.rpc
            .connection()
            .close(CloseCode::DONE, "the session has expired");
    }

    /// Ends the session; what was not committed is lost.
    pub(crate) async fn close(&self) {
        let state = self.link.send_replace(LinkState::Closed);
        self.stop.notify_waiters();
        if let LinkState::Up(link) = state {
            // If it does not arrive, the session times out.
            let _ = link.rpc.call(&Request::CloseSession, DIAL_DEADLINE).await;
            link.rpc.connection().close(CloseCode::DONE, "closed");
        }
        self.forget_unconfirmed();
        self.lease.end();
        self.cache.invalidate_all();
        self.endpoint.close("the client is closed");
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(*self.link.borrow(), LinkState::Closed)
    }

    /// From here on calls use the link, and the cache may be used: a caller that caches something
    /// must first have forgotten what was invalidated while the session was disconnected.
    fn publish(&self, link: Link) -> Arc<Link> {
        let link = Arc::new(link);
        self.link.send_if_modified(|state| {
            let open = !matches!(state, LinkState::Closed);
            if open {
                self.lease.renew(link.asked);
                *state = LinkState::Up(link.clone());
            }
            open
        });
        link
    }

    /// Tries every namenode once.
    async fn try_connect(
        &self,
        resume: Option<&Link>,
    ) -> Result<(Link, mpsc::Receiver<Notice>), ConnectFailure> {
        let mut last = ConnectFailure {
            error: ClientError::Unreachable {
                waited: Duration::ZERO,
                reason: "no namenode is configured".into(),
            },
            hopeless: true,
        };
        for addr in &self.options.namenodes {
            match self
                .endpoint
                .connect(*addr, &self.namenode, DIAL_DEADLINE)
                .await
            {
                Ok(connection) => match self.open_session(connection, resume).await {
                    Ok(connected) => return Ok(connected),
                    Err(failure) => last = failure,
                },
                Err(error) => {
                    last = ConnectFailure {
                        hopeless: matches!(
                            error,
                            TransportError::PeerNotTrusted { .. }
                                | TransportError::RefusedByPeer { .. }
                                | TransportError::WrongPeer { .. }
                                | TransportError::Wire(_)
                        ),
                        error: error.into(),
                    };
                }
            }
        }
        Err(last)
    }

    async fn open_session(
        &self,
        connection: Connection,
        resume: Option<&Link>,
    ) -> Result<(Link, mpsc::Receiver<Notice>), ConnectFailure> {
        let retry = |error: ClientError| ConnectFailure {
            error,
            hopeless: false,
        };
        let (sender, notices) = mpsc::channel(NOTICES_QUEUED_MAX);
        let rpc = Rpc::start(connection, sender)
            .await
            .map_err(|error| retry(error.into()))?;
        let asked = since_boot();
        let request = |resumed: Option<&Link>| {
            let resume = resumed.map(|link| link.opened.session);
            Request::OpenSession(OpenSession {
                resume,
                holds: self.holds.all(),
                delegations: Some(match resume {
                    Some(_) => self.delegations.declare(),
                    None => Vec::new(),
                }),
                seen: resumed.map(|link| link.opened.position),
            })
        };
        let resume = resume.filter(|link| link.generation > self.expired.load(Ordering::Acquire));
        let mut reply = rpc.call(&request(resume), OPEN_DEADLINE).await;
        let mut resumed = resume.map(|link| link.generation);
        if matches!(reply, Ok(Err(FsError::SessionExpired))) {
            resumed = None;
            reply = rpc.call(&request(None), OPEN_DEADLINE).await;
        }
        match reply {
            Ok(Ok(Reply::SessionOpened(opened))) => {
                // Entries from before may have been invalidated while the session was disconnected.
                self.cache.invalidate_all();
                let generation = match resumed {
                    Some(generation) => generation,
                    None => {
                        self.forget_unconfirmed();
                        self.delegations.clear();
                        self.sequences.restart()
                    }
                };
                self.epoch
                    .store(opened.position.epoch.number, Ordering::Release);
                let link = Link {
                    rpc,
                    opened,
                    generation,
                    asked,
                };
                Ok((link, notices))
            }
            Ok(Ok(_)) => Err(retry(ClientError::UnexpectedReply("open_session"))),
            Ok(Err(error)) => Err(ConnectFailure {
                hopeless: matches!(error, FsError::RoleDenied(_) | FsError::Protocol(_)),
                error: error.into(),
            }),
            Err(error) => Err(retry(unreachable(Duration::ZERO, &error))),
        }
    }

    /// Does what a batch of notices says and acknowledges them.
    async fn handle_notices(&self, link: &Arc<Link>, batch: Vec<Notice>) {
        let mut acks = Vec::with_capacity(batch.len());
        for notice in &batch {
            match notice {
                Notice::Invalidate {
                    id,
                    inodes,
                    entries,
                } => {
                    acks.push(*id);
                    self.cache.invalidate(inodes, entries);
                    for ino in inodes {
                        self.holds.drop_idle(*ino);
                    }
                }
                Notice::InvalidateAll { id } => {
                    acks.push(*id);
                    self.cache.invalidate_all();
                }
                Notice::Recall { inodes } => {
                    self.delegations.recalled(inodes);
                    if let Some(core) = self.core.get().and_then(Weak::upgrade) {
                        tokio::spawn(core.commit_recalled(inodes.clone()));
                    }
                }
            }
        }
        let mut invalidated = Vec::new();
        for notice in batch {
            match notice {
                Notice::Invalidate {
                    inodes, entries, ..
                } => {
                    let entries = entries.into_iter();
                    invalidated
                        .extend(entries.map(|(parent, name)| Invalidation::Entry(parent, name)));
                    invalidated.extend(inodes.into_iter().map(Invalidation::Inode));
                }
                Notice::InvalidateAll { .. } => invalidated.push(Invalidation::All),
                Notice::Recall { .. } => {}
            }
        }
        self.notify_listener(invalidated).await;
        for id in acks {
            let link = link.clone();
            // In a task: the next notices need not wait for the answer, which says nothing.
            tokio::spawn(async move {
                let ack = Request::AckInvalidation { id };
                let _ = link.rpc.call(&ack, KEEPALIVE_DEADLINE).await;
            });
        }
    }

    /// Nothing that is cached is valid any more.
    async fn forget_everything(&self) {
        self.cache.invalidate_all();
        self.notify_listener(vec![Invalidation::All]).await;
    }

    pub(crate) async fn notify_listener(&self, what: Vec<Invalidation>) {
        let listener = self.listener.lock().clone();
        if let Some(listener) = listener.filter(|_| !what.is_empty()) {
            listener.invalidate(what).await;
        }
    }
}

/// Keeps the session alive and reconnects until the client is closed.
async fn maintain(session: Arc<Session>, first: Arc<Link>, notices: mpsc::Receiver<Notice>) {
    let (mut link, mut notices) = (first, notices);
    loop {
        let reason = serve(&session, &link, notices).await;
        if session.is_closed() {
            return;
        }
        tracing::warn!(reason, "the connection to the namenode was lost");
        session.link.send_if_modified(|state| {
            let open = !matches!(state, LinkState::Closed);
            if open {
                *state = LinkState::Down { reason };
            }
            open
        });
        link.rpc.connection().close(CloseCode::DONE, "reconnecting");
        let Some(connected) = reconnect(&session, &link).await else {
            return;
        };
        session.notify_listener(vec![Invalidation::All]).await;
        link = session.publish(connected.0);
        notices = connected.1;
        tracing::info!("connected to the namenode again");
    }
}

/// Tries until it works; none when the client is closed.
async fn reconnect(session: &Arc<Session>, link: &Link) -> Option<(Link, mpsc::Receiver<Notice>)> {
    let mut pause = RECONNECT_PAUSE_MIN;
    let mut lease_over = false;
    loop {
        let stopped = session.stop.notified();
        if session.is_closed() {
            return None;
        }
        tokio::select! {
            biased;
            result = resume(session, link) => match result {
                Ok(connected) => return Some(connected),
                Err(error) => tracing::debug!(%error, "cannot reconnect yet"),
            },
            () = stopped => return None,
        }
        if !lease_over && session.lease_remaining().is_zero() {
            lease_over = true;
            session.forget_everything().await;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
    }
}

/// Connects, and replays what the namenode may have forgotten.
async fn resume(
    session: &Arc<Session>,
    link: &Link,
) -> Result<(Link, mpsc::Receiver<Notice>), ClientError> {
    let connected = session.try_connect(Some(link)).await;
    let (link, notices) = connected.map_err(|failure| failure.error)?;
    session
        .repeat_unconfirmed(&link)
        .await
        .map_err(|error| unreachable(Duration::ZERO, &error))?;
    Ok((link, notices))
}

/// Sends keepalives and handles notices until the connection fails; returns why it did.
async fn serve(
    session: &Arc<Session>,
    link: &Arc<Link>,
    notices: mpsc::Receiver<Notice>,
) -> String {
    tokio::select! {
        biased;
        reason = keep_alive(session, link) => reason,
        reason = take_notices(session, link, notices) => reason,
        error = link.rpc.connection().closed() => error.to_string(),
        () = session.stop.notified() => "closed".into(),
    }
}

async fn keep_alive(session: &Arc<Session>, link: &Arc<Link>) -> String {
    loop {
        pause(session).await;
        if session.lease_remaining().is_zero() {
            // At once, in case the machine was suspended: the kernel's times to live stopped then.
            session.forget_everything().await;
        }
        let sent = since_boot();
        match link.rpc.call(&Request::KeepAlive, KEEPALIVE_DEADLINE).await {
            Ok(Ok(_)) => {
                if session.lease_remaining().is_zero() {
                    // The namenode may have stopped sending us notices meanwhile.
                    session.forget_everything().await;
                }
                session.lease.renew(sent);
            }
            Ok(Err(FsError::SessionExpired)) => {
                session.session_expired(link);
                return "the session has expired".into();
            }
            Ok(Err(error)) => return error.to_string(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Waits until the next keepalive is due, or the lease is found to be over.
async fn pause(session: &Session) {
    for _ in 0..LEASE_LOOKS {
        tokio::time::sleep(KEEPALIVE_INTERVAL / LEASE_LOOKS).await;
        if session.lease_remaining().is_zero() {
            return;
        }
    }
}

async fn take_notices(
    session: &Arc<Session>,
    link: &Arc<Link>,
    mut notices: mpsc::Receiver<Notice>,
) -> String {
    let mut batch = Vec::new();
    while notices.recv_many(&mut batch, NOTICES_QUEUED_MAX).await > 0 {
        session
            .handle_notices(link, std::mem::take(&mut batch))
            .await;
    }
    "the namenode ended the connection".into()
}

/// A call that got no answer, as an error for users.
pub(crate) fn unreachable(waited: Duration, error: &RpcError) -> ClientError {
    ClientError::Unreachable {
        waited,
        reason: error.to_string(),
    }
}
