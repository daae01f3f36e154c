//! A namenode that records what datanodes report and sends them the commands of a test. Also used by the benchmark, so
//! it uses the protocol only.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::{BlockId, ClusterId, NodeId, StorageId};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::node::{
    Heartbeat, HeartbeatReply, NodeCommand, NodeRegistered, NodeReply, NodeRequest, RegisterNode,
    ReplicaChange, ReplicaReport,
};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::timeline::{Authority, Epoch, Position};
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenSigner};
use harvestfs_protocol::transport::{CloseCode, Connection, Endpoint, RpcServer, TransportOptions};
use harvestfs_protocol::types::NodeInfo;
use harvestfs_protocol::unix_now_ms;
use harvestfs_protocol::version::Version;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

pub const CLUSTER: ClusterId = ClusterId(0xc1);
pub const NAMENODE: &str = "nn1";
pub const VALIDITY: Duration = Duration::from_secs(3600);

/// A namenode without a namespace.
pub struct FakeNamenode {
    pub addr: SocketAddr,
    pub state: Arc<Mutex<State>>,
    endpoint: Endpoint,
    key: TokenKey,
}

/// The reports of datanodes, and the commands for them.
#[derive(Default)]
pub struct State {
    pub registered: Vec<RegisterNode>,
    pub nodes: HashMap<String, NodeId>,
    pub heartbeats: Vec<(NodeId, Instant, Heartbeat)>,
    pub replicas: HashMap<NodeId, HashMap<BlockId, (StorageId, ReplicaReport)>>,
    pub full_reports: HashMap<NodeId, u32>,
    pub changes: Vec<(NodeId, ReplicaChange)>,
    pub commands: HashMap<NodeId, Vec<NodeCommand>>,
    pub new_keys: Option<Vec<TokenKey>>,
    pub block_bytes: u64,
    pub cluster: Option<ClusterId>,
    pub authority: Authority,
    /// Heartbeats arrive, but their answers are lost.
    pub loses_answers: bool,
    /// It registers datanodes, and refuses their heartbeats.
    pub refuses_heartbeats: bool,
    /// It is a standby that has not learned yet of these servers.
    pub knows_no_server: bool,
    connections: Vec<Connection>,
}

impl FakeNamenode {
    pub fn start(authority: &CertificateAuthority, addr: SocketAddr) -> Self {
        Self::start_with_secret(authority, addr, 7)
    }

    /// A namenode whose first key has the same number as that of any other namenode, and this secret.
    pub fn start_with_secret(
        authority: &CertificateAuthority,
        addr: SocketAddr,
        secret: u8,
    ) -> Self {
        let identity = authority.issue(Role::Namenode, NAMENODE, VALIDITY).unwrap();
        let endpoint = Endpoint::bind(addr, &identity, TransportOptions::default()).unwrap();
        let state = Arc::new(Mutex::new(State {
            block_bytes: 256 << 20,
            ..State::default()
        }));
        let key = TokenKey {
            key_id: 1,
            secret: [secret; 32],
        };
        tokio::spawn(accept(endpoint.clone(), state.clone(), key.clone()));
        Self {
            addr: endpoint.local_addr().unwrap(),
            state,
            endpoint,
            key,
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Makes it lead from now on, in this epoch.
    pub fn lead(&self, number: u32) {
        self.lock().authority = Authority {
            position: Position {
                epoch: Epoch {
                    number,
                    id: u64::from(number),
                },
                record: 1,
            },
            recovering: false,
        };
    }

    /// Makes it a standby from now on.
    pub fn stand_by(&self) {
        self.lock().authority.recovering = true;
    }

    /// Closes all connections.
    pub fn disconnect(&self) {
        self.lock().disconnect();
    }

    /// Waits until it has answered a datanode's heartbeat that arrived after this call, and the datanode has the
    /// answer, which the arrival of the next heartbeat shows.
    pub async fn wait_for_heartbeats(&self) {
        let before = self.lock().heartbeats.len();
        self.wait_for(|state| (state.heartbeats.len() >= before + 2).then_some(()))
            .await;
    }

    /// Simulates a crash: connections and everything known are lost.
    pub async fn stop(self) {
        self.endpoint.close("stopping");
        let _ = self.endpoint.wait_idle(Duration::from_secs(5)).await;
    }

    /// A token for a block, valid for an hour.
    pub fn token(&self, block: BlockId, right: Right) -> BlockToken {
        self.token_of(&self.key, block, right, VALIDITY)
    }

    pub fn token_of(
        &self,
        key: &TokenKey,
        block: BlockId,
        right: Right,
        valid_for: Duration,
    ) -> BlockToken {
        let expires_unix_ms = unix_now_ms().unwrap() + valid_for.as_millis() as u64;
        TokenSigner::new(key).sign(block, right, expires_unix_ms)
    }

    /// The address of a datanode, once it has registered and reported everything.
    pub async fn node(&self, name: &str) -> NodeInfo {
        self.wait_for(|state| {
            let node = *state.nodes.get(name)?;
            state.full_reports.get(&node)?;
            let registered = state.registered.iter().rev();
            let server = registered.map(|it| &it.server).find(|it| it.name == name)?;
            Some(NodeInfo {
                node,
                name: name.to_owned(),
                data_addr: server.data_addr,
                rack: server.rack.clone(),
            })
        })
        .await
    }

    /// Waits until the state yields something.
    pub async fn wait_for<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look(&mut self.lock()) {
                return found;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "it never came");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends a command to a datanode with its next heartbeat, which it sends immediately because its connection is
    /// closed.
    pub fn command_now(&self, node: NodeId, command: NodeCommand) {
        let mut state = self.lock();
        state.commands.entry(node).or_default().push(command);
        state.disconnect();
    }
}

async fn accept(endpoint: Endpoint, state: Arc<Mutex<State>>, key: TokenKey) {
    while let Some(incoming) = endpoint.accept().await {
        let (state, key) = (state.clone(), key.clone());
        tokio::spawn(async move {
            if let Ok(connection) = incoming.establish().await {
                serve(connection, &state, &key).await;
            }
        });
    }
}

async fn serve(connection: Connection, state: &Mutex<State>, key: &TokenKey) {
    state.lock().connections.push(connection.clone());
    let peer = connection.peer().clone();
    let Ok((StreamKind::Rpc, sender, receiver)) = connection.accept_stream().await else {
        return;
    };
    let mut server =
        RpcServer::<Request, Response, Notice>::start(connection.clone(), sender, receiver);
    let mut lost = Vec::new();
    while let Ok(Some((request, responder))) = server.next().await {
        let is_heartbeat = matches!(request, Request::Node(NodeRequest::Heartbeat(_)));
        let response = {
            let mut state = state.lock();
            // `command_now` may have closed the connection: a heartbeat that arrived before must not take the command,
            // which would be lost with the answer.
            if connection.is_closed() {
                return;
            }
            match request {
                Request::Node(request) => state.answer(&peer, request, key),
                _ => Err(FsError::Protocol("not from a datanode".into())),
            }
        };
        if is_heartbeat && state.lock().loses_answers {
            lost.push(responder);
            continue;
        }
        responder.send(&response.map(Reply::Node));
    }
}

impl State {
    fn disconnect(&mut self) {
        for connection in self.connections.drain(..) {
            connection.close(CloseCode::DONE, "register again");
        }
    }

    fn answer(
        &mut self,
        peer: &Peer,
        request: NodeRequest,
        key: &TokenKey,
    ) -> Result<NodeReply, FsError> {
        let next = NodeId(self.nodes.len() as u32 + 1);
        let node = *self.nodes.entry(peer.name.clone()).or_insert(next);
        Ok(match request {
            NodeRequest::Register(request) => {
                assert_eq!(request.server.name, peer.name);
                self.registered.push(*request);
                if self.knows_no_server {
                    return Err(FsError::NotLeader { leader: None });
                }
                self.full_reports.remove(&node);
                NodeReply::Registered(NodeRegistered {
                    node,
                    cluster: self.cluster.unwrap_or(CLUSTER),
                    keys: vec![key.clone()],
                    block_bytes: self.block_bytes,
                    authority: self.authority,
                    cluster_version: Version::default(),
                })
            }
            NodeRequest::Heartbeat(_) if self.refuses_heartbeats => {
                return Err(FsError::Protocol("on purpose".into()));
            }
            NodeRequest::Heartbeat(heartbeat) => {
                self.heartbeats.push((node, Instant::now(), heartbeat));
                NodeReply::Heartbeat(HeartbeatReply {
                    commands: self.commands.remove(&node).unwrap_or_default(),
                    keys: self.new_keys.take(),
                    authority: self.authority,
                    cluster_version: Version::default(),
                })
            }
            NodeRequest::BlockReport(report) => {
                let replicas = self.replicas.entry(node).or_default();
                if report.part == 0 {
                    replicas.retain(|_, (storage, _)| *storage != report.storage);
                }
                for replica in &report.replicas {
                    replicas.insert(replica.block, (report.storage, *replica));
                }
                if report.last {
                    *self.full_reports.entry(node).or_default() += 1;
                }
                NodeReply::Accepted
            }
            NodeRequest::IncrementalReport(report) => {
                let replicas = self.replicas.entry(node).or_default();
                for (storage, change) in report.changes {
                    match change {
                        ReplicaChange::Have(replica) => {
                            replicas.insert(replica.block, (storage, replica));
                        }
                        ReplicaChange::Deleted(block) | ReplicaChange::Corrupt(block) => {
                            replicas.remove(&block);
                        }
                        ReplicaChange::RepairFailed(_) => {}
                    }
                    self.changes.push((node, change));
                }
                NodeReply::Accepted
            }
            NodeRequest::Stopping => NodeReply::Accepted,
        })
    }
}
