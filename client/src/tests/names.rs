//! Names: lookups, renames and walks.

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::types::FileKind;

use super::{create, name, root};
use crate::testing::Cluster;
use crate::{ClientError, OpenFlags};

#[tokio::test(flavor = "multi_thread")]
async fn what_was_found_by_its_name_is_whole_when_it_is_opened_after_it_lost_it() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    file.close().await.unwrap();
    client
        .unlink(&root(), InodeId::ROOT, &name("file"))
        .await
        .unwrap();
    let again = client
        .open(&root(), attr.ino, OpenFlags::READ)
        .await
        .unwrap();
    assert_eq!(&again.read(0, 10).await.unwrap()[..], b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_moved_and_exchanged() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let directory = client
        .mkdir(&root(), InodeId::ROOT, &name("dir"), 0o755)
        .await
        .unwrap();
    let (one, _) = create(&client, "one").await;
    let (two, _) = create(&client, "two").await;
    let me = root();
    let rename = |from: &'static str, to_dir, to: &'static str, mode| {
        let (client, me) = (client.clone(), me.clone());
        async move {
            let (from, to) = (name(from), name(to));
            client
                .rename(&me, InodeId::ROOT, &from, to_dir, &to, mode)
                .await
        }
    };
    rename("one", directory.ino, "moved", RenameMode::Replace)
        .await
        .unwrap();
    assert_eq!(
        client.resolve(&root(), b"/dir/moved").await.unwrap().ino,
        one.ino
    );
    assert_eq!(
        client.resolve(&root(), b"one").await,
        Err(FsError::NotFound.into())
    );
    let refused = rename("two", directory.ino, "moved", RenameMode::NoReplace).await;
    assert_eq!(refused, Err(FsError::Exists.into()));
    rename("two", directory.ino, "moved", RenameMode::Exchange)
        .await
        .unwrap();
    assert_eq!(client.resolve(&root(), b"/two").await.unwrap().ino, one.ino);
    assert_eq!(
        client.resolve(&root(), b"/dir/moved").await.unwrap().ino,
        two.ino
    );
    let replaced = rename("two", directory.ino, "moved", RenameMode::Replace)
        .await
        .unwrap();
    assert_eq!(replaced.map(|attr| attr.ino), Some(two.ino));
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_lead_through_symlinks_and_walks_see_everything() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let me = root();
    let directory = client
        .mkdir(&me, InodeId::ROOT, &name("dir"), 0o755)
        .await
        .unwrap();
    client
        .write_file(&me, b"/dir/file", b"content")
        .await
        .unwrap();
    client
        .symlink(&me, directory.ino, &name("up"), b"../dir/./file")
        .await
        .unwrap();
    client
        .symlink(&me, InodeId::ROOT, &name("link"), b"/dir/up")
        .await
        .unwrap();
    client
        .symlink(&me, InodeId::ROOT, &name("loop"), b"loop")
        .await
        .unwrap();
    assert_eq!(client.read_file(&me, b"/link").await.unwrap(), b"content");
    assert_eq!(
        client.resolve_no_follow(&me, b"link").await.unwrap().kind,
        FileKind::Symlink
    );
    assert!(matches!(
        client.resolve(&me, b"/loop").await,
        Err(ClientError::Fs(FsError::InvalidArgument(_)))
    ));
    assert_eq!(
        client.resolve(&me, b"/dir/file/x").await,
        Err(FsError::NotADirectory.into())
    );
    let mut walk = client.walk(&me, InodeId::ROOT);
    let mut paths = Vec::new();
    while let Some(entry) = walk.next().await.unwrap() {
        paths.push(String::from_utf8(entry.path).unwrap());
    }
    assert_eq!(paths, ["", "dir", "dir/file", "dir/up", "link", "loop"]);
    // Overwriting with less data leaves nothing of the old content.
    client.write_file(&me, b"/dir/file", b"new").await.unwrap();
    assert_eq!(client.read_file(&me, b"/dir/file").await.unwrap(), b"new");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_goes_on_behind_what_is_removed_meanwhile() {
    let cluster = Cluster::start(1, 1).await;
    let (client, me) = (cluster.client("a").await, root());
    for directory in ["gone", "there"] {
        client
            .mkdir(&me, InodeId::ROOT, &name(directory), 0o755)
            .await
            .unwrap();
    }
    let mut walk = client.walk(&me, InodeId::ROOT);
    let mut paths = Vec::new();
    while let Some(entry) = walk.next().await.unwrap() {
        if entry.path == b"gone" {
            client
                .rmdir(&me, InodeId::ROOT, &name("gone"))
                .await
                .unwrap();
        }
        paths.push(String::from_utf8(entry.path).unwrap());
    }
    assert_eq!(paths, ["", "gone", "there"]);
    // Unlike a removed entry, a missing start is an error.
    let mut walk = client.walk(&me, InodeId(4_711));
    assert_eq!(walk.next().await.unwrap_err(), FsError::Stale.into());
}

/// As `open(2)` does with `O_CREAT`.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_created_where_symlinks_lead_to_nothing() {
    let cluster = Cluster::start(3, 3).await;
    let (client, me) = (cluster.client("a").await, root());
    let directory = client
        .mkdir(&me, InodeId::ROOT, &name("dir"), 0o755)
        .await
        .unwrap()
        .ino;
    for (parent, link, target) in [
        (directory, "relative", "../dir/./made"),
        (InodeId::ROOT, "absolute", "/dir/relative"),
        (InodeId::ROOT, "nowhere", "missing/file"),
    ] {
        let (link, target) = (name(link), target.as_bytes());
        let linked = client.symlink(&me, parent, &link, target).await;
        linked.unwrap();
    }
    let written = client.write_file(&me, b"/absolute", b"content").await;
    written.unwrap();
    let made = client.resolve_no_follow(&me, b"/dir/made").await.unwrap();
    assert_eq!(made.kind, FileKind::Regular);
    assert_eq!(
        client.read_file(&me, b"/absolute").await.unwrap(),
        b"content"
    );
    let refused = client.write_file(&me, b"/nowhere", b"content").await;
    assert_eq!(refused, Err(FsError::NotFound.into()));
}
