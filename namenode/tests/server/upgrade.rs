//! Parts with other versions, and what the namenode reports about them.

use harvestfs_namenode::engine::namespace::Command;
use harvestfs_namenode::journal::{Journal, JournalOptions};
use harvestfs_namenode::server::{Namenode, NamenodeError, journal_dir};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::types::Timestamp;
use harvestfs_protocol::upgrade::{UpgradeReply, UpgradeRequest, UpgradeStatus};
use harvestfs_protocol::version::{Release, Unfit, Version, Versions};

use crate::harness::*;

/// A program that is one version newer than this one.
const NEWER: Versions = Versions {
    newest: Version(Version::NEWEST.0 + 1),
    oldest: Version::OLDEST,
};

async fn upgrade(cluster: &Cluster, request: UpgradeRequest) -> Result<UpgradeStatus, FsError> {
    match cluster.admin(AdminRequest::Upgrade(request)).await? {
        AdminReply::Upgrade(UpgradeReply::Status(status)) => Ok(*status),
        other => panic!("unexpected {other:?}"),
    }
}

#[tokio::test]
async fn a_cluster_whose_parts_are_alike_has_nothing_to_finish() {
    let cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let client = cluster.client("alice").await;
    let status = upgrade(&cluster, UpgradeRequest::Status).await.unwrap();
    assert_eq!(status.cluster, Version::NEWEST);
    assert!(!status.is_under_way() && status.missing.is_empty());
    let parts = [&status.namenodes, &status.datanodes, &status.clients];
    for parts in parts {
        assert_eq!(parts.len(), 1, "{status:?}");
        assert_eq!(parts[0].versions, Some(Versions::OURS));
        assert_eq!(parts[0].release, Some(Release::OURS.to_string()));
        assert!(parts[0].is_live);
    }
    assert_eq!(status.datanodes[0].name, "dn-1");
    assert!(status.clients[0].name.starts_with("alice at 127.0.0.1"));
    let finished = upgrade(&cluster, UpgradeRequest::Finish).await.unwrap();
    assert_eq!(finished, status, "nothing is changed");
    drop(client);
}

#[tokio::test]
async fn what_is_older_than_the_newest_part_is_named_and_nothing_is_raised() {
    let mut cluster = Cluster::new().await;
    let newer = cluster.connect_as(Role::Datanode, "dn-1", NEWER).await;
    assert_eq!(newer.1.version(), Version::NEWEST);
    let (link, _notices) = cluster.rpc_on(newer).await;
    let node = Datanode::register_on(link, "dn-1", None).await.unwrap();
    assert_eq!(node.registered.cluster_version, Version::NEWEST);
    assert_eq!(node.heartbeat().await.cluster_version, Version::NEWEST);
    let status = upgrade(&cluster, UpgradeRequest::Status).await.unwrap();
    assert!(status.is_under_way());
    assert_eq!(
        (status.cluster, status.newest),
        (Version::NEWEST, NEWER.newest)
    );
    assert_eq!(status.datanodes[0].versions, Some(NEWER));
    let refused = upgrade(&cluster, UpgradeRequest::Finish).await.unwrap_err();
    let FsError::InvalidArgument(why) = &refused else {
        panic!("{refused:?}");
    };
    let address = cluster.addr().to_string();
    let namenode = &status.namenodes[0];
    assert!(
        why.contains(&format!("the namenode {}", namenode.name)),
        "{why}, {address}"
    );
    let status = cluster.status().await;
    assert_eq!(status.cluster_version, Version::NEWEST);
    assert_eq!(status.newest_version, NEWER.newest);
    // It is only as new as what is there.
    drop(node);
    cluster.restart().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let status = upgrade(&cluster, UpgradeRequest::Status).await.unwrap();
    assert!(!status.is_under_way(), "{status:?}");
}

#[tokio::test]
async fn a_program_does_not_start_with_the_directory_of_a_newer_cluster() {
    let mut cluster = Cluster::new().await;
    cluster.shutdown().await;
    let options = JournalOptions::new(journal_dir(&cluster.data_dir()), CLUSTER.0);
    let (mut journal, recovered) = Journal::open(&options).unwrap();
    drop(recovered);
    let raised = Command::RaiseVersion {
        version: NEWER.newest,
        now: Timestamp(1),
    };
    journal.append(&[raised.encode().unwrap()]).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let unfit = Unfit {
        program: Versions::OURS,
        cluster: NEWER.newest,
    };
    match Namenode::start(cluster.options()).await {
        Err(NamenodeError::Unfit(why)) => assert_eq!(why, unfit),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it started"),
    }
}
