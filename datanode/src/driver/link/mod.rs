//! The connection to the namenode: registration, and again after every loss, for ever.
//!
//! On a registered connection two tasks run side by side and wait for nothing of each other:
//! heartbeats, and reports of replicas.

mod commands;
mod removals;
mod reports;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Peer;
use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;
use harvestfs_protocol::machine;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::node::{
    Heartbeat, HeartbeatReply, NodeRegistered, NodeReply, NodeRequest, RegisterNode,
    ServerDescription,
};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::timeline::Authority;
use harvestfs_protocol::transport::{Endpoint, RpcClient, RpcError, TransportError};
use harvestfs_protocol::unix_now_ms;
use parking_lot::Mutex;
use tokio::sync::mpsc;

pub use self::commands::Commands;
pub use self::removals::Removals;
use crate::driver::budget::sleep_until;
use crate::driver::node::Node;
use crate::driver::service::Alive;
use crate::engine::link::attempts::Attempts;
use crate::engine::link::heartbeats::Heartbeats;
use crate::engine::link::obedience::Refusal;
use crate::store::now;

/// How long connecting to a namenode may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// How long a registration may take: the namenode journals it.
const REGISTER_DEADLINE: Duration = Duration::from_secs(15);
/// How long the namenode has to take note that this datanode stops.
const STOP_DEADLINE: Duration = Duration::from_secs(1);
/// Volumes that a full report was asked for and that wait for their turn.
const REPORTS_QUEUED_MAX: usize = 64;

type Client = RpcClient<Request, Response, Notice>;

/// Why a registered connection, or the attempt to make one, is over.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error("the namenode refuses: {0}")]
    Refused(FsError),
    #[error(transparent)]
    Disobeyed(Refusal),
    #[error("the namenode's answer does not fit the request")]
    UnexpectedReply,
}

/// What the link needs to know.
pub struct NamenodeLink {
    pub node: Arc<Node>,
    pub endpoint: Endpoint,
    pub namenode: Peer,
    pub addrs: Vec<SocketAddr>,
    pub server: ServerDescription,
    pub removals: Arc<Removals>,
    pub commands: Commands,
    /// Dropped when the namenode knows that the datanode stops.
    pub alive: Alive,
}

impl NamenodeLink {
    /// Keeps the datanode registered until it stops, and says so then.
    pub async fn run(self) {
        let registered = Mutex::new(None);
        tokio::select! {
            biased;
            () = self.node.stopping() => {}
            () = self.keep_registered(&registered) => {}
        }
        let client = registered.into_inner();
        if let Some(client) = client
            && let Err(error) = call(&client, NodeRequest::Stopping, STOP_DEADLINE).await
        {
            tracing::debug!(%error, "the namenode does not know that this datanode stops");
        }
        drop(self.alive);
    }

    /// Notes the client of the registered connection as long as there is one.
    async fn keep_registered(&self, registered: &Mutex<Option<Client>>) {
        let note = |client: Option<&Client>| {
            *registered.lock() = client.cloned();
        };
        let mut attempts = Attempts::default();
        loop {
            let addr = attempts.next(&self.addrs);
            match self.connect(addr).await {
                Ok(client) => {
                    attempts.registered();
                    note(Some(&client));
                    let error = self.serve(&client).await;
                    note(None);
                    tracing::warn!(%addr, %error, "lost the namenode");
                }
                Err(error) => tracing::warn!(%addr, %error, "cannot register with the namenode"),
            }
            tokio::time::sleep(attempts.pause(machine::random())).await;
        }
    }

    async fn connect(&self, addr: SocketAddr) -> Result<Client, LinkError> {
        let connecting = self
            .endpoint
            .connect(addr, &self.namenode, CONNECT_DEADLINE);
        // Notices are for clients; without a receiver they are ignored.
        let (notices, _) = mpsc::channel(1);
        let client = Client::start(connecting.await?, notices).await?;
        self.removals.forget_commands();
        let request = NodeRequest::Register(Box::new(RegisterNode {
            server: self.server.clone(),
            volumes: self.node.store.status(),
            cluster: self.node.store.cluster(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            obeyed: self.node.obedience.obeyed(),
        }));
        match call(&client, request, REGISTER_DEADLINE).await? {
            NodeReply::Registered(registered) => {
                self.may_speak(&registered.authority)?;
                self.registered(&registered).await;
                Ok(client)
            }
            NodeReply::Heartbeat(_) | NodeReply::Accepted => Err(LinkError::UnexpectedReply),
        }
    }

    async fn registered(&self, registered: &NodeRegistered) {
        tracing::info!(node = %registered.node, cluster = %registered.cluster, "registered");
        // Before its keys are accepted, what belongs to another cluster goes down.
        self.node.store.claim(registered.cluster).await;
        self.node.registered(registered);
    }

    /// Works on a registered connection until it is lost.
    async fn serve(&self, client: &Client) -> LinkError {
        let (ask_for_report, asked) = mpsc::channel(REPORTS_QUEUED_MAX);
        tokio::select! {
            biased;
            error = self.send_heartbeats(client, &ask_for_report) => error,
            error = reports::send(&self.node, client, asked) => error,
            error = client.connection().closed() => error.into(),
        }
    }

    /// Sends heartbeats from the values last found. Waits for the clock and the namenode only, never
    /// for a disk.
    async fn send_heartbeats(
        &self,
        client: &Client,
        ask_for_report: &mpsc::Sender<StorageId>,
    ) -> LinkError {
        let busy = &self.node.busy;
        let mut changes = busy.changes();
        let mut heartbeats = Heartbeats::new(now());
        loop {
            let is_due = tokio::select! {
                biased;
                () = sleep_until(heartbeats.look_at(), now()) => {
                    heartbeats.look(now(), self.removals.pressure_bytes())
                }
                // The sooner it is known, the fewer clients come in vain. The gate's settling time
                // bounds how often.
                Ok(()) = changes.changed() => true,
            };
            if !is_due {
                continue;
            }
            heartbeats.sent(now(), self.removals.pressure_bytes());
            let request = NodeRequest::Heartbeat(Heartbeat {
                volumes: self.node.store.status(),
                busy: busy.denial().is_some(),
                primary: busy.primary(),
                active_streams: self.node.active_streams.load(Ordering::Relaxed),
                // Far off, as a clock before 1970 is: the namenode says so.
                unix_ms: unix_now_ms().unwrap_or(0),
                denials: self.node.metrics.denials(),
                removable_bytes: self.removals.removable_bytes(),
            });
            let answer = call(client, request, HEARTBEAT_INTERVAL).await;
            heartbeats.answered(now());
            match answer {
                Ok(NodeReply::Heartbeat(reply)) => {
                    if let Err(error) = self.obey(reply, ask_for_report) {
                        return error;
                    }
                }
                Ok(NodeReply::Registered(_) | NodeReply::Accepted) => {
                    return LinkError::UnexpectedReply;
                }
                // The next one may do better; a connection that is gone ends the session elsewhere.
                Err(LinkError::Rpc(RpcError::Deadline { .. })) => {
                    tracing::warn!("the namenode did not answer a heartbeat in time");
                }
                Err(error) => return error,
            }
        }
    }

    fn obey(
        &self,
        reply: HeartbeatReply,
        ask_for_report: &mpsc::Sender<StorageId>,
    ) -> Result<(), LinkError> {
        let is_obeyed = self.may_speak(&reply.authority)?;
        if let Some(keys) = reply.keys {
            self.node.set_keys(&keys);
        }
        if is_obeyed {
            for command in reply.commands {
                self.commands.obey(command, ask_for_report);
            }
        }
        Ok(())
    }

    /// Whether a namenode is obeyed.
    ///
    /// # Errors
    /// It is not to be spoken to either.
    fn may_speak(&self, authority: &Authority) -> Result<bool, LinkError> {
        match self.node.obedience.obey(authority) {
            Ok(()) => Ok(true),
            Err(refusal) if refusal.ends_connection() => Err(LinkError::Disobeyed(refusal)),
            Err(_) => Ok(false),
        }
    }
}

async fn call(
    client: &Client,
    request: NodeRequest,
    deadline: Duration,
) -> Result<NodeReply, LinkError> {
    match client.call(&Request::Node(request), deadline).await? {
        Ok(Reply::Node(reply)) => Ok(reply),
        Ok(_) => Err(LinkError::UnexpectedReply),
        Err(error) => Err(LinkError::Refused(error)),
    }
}
