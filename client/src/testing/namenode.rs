//! A namenode with the real engine, a journal in memory, and replicas on whichever datanodes a test chooses.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_namenode::engine::namespace::{Command, EDITION, Effects, Namespace, Outcome};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Identity;
use harvestfs_protocol::ids::{BlockId, ClusterId, InodeId, NodeId, SessionId};
use harvestfs_protocol::meta::housekeeping::Release;
use harvestfs_protocol::meta::mutation::{AllocateBlocks, Answered, Creates, SetAttr};
use harvestfs_protocol::meta::{
    AttrChanges, Housekeeping, MetaCall, MetaOp, MetaReply, Mutated, Mutation, MutationCall,
    Notice, OpenSession, Query, SessionOpened,
};
use harvestfs_protocol::outlook::Shortage;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::timeline::Position;
use harvestfs_protocol::token::{Right, TokenSigner};
use harvestfs_protocol::transport::{Endpoint, NoticeSender, TransportOptions};
use harvestfs_protocol::types::{
    BlockInfo, Credentials, Durability, Located, NodeInfo, PlacementRules, Timestamp,
};
use harvestfs_protocol::version::Version;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::serving::{Part, accept};
use super::{any_port, bind, token_key, unix_ms_now};

/// How long the author of a mutation waits for other caches to be invalidated.
const ACK_DEADLINE: Duration = Duration::from_secs(5);
/// Extents in the reply to an `Open` and to a `GetExtents`: few, so that clients have to ask for the rest.
const EXTENTS_PER_OPEN: usize = 2;
const EXTENTS_PER_REPLY: usize = 3;

/// The test namenode.
pub(crate) struct Namenode {
    pub(super) shared: Arc<Shared>,
    pub(super) identity: Identity,
    addr: SocketAddr,
    /// `None` while it is stopped.
    endpoint: Mutex<Option<Endpoint>>,
}

pub(super) struct Shared {
    nodes: Vec<NodeInfo>,
    replication: u8,
    block_bytes: u64,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    namespace: Namespace,
    journal: Vec<Command>,
    position: Position,
    /// Number of commands that survive a crash.
    durable: usize,
    /// Time of the last command, in nanoseconds since 1970.
    now_ns: i64,
    /// Inodes that some session holds open.
    held: HashSet<InodeId>,
    pub(super) sessions: HashMap<SessionId, Option<NoticeSender<Notice>>>,
    /// The locations of replicas.
    blocks: HashMap<BlockId, Vec<NodeId>>,
    /// Sealed blocks and their maximum lengths.
    sealed: HashMap<BlockId, u64>,
    acks: HashMap<u64, oneshot::Sender<()>>,
    next_notice: u64,
    /// Number of calls, by the name of their operation.
    calls: BTreeMap<&'static str, u64>,
    /// Number of mutations that are executed but not answered: the connection breaks.
    lose_replies: u32,
    /// Whether notices of invalidations are withheld.
    holds_notices: bool,
    /// Operations with this name are not answered.
    unanswered: Option<&'static str>,
    /// See [`Namenode::declared`].
    declared: Vec<InodeId>,
    /// Bad replicas that were reported, and whether they are corrupt.
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
        let shared = Arc::new(Shared {
            nodes,
            replication,
            block_bytes,
            state: Mutex::new(State::formatted(replication, block_bytes)),
        });
        let leads = Arc::new(Mutex::new(Part::Leads));
        tokio::spawn(accept(shared.clone(), endpoint.clone(), leads));
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

    /// Stops, and loses everything that was not durable.
    pub(crate) async fn crash(&self) {
        let endpoint = self.endpoint.lock().take().unwrap();
        endpoint.close("crashed");
        endpoint.wait_idle(Duration::from_secs(5)).await.unwrap();
        drop(endpoint);
        self.begin_epoch();
    }

    /// Loses everything that was not durable, and disconnects all sessions.
    pub(super) fn begin_epoch(&self) {
        let mut state = self.shared.state.lock();
        state.forget_what_is_not_durable();
        state.acks.clear();
        state.sessions.values_mut().for_each(|it| *it = None);
        state.position.epoch.id += 1;
    }

    /// Starts again after [`Namenode::crash`], at the same address.
    pub(crate) async fn restart(&self) {
        let endpoint = loop {
            // The old socket closes with the last of its tasks.
            match Endpoint::bind(self.addr, &self.identity, TransportOptions::default()) {
                Ok(endpoint) => break endpoint,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        let leads = Arc::new(Mutex::new(Part::Leads));
        tokio::spawn(accept(self.shared.clone(), endpoint.clone(), leads));
        *self.endpoint.lock() = Some(endpoint);
    }

    /// Executes the next mutations, and then breaks the connection before answering them.
    pub(crate) fn lose_replies(&self, count: u32) {
        self.shared.state.lock().lose_replies = count;
    }

    /// Withholds all invalidations, until it is called with false.
    pub(crate) fn hold_notices(&self, hold: bool) {
        self.shared.state.lock().holds_notices = hold;
    }

    /// Executes operations with this name without answering them, until it is called again.
    pub(crate) fn hold(&self, name: Option<&'static str>) {
        self.shared.state.lock().unanswered = name;
    }

    /// Changes the locations of a block from now on; `None` forgets the block, even if files use it.
    pub(crate) fn place(&self, block: BlockId, nodes: Option<Vec<NodeId>>) {
        let blocks = &mut self.shared.state.lock().blocks;
        blocks.retain(|other, _| *other != block);
        blocks.extend(nodes.map(|nodes| (block, nodes)));
    }

    /// Returns the delegations that the most recently opened or resumed session declared.
    pub(crate) fn declared(&self) -> Vec<InodeId> {
        self.shared.state.lock().declared.clone()
    }

    /// Ends all sessions.
    pub(crate) fn expire_sessions(&self) {
        self.shared.state.lock().end_sessions();
    }

    /// Returns how often an operation was called, by its name in metrics.
    pub(crate) fn calls(&self, op: &str) -> u64 {
        let names = [Query::NAMES, Mutation::NAMES, Housekeeping::NAMES];
        assert!(names.concat().contains(&op), "no operation is called {op}");
        self.shared.state.lock().calls.get(op).copied().unwrap_or(0)
    }

    pub(crate) fn bad_replicas(&self) -> Vec<(BlockId, NodeId, bool)> {
        self.shared.state.lock().bad.clone()
    }

    /// Returns the sealed blocks with their lengths.
    pub(crate) fn sealed(&self) -> HashMap<BlockId, u64> {
        self.shared.state.lock().sealed.clone()
    }

    /// Returns the committed size of a file, in bytes.
    pub(crate) fn size_bytes(&self, ino: InodeId) -> u64 {
        let state = self.shared.state.lock();
        state.namespace.attr(ino).unwrap().size_bytes
    }

    /// Returns the blocks that files use.
    pub(crate) fn used_blocks(&self) -> HashSet<BlockId> {
        let state = self.shared.state.lock();
        let blocks = state.namespace.blocks();
        let blocks = blocks.map(|view| (view.block, 0)).collect();
        let users = state.namespace.files_using(&blocks);
        users.into_iter().map(|(block, _)| block).collect()
    }

    /// Drops all holds of sessions on an inode.
    pub(crate) fn release(&self, ino: InodeId) {
        let release = Release { inodes: vec![ino] };
        let release = Housekeeping::Release(release);
        self.shared.state.lock().keep_house(release);
    }

    pub(crate) fn inode_exists(&self, ino: InodeId) -> bool {
        self.shared.state.lock().namespace.exists(ino)
    }
}

impl Shared {
    pub(super) fn open_session(
        &self,
        open: &OpenSession,
        notices: NoticeSender<Notice>,
    ) -> Result<SessionOpened, FsError> {
        let mut state = self.state.lock();
        state.declared = open.delegations.clone().unwrap_or_default();
        let session = match open.resume {
            Some(session) if state.sessions.contains_key(&session) => session,
            Some(_) => return Err(FsError::SessionExpired),
            None => state.open_session()?,
        };
        state.sessions.insert(session, Some(notices));
        Ok(SessionOpened {
            session,
            cluster: ClusterId(1),
            block_bytes: self.block_bytes,
            default_rules: rules(self.replication),
            position: state.position,
            cluster_version: Version::default(),
        })
    }

    /// Returns `None` if the reply is lost.
    pub(super) async fn handle(
        &self,
        session: Option<SessionId>,
        request: Request,
    ) -> Option<Response> {
        let alive = |session: &SessionId| self.state.lock().sessions.contains_key(session);
        let Some(session) = session.filter(alive) else {
            return Some(Err(FsError::SessionExpired));
        };
        match request {
            Request::AckInvalidation { id } => {
                if let Some(ack) = self.state.lock().acks.remove(&id) {
                    let _ = ack.send(());
                }
                Some(Ok(Reply::Done))
            }
            Request::CloseSession => {
                self.state.lock().sessions.remove(&session);
                Some(Ok(Reply::Done))
            }
            Request::Meta(MetaCall { credentials, op }) => {
                let name = op.name();
                let reply = match op {
                    MetaOp::Query(query) => Some(self.query(&credentials, &query).map(Reply::Meta)),
                    MetaOp::Housekeeping(operation) => {
                        let mut state = self.state.lock();
                        *state.calls.entry(operation.name()).or_default() += 1;
                        state.keep_house(operation);
                        Some(Ok(Reply::Meta(MetaReply::Done)))
                    }
                    MetaOp::Mutation(call) => self.mutate(session, credentials, call).await,
                };
                while self.state.lock().unanswered == Some(name) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                reply
            }
            _ => Some(Ok(Reply::Done)),
        }
    }

    fn query(&self, credentials: &Credentials, query: &Query) -> Result<MetaReply, FsError> {
        let mut state = self.state.lock();
        *state.calls.entry(query.name()).or_default() += 1;
        let mut reply = state.namespace.query(credentials, query)?;
        let (extents, end, max) = match (query, &mut reply) {
            (Query::Locate(locate), _) => {
                let (ino, blocks) = (locate.ino, &locate.blocks);
                let mut blocks = state.namespace.readable_blocks(credentials, ino, blocks)?;
                blocks.retain(|block| state.blocks.contains_key(block));
                let located = self.located(&state, &blocks, Right::Read);
                return Ok(MetaReply::Located(located));
            }
            (Query::Open(open), MetaReply::Opened { extents, end, .. }) => {
                state.held.insert(open.ino);
                (extents, end, EXTENTS_PER_OPEN)
            }
            (_, MetaReply::Extents { extents, end }) => (extents, end, EXTENTS_PER_REPLY),
            _ => return Ok(reply),
        };
        if extents.len() > max {
            extents.truncate(max);
            *end = false;
        }
        Ok(reply)
    }

    async fn mutate(
        &self,
        session: SessionId,
        credentials: Credentials,
        call: MutationCall,
    ) -> Option<Response> {
        let (result, waits, lost) = {
            let mut state = self.state.lock();
            // This is under the lock under which the mutation is executed: whatever was counted was executed.
            *state.calls.entry(call.mutation.name()).or_default() += 1;
            if let Some(outcome) = state.namespace.remembered_reply(session, call.sequence) {
                let mutated = Mutated {
                    reply: self.reply_of(&state, outcome.clone()),
                    directories: Vec::new(),
                };
                return Some(Ok(Reply::Mutated(mutated)));
            }
            let mut effects = Effects::default();
            let result = self.execute(&mut state, session, credentials, call, &mut effects);
            let lost = state.lose_replies > 0;
            state.lose_replies = state.lose_replies.saturating_sub(1);
            (result, state.announce(session, effects), lost)
        };
        for wait in waits {
            let _ = tokio::time::timeout(ACK_DEADLINE, wait).await;
        }
        (!lost).then(|| result.map(Reply::Mutated))
    }

    fn execute(
        &self,
        state: &mut State,
        session: SessionId,
        credentials: Credentials,
        call: MutationCall,
        effects: &mut Effects,
    ) -> Result<Mutated, FsError> {
        let mutation = call.mutation.clone();
        let facts = mutation.facts();
        match (&mutation, call.file) {
            (Mutation::CloneRange(op), _) => state.namespace.check_clone(op)?,
            (Mutation::AllocateBlocks(_), None) => {
                return Err(FsError::InvalidArgument("for no file".into()));
            }
            (_, Some(file)) => state.namespace.check_room_for_data(file)?,
            (_, None) => {}
        }
        let usable = self.usable(&mutation)?;
        let target = state.namespace.removal_target(&mutation);
        let command = Command::Mutate {
            session,
            sequence: call.sequence,
            answered_below: call.answered_below,
            credentials,
            now: state.now(),
            held_elsewhere: target.is_some_and(|ino| state.held.contains(&ino)),
            op: call.mutation,
        };
        let (outcome, changed) = state.apply(command)?;
        *effects = changed;
        let early = match facts.answered {
            Answered::Durable => false,
            Answered::DurableUnlessRelaxed => call.relaxed,
            Answered::AtOnce => true,
        };
        if !early {
            state.durable = state.journal.len();
        }
        if let Mutation::SealBlocks(seal) = &mutation {
            for sealed in &seal.blocks {
                state.sealed.insert(sealed.block, sealed.length_bytes);
                state.blocks.insert(sealed.block, sealed.replicas.clone());
            }
        }
        if let Outcome::Blocks(blocks) = &outcome {
            for &block in blocks {
                // The order rotates, so that tests know which datanodes come first.
                let start = block.0 as usize % usable.len();
                let nodes = usable.iter().cycle().skip(start);
                let nodes = nodes.take(usable.len().min(self.replication.into()));
                state.blocks.insert(block, nodes.copied().collect());
            }
        }
        let reply = self.reply_of(state, outcome);
        if let (Creates::HeldFile, MetaReply::Attr(attr)) = (facts.creates, &reply) {
            state.held.insert(attr.ino);
        }
        Ok(Mutated {
            reply,
            directories: state.namespace.directories_of(&facts),
        })
    }

    fn reply_of(&self, state: &State, outcome: Outcome) -> MetaReply {
        match outcome {
            Outcome::Blocks(blocks) => {
                MetaReply::Located(self.located(state, &blocks, Right::Write))
            }
            Outcome::Meta(reply) => reply,
            other => panic!("a mutation has the outcome {other:?}"),
        }
    }

    /// Returns the datanodes that new blocks can be placed on.
    fn usable(&self, mutation: &Mutation) -> Result<Vec<NodeId>, FsError> {
        let Mutation::AllocateBlocks(AllocateBlocks { exclude, .. }) = mutation else {
            return Ok(Vec::new());
        };
        let nodes = self.nodes.iter().map(|info| info.node);
        let usable: Vec<NodeId> = nodes.filter(|node| !exclude.contains(node)).collect();
        let needed = self.replication.min(2);
        if usable.len() < usize::from(needed) {
            return Err(FsError::TooFewDatanodes(Shortage {
                needed,
                placeable: usable.len() as u8,
                ..Shortage::default()
            }));
        }
        Ok(usable)
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

fn rules(replication: u8) -> PlacementRules {
    PlacementRules {
        replication,
        durability: Durability::Strict,
        class: None,
    }
}

impl State {
    /// An empty root directory that all users may write to.
    fn formatted(replication: u8, block_bytes: u64) -> Self {
        let mut state = Self {
            namespace: Namespace::new(),
            journal: Vec::new(),
            position: Position::default(),
            durable: 0,
            now_ns: 1_000,
            held: HashSet::new(),
            sessions: HashMap::new(),
            blocks: HashMap::new(),
            sealed: HashMap::new(),
            acks: HashMap::new(),
            next_notice: 1,
            calls: BTreeMap::new(),
            lose_replies: 0,
            holds_notices: false,
            unanswered: None,
            declared: Vec::new(),
            bad: Vec::new(),
        };
        let format = Command::Format {
            cluster: ClusterId(1),
            now: state.now(),
            root_uid: 0,
            root_gid: 0,
            block_bytes,
            default_rules: rules(replication),
        };
        state.apply(format).unwrap();
        let begin = Command::BeginEdition {
            edition: EDITION,
            now: state.now(),
        };
        state.apply(begin).unwrap();
        let session = state.open_session().unwrap();
        let changes = AttrChanges {
            mode: Some(0o777),
            ..AttrChanges::default()
        };
        let open_root = Command::Mutate {
            session,
            sequence: 1,
            answered_below: 1,
            credentials: Credentials::root(),
            now: state.now(),
            held_elsewhere: false,
            op: Mutation::SetAttr(SetAttr {
                ino: InodeId::ROOT,
                changes,
            }),
        };
        state.apply(open_root).unwrap();
        state.end_sessions();
        state
    }

    fn now(&mut self) -> Timestamp {
        self.now_ns += 1;
        Timestamp(self.now_ns)
    }

    fn apply(&mut self, command: Command) -> Result<(Outcome, Effects), FsError> {
        let applied = self.namespace.apply(&command)?;
        self.journal.push(command);
        Ok((applied.reply, applied.effects))
    }

    pub(super) fn open_session(&mut self) -> Result<SessionId, FsError> {
        let open = Command::OpenSession {
            client: "client".into(),
            now: self.now(),
        };
        let (Outcome::Session(session), _) = self.apply(open)? else {
            panic!("a session was opened");
        };
        self.durable = self.journal.len();
        self.sessions.insert(session, None);
        Ok(session)
    }

    fn end_sessions(&mut self) {
        for session in std::mem::take(&mut self.sessions).into_keys() {
            let now = self.now();
            self.apply(Command::CloseSession { session, now }).unwrap();
        }
        self.durable = self.journal.len();
    }

    fn forget_what_is_not_durable(&mut self) {
        self.journal.truncate(self.durable);
        self.namespace = Namespace::new();
        for command in &self.journal {
            self.namespace.apply(command).unwrap();
        }
    }

    fn keep_house(&mut self, operation: Housekeeping) {
        match operation {
            Housekeeping::Release(Release { inodes }) => {
                for ino in &inodes {
                    self.held.remove(ino);
                }
                let now = self.now();
                self.apply(Command::ReleaseOrphans { inodes, now }).unwrap();
            }
            Housekeeping::ReturnDelegations(_) => {}
            Housekeeping::ReportBadReplica(it) => self.bad.push((it.block, it.node, it.corrupt)),
        }
    }

    /// Invalidates what every other session has cached.
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
