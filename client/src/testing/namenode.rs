//! A namenode in memory.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use harvestfs_protocol::{
    codec::StreamKind,
    error::FsError,
    identity::Identity,
    ids::{BlockId, ClusterId, NodeId, SessionId},
    meta::{MetaCall, MetaOp, MetaReply, Notice, SessionOpened},
    outlook::Shortage,
    rpc::{Reply, Request, Response},
    timeline::Position,
    token::{Right, TokenSigner},
    transport::{Connection, Endpoint, NoticeSender, RpcServer},
    types::{BlockInfo, Durability, Located, NodeInfo, PlacementRules},
};
use tokio::sync::oneshot;

use super::{
    any_port, bind, lock,
    namespace::{Effects, Namespace},
    token_key, unix_ms_now,
};

/// How long the author of a mutation waits for caches elsewhere.
const ACK_DEADLINE: Duration = Duration::from_secs(5);

type Replies = HashMap<SessionId, BTreeMap<u64, Result<MetaReply, FsError>>>;

/// See the module.
pub(crate) struct Namenode {
    shared: Arc<Shared>,
    identity: Identity,
    addr: SocketAddr,
    /// None while it is stopped.
    endpoint: Mutex<Option<Endpoint>>,
}

struct Shared {
    nodes: Vec<NodeInfo>,
    replication: u8,
    block_bytes: u64,
    state: Mutex<State>,
}

struct State {
    namespace: Namespace,
    replies: Replies,
    /// What survives a crash.
    durable: (Namespace, Replies),
    sessions: HashMap<SessionId, Option<NoticeSender<Notice>>>,
    next_session: u64,
    next_block: u64,
    blocks: HashMap<BlockId, Vec<NodeId>>,
    acks: HashMap<u64, oneshot::Sender<()>>,
    next_notice: u64,
    /// Calls by the name of their operation.
    calls: HashMap<String, u64>,
    /// So many mutations are executed and not answered: the connection breaks.
    lose_replies: u32,
    /// Nobody is told what to forget.
    holds_notices: bool,
    /// Bad replicas that were reported.
    bad: Vec<(BlockId, NodeId, bool)>,
}

impl Namenode {
    pub(super) fn start(
        identity: Identity,
        nodes: Vec<NodeInfo>,
        replication: u8,
        block_bytes: u64,
    ) -> Self {
        let endpoint = bind(any_port(), &identity);
        let namespace = Namespace::new();
        let shared = Arc::new(Shared {
            nodes,
            replication,
            block_bytes,
            state: Mutex::new(State {
                durable: (namespace.clone(), Replies::new()),
                namespace,
                replies: Replies::new(),
                sessions: HashMap::new(),
                next_session: 1,
                next_block: 1,
                blocks: HashMap::new(),
                acks: HashMap::new(),
                next_notice: 1,
                calls: HashMap::new(),
                lose_replies: 0,
                holds_notices: false,
                bad: Vec::new(),
            }),
        });
        tokio::spawn(accept(shared.clone(), endpoint.clone()));
        Self {
            shared,
            identity,
            addr: endpoint.local_addr().unwrap(),
            endpoint: Mutex::new(Some(endpoint)),
        }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops, and forgets what was not durable.
    pub(crate) async fn crash(&self) {
        let endpoint = lock(&self.endpoint).take().unwrap();
        endpoint.close("crashed");
        endpoint.wait_idle(Duration::from_secs(5)).await.unwrap();
        drop(endpoint);
        let mut state = lock(&self.shared.state);
        (state.namespace, state.replies) = state.durable.clone();
        state.acks.clear();
        for sender in state.sessions.values_mut() {
            *sender = None;
        }
    }

    /// Starts again after [`Namenode::crash`], at the same address.
    pub(crate) async fn restart(&self) {
        let endpoint = loop {
            // The old socket closes with the last of its tasks.
            let options = harvestfs_protocol::transport::TransportOptions::default();
            match Endpoint::bind(self.addr, &self.identity, options) {
                Ok(endpoint) => break endpoint,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        tokio::spawn(accept(self.shared.clone(), endpoint.clone()));
        *lock(&self.endpoint) = Some(endpoint);
    }

    /// The next mutations are executed, and then the connection breaks before they are answered.
    pub(crate) fn lose_replies(&self, count: u32) {
        lock(&self.shared.state).lose_replies = count;
    }

    /// Until it is called again, nobody is told what to forget.
    pub(crate) fn hold_notices(&self, hold: bool) {
        lock(&self.shared.state).holds_notices = hold;
    }

    /// Knows nothing of a block any more, whatever files say.
    pub(crate) fn forget_block(&self, block: BlockId) {
        lock(&self.shared.state).blocks.remove(&block);
    }

    /// Ends all sessions.
    pub(crate) fn expire_sessions(&self) {
        lock(&self.shared.state).sessions.clear();
    }

    /// How often an operation was called, by the name of its variant.
    pub(crate) fn calls(&self, op: &str) -> u64 {
        lock(&self.shared.state).calls.get(op).copied().unwrap_or(0)
    }

    pub(crate) fn bad_replicas(&self) -> Vec<(BlockId, NodeId, bool)> {
        lock(&self.shared.state).bad.clone()
    }

    /// Blocks that were sealed with their lengths.
    pub(crate) fn sealed(&self) -> HashMap<BlockId, u64> {
        lock(&self.shared.state).namespace.sealed.clone()
    }

    /// The blocks that files use.
    pub(crate) fn used_blocks(&self) -> HashSet<BlockId> {
        let state = lock(&self.shared.state);
        let inodes = state.namespace.inodes.values();
        inodes
            .flat_map(|inode| {
                inode
                    .extents
                    .from(0)
                    .map(|extent| extent.block)
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    pub(crate) fn inode_exists(&self, ino: harvestfs_protocol::ids::InodeId) -> bool {
        lock(&self.shared.state).namespace.inodes.contains_key(&ino)
    }
}

async fn accept(shared: Arc<Shared>, endpoint: Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Ok(connection) = incoming.establish().await {
                serve(shared, connection).await;
            }
        });
    }
}

async fn serve(shared: Arc<Shared>, connection: Connection) {
    let Ok((kind, sender, receiver)) = connection.accept_stream().await else {
        return;
    };
    assert_eq!(kind, StreamKind::Rpc);
    let mut server: RpcServer<Request, Response, Notice> =
        RpcServer::start(connection.clone(), sender, receiver);
    let notices = server.notice_sender();
    let mut session = None;
    while let Ok(Some((request, responder))) = server.next().await {
        if let Request::OpenSession(open) = &request {
            let opened = shared.open_session(open.resume, notices.clone());
            session = opened.as_ref().ok().map(|opened| opened.session);
            responder.send(&opened.map(Reply::SessionOpened));
            continue;
        }
        let (shared, connection) = (shared.clone(), connection.clone());
        tokio::spawn(async move {
            match shared.handle(session, request).await {
                Some(response) => responder.send(&response),
                None => {
                    let code = harvestfs_protocol::transport::CloseCode::DONE;
                    connection.close(code, "the reply is lost");
                    drop(responder);
                }
            }
        });
    }
}

impl Shared {
    fn open_session(
        &self,
        resume: Option<SessionId>,
        notices: NoticeSender<Notice>,
    ) -> Result<SessionOpened, FsError> {
        let mut state = lock(&self.state);
        let session = match resume {
            Some(session) if state.sessions.contains_key(&session) => session,
            Some(_) => return Err(FsError::SessionExpired),
            None => {
                state.next_session += 1;
                SessionId(state.next_session)
            }
        };
        state.sessions.insert(session, Some(notices));
        Ok(SessionOpened {
            session,
            cluster: ClusterId(1),
            block_bytes: self.block_bytes,
            default_rules: PlacementRules {
                replication: self.replication,
                durability: Durability::Strict,
                class: None,
            },
            position: Position::default(),
        })
    }

    /// None: the reply is lost.
    async fn handle(&self, session: Option<SessionId>, request: Request) -> Option<Response> {
        let alive = |session: &SessionId| lock(&self.state).sessions.contains_key(session);
        let Some(session) = session.filter(alive) else {
            return Some(Err(FsError::SessionExpired));
        };
        match request {
            Request::AckInvalidation { id } => {
                if let Some(ack) = lock(&self.state).acks.remove(&id) {
                    let _ = ack.send(());
                }
                Some(Ok(Reply::Done))
            }
            Request::CloseSession => {
                lock(&self.state).sessions.remove(&session);
                Some(Ok(Reply::Done))
            }
            Request::Meta(call) if call.sequence == 0 => Some(self.query(&call).map(Reply::Meta)),
            Request::Meta(call) => self.mutate(session, &call).await,
            _ => Some(Ok(Reply::Done)),
        }
    }

    fn query(&self, call: &MetaCall) -> Result<MetaReply, FsError> {
        let mut state = lock(&self.state);
        state.count(&call.op);
        match &call.op {
            MetaOp::Locate { ino, blocks } => {
                let mut blocks = state.namespace.blocks_of(*ino, blocks)?;
                blocks.retain(|block| state.blocks.contains_key(block));
                Ok(MetaReply::Located(self.located(
                    &state,
                    &blocks,
                    Right::Read,
                )))
            }
            MetaOp::Release { inodes } => {
                state.namespace.release(inodes);
                Ok(MetaReply::Done)
            }
            MetaOp::ReturnDelegations { .. } => Ok(MetaReply::Done),
            MetaOp::ReportBadReplica {
                block,
                node,
                corrupt,
            } => {
                state.bad.push((*block, *node, *corrupt));
                Ok(MetaReply::Done)
            }
            op => {
                let reply = state.namespace.query(&call.credentials, op)?;
                if let MetaOp::Open { ino, .. } = op {
                    state.namespace.held.insert(*ino);
                }
                Ok(reply)
            }
        }
    }

    async fn mutate(&self, session: SessionId, call: &MetaCall) -> Option<Response> {
        let (result, waits, lost) = {
            let mut state = lock(&self.state);
            state.count(&call.op);
            let remembered = state.replies.entry(session).or_default();
            if let Some(reply) = remembered.get(&call.sequence) {
                return Some(reply.clone().map(Reply::Meta));
            }
            remembered.retain(|sequence, _| *sequence >= call.answered_below);
            let mut effects = Effects::default();
            let result = match &call.op {
                MetaOp::AllocateBlocks { count, exclude, .. } => {
                    self.allocate(&mut state, *count, exclude)
                }
                op => state.namespace.mutate(&call.credentials, op, &mut effects),
            };
            if let MetaOp::SealBlocks { blocks } = &call.op {
                for sealed in blocks {
                    state.blocks.insert(sealed.block, sealed.replicas.clone());
                }
            }
            if result.is_ok() {
                let remembered = state.replies.entry(session).or_default();
                remembered.insert(call.sequence, result.clone());
            }
            let relaxed = MetaOp::SealBlocks { blocks: Vec::new() };
            let relaxed = call.relaxed
                || std::mem::discriminant(&call.op) == std::mem::discriminant(&relaxed)
                || matches!(call.op, MetaOp::Commit { durable: false, .. });
            if !relaxed {
                state.durable = (state.namespace.clone(), state.replies.clone());
            }
            let lost = state.lose_replies > 0;
            state.lose_replies = state.lose_replies.saturating_sub(1);
            (result, state.announce(session, effects), lost)
        };
        for wait in waits {
            let _ = tokio::time::timeout(ACK_DEADLINE, wait).await;
        }
        (!lost).then(|| result.map(Reply::Meta))
    }

    fn allocate(
        &self,
        state: &mut State,
        count: u32,
        exclude: &[NodeId],
    ) -> Result<MetaReply, FsError> {
        let usable: Vec<NodeId> = self
            .nodes
            .iter()
            .map(|info| info.node)
            .filter(|node| !exclude.contains(node))
            .collect();
        let needed = self.replication.min(2);
        if usable.len() < usize::from(needed) {
            return Err(FsError::TooFewDatanodes(Shortage {
                needed,
                placeable: usable.len() as u8,
                ..Shortage::default()
            }));
        }
        let mut blocks = Vec::new();
        for _ in 0..count {
            let block = BlockId(state.next_block);
            state.next_block += 1;
            // Round and round, so that tests know which ones come first.
            let start = block.0 as usize % usable.len();
            let chosen = usable
                .iter()
                .cycle()
                .skip(start)
                .take(usable.len().min(self.replication.into()));
            state.blocks.insert(block, chosen.copied().collect());
            blocks.push(block);
        }
        Ok(MetaReply::Located(self.located(
            state,
            &blocks,
            Right::Write,
        )))
    }

    fn located(&self, state: &State, blocks: &[BlockId], right: Right) -> Located {
        let signer = TokenSigner::new(&token_key());
        let expires = unix_ms_now() + 3_600_000;
        let info = |block: &BlockId| BlockInfo {
            block: *block,
            committed_bytes: 0,
            replicas: state.blocks.get(block).cloned().unwrap_or_default(),
            due_replicas: self.replication.min(self.nodes.len() as u8),
            token: signer.sign(*block, right, expires),
        };
        Located {
            blocks: blocks.iter().map(info).collect(),
            nodes: self.nodes.clone(),
        }
    }
}

impl State {
    fn count(&mut self, op: &MetaOp) {
        let text = format!("{op:?}");
        let name = text.split([' ', '{', '(']).next().unwrap_or_default();
        *self.calls.entry(name.to_owned()).or_default() += 1;
    }

    /// Tells every other session what to forget.
    fn announce(&mut self, author: SessionId, effects: Effects) -> Vec<oneshot::Receiver<()>> {
        let mut waits = Vec::new();
        let nothing = effects.inodes.is_empty() && effects.entries.is_empty();
        if nothing || self.holds_notices {
            return waits;
        }
        for (session, sender) in &self.sessions {
            let Some(sender) = sender.as_ref().filter(|_| *session != author) else {
                continue;
            };
            let id = self.next_notice;
            self.next_notice += 1;
            let notice = Notice::Invalidate {
                id,
                inodes: effects.inodes.clone(),
                entries: effects.entries.clone(),
            };
            if sender.send(&notice).is_ok() {
                let (ack, wait) = oneshot::channel();
                self.acks.insert(id, ack);
                waits.push(wait);
            }
        }
        waits
    }
}
