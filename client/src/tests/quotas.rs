//! What a quota refuses before it is written.

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::SetXattrMode;

use super::{create, name, root};
use crate::testing::Cluster;
use crate::{ClientError, OpenFlags};

/// Files of one session share blocks: the one without room fails, and the others do not wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn data_without_room_is_refused_and_other_data_is_not() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let root = root();
    let directory = name("full");
    let full = client.mkdir(&root, InodeId::ROOT, &directory, 0o755);
    let full = full.await.unwrap().ino;
    let quota = b"user.harvestfs.quota_bytes";
    let limited = client.setxattr(&root, full, quota, b"0", SetXattrMode::Any);
    limited.await.unwrap();
    let refused = client
        .create_file(&root, full, &name("f"), 0o644, OpenFlags::WRITE)
        .await;
    let (_, refused) = refused.unwrap();
    let (_, stored) = create(&client, "stored").await;
    for file in [&refused, &stored] {
        file.write(0, Bytes::from_static(b"data")).await.unwrap();
    }
    let (refused, stored) = tokio::join!(refused.sync(), stored.sync());
    let quota = matches!(refused, Err(ClientError::Fs(FsError::QuotaExceeded)));
    assert!(quota, "{refused:?}");
    stored.unwrap();
}
