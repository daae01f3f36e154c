//! Requests of datanodes.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{NodeId, StorageId};
use harvestfs_protocol::limits::{
    COMMANDS_PER_HEARTBEAT_MAX, LABEL_BYTES_MAX, REPLICAS_PER_REPORT_MAX, VOLUMES_PER_NODE_MAX,
};
use harvestfs_protocol::node::{
    Heartbeat, HeartbeatReply, NodeRegistered, NodeReply, NodeRequest, RegisterNode,
    ServerDescription,
};
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::types::{Timestamp, VolumeStatus};

use super::Owner;
use super::session::unexpected_outcome;
use crate::engine::cluster::ClusterError;
use crate::engine::namespace::{Command, Outcome};
use crate::journal::Lsn;
use crate::server::clock;
use crate::server::metrics::Responder;
use crate::server::sessions::ConnectionId;
use crate::server::timeline::{Verdict, check_obeyed};

impl Owner {
    pub(super) fn node_request(
        &mut self,
        connection: ConnectionId,
        request: NodeRequest,
        responder: Responder,
    ) {
        if let NodeRequest::Register(register) = request {
            return match self.register(connection, *register) {
                Ok((registered, record)) => {
                    let reply = Reply::Node(NodeReply::Registered(registered));
                    self.answer(responder, Ok(reply), record);
                }
                Err(error) => {
                    // A standby refuses each of them whenever it starts.
                    if !matches!(error, FsError::NotLeader { .. }) {
                        tracing::warn!(connection, %error, "a datanode was not registered");
                    }
                    responder.send(&Err(error));
                }
            };
        }
        let reply = self.registered_node_request(connection, request);
        // A leader that was just elected may still lose the epoch that it announces, and with it all records that it
        // has not committed: a datanode that had obeyed it would know more than every later leader.
        let is_command = self.leads() && matches!(reply, Ok(NodeReply::Heartbeat(_)));
        let record = is_command.then_some(self.epoch_record);
        self.answer(responder, reply.map(Reply::Node), record);
    }

    fn registered_node_request(
        &mut self,
        connection: ConnectionId,
        request: NodeRequest,
    ) -> Result<NodeReply, FsError> {
        let node = self.connections.get(&connection).and_then(|c| c.node);
        let node = node.ok_or_else(|| FsError::Protocol("register first".into()))?;
        if self.node_connections.get(&node) != Some(&connection) {
            return Err(FsError::Protocol(
                "the datanode registered on another connection since".into(),
            ));
        }
        let now_ms = self.clock.now_ms();
        let refused = |error: ClusterError| FsError::Protocol(error.to_string());
        match request {
            NodeRequest::Register(_) => Err(FsError::Protocol("registered already".into())),
            NodeRequest::Heartbeat(heartbeat) => self
                .heartbeat(connection, node, &heartbeat)
                .map(NodeReply::Heartbeat),
            NodeRequest::BlockReport(report) => {
                check_count("replicas", report.replicas.len(), REPLICAS_PER_REPORT_MAX)?;
                let reported = self.cluster.block_report(now_ms, node, &report);
                reported.map(|()| NodeReply::Accepted).map_err(refused)
            }
            NodeRequest::IncrementalReport(report) => {
                check_count("changes", report.changes.len(), REPLICAS_PER_REPORT_MAX)?;
                let reported = self.cluster.incremental_report(now_ms, node, &report);
                reported.map(|()| NodeReply::Accepted).map_err(refused)
            }
            NodeRequest::Stopping => {
                tracing::info!(%node, "a datanode stops");
                self.cluster.stopping(now_ms, node);
                Ok(NodeReply::Accepted)
            }
        }
    }

    fn register(
        &mut self,
        connection: ConnectionId,
        register: RegisterNode,
    ) -> Result<(NodeRegistered, Option<Lsn>), FsError> {
        let connected = self.connections.get(&connection);
        let connected = connected.ok_or_else(|| FsError::Protocol("not connected".into()))?;
        let server = &register.server;
        if connected.peer.name != server.name {
            return Err(FsError::RoleDenied(format!(
                "the certificate is of {}, not of server {}",
                connected.peer, server.name
            )));
        }
        (connected.running.versions)
            .check_cluster(self.namespace.version())
            .map_err(FsError::Unfit)?;
        check_labels(server)?;
        check_count(
            "bytes of a version",
            register.version.len(),
            LABEL_BYTES_MAX,
        )?;
        check_count("volumes", register.volumes.len(), VOLUMES_PER_NODE_MAX)?;
        check_distinct(&register.volumes)?;
        if register
            .cluster
            .is_some_and(|cluster| cluster != self.formatted.cluster)
        {
            return Err(FsError::Protocol(format!(
                "the volumes are not of this cluster, {}",
                self.formatted.cluster
            )));
        }
        let last_number = self.namespace.last_number();
        check_obeyed(clock::unix_now_s().into(), last_number, register.obeyed)?;
        // A standby commands nobody, and lags behind what datanodes obeyed. It judges them when it takes over.
        let verdict = if self.leads() {
            self.judge_position(register.obeyed)
        } else {
            Verdict::Behind
        };
        if let Verdict::Refuse(obeyed) = verdict {
            tracing::error!(
                name = server.name,
                "a datanode obeys another namenode of this cluster, which started later"
            );
            return Err(self.timeline.refused(&server.name, obeyed));
        }
        let storages = register.volumes.iter().map(|volume| volume.storage);
        let (node, record) = self.journal_server(server, storages.collect())?;
        let now_ms = self.clock.now_ms();
        self.cluster
            .register(now_ms, node, server, &register.volumes);
        // The datanode may have been reimaged while the namenode did not run.
        let held = self
            .namespace
            .server(&server.name)
            .is_some_and(|it| it.held);
        self.cluster.set_draining(now_ms, node, held);
        self.node_connections.insert(node, connection);
        self.follow_or_recover(node, &server.name, verdict);
        self.tell_historian(node, &server.name);
        if let Some(connected) = self.connections.get_mut(&connection) {
            connected.node = Some(node);
            connected.obeyed = register.obeyed;
            connected.version = Some(register.version);
        }
        tracing::info!(%node, name = server.name, addr = %server.data_addr, "a datanode registered");
        let registered = NodeRegistered {
            node,
            cluster: self.formatted.cluster,
            keys: self.tokens.all(),
            block_bytes: self.formatted.block_bytes,
            authority: self.authority(),
            cluster_version: self.settled_version(),
        };
        Ok((registered, record.max(Some(self.epoch_record))))
    }

    /// Returns the server's number, and the record to wait for. A server that comes back unchanged is not journaled
    /// again.
    fn journal_server(
        &mut self,
        server: &ServerDescription,
        mut storages: Vec<StorageId>,
    ) -> Result<(NodeId, Option<Lsn>), FsError> {
        storages.sort_unstable();
        if let Some(known) = self.namespace.server(&server.name)
            && known.server == server
            && known.storages == storages
        {
            return Ok((known.node, self.undurable.last()));
        }
        if !self.leads() {
            return Err(self.not_leader());
        }
        let command = Command::RegisterServer {
            server: server.clone(),
            storages,
            now: Timestamp::now(),
        };
        let (applied, lsn) = self.execute(&command, true)?;
        match applied.reply {
            Outcome::Node(node) => Ok((node, Some(lsn))),
            other => unexpected_outcome(&other),
        }
    }

    fn heartbeat(
        &mut self,
        connection: ConnectionId,
        node: NodeId,
        heartbeat: &Heartbeat,
    ) -> Result<HeartbeatReply, FsError> {
        check_count("volumes", heartbeat.volumes.len(), VOLUMES_PER_NODE_MAX)?;
        let now_ms = self.clock.now_ms();
        self.cluster
            .heartbeat(now_ms, node, heartbeat)
            .map_err(|error| FsError::Protocol(error.to_string()))?;
        self.activity.observe(clock::unix_now_s(), node, heartbeat);
        if let Some(primary) = &heartbeat.primary {
            self.historian.observe(node, primary.cpu_permille);
        }
        let now_unix_ms = clock::unix_now_ms();
        let tokens = &self.tokens;
        let mut commands = self.cluster.next_commands(
            now_ms,
            node,
            COMMANDS_PER_HEARTBEAT_MAX - 1,
            &mut |block| tokens.sign(block, Right::Read, now_unix_ms),
        );
        if let Some(connected) = self.connections.get_mut(&connection) {
            let ahead_ms = i128::from(heartbeat.unix_ms) - i128::from(now_unix_ms);
            connected.clock_ahead_ms = i64::try_from(ahead_ms).ok();
        }
        // Each time, since an earlier reply may have been lost: a datanode without the newest key would refuse all
        // clients, and one that knows no current namenode would be lost.
        commands.extend(self.namenodes_command());
        let keys = Some(self.tokens.all());
        Ok(HeartbeatReply {
            commands,
            keys,
            authority: self.authority(),
            cluster_version: self.settled_version(),
        })
    }
}

fn check_count(what: &str, count: usize, max: usize) -> Result<(), FsError> {
    if count <= max {
        return Ok(());
    }
    Err(FsError::InvalidArgument(format!(
        "{count} {what} in one request, at most {max} are accepted"
    )))
}

/// Refuses two directories with one ID: each full report of one would remove what the other has.
fn check_distinct(volumes: &[VolumeStatus]) -> Result<(), FsError> {
    let mut ids: Vec<StorageId> = volumes.iter().map(|volume| volume.storage).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(FsError::InvalidArgument(format!(
            "the server has volume {} twice: one directory is a copy of the other, take it away",
            pair[0]
        ))),
    }
}

fn check_labels(server: &ServerDescription) -> Result<(), FsError> {
    let labels = [
        ("name", &server.name),
        ("rack", &server.rack),
        ("environment", &server.environment),
        ("machine function", &server.machine_function),
    ];
    for (what, label) in labels {
        if label.is_empty() || label.len() > LABEL_BYTES_MAX {
            return Err(FsError::InvalidArgument(format!(
                "the server's {what} must have 1 to {LABEL_BYTES_MAX} bytes"
            )));
        }
    }
    Ok(())
}
