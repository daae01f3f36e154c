//! Datanodes of the tests.

use std::net::SocketAddr;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::node::{
    Heartbeat, HeartbeatReply, IncrementalReport, NodeRegistered, NodeReply, NodeRequest,
    RegisterNode, ReplicaChange, ReplicaReport, ServerDescription,
};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::timeline::Position;
use harvestfs_protocol::types::{StorageClass, VolumeStatus};

use super::{Cluster, Link};

/// A datanode without disks.
pub struct Datanode {
    pub link: Link,
    pub registered: NodeRegistered,
    volumes: Vec<VolumeStatus>,
}

impl Datanode {
    pub async fn register(cluster: &Cluster, name: &str) -> Self {
        Self::register_after(cluster, name, None).await.unwrap()
    }

    /// For a datanode that has obeyed a namenode.
    pub async fn register_after(
        cluster: &Cluster,
        name: &str,
        obeyed: Option<Position>,
    ) -> Result<Self, FsError> {
        let (link, _notices) = cluster.rpc(Role::Datanode, name).await;
        Self::register_on(link, name, obeyed).await
    }

    /// On an existing connection.
    pub async fn register_on(
        link: Link,
        name: &str,
        obeyed: Option<Position>,
    ) -> Result<Self, FsError> {
        let number = name.strip_prefix("dn-").and_then(|text| text.parse().ok());
        let volumes = vec![volume(number.expect("a name such as dn-1"))];
        let register = RegisterNode {
            server: server(name),
            volumes: volumes.clone(),
            cluster: None,
            version: "1.2.3".into(),
            obeyed,
        };
        let registered = match link.node(NodeRequest::Register(Box::new(register))).await? {
            NodeReply::Registered(registered) => registered,
            other => panic!("unexpected {other:?}"),
        };
        let node = Self {
            link,
            registered,
            volumes,
        };
        node.heartbeat().await;
        Ok(node)
    }

    /// Reports a replica of a block that is being written.
    pub async fn has(&self, block: BlockId, length_bytes: u64) {
        let replica = ReplicaReport {
            block,
            length_bytes,
            sealed: false,
        };
        self.changed(ReplicaChange::Have(replica)).await;
    }

    pub async fn changed(&self, change: ReplicaChange) {
        let changes = vec![(self.volumes[0].storage, change)];
        let report = NodeRequest::IncrementalReport(IncrementalReport { changes });
        assert_eq!(self.link.node(report).await, Ok(NodeReply::Accepted));
    }

    pub async fn heartbeat(&self) -> HeartbeatReply {
        let heartbeat = Heartbeat {
            volumes: self.volumes.clone(),
            busy: false,
            primary: None,
            active_streams: 0,
            unix_ms: 0,
            denials: 0,
            removable_bytes: u64::MAX,
        };
        match self.link.node(NodeRequest::Heartbeat(heartbeat)).await {
            Ok(NodeReply::Heartbeat(reply)) => reply,
            other => panic!("unexpected {other:?}"),
        }
    }
}

impl Link {
    pub async fn node(&self, request: NodeRequest) -> Result<NodeReply, FsError> {
        match self.ask(Request::Node(request)).await? {
            Reply::Node(reply) => Ok(reply),
            other => panic!("unexpected {other:?}"),
        }
    }
}

pub fn server(name: &str) -> ServerDescription {
    ServerDescription {
        name: name.to_owned(),
        rack: format!("rack-of-{name}"),
        environment: "environment".to_owned(),
        machine_function: "function".to_owned(),
        data_addr: SocketAddr::from(([127, 0, 0, 1], 9_000)),
    }
}

pub fn volume(storage: u128) -> VolumeStatus {
    VolumeStatus {
        storage: StorageId(storage),
        class: StorageClass::Disk,
        quota_bytes: 1 << 30,
        used_bytes: 0,
        healthy: true,
        shrinks_in_ms: None,
    }
}
