//! What the owner sends to the historian, and what it receives from it.

use harvestfs_protocol::admin::AdminReply;
use harvestfs_protocol::classes::Classes;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::Timestamp;
use harvestfs_telemetry::profile::TenantKey;

use super::Owner;
use crate::engine::namespace::ServerView;
use crate::server::classes::{LiveServer, classes};
use crate::server::history::{Finished, KnownServer};

impl Owner {
    /// Handles a task that the historian has finished.
    pub(super) fn on_history(&mut self, finished: Finished) {
        match finished {
            Finished::Answer(reply, responder) => {
                let reply = reply.map(|reply| Reply::Admin(AdminReply::History(reply)));
                responder.send(&reply);
            }
            Finished::Analysis(analysis) => {
                let tenants = analysis.tenants.iter();
                let profiles = tenants.map(|(key, tenant)| (key, tenant.profile));
                self.cluster.set_profiles(profiles);
                let pairs = analysis.pairs.iter();
                let pairs = pairs.map(|(first, second, _)| (first, second));
                self.cluster.set_together(pairs);
                self.cluster.set_coincidence(&analysis.coincidence);
                self.cluster.update_grid(self.clock.now_ms());
                self.analysis = Some(analysis);
            }
        }
    }

    /// The utilisation classes, with the servers that are alive and what their primary tenants use. O(nodes).
    pub(crate) fn classes(&self) -> Classes {
        let mut nodes = self.cluster.nodes(self.clock.now_ms());
        nodes.retain(|node| node.alive);
        nodes.sort_by(|a, b| a.server.name.cmp(&b.server.name));
        let servers = nodes.into_iter().map(|node| {
            let said = self.activity.node(node.node);
            LiveServer {
                tenant: tenant(&node.server),
                name: node.server.name,
                primary: said.and_then(|said| said.primary),
            }
        });
        classes(self.analysis.as_deref(), servers.collect())
    }

    /// Notifies the historian of a datanode that registered: its server may have changed hands or been reimaged.
    pub(super) fn tell_historian(&mut self, node: NodeId, name: &str) {
        if let Some(view) = self.namespace.server(name) {
            self.historian.server(node, known(&view));
        }
    }
}

/// What the historian needs to know of a server.
pub(super) fn known(view: &ServerView<'_>) -> KnownServer {
    KnownServer {
        name: view.server.name.clone(),
        tenant: tenant(view.server),
        registered_s: seconds(view.registered),
        reimages: view.reimages.iter().copied().map(seconds).collect(),
    }
}

fn tenant(server: &ServerDescription) -> TenantKey {
    TenantKey {
        environment: server.environment.clone(),
        machine_function: server.machine_function.clone(),
    }
}

fn seconds(time: Timestamp) -> u32 {
    u32::try_from((time.0 / 1_000_000_000).max(0)).unwrap_or(u32::MAX)
}
