//! The requests of the harness to the namenode.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use harvestfs_protocol::admin::{AdminReply, AdminRequest, ClusterStatus, FsckReport};
use harvestfs_protocol::group::{GroupRequest, GroupStatus};
use harvestfs_protocol::identity::{Identity, Peer, Role};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::placement::{PlacementReply, PlacementRequest, RepairChange, RepairLimits};
use harvestfs_protocol::rpc::{Reply, Request, Response};
use harvestfs_protocol::transport::{Endpoint, RpcClient, TransportError, TransportOptions};
use tokio::sync::mpsc;

use super::LiveError;

/// The name in the namenode's certificate.
pub(crate) const NAMENODE_NAME: &str = "namenode";
const DIAL_DEADLINE: Duration = Duration::from_secs(3);
const STATUS_DEADLINE: Duration = Duration::from_secs(3);
const FSCK_DEADLINE: Duration = Duration::from_secs(60);
/// Long enough for a namenode to receive a snapshot and catch up.
const ADD_DEADLINE: Duration = Duration::from_secs(30);

/// An operator, who reconnects when needed, to the next namenode if one does not answer or lead.
pub(crate) struct Admin {
    endpoint: Endpoint,
    /// The first one is asked first.
    namenodes: VecDeque<SocketAddr>,
    rpc: Option<RpcClient<Request, Response, Notice>>,
}

impl Admin {
    /// Creates an operator with the certificate that `init cluster` made below `data`.
    pub fn new(data: &Path, namenodes: &[SocketAddr]) -> Result<Self, LiveError> {
        let fail = |error: &dyn std::fmt::Display| LiveError::Cluster(error.to_string());
        let identity = Identity::load(&data.join("admin/identity")).map_err(|e| fail(&e))?;
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let [first, ..] = namenodes else {
            return Err(fail(&"there is no namenode"));
        };
        let mut admin = Self::with_identity(&identity, any, *first).map_err(|e| fail(&e))?;
        admin.namenodes = namenodes.iter().copied().collect();
        Ok(admin)
    }

    /// Creates an operator with this identity, who connects from this address.
    pub fn with_identity(
        identity: &Identity,
        bind: SocketAddr,
        namenode: SocketAddr,
    ) -> Result<Self, TransportError> {
        Ok(Self {
            endpoint: Endpoint::bind(bind, identity, TransportOptions::default())?,
            namenodes: [namenode].into(),
            rpc: None,
        })
    }

    /// The status of the cluster; `None` if the namenode does not answer.
    pub async fn status(&mut self) -> Option<ClusterStatus> {
        match self.ask(AdminRequest::Status, STATUS_DEADLINE).await? {
            AdminReply::Status(status) => Some(*status),
            _ => None,
        }
    }

    /// The report of `fsck`; `None` if the namenode does not answer.
    pub async fn fsck(&mut self) -> Option<FsckReport> {
        match self.ask(AdminRequest::Fsck, FSCK_DEADLINE).await? {
            AdminReply::Fsck(report) => Some(report),
            _ => None,
        }
    }

    /// Has the namenode continue without what it lacks. Returns whether it does.
    pub async fn accept_loss(&mut self) -> bool {
        let accepted = self.ask(AdminRequest::AcceptLoss, STATUS_DEADLINE).await;
        accepted.is_some()
    }

    /// The group as the namenode, which need not lead, sees it; `None` if it does not answer.
    pub async fn group(&mut self) -> Option<GroupStatus> {
        let list = AdminRequest::Group(GroupRequest::List);
        match self.ask(list, STATUS_DEADLINE).await? {
            AdminReply::Group(status) => Some(status),
            _ => None,
        }
    }

    /// Asks for another namenode to lead. Returns whether the transfer has begun.
    pub async fn transfer(&mut self, to: SocketAddr) -> bool {
        let transfer = AdminRequest::Group(GroupRequest::Transfer(Some(to)));
        self.ask(transfer, STATUS_DEADLINE).await.is_some()
    }

    /// Adds a namenode to the group. Returns whether it was added.
    pub async fn add(&mut self, namenode: SocketAddr) -> bool {
        let add = AdminRequest::Group(GroupRequest::Add(namenode));
        self.ask(add, ADD_DEADLINE).await.is_some()
    }

    /// Removes a namenode from the group. Returns whether it was removed.
    pub async fn remove(&mut self, namenode: SocketAddr) -> bool {
        let remove = AdminRequest::Group(GroupRequest::Remove(namenode));
        self.ask(remove, ADD_DEADLINE).await.is_some()
    }

    /// Changes the budgets of repair, and returns the new ones; `None` if the namenode does not answer or does not
    /// lead.
    pub async fn repair(&mut self, change: RepairChange) -> Option<RepairLimits> {
        let repair = AdminRequest::Placement(PlacementRequest::Repair(change));
        match self.ask(repair, STATUS_DEADLINE).await? {
            AdminReply::Placement(PlacementReply::Repair(limits)) => Some(limits),
            _ => None,
        }
    }

    async fn ask(&mut self, request: AdminRequest, deadline: Duration) -> Option<AdminReply> {
        for _ in 0..self.namenodes.len() {
            if let Some(reply) = self.ask_first(request.clone(), deadline).await {
                return Some(reply);
            }
            if self.namenodes.len() > 1 {
                self.rpc = None;
                self.namenodes.rotate_left(1);
            }
        }
        None
    }

    async fn ask_first(&mut self, request: AdminRequest, deadline: Duration) -> Option<AdminReply> {
        if self.rpc.is_none() {
            let first = *self.namenodes.front()?;
            let namenode = Peer::new(Role::Namenode, NAMENODE_NAME).ok()?;
            let connection = self
                .endpoint
                .connect(first, &namenode, DIAL_DEADLINE)
                .await
                .ok()?;
            // Notices are for clients that cache; an operator receives none.
            let (notices, _) = mpsc::channel(1);
            self.rpc = RpcClient::start(connection, notices).await.ok();
        }
        let rpc = self.rpc.as_ref()?;
        match rpc.call(&Request::Admin(request), deadline).await {
            Ok(Ok(Reply::Admin(reply))) => Some(reply),
            Ok(_) => None,
            Err(_) => {
                self.rpc = None;
                None
            }
        }
    }
}
