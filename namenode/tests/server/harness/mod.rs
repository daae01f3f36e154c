//! The cluster that the tests run against.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use harvestfs_namenode::server::{FormatOptions, Namenode, NamenodeError, NamenodeOptions, format};
use harvestfs_protocol::admin::{AdminReply, AdminRequest, ClusterStatus};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Peer, Role};
use harvestfs_protocol::ids::{ClusterId, InodeId, SessionId};
use harvestfs_protocol::meta::{
    Housekeeping, MetaCall, MetaOp, MetaReply, Mutated, Mutation, MutationCall, Notice,
    OpenSession, Query, mutation, query,
};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{Connection, Endpoint, RpcClient, RpcError, TransportOptions};
use harvestfs_protocol::types::{Attr, Credentials, Durability, FileKind, Located, PlacementRules};
use harvestfs_protocol::version::Versions;
use tempfile::TempDir;
use tokio::sync::mpsc;

mod datanode;

pub use datanode::*;

pub const DEADLINE: Duration = Duration::from_secs(60);
pub const CLUSTER: ClusterId = ClusterId(0xc1);
pub const BLOCK_BYTES: u64 = 1 << 20;
pub const RULES: PlacementRules = PlacementRules {
    replication: 1,
    durability: Durability::Space,
    class: None,
};

pub type Rpc = RpcClient<Request, Response, Notice>;

/// A namenode and its certificate authority.
pub struct Cluster {
    authority: CertificateAuthority,
    dir: TempDir,
    namenode: Option<Namenode>,
    adjust: fn(&mut NamenodeOptions),
}

impl Cluster {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(adjust: fn(&mut NamenodeOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        format(&dir.path().join("nn"), &format_options()).unwrap();
        let mut cluster = Self {
            authority: CertificateAuthority::in_memory().unwrap(),
            dir,
            namenode: None,
            adjust,
        };
        cluster.start().await;
        cluster
    }

    /// Starts on a directory with a data directory `nn`.
    pub async fn on(dir: TempDir) -> Self {
        let mut cluster = Self {
            authority: CertificateAuthority::in_memory().unwrap(),
            dir,
            namenode: None,
            adjust: |_| {},
        };
        cluster.start().await;
        cluster
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("nn")
    }

    pub fn options(&self) -> NamenodeOptions {
        let identity = self.identity(Role::Namenode, "nn");
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut options = NamenodeOptions::new(self.data_dir(), listen, identity);
        options.segment_bytes = 4 << 20;
        options.tick = Duration::from_millis(10);
        options.rng_seed = Some(1);
        // Datanodes send heartbeats only when a test says so, and tests wait for leases.
        options.cluster.stale_after_ms = 3_600_000;
        options.cluster.dead_after_ms = 3_600_000;
        (self.adjust)(&mut options);
        options
    }

    pub async fn start(&mut self) {
        self.namenode = Some(Namenode::start(self.options()).await.unwrap());
    }

    pub async fn shutdown(&mut self) {
        self.namenode.take().unwrap().shutdown().await.unwrap();
    }

    pub async fn kill(&mut self) {
        self.namenode.take().unwrap().kill().await.unwrap();
    }

    /// Waits until the namenode ends by itself.
    pub async fn ended(&mut self) -> Result<(), NamenodeError> {
        self.namenode.take().unwrap().ended().await
    }

    pub async fn restart(&mut self) {
        self.shutdown().await;
        self.start().await;
    }

    pub async fn kill_and_start(&mut self) {
        self.kill().await;
        self.start().await;
    }

    pub fn identity(&self, role: Role, name: &str) -> Identity {
        let validity = Duration::from_secs(3600);
        self.authority.issue(role, name, validity).unwrap()
    }

    pub fn addr(&self) -> SocketAddr {
        self.namenode.as_ref().unwrap().local_addr()
    }

    pub async fn connect(&self, role: Role, name: &str) -> (Endpoint, Connection) {
        self.connect_as(role, name, Versions::OURS).await
    }

    /// A program with other versions.
    pub async fn connect_as(
        &self,
        role: Role,
        name: &str,
        versions: Versions,
    ) -> (Endpoint, Connection) {
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let identity = self.identity(role, name);
        let options = TransportOptions {
            versions,
            ..TransportOptions::default()
        };
        let endpoint = Endpoint::bind(local, &identity, options).unwrap();
        let namenode = Peer::new(Role::Namenode, "nn").unwrap();
        let connected = endpoint.connect(self.addr(), &namenode, DEADLINE).await;
        (endpoint, connected.unwrap())
    }

    pub async fn rpc(&self, role: Role, name: &str) -> (Link, mpsc::Receiver<Notice>) {
        self.rpc_on(self.connect(role, name).await).await
    }

    pub async fn rpc_on(
        &self,
        (endpoint, connection): (Endpoint, Connection),
    ) -> (Link, mpsc::Receiver<Notice>) {
        let (sender, notices) = mpsc::channel(1_024);
        let rpc = RpcClient::start(connection, sender).await.unwrap();
        (Link { rpc, endpoint }, notices)
    }

    /// A client with a new session.
    pub async fn client(&self, name: &str) -> Client {
        self.open(name, None, vec![]).await.unwrap()
    }

    /// A client that opens or resumes a session.
    pub async fn open(
        &self,
        name: &str,
        resume: Option<SessionId>,
        holds: Vec<InodeId>,
    ) -> Result<Client, FsError> {
        self.open_as(name, resume, holds, None).await
    }

    /// A client that takes delegations, and declares these.
    pub async fn open_as(
        &self,
        name: &str,
        resume: Option<SessionId>,
        holds: Vec<InodeId>,
        delegations: Option<Vec<InodeId>>,
    ) -> Result<Client, FsError> {
        let (link, notices) = self.rpc(Role::Client, name).await;
        let open = Request::OpenSession(OpenSession {
            resume,
            holds,
            delegations,
            seen: None,
        });
        match link.ask(open).await? {
            Reply::SessionOpened(opened) => {
                assert_eq!(opened.cluster, CLUSTER);
                assert_eq!(opened.block_bytes, BLOCK_BYTES);
                Ok(Client {
                    link,
                    notices,
                    session: opened.session,
                    sequence: 0,
                })
            }
            other => panic!("unexpected {other:?}"),
        }
    }

    pub async fn admin(&self, request: AdminRequest) -> Result<AdminReply, FsError> {
        let (link, _notices) = self.rpc(Role::Admin, "operator").await;
        match link.ask(Request::Admin(request)).await? {
            Reply::Admin(reply) => Ok(reply),
            other => panic!("unexpected {other:?}"),
        }
    }

    pub async fn status(&self) -> ClusterStatus {
        match self.admin(AdminRequest::Status).await.unwrap() {
            AdminReply::Status(status) => *status,
            other => panic!("unexpected {other:?}"),
        }
    }
}

pub fn format_options() -> FormatOptions {
    FormatOptions {
        cluster: CLUSTER,
        root_uid: 0,
        root_gid: 0,
        block_bytes: BLOCK_BYTES,
        default_rules: RULES,
        segment_bytes: 4 << 20,
        group: None,
    }
}

/// A connection on which requests are made. The endpoint lives as long.
#[derive(Clone)]
pub struct Link {
    pub rpc: Rpc,
    endpoint: Endpoint,
}

impl Link {
    pub fn new(rpc: Rpc, endpoint: Endpoint) -> Self {
        Self { rpc, endpoint }
    }

    pub async fn ask(&self, request: Request) -> Response {
        self.try_ask(request).await.unwrap()
    }

    pub async fn try_ask(&self, request: Request) -> Result<Response, RpcError> {
        self.rpc.call(&request, DEADLINE).await
    }

    /// Closes the connection, which the namenode notices immediately.
    pub fn cut(&self) {
        self.endpoint.close("cut by the test");
    }
}

/// A client with a session.
pub struct Client {
    pub link: Link,
    pub notices: mpsc::Receiver<Notice>,
    pub session: SessionId,
    sequence: u64,
}

impl Client {
    pub fn new(link: Link, notices: mpsc::Receiver<Notice>, session: SessionId) -> Self {
        Self {
            link,
            notices,
            session,
            sequence: 0,
        }
    }

    /// The call with the next sequence number, if it is a mutation.
    pub fn number(&mut self, op: impl Into<Op>) -> MetaCall {
        let op = match op.into() {
            Op::Query(query) => MetaOp::Query(query),
            Op::Housekeeping(operation) => MetaOp::Housekeeping(operation),
            Op::Mutation(mutation) => {
                self.sequence += 1;
                MetaOp::Mutation(MutationCall {
                    sequence: self.sequence,
                    answered_below: self.sequence,
                    relaxed: false,
                    file: matches!(mutation, Mutation::AllocateBlocks(_)).then_some(InodeId::ROOT),
                    mutation,
                })
            }
        };
        MetaCall {
            credentials: Credentials::root(),
            op,
        }
    }

    pub fn last_sequence(&self) -> u64 {
        self.sequence
    }

    pub fn set_sequence(&mut self, sequence: u64) {
        self.sequence = sequence;
    }

    pub async fn call(&mut self, op: impl Into<Op>) -> Result<MetaReply, FsError> {
        let call = self.number(op);
        meta(&self.link, call).await
    }

    pub async fn attr(&mut self, op: impl Into<Op>) -> Attr {
        match self.call(op).await {
            Ok(MetaReply::Attr(attr) | MetaReply::Created { attr, .. }) => attr,
            other => panic!("unexpected {other:?}"),
        }
    }

    pub async fn create(&mut self, parent: InodeId, name: &str) -> Attr {
        self.attr(create(parent, name)).await
    }

    pub async fn allocate(&mut self, count: u32) -> Result<Located, FsError> {
        let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count,
            rules: RULES,
            exclude: vec![],
        });
        match self.call(op).await? {
            MetaReply::Located(located) => Ok(located),
            other => panic!("unexpected {other:?}"),
        }
    }

    pub async fn lookup(&mut self, parent: InodeId, name: &str) -> Result<Attr, FsError> {
        let name = self::name(name);
        match self
            .call(Query::Lookup(query::Lookup { parent, name }))
            .await?
        {
            MetaReply::Attr(attr) => Ok(attr),
            other => panic!("unexpected {other:?}"),
        }
    }

    pub async fn close(self) {
        assert_eq!(self.link.ask(Request::CloseSession).await, Ok(Reply::Done));
    }

    /// From now on, all notices are acknowledged as they arrive.
    pub fn acknowledge_all(&mut self) {
        let (_, nothing) = mpsc::channel(1);
        let mut notices = std::mem::replace(&mut self.notices, nothing);
        let link = self.link.clone();
        tokio::spawn(async move {
            while let Some(notice) = notices.recv().await {
                let (Notice::Invalidate { id, .. } | Notice::InvalidateAll { id }) = notice else {
                    continue;
                };
                // The namenode may be gone by now.
                let _ = link.try_ask(Request::AckInvalidation { id }).await;
            }
        });
    }

    /// Acknowledges a notice.
    pub async fn ack(&self, notice: &Notice) {
        let (Notice::Invalidate { id, .. } | Notice::InvalidateAll { id }) = notice else {
            panic!("{notice:?} is answered with ReturnDelegations");
        };
        let request = Request::AckInvalidation { id: *id };
        assert_eq!(self.link.ask(request).await, Ok(Reply::Done));
    }

    pub async fn notice(&mut self) -> Notice {
        let notice = tokio::time::timeout(DEADLINE, self.notices.recv()).await;
        notice.expect("a notice in time").expect("a connection")
    }
}

/// Makes a call as numbered, again if the namenode is busy: it is if the lease of the caller, which sends no
/// keepalives, ran out on a slow machine.
pub async fn meta(link: &Link, call: MetaCall) -> Result<MetaReply, FsError> {
    let started = Instant::now();
    loop {
        match link.ask(Request::Meta(call.clone())).await {
            Ok(Reply::Meta(reply) | Reply::Mutated(Mutated { reply, .. })) => return Ok(reply),
            Err(FsError::Busy { retry_after_ms }) if started.elapsed() < DEADLINE => {
                tokio::time::sleep(Duration::from_millis(retry_after_ms.into())).await;
            }
            Err(error) => return Err(error),
            Ok(other) => panic!("unexpected {other:?}"),
        }
    }
}

/// The mutation of a call, to change its number.
pub fn numbered(call: &mut MetaCall) -> &mut MutationCall {
    match &mut call.op {
        MetaOp::Mutation(numbered) => numbered,
        other => panic!("{other:?} has no number"),
    }
}

/// An operation without a number.
#[derive(Clone, Debug)]
pub enum Op {
    Query(Query),
    Mutation(Mutation),
    Housekeeping(Housekeeping),
}

impl Op {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Query(query) => query.name(),
            Self::Mutation(mutation) => mutation.name(),
            Self::Housekeeping(operation) => operation.name(),
        }
    }
}

impl From<Query> for Op {
    fn from(query: Query) -> Self {
        Self::Query(query)
    }
}

impl From<Mutation> for Op {
    fn from(mutation: Mutation) -> Self {
        Self::Mutation(mutation)
    }
}

impl From<Housekeeping> for Op {
    fn from(operation: Housekeeping) -> Self {
        Self::Housekeeping(operation)
    }
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub fn create(parent: InodeId, text: &str) -> Mutation {
    Mutation::Create(mutation::Create {
        parent,
        name: name(text),
        kind: FileKind::Regular,
        mode: 0o644,
        rdev: 0,
    })
}

pub fn unlink(parent: InodeId, text: &str) -> Mutation {
    Mutation::Unlink(mutation::Unlink {
        parent,
        name: name(text),
    })
}

pub fn open_to_read(ino: InodeId) -> Query {
    Query::Open(query::Open {
        ino,
        read: true,
        write: false,
        execute: false,
    })
}

/// Tries until it is true; fails the test when that takes too long.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    while !condition().await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "not in time: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
