//! The links to all namenodes: they start and end as namenodes join and leave the group.

use std::net::SocketAddr;
use std::sync::Arc;

use harvestfs_protocol::identity::Peer;
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::transport::Endpoint;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Commands, NamenodeLink, Removals};
use crate::driver::node::Node;
use crate::driver::service::{Alive, WeakAlive};
use crate::engine::link::LinkId;
use crate::engine::link::members::{Change, Members};

/// The state shared by all links.
pub struct Links {
    pub node: Arc<Node>,
    pub endpoint: Endpoint,
    pub namenode: Peer,
    pub server: ServerDescription,
    pub removals: Arc<Removals>,
    pub commands: Commands,
    members: Mutex<Members>,
    /// By link: signals that the link is to end.
    leaving: Vec<Notify>,
    alive: WeakAlive,
}

/// The parts that [`Links`] are built from.
pub struct Parts {
    pub node: Arc<Node>,
    pub endpoint: Endpoint,
    pub namenode: Peer,
    pub server: ServerDescription,
    pub removals: Arc<Removals>,
    pub commands: Commands,
}

impl Links {
    /// Starts links to the namenodes of the configuration.
    pub fn begin(parts: Parts, members: Members, configured: &[SocketAddr], alive: &Alive) {
        let Parts {
            node,
            endpoint,
            namenode,
            server,
            removals,
            commands,
        } = parts;
        let links = Arc::new(Self {
            leaving: std::iter::repeat_with(Notify::new)
                .take(members.links_max())
                .collect(),
            members: Mutex::new(members),
            alive: alive.downgrade(),
            node,
            endpoint,
            namenode,
            server,
            removals,
            commands,
        });
        for (index, &addr) in configured.iter().enumerate() {
            links.begin_one(LinkId(index), addr);
        }
    }

    fn begin_one(self: &Arc<Self>, id: LinkId, addr: SocketAddr) {
        // `None` means that the datanode is stopping.
        if let Some(alive) = self.alive.upgrade() {
            self.node.begin(id);
            let link = NamenodeLink {
                id,
                addr,
                alive,
                links: Arc::clone(self),
            };
            tokio::spawn(link.run());
        }
    }

    /// Whether there are links to several namenodes.
    pub fn are_several(&self) -> bool {
        self.members.lock().are_several()
    }

    /// Whether the obeyed namenode does not list this link's namenode as a member.
    pub fn has_left(&self, link: LinkId) -> bool {
        self.members.lock().has_left(link)
    }

    /// Handles the list of group members sent by a namenode, which may or may not be the obeyed one.
    pub fn told(
        self: &Arc<Self>,
        by: LinkId,
        this: SocketAddr,
        all: &[SocketAddr],
        is_obeyed: bool,
    ) {
        let counts = is_obeyed || !self.node.has_leader();
        let changes = self.members.lock().told(by, this, all, is_obeyed, counts);
        self.carry_out(changes);
    }

    /// Handles the hint of a namenode that does not know this server yet: the leader, which must be the first to know
    /// it.
    pub fn hinted(self: &Arc<Self>, leader: SocketAddr) {
        if !self.node.has_leader() {
            let change = self.members.lock().hinted(leader);
            self.carry_out(change);
        }
    }

    fn carry_out(self: &Arc<Self>, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            match change {
                Change::Begin(link, addr) => {
                    tracing::info!(%addr, "there is another namenode, which the configuration does not name");
                    self.begin_one(link, addr);
                }
                Change::End(link) => self.leaving[link.0].notify_one(),
                Change::Left(LinkId(link)) => tracing::warn!(
                    "namenode {} of the configuration is in the group no more: name the members there instead",
                    link + 1
                ),
                Change::TooMany(addr) => {
                    tracing::warn!(%addr, "too many namenodes to be registered with this one");
                }
            }
        }
    }

    /// Completes when a link is to end.
    pub async fn leaving(&self, LinkId(link): LinkId) {
        self.leaving[link].notified().await;
    }

    /// Takes note that a link that was to end has ended.
    pub fn ended(&self, link: LinkId) {
        self.node.end(link);
        self.members.lock().ended(link);
    }
}
