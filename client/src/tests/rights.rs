//! The rights that a program file keeps when it is written, and those that opening a file needs.

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::mutation::Commit;
use harvestfs_protocol::meta::{AttrChanges, SetXattrMode};
use harvestfs_protocol::types::Credentials;

use super::waiting::commit_is_called;
use super::{APPEND, create, root, unhurried_client};
use crate::OpenFlags;
use crate::testing::Cluster;

/// As when a program writes through a descriptor inherited from root.
#[tokio::test(flavor = "multi_thread")]
async fn what_others_write_through_a_handle_of_root_takes_the_set_id_bits_with_its_commit() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, _file) = create(&client, "program").await;
    let file = client.open(&root(), attr.ino, APPEND).await.unwrap();
    let set_id = AttrChanges {
        mode: Some(0o6755),
        ..AttrChanges::default()
    };
    for (offset, expected) in [(Some(0), 6), (None, 12)] {
        let changed = client.setattr(&root(), attr.ino, set_id.clone()).await;
        assert_eq!(changed.unwrap().permission_bits(), 0o6755);
        let data = Bytes::from_static(b"others");
        file.write_unprivileged(offset, data).await.unwrap();
        assert_eq!(file.mode().await, Ok(0o6755), "it is not committed");
        let shown = client.getattr(&root(), attr.ino).await.unwrap();
        assert_eq!(
            shown.permission_bits(),
            0o755,
            "nobody runs what others wrote"
        );
        file.sync().await.unwrap();
        let seen = file.attr().await.unwrap();
        assert_eq!((seen.permission_bits(), seen.size_bytes), (0o755, expected));
    }
}

/// Root restores the bits while the file is being written.
#[tokio::test(flavor = "multi_thread")]
async fn set_id_bits_stay_that_root_sets_after_others_wrote_though_root_writes_on() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (attr, file) = create(&client, "program").await;
    let data = Bytes::from_static(b"others");
    file.write_unprivileged(Some(0), data).await.unwrap();
    cluster.namenode.hold(Some(Commit::NAME));
    let setting = tokio::spawn({
        let (client, ino) = (client.clone(), attr.ino);
        let set_id = AttrChanges {
            mode: Some(0o6755),
            ..AttrChanges::default()
        };
        async move { client.setattr(&root(), ino, set_id).await }
    });
    commit_is_called(&cluster).await;
    file.write(6, Bytes::from_static(b"root")).await.unwrap();
    cluster.namenode.hold(None);
    let set = setting.await.unwrap().unwrap();
    assert_eq!(set.permission_bits(), 0o6755);
    file.sync().await.unwrap();
    let seen = file.attr().await.unwrap();
    assert_eq!((seen.permission_bits(), seen.size_bytes), (0o6755, 10));
}

/// The cache decides as the namenode would.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_write_to_a_file_does_not_open_it_to_append() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, _file) = create(&client, "file").await;
    let somebody = Credentials {
        uid: 1_000,
        gid: 1_000,
        groups: Vec::new(),
    };
    let append = OpenFlags {
        append: true,
        ..OpenFlags::READ
    };
    let try_open = |who: &Credentials, flags| client.try_open(who, attr.ino, flags);
    let to_read = try_open(&somebody, OpenFlags::READ);
    assert!(to_read.is_some(), "the cache does not know the file");
    assert!(try_open(&somebody, append).is_none());
    let opened = try_open(&root(), append);
    assert!(opened.is_some_and(|file| file.flags().write));
    let new = client
        .open_path(&root(), b"/new", append, Some(0o644))
        .await;
    assert!(new.unwrap().flags().write);
}

/// The kernel would run the new content with the capabilities of the old one.
#[tokio::test(flavor = "multi_thread")]
async fn capabilities_that_a_change_removes_are_not_cached() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, file) = create(&client, "program").await;
    let (me, ino, capability) = (root(), attr.ino, b"security.capability");
    for change in ["write", "truncate", "chown"] {
        let set = client.setxattr(&me, ino, capability, b"all", SetXattrMode::Any);
        set.await.unwrap();
        let known = client.getxattr(&me, ino, capability).await;
        assert_eq!(known.unwrap(), b"all");
        match change {
            "write" => {
                file.write(0, Bytes::from_static(b"new")).await.unwrap();
                file.sync().await.unwrap();
            }
            "truncate" => {
                file.truncate(1).await.unwrap();
            }
            _ => {
                let owner = AttrChanges {
                    uid: Some(1_000),
                    ..AttrChanges::default()
                };
                client.setattr(&me, ino, owner).await.unwrap();
            }
        }
        let left = client.getxattr(&me, ino, capability).await;
        assert_eq!(left, Err(FsError::NoAttribute.into()), "after {change}");
    }
}
