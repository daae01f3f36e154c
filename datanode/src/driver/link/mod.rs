//! The connection to a namenode: registration, repeated after every loss, forever. With several namenodes there is one
//! such link to each of them, all the time, so that whichever becomes leader already knows what is here. The namenodes
//! themselves report which ones there are.
//!
//! On a registered connection two tasks run side by side and never wait for each other: heartbeats, and reports of
//! replicas.

mod commands;
mod links;
mod removals;
mod reports;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{ClusterId, StorageId};
use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;
use harvestfs_protocol::machine;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::node::{
    Heartbeat, HeartbeatReply, NodeCommand, NodeRegistered, NodeReply, NodeRequest, RegisterNode,
};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::timeline::Authority;
use harvestfs_protocol::transport::{CloseCode, RpcClient, RpcError, TransportError};
use harvestfs_protocol::unix_now_ms;
use harvestfs_protocol::version::{Release, Unfit, Versions};
use harvestfs_protocol::watch;
use parking_lot::Mutex;
use tokio::sync::mpsc;

pub use self::commands::Commands;
use self::commands::Mandate;
pub use self::links::{Links, Parts};
pub use self::removals::Removals;
use crate::driver::budget::sleep_until;
use crate::driver::service::Alive;
use crate::engine::link::LinkId;
use crate::engine::link::attempts::{Attempts, Failure};
use crate::engine::link::heartbeats::Heartbeats;
use crate::engine::link::obedience::Refusal;
use crate::store::now;

/// How long connecting to a namenode may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// How long a registration may take: the namenode journals it.
const REGISTER_DEADLINE: Duration = Duration::from_secs(15);
/// How long the answer to a heartbeat may take before the connection is given up, just like a connection that is
/// silent for about as long. Not shorter: a registration and the full reports after it are far more work for a slow
/// namenode than heartbeats are. Not longer: without heartbeats the namenode takes this server for unreachable.
const HEARTBEAT_DEADLINE: Duration = Duration::from_secs(3 * HEARTBEAT_INTERVAL.as_secs());
/// How long to wait for the namenode to acknowledge that this datanode stops.
const STOP_DEADLINE: Duration = Duration::from_secs(1);
/// Most requests for full reports of volumes that wait for their turn.
const REPORTS_QUEUED_MAX: usize = 64;

type Client = RpcClient<Request, Response, Notice>;

/// Why a registered connection, or an attempt to make one, ended.
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
    #[error("it is a namenode of cluster {0}, and the volumes belong to {1}")]
    OtherCluster(ClusterId, ClusterId),
    #[error(transparent)]
    Unfit(#[from] Unfit),
    #[error("the namenode's answer does not fit the request")]
    UnexpectedReply,
    #[error("a volume has joined since it was registered")]
    AnotherVolume,
    #[error("the namenode has to know what was obeyed before")]
    Untold,
}

impl LinkError {
    /// Whether the namenode has answered, but not as one that this datanode can work with.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(_)
            | Self::Disobeyed(_)
            | Self::OtherCluster(..)
            | Self::Unfit(_)
            | Self::UnexpectedReply => true,
            Self::Transport(_) | Self::Rpc(_) | Self::AnotherVolume | Self::Untold => false,
        }
    }
}

/// The link to one namenode.
pub struct NamenodeLink {
    id: LinkId,
    addr: SocketAddr,
    /// Dropped once the namenode knows that the datanode stops.
    alive: Alive,
    links: Arc<Links>,
}

impl NamenodeLink {
    /// Keeps the datanode registered until it stops, which it then reports to the namenode; or until the namenode has
    /// left the group.
    pub async fn run(self) {
        let registered = Mutex::new(None);
        let has_left = tokio::select! {
            biased;
            () = self.links.node.stopping() => false,
            () = self.links.leaving(self.id) => true,
            () = self.keep_registered(&registered) => false,
        };
        let client = registered.into_inner();
        if has_left {
            return self.leave(client);
        }
        if let Some(client) = client
            && let Err(error) = call(&client, NodeRequest::Stopping, STOP_DEADLINE).await
        {
            tracing::debug!(addr = %self.addr, %error, "the namenode does not know that this datanode stops");
        }
        drop(self.alive);
    }

    /// Ends the link without another message: the namenode is no longer a member of the group.
    fn leave(self, client: Option<Client>) {
        tracing::info!(addr = %self.addr, "there is no link to this namenode any more");
        if let Some(client) = client {
            let reason = "the namenode is in the group no more";
            client.connection().close(CloseCode::DONE, reason);
        }
        self.links.ended(self.id);
        drop(self.alive);
    }

    /// Keeps the datanode registered forever, and stores the client of the registered connection in `registered` as
    /// long as there is one.
    async fn keep_registered(&self, registered: &Mutex<Option<Client>>) {
        let note = |client: Option<&Client>| {
            *registered.lock() = client.cloned();
        };
        let addr = self.addr;
        let mut attempts = Attempts::default();
        loop {
            let (error, happened) = match self.connect().await {
                Ok((client, joined)) => {
                    let begun = now();
                    note(Some(&client));
                    let error = self.serve(&client, joined).await;
                    note(None);
                    self.links.node.lost(self.id);
                    attempts.registered(now() - begun, error.is_refusal());
                    (error, "lost the namenode")
                }
                Err(error) => (error, "cannot register with the namenode"),
            };
            if let LinkError::Refused(FsError::NotLeader {
                leader: Some(leader),
            }) = error
            {
                self.links.hinted(leader);
            }
            let after = attempts.failed(self.failure(&error), machine::random());
            if after.is_warned_of && !self.links.has_left(self.id) {
                tracing::warn!(%addr, %error, "{happened}");
            } else {
                tracing::debug!(%addr, %error, "{happened}");
            }
            tokio::time::sleep(after.pause).await;
        }
    }

    fn failure(&self, error: &LinkError) -> Failure {
        match error {
            // Until the leader has registered this server, and this namenode knows.
            LinkError::Refused(FsError::NotLeader { .. }) => Failure::Passing,
            LinkError::AnotherVolume | LinkError::Untold => Failure::Passing,
            // It was the leader, and has yet to learn from the others that it no longer is.
            LinkError::Disobeyed(Refusal::Older { .. }) if self.links.are_several() => {
                Failure::Passing
            }
            LinkError::Transport(_)
            | LinkError::Rpc(_)
            | LinkError::Refused(_)
            | LinkError::Disobeyed(_)
            | LinkError::OtherCluster(..)
            | LinkError::Unfit(_)
            | LinkError::UnexpectedReply => Failure::Lasting,
        }
    }

    /// Registers. Also returns a receiver that changes when a volume joins that was not registered.
    async fn connect(&self) -> Result<(Client, watch::Receiver<usize>), LinkError> {
        let Links {
            endpoint, namenode, ..
        } = &*self.links;
        let connecting = endpoint.connect(self.addr, namenode, CONNECT_DEADLINE);
        // Notices are for clients; without a receiver they are ignored.
        let (notices, _) = mpsc::channel(1);
        let client = Client::start(connecting.await?, notices).await?;
        self.links.removals.forget_commands(self.id);
        let node = &self.links.node;
        let joined = node.late.joined();
        let (cluster, told) = (node.store.cluster(), node.obedience.obeyed());
        let request = NodeRequest::Register(Box::new(RegisterNode {
            server: self.links.server.clone(),
            volumes: node.volumes(),
            cluster,
            version: Release::OURS.to_string(),
            obeyed: told,
        }));
        match call(&client, request, REGISTER_DEADLINE).await? {
            NodeReply::Registered(registered) => {
                self.check_cluster(registered.cluster)?;
                Versions::OURS.check_cluster(registered.cluster_version)?;
                if cluster.is_none() && node.recall(registered.cluster, told).await {
                    return Err(LinkError::Untold);
                }
                self.may_speak(&registered.authority)?;
                self.registered(&registered).await;
                Ok((client, joined))
            }
            NodeReply::Heartbeat(_) | NodeReply::Accepted => Err(LinkError::UnexpectedReply),
        }
    }

    /// Rejects a namenode of another cluster, whatever its epoch, if there are several namenodes. A sole namenode
    /// determines the cluster of the volumes, and so does the first one that answers if they do not agree on one.
    fn check_cluster(&self, cluster: ClusterId) -> Result<(), LinkError> {
        let claimed = self.links.node.store.cluster();
        match claimed.filter(|&it| it != cluster && self.links.are_several()) {
            Some(claimed) => Err(LinkError::OtherCluster(cluster, claimed)),
            None => Ok(()),
        }
    }

    async fn registered(&self, registered: &NodeRegistered) {
        let (addr, cluster) = (self.addr, registered.cluster);
        tracing::info!(%addr, node = %registered.node, %cluster, "registered");
        // Volumes of another cluster are taken down before the keys are accepted.
        self.links.node.claim(cluster).await;
        self.links.node.registered(self.id, registered);
    }

    /// Works on a registered connection until it is lost, or a volume has joined, which has to be registered.
    async fn serve(&self, client: &Client, mut joined: watch::Receiver<usize>) -> LinkError {
        let (ask_for_report, asked) = mpsc::channel(REPORTS_QUEUED_MAX);
        tokio::select! {
            biased;
            error = self.send_heartbeats(client, &ask_for_report) => error,
            error = reports::send(&self.links.node, self.id, client, asked) => error,
            error = client.connection().closed() => error.into(),
            Ok(()) = joined.changed() => LinkError::AnotherVolume,
        }
    }

    /// Sends heartbeats from the values last found. Waits only for the clock and the namenode, never for a disk.
    async fn send_heartbeats(
        &self,
        client: &Client,
        ask_for_report: &mpsc::Sender<StorageId>,
    ) -> LinkError {
        let busy = &self.links.node.busy;
        let mut changes = busy.changes();
        let mut heartbeats = Heartbeats::new(now());
        loop {
            let is_due = tokio::select! {
                biased;
                () = sleep_until(heartbeats.look_at(), now()) => {
                    let cpu_permille = busy.primary().map(|primary| primary.cpu_permille);
                    heartbeats.look(now(), self.links.removals.pressure_bytes(), cpu_permille)
                }
                // The sooner the namenodes know, the fewer clients try in vain. The gate's settling time bounds how
                // often this happens.
                Ok(()) = changes.changed() => true,
            };
            if !is_due {
                continue;
            }
            let primary = busy.primary();
            let cpu_permille = primary.map(|primary| primary.cpu_permille);
            heartbeats.sent(now(), self.links.removals.pressure_bytes(), cpu_permille);
            let request = NodeRequest::Heartbeat(Heartbeat {
                volumes: self.links.node.volumes(),
                busy: busy.denial().is_some(),
                primary,
                active_streams: self.links.node.active_streams.load(Ordering::Relaxed),
                // 0 is far off, as is a clock before 1970: the namenode reports it.
                unix_ms: unix_now_ms().unwrap_or(0),
                denials: self.links.node.metrics.denials(),
                removable_bytes: self.links.removals.removable_bytes(),
            });
            // No heartbeat is sent before the previous one is answered: the next one on this connection tells the
            // namenode that the answer has arrived, and that no command of an earlier namenode is carried out any
            // more.
            let answer = call(client, request, HEARTBEAT_DEADLINE).await;
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
                Err(error) => return error,
            }
        }
    }

    fn obey(
        &self,
        reply: HeartbeatReply,
        ask_for_report: &mpsc::Sender<StorageId>,
    ) -> Result<(), LinkError> {
        Versions::OURS.check_cluster(reply.cluster_version)?;
        let mandate = self.may_speak(&reply.authority)?;
        if let Some(keys) = reply.keys {
            self.links.node.set_keys(self.id, &keys);
        }
        for command in reply.commands {
            match (command, mandate) {
                (NodeCommand::Namenodes { this, all }, _) => {
                    self.links.told(self.id, this, &all, mandate.is_some());
                }
                (command, Some(mandate)) => {
                    self.links.commands.obey(command, mandate, ask_for_report);
                }
                (_, None) => {}
            }
        }
        Ok(())
    }

    /// Returns the authority by which the namenode gives commands; `None` if it is not obeyed.
    ///
    /// # Errors
    /// The namenode is not to be contacted any more either.
    fn may_speak(&self, authority: &Authority) -> Result<Option<Mandate>, LinkError> {
        let link = self.id;
        match self.links.node.obey(link, self.addr, authority) {
            Ok(obeyed) => Ok(Some(Mandate { link, obeyed })),
            Err(refusal) if refusal.ends_connection() => Err(LinkError::Disobeyed(refusal)),
            Err(_) => Ok(None),
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
