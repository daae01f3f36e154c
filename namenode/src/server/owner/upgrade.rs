//! The version of the cluster: which ones its parts have, and raising it.

use harvestfs_protocol::admin::AdminReply;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::Timestamp;
use harvestfs_protocol::upgrade::{UpgradePart, UpgradeReply, UpgradeRequest, UpgradeStatus};
use harvestfs_protocol::version::{Release, Version, Versions};

use super::group::answers;
use super::{Connected, Owner};
use crate::consensus::{ClusterVersion, MemberId, Running};
use crate::engine::namespace::Command;
use crate::journal::Lsn;
use crate::server::metrics::Responder;

/// This program.
const THIS: Running = Running {
    release: Release::OURS,
    versions: Versions::OURS,
};

impl Owner {
    pub(super) fn upgrade_request(&mut self, request: UpgradeRequest, responder: Responder) {
        let result = match request {
            UpgradeRequest::Status => Ok(self.undurable.last()),
            UpgradeRequest::Finish => self.finish_upgrade(),
            #[cfg(feature = "next-version")]
            UpgradeRequest::Probe => {
                return match self.probe() {
                    Ok((probes, record)) => {
                        let reply = AdminReply::Upgrade(UpgradeReply::Probes(probes));
                        self.answer(responder, Ok(Reply::Admin(reply)), Some(record));
                    }
                    Err(error) => responder.send(&Err(error)),
                };
            }
        };
        match result {
            Ok(record) => {
                let status = UpgradeReply::Status(Box::new(self.upgrade_status()));
                let status = AdminReply::Upgrade(status);
                self.answer(responder, Ok(Reply::Admin(status)), record);
            }
            Err(error) => responder.send(&Err(error)),
        }
    }

    fn upgrade_status(&self) -> UpgradeStatus {
        let clients = self.connections.values().filter(|it| it.session.is_some());
        let clients = clients.map(|client| {
            let name = format!("{} at {}", client.peer.name, client.ip);
            part(name, Some(client.running), true)
        });
        let mut clients: Vec<UpgradePart> = clients.collect();
        clients.sort_by(|a, b| a.name.cmp(&b.name));
        UpgradeStatus::of(
            self.namespace.version(),
            self.namenode_parts(),
            self.datanode_parts(),
            clients,
        )
    }

    /// The newest version that a namenode or datanode has.
    pub(super) fn newest_version(&self) -> Version {
        let parts = (self.namenode_parts(), self.datanode_parts());
        UpgradeStatus::of(self.namespace.version(), parts.0, parts.1, Vec::new()).newest
    }

    fn namenode_parts(&self) -> Vec<UpgradePart> {
        let group = self.log.group();
        let (status, others) = (group.status(), group.running());
        let members = status.members.iter().map(|member| {
            let running = if member.id == status.this {
                Some(THIS)
            } else {
                others.get(&MemberId(member.id)).copied()
            };
            part(member.addr.to_string(), running, answers(&status, member))
        });
        members.collect()
    }

    fn datanode_parts(&self) -> Vec<UpgradePart> {
        let nodes = self.cluster.nodes(self.clock.now_ms()).into_iter();
        let parts = nodes.map(|node| {
            let connection = self.node_connections.get(&node.node);
            let connected = connection.and_then(|id| self.connections.get(id));
            let running = connected.map(|it: &Connected| it.running);
            part(node.server.name, running, node.alive || connected.is_some())
        });
        parts.collect()
    }

    /// Raises the version of the cluster, if all parts have a newer one.
    fn finish_upgrade(&mut self) -> Result<Option<Lsn>, FsError> {
        let status = self.upgrade_status();
        if !status.is_under_way() {
            return Ok(self.undurable.last());
        }
        if !status.missing.is_empty() {
            let named = status.missing.iter().take(MISSING_NAMED_MAX);
            let named = named.map(|it| format!("{}: {}", it.part, it.reason));
            let named: Vec<String> = named.collect();
            let left = status.missing.len() - named.len();
            let more = if left == 0 {
                String::new()
            } else {
                format!("; and {left} more")
            };
            return Err(FsError::InvalidArgument(format!(
                "version {} stays: not all parts have version {}: {}{more}",
                status.cluster,
                status.newest,
                named.join("; ")
            )));
        }
        let before = self.namespace.version();
        let command = Command::RaiseVersion {
            version: status.newest,
            now: Timestamp::now(),
        };
        let (_, record) = self.execute(&command, true)?;
        self.raised = Some((record, before));
        self.note_version();
        tracing::info!(%before, version = %status.newest, record, "the version of the cluster is raised");
        Ok(Some(record))
    }

    /// The version of the cluster, for those who write by it: not before its record is durable.
    pub(super) fn settled_version(&self) -> Version {
        self.cluster_version().settled(self.log.commits().last())
    }

    fn cluster_version(&self) -> ClusterVersion {
        ClusterVersion {
            newest: self.namespace.version(),
            raised: self.raised,
        }
    }

    /// Namenodes that do not have the version of the cluster are refused from here on.
    pub(super) fn note_version(&self) {
        self.log.set_cluster_version(self.cluster_version());
    }

    /// Writes a record of the next version.
    #[cfg(feature = "next-version")]
    fn probe(&mut self) -> Result<(u64, Lsn), FsError> {
        let command = Command::Probe {
            now: Timestamp::now(),
        };
        let (_, record) = self.execute(&command, true)?;
        Ok((self.namespace.probes(), record))
    }
}

/// Parts that a refusal names.
const MISSING_NAMED_MAX: usize = 16;

fn part(name: String, running: Option<Running>, is_live: bool) -> UpgradePart {
    UpgradePart {
        name,
        release: running.map(|it| it.release.to_string()),
        versions: running.map(|it| it.versions),
        is_live,
    }
}
