//! The session with the namenode: connecting, resuming, leases, notices.

pub(crate) mod calls;
mod commits;
pub(crate) mod content;
mod earlier;
pub(crate) mod holds;
pub(crate) mod listener;
mod listing;
mod maintain;
mod replay;
mod search;
mod sequences;

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::LEASE;
use harvestfs_protocol::meta::{Notice, OpenSession, SessionOpened};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::since_boot;
use harvestfs_protocol::transport::{
    CloseCode, Endpoint, NOTICES_QUEUED_MAX, RpcClient, RpcError, TransportError, TransportOptions,
};
use harvestfs_protocol::types::PlacementRules;
use harvestfs_protocol::watch;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};

use self::holds::Holds;
use self::listener::{CacheListener, Invalidation};
use self::replay::Lost;
use self::search::{Failure, Searching};
use self::sequences::{Numbered, Sequences};
use crate::driver::clock;
use crate::engine::cache::MetaCache;
use crate::engine::cache::listings::Listings;
use crate::engine::session::connection::{DOUBT_AFTER, Ended};
use crate::engine::session::delegations::Delegations;
use crate::engine::session::lease::Lease;
use crate::engine::session::namenodes::Namenodes;
use crate::engine::session::search::DIAL_DEADLINE;
use crate::engine::session::sequences::Unconfirmed;
use crate::error::ClientError;
use crate::options::ClientOptions;

/// Deadline for closing the session.
const CLOSE_DEADLINE: Duration = Duration::from_secs(3);
/// Deadline for opening a session, which may wait for the namenode's journal.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);
/// A keepalive that takes longer makes the client try a new connection, well before its lease ends.
const KEEPALIVE_DEADLINE: Duration = Duration::from_secs(4);

pub(crate) type Rpc = RpcClient<Request, Response, Notice>;

/// A working connection within a session.
pub(crate) struct Link {
    pub(crate) rpc: Rpc,
    pub(crate) opened: SessionOpened,
    /// Counts sessions: blocks and sequence numbers of an older one are no longer valid.
    pub(crate) generation: u64,
    /// When the session was requested, since the machine started: its lease counts from here.
    asked: Duration,
    /// The namenode that the connection is with.
    namenode: SocketAddr,
    doubts: Doubts,
}

/// With several namenodes: a request has waited so long that perhaps another one leads by now.
struct Doubts {
    are_several: AtomicBool,
    arisen: Notify,
}

impl Link {
    /// As a call of [`Rpc`], but raises doubts while no answer comes.
    async fn ask(&self, request: &Request, deadline: Duration) -> Result<Response, RpcError> {
        let answer = self.rpc.call(request, deadline);
        if !self.doubts.are_several.load(Ordering::Relaxed) {
            return answer.await;
        }
        let mut answer = pin!(answer);
        loop {
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                () = tokio::time::sleep(DOUBT_AFTER) => self.doubts.arisen.notify_one(),
            }
        }
    }
}

/// Whether a namenode is connected.
#[derive(Clone)]
pub(crate) enum LinkState {
    Up(Arc<Link>),
    Down { reason: String },
    Closed,
}

/// Files whose content another session requests: their data in memory is to be committed.
pub(crate) type Recall = Vec<InodeId>;

/// The session with the namenode.
pub(crate) struct Session {
    pub(crate) options: ClientOptions,
    pub(crate) endpoint: Endpoint,
    pub(crate) cache: MetaCache,
    pub(crate) holds: Holds,
    pub(crate) delegations: Delegations,
    pub(crate) runtime: Handle,
    /// Receives what the namenode recalls.
    recalls: mpsc::Sender<Recall>,
    listings: Mutex<Listings>,
    sequences: Arc<Sequences>,
    unconfirmed: Mutex<Unconfirmed<(Numbered, Arc<Request>)>>,
    lost: Mutex<Lost>,
    link: watch::Sender<LinkState>,
    namenode: Peer,
    namenodes: Mutex<Namenodes>,
    /// The namenode that probably leads.
    leader: Mutex<Option<SocketAddr>>,
    lease: Lease,
    listener: Mutex<Option<Arc<dyn CacheListener>>>,
    ended: Mutex<Ended>,
    /// Notified when a mutation has ended whose caller did not wait.
    settled: Notify,
    /// The namenode's block settings, as of the start of the session: nothing uses them earlier.
    block_bytes: AtomicU64,
    default_rules: Mutex<Option<PlacementRules>>,
    /// The number of the namenode's epoch at the last connection.
    epoch: AtomicU32,
    stop: Notify,
}

impl Session {
    /// Connects and starts the tasks that keep the session alive. The channel delivers what the
    /// namenode recalls.
    pub(crate) async fn connect(
        options: ClientOptions,
    ) -> Result<(Arc<Self>, mpsc::Receiver<Recall>), ClientError> {
        if options.namenodes.is_empty() {
            // There would be nobody to ask, and nobody who could name others.
            return Err(FsError::InvalidArgument("no namenode is named".into()).into());
        }
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
        let (recalls, recalled) = mpsc::channel(NOTICES_QUEUED_MAX);
        let session = Arc::new(Self {
            cache: MetaCache::new(options.cache_entries_max),
            holds: Holds::new(options.idle_holds_max),
            delegations: Delegations::default(),
            runtime: Handle::current(),
            recalls,
            listings: Mutex::default(),
            sequences: Arc::default(),
            unconfirmed: Mutex::default(),
            lost: Mutex::default(),
            link: watch::Sender::new(LinkState::Down {
                reason: "not connected yet".into(),
            }),
            namenode,
            namenodes: Mutex::new(Namenodes::new(options.namenodes.clone())),
            leader: Mutex::new(None),
            lease: Lease::default(),
            listener: Mutex::default(),
            ended: Mutex::default(),
            settled: Notify::new(),
            block_bytes: AtomicU64::new(0),
            default_rules: Mutex::default(),
            epoch: AtomicU32::new(0),
            stop: Notify::new(),
            endpoint,
            options,
        });
        let (link, notices) = session.first_link().await?;
        let link = Arc::new(link);
        session.publish(&link);
        tokio::spawn(maintain::maintain(session.clone(), link, notices));
        tokio::spawn(holds::release_closed(session.clone()));
        Ok((session, recalled))
    }

    async fn first_link(&self) -> Result<(Link, mpsc::Receiver<Notice>), ClientError> {
        let started = clock::now();
        let mut searching = Searching::everywhere(self);
        // Even with little patience, one dial is attempted.
        let deadline = self.options.unreachable_timeout.max(DIAL_DEADLINE);
        match tokio::time::timeout(deadline, searching.open(None, true)).await {
            Ok(result) => result,
            Err(_) => Err(ClientError::Unreachable {
                waited: clock::now() - started,
                reason: searching.last_error(),
            }),
        }
    }

    /// Returns the connection, once there is one.
    pub(crate) async fn link(&self, wait_max: Duration) -> Result<Arc<Link>, ClientError> {
        if let LinkState::Up(link) = &*self.link.borrow() {
            return Ok(link.clone());
        }
        let started = clock::now();
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
                waited: clock::now() - started,
                reason,
            }),
        }
    }

    /// Returns once there has been no connection for as long as an operation waits for one.
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

    /// Watches connections being made and lost.
    pub(crate) fn watch_link(&self) -> watch::Receiver<LinkState> {
        self.link.subscribe()
    }

    /// Returns the number of the current session, even while the connection is down.
    pub(crate) fn generation(&self) -> u64 {
        self.sequences.generation()
    }

    /// Returns the number of the namenode's current epoch.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn lease_remaining(&self) -> Duration {
        let remaining = self.lease.remaining(since_boot());
        if planted::is(Bug::BelievesExpiredLease) {
            return remaining.max(LEASE);
        }
        remaining
    }

    /// Returns the maximum size of a block, in bytes.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes.load(Ordering::Relaxed)
    }

    /// Returns the placement rules that apply where no directory sets others.
    pub(crate) fn default_rules(&self) -> PlacementRules {
        let Some(rules) = *self.default_rules.lock() else {
            unreachable!("no session was ever opened");
        };
        rules
    }

    /// Returns the cache, while it is valid.
    pub(crate) fn valid_cache(&self) -> Option<&MetaCache> {
        (!self.lease_remaining().is_zero()).then_some(&self.cache)
    }

    /// Simulates the expiry of the lease.
    #[cfg(test)]
    pub(crate) fn end_lease(&self) {
        self.lease.end();
    }

    pub(crate) fn set_listener(&self, listener: Arc<dyn CacheListener>) {
        *self.listener.lock() = Some(listener);
    }

    /// Notes that the session of this link has ended, as the namenode reports.
    pub(crate) fn session_expired(&self, link: &Link) {
        self.ended.lock().session(link.generation);
        link.rpc
            .connection()
            .close(CloseCode::DONE, "the session has expired");
    }

    /// Notes that the namenode of this link no longer leads.
    pub(crate) fn deposed(&self, link: &Link, leader: Option<SocketAddr>) {
        *self.leader.lock() = leader.and_then(|it| self.namenodes.lock().hinted(it));
        link.rpc
            .connection()
            .close(CloseCode::DONE, "another namenode leads");
    }

    /// Notes that the connection of this link was lost. Its namenode is now no more likely to lead than others.
    pub(crate) fn lost(&self, link: &Link) {
        let mut leader = self.leader.lock();
        if *leader == Some(link.namenode) {
            *leader = None;
        }
    }

    fn has_several_namenodes(&self) -> bool {
        self.namenodes.lock().are_several()
    }

    /// Notes the namenodes that the leader reports.
    fn told_namenodes(&self, link: &Link, all: Vec<SocketAddr>) {
        tracing::debug!(?all, "these are the namenodes");
        self.namenodes.lock().told(all);
        let are_several = self.has_several_namenodes();
        link.doubts
            .are_several
            .store(are_several, Ordering::Relaxed);
    }

    /// Ends the session; data that was not committed is lost.
    pub(crate) async fn close(&self) {
        let state = self.link.send_replace(LinkState::Closed);
        self.stop.notify_waiters();
        if let LinkState::Up(link) = state {
            // If it does not arrive, the session times out.
            let _ = link.rpc.call(&Request::CloseSession, CLOSE_DEADLINE).await;
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

    /// Makes the link available to calls, and the cache valid. Whatever caches on top of it must
    /// first have forgotten what was invalidated while the session was disconnected.
    fn publish(&self, link: &Arc<Link>) {
        self.link.send_if_modified(|state| {
            let open = !matches!(state, LinkState::Closed);
            if open {
                self.lease.renew(link.asked);
                *state = LinkState::Up(link.clone());
            }
            open
        });
    }

    /// Opens a session on a connection to a namenode, or resumes the session of another link.
    async fn open_session(
        &self,
        rpc: Rpc,
        namenode: SocketAddr,
        resume: Option<&Link>,
    ) -> Result<Link, Failure> {
        let asked = since_boot();
        let request = |resumed: Option<&Link>| {
            let resume = resumed.map(|link| link.opened.session);
            Request::OpenSession(OpenSession {
                resume,
                holds: self.holds.lock().all(),
                delegations: Some(match resume {
                    Some(_) => self.delegations.declare(self.unconfirmed_inodes()),
                    None => Vec::new(),
                }),
                seen: resumed.map(|link| link.opened.position),
            })
        };
        let before = resume;
        let resume = resume.filter(|link| self.ended.lock().may_resume(link.generation));
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
                self.holds.lock().all_may_have_changed();
                let generation = match resumed {
                    Some(generation) => generation,
                    None => {
                        // This applies even if this connection is lost before it is used: another
                        // namenode may still have the session.
                        if let Some(before) = before {
                            self.ended.lock().session(before.generation);
                        }
                        self.delegations.clear();
                        self.block_bytes
                            .store(opened.block_bytes, Ordering::Relaxed);
                        *self.default_rules.lock() = Some(opened.default_rules);
                        self.sequences.restart()
                    }
                };
                self.epoch
                    .store(opened.position.epoch.number, Ordering::Release);
                Ok(Link {
                    rpc,
                    opened,
                    generation,
                    asked,
                    namenode,
                    doubts: Doubts {
                        are_several: AtomicBool::new(self.has_several_namenodes()),
                        arisen: Notify::new(),
                    },
                })
            }
            Ok(Ok(_)) => Err(Failure::passing(ClientError::UnexpectedReply(
                "open_session",
            ))),
            Ok(Err(error)) => Err(Failure::refused(error)),
            Err(error) => Err(Failure::passing(unreachable(Duration::ZERO, &error))),
        }
    }

    /// Acts on a batch of notices, which the cache has already obeyed, and acknowledges them.
    async fn handle_notices(&self, link: &Arc<Link>, batch: Vec<Notice>) {
        let mut acks = Vec::with_capacity(batch.len());
        for notice in &batch {
            if planted::is(Bug::ObeysNoticesLate) {
                self.cache.obey(notice);
            }
            match notice {
                Notice::Invalidate { id, inodes, .. } => {
                    acks.push(*id);
                    let mut holds = self.holds.lock();
                    for ino in inodes {
                        holds.drop_idle(*ino);
                    }
                }
                Notice::InvalidateAll { id } => {
                    acks.push(*id);
                    self.holds.lock().all_may_have_changed();
                }
                Notice::Recall { inodes } => {
                    self.delegations.recalled(inodes);
                    // If the receiver is gone, nothing is in memory.
                    let _ = self.recalls.send(inodes.clone()).await;
                }
                Notice::Namenodes { all } => self.told_namenodes(link, all.clone()),
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
                Notice::Recall { .. } | Notice::Namenodes { .. } => {}
            }
        }
        self.notify_listener(invalidated).await;
        for id in acks {
            let link = link.clone();
            // This runs in a task: the next notices need not wait for the answer, which has no content.
            tokio::spawn(async move {
                let ack = Request::AckInvalidation { id };
                let _ = link.rpc.call(&ack, KEEPALIVE_DEADLINE).await;
            });
        }
    }

    /// Invalidates everything that is cached.
    async fn forget_everything(&self) {
        self.cache.invalidate_all();
        self.holds.lock().all_may_have_changed();
        self.notify_listener(vec![Invalidation::All]).await;
    }

    pub(crate) async fn notify_listener(&self, what: Vec<Invalidation>) {
        let listener = self.listener.lock().clone();
        if let Some(listener) = listener.filter(|_| !what.is_empty()) {
            listener.invalidate(what).await;
        }
    }
}

/// Converts the error of an unanswered call for users.
fn unreachable(waited: Duration, error: &RpcError) -> ClientError {
    ClientError::Unreachable {
        waited,
        reason: error.to_string(),
    }
}
