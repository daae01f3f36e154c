//! Datanodes: registration, keys, heartbeats.

use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::ids::{BlockId, ClusterId, InodeId, StorageId};
use harvestfs_protocol::limits::REPLICAS_PER_REPORT_MAX;
use harvestfs_protocol::meta::{Mutation, mutation};
use harvestfs_protocol::node::{
    BlockReport, NodeCommand, NodeReply, NodeRequest, RegisterNode, ReplicaReport,
};
use harvestfs_protocol::token::{Right, TokenVerifier};

use crate::harness::*;

fn register(name: &str) -> RegisterNode {
    RegisterNode {
        server: server(name),
        volumes: vec![volume(1)],
        cluster: None,
        version: "1.2.3".into(),
        obeyed: None,
    }
}

fn report(replicas: Vec<ReplicaReport>) -> NodeRequest {
    NodeRequest::BlockReport(BlockReport {
        storage: StorageId(1),
        part: 0,
        last: true,
        replicas,
    })
}

/// A reply may arrive too late and be dropped: no single one may matter.
#[tokio::test]
async fn each_heartbeat_tells_the_keys() {
    let cluster = Cluster::new().await;
    let node = Datanode::register(&cluster, "dn-1").await;
    for _ in 0..2 {
        let keys = node.heartbeat().await.keys;
        assert_eq!(keys.as_ref(), Some(&node.registered.keys));
    }
}

#[tokio::test]
async fn a_server_keeps_its_number_and_tokens_stay_valid_over_a_restart() {
    let mut cluster = Cluster::new().await;
    let (first, second) = (
        Datanode::register(&cluster, "dn-1").await,
        Datanode::register(&cluster, "dn-2").await,
    );
    let (first, second) = (&first.registered, &second.registered);
    assert_ne!(first.node, second.node);
    assert_eq!(first.cluster, CLUSTER);
    let mut alice = cluster.client("alice").await;
    let located = alice.allocate(1).await.unwrap();
    let lsn = cluster.status().await.journal_lsn;

    cluster.kill_and_start().await;
    let again = Datanode::register(&cluster, "dn-2").await.registered;
    assert_eq!(again.node, second.node);
    assert_eq!(
        cluster.status().await.journal_lsn,
        // The records of a term and of an epoch that began.
        lsn + 2,
        "nothing new to journal"
    );
    let info = &located.blocks[0];
    TokenVerifier::new(&again.keys)
        .verify(&info.token, info.block, Right::Write, 0)
        .unwrap();
    assert_eq!(
        Datanode::register(&cluster, "dn-1").await.registered.node,
        first.node
    );
    let AdminReply::Nodes(nodes) = cluster.admin(AdminRequest::Nodes).await.unwrap() else {
        panic!("nodes were expected");
    };
    let names: Vec<&str> = nodes.iter().map(|node| node.server.name.as_str()).collect();
    assert_eq!(names, ["dn-1", "dn-2"]);
}

#[tokio::test]
async fn a_datanode_registers_as_what_its_certificate_says() {
    let cluster = Cluster::new().await;
    let (link, _notices) = cluster.rpc(Role::Datanode, "dn-1").await;
    let refused = link
        .node(NodeRequest::Register(Box::new(register("dn-2"))))
        .await;
    assert!(
        matches!(refused, Err(FsError::RoleDenied(_))),
        "{refused:?}"
    );

    let mut foreign = register("dn-1");
    foreign.cluster = Some(ClusterId(7));
    let refused = link.node(NodeRequest::Register(Box::new(foreign))).await;
    assert!(matches!(refused, Err(FsError::Protocol(_))), "{refused:?}");

    let mut unnamed = register("dn-1");
    unnamed.server.rack = String::new();
    let refused = link.node(NodeRequest::Register(Box::new(unnamed))).await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );

    let mut too_many = register("dn-1");
    too_many.volumes = (0..65).map(volume).collect();
    let refused = link.node(NodeRequest::Register(Box::new(too_many))).await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );

    let mut copied = register("dn-1");
    copied.volumes = [1, 2, 1].map(volume).into();
    let refused = link.node(NodeRequest::Register(Box::new(copied))).await;
    let Err(FsError::InvalidArgument(reason)) = &refused else {
        panic!("one volume twice: {refused:?}");
    };
    assert!(reason.contains(&StorageId(1).to_string()), "{reason}");

    let refused = link.node(report(vec![])).await;
    assert!(
        matches!(refused, Err(FsError::Protocol(_))),
        "not registered: {refused:?}"
    );
    let registered = link
        .node(NodeRequest::Register(Box::new(register("dn-1"))))
        .await;
    assert!(matches!(registered, Ok(NodeReply::Registered(_))));
    assert_eq!(link.node(report(vec![])).await, Ok(NodeReply::Accepted));
}

#[tokio::test]
async fn the_last_connection_of_a_datanode_is_the_one_that_counts() {
    let cluster = Cluster::new().await;
    let first = Datanode::register(&cluster, "dn-1").await;
    let second = Datanode::register(&cluster, "dn-1").await;
    let refused = first.link.node(report(vec![])).await;
    assert!(matches!(refused, Err(FsError::Protocol(_))), "{refused:?}");
    first.link.cut();
    assert_eq!(
        second.link.node(report(vec![])).await,
        Ok(NodeReply::Accepted)
    );
    assert_eq!(cluster.status().await.nodes_alive, 1);
}

#[tokio::test]
async fn a_report_over_the_limit_is_refused() {
    let cluster = Cluster::new().await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let replica = ReplicaReport {
        block: BlockId(1),
        length_bytes: 0,
        sealed: true,
    };
    let refused = node
        .link
        .node(report(vec![replica; REPLICAS_PER_REPORT_MAX + 1]))
        .await;
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn replicas_that_nothing_uses_are_removed() {
    let cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let located = alice.allocate(1).await.unwrap();
    let freed = located.blocks[0].block;
    alice.close().await;
    let never_allocated = BlockId(freed.0 + 1);
    let replica = |block| ReplicaReport {
        block,
        length_bytes: 4_096,
        sealed: true,
    };
    let replicas = vec![replica(freed), replica(never_allocated)];
    assert_eq!(
        node.link.node(report(replicas)).await,
        Ok(NodeReply::Accepted)
    );
    until("the replica is removed", async || {
        let commands = node.heartbeat().await.commands;
        commands
            .iter()
            .any(|command| matches!(command, NodeCommand::Delete { blocks } if blocks == &[freed]))
    })
    .await;
    let kept = cluster
        .admin(AdminRequest::Quarantine { after: freed })
        .await;
    let Ok(AdminReply::Quarantine(kept)) = kept else {
        panic!("blocks were expected");
    };
    assert_eq!((kept.len(), kept[0].block), (1, never_allocated));
}

#[tokio::test]
async fn without_datanodes_a_write_waits_for_them() {
    let cluster = Cluster::with(|options| options.cluster.safe_mode_max_ms = 0).await;
    let mut alice = cluster.client("alice").await;
    until("the cluster has started", async || {
        cluster.status().await.ready
    })
    .await;
    let op = |count| {
        Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count,
            rules: RULES,
            exclude: vec![],
        })
    };
    let refused = alice.call(op(1)).await;
    assert!(
        matches!(refused, Err(FsError::TooFewDatanodes(_))),
        "{refused:?}"
    );
    for count in [0, 1_025] {
        let refused = alice.call(op(count)).await;
        assert!(
            matches!(refused, Err(FsError::InvalidArgument(_))),
            "{refused:?}"
        );
    }
    assert_eq!(cluster.status().await.blocks, 0);
    assert!(alice.create(InodeId::ROOT, "file").await.size_bytes == 0);
}
