//! Data that a quota refuses before it is written.

use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::housekeeping::Release;
use harvestfs_protocol::meta::mutation::{AllocateBlocks, SetAttr};
use harvestfs_protocol::meta::{AttrChanges, SetXattrMode};
use harvestfs_protocol::types::Credentials;

use tokio::time::Instant;

use super::faults::{DEADLINE, read_elsewhere, write_all};
use super::{APPEND, create, name, pattern, root, unhurried, unhurried_client};
use crate::testing::{Cluster, Mood};
use crate::{Client, ClientError, File, OpenFlags};

const QUOTA: &[u8] = b"user.harvestfs.quota_bytes";

/// A file in a directory that has no room, and that directory.
async fn create_without_room(client: &Client) -> (InodeId, File) {
    let (root, directory, file) = (root(), name("full"), name("f"));
    let full = client.mkdir(&root, InodeId::ROOT, &directory, 0o755);
    let full = full.await.unwrap().ino;
    limit(client, full, b"0").await;
    let created = client.create_file(&root, full, &file, 0o644, OpenFlags::READ_WRITE);
    (full, created.await.unwrap().1)
}

async fn limit(client: &Client, directory: InodeId, bytes: &[u8]) {
    let root = root();
    let limited = client.setxattr(&root, directory, QUOTA, bytes, SetXattrMode::Any);
    limited.await.unwrap();
}

/// Appends to a file that has no room.
async fn append_refused(log: &File) {
    log.append(Bytes::from_static(b"refused")).await.unwrap();
    assert_eq!(log.sync().await, quota_exceeded());
}

fn quota_exceeded<T>() -> Result<T, ClientError> {
    Err(FsError::QuotaExceeded.into())
}

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

/// A release in the background may be answered after the refusal was sent and before it is seen: there is
/// nothing left to release then, and there is room nevertheless.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_overtakes_a_refusal_makes_room_too() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let session = &client.core().session;
    let answered = || session.holds.lock().releases_answered();
    let (_, file) = create(&client, "removed").await;
    let when_sent = answered();
    let began = Instant::now();
    client
        .unlink(&root(), InodeId::ROOT, &name("removed"))
        .await
        .unwrap();
    file.close().await.unwrap();
    while answered() == when_sent {
        assert!(began.elapsed() < DEADLINE, "it is never released");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(session.release_now(when_sent).await, "repeat it");
    assert!(!session.release_now(answered()).await, "it is full");
}

/// Another mount removed its last name while it was open here.
#[tokio::test(flavor = "multi_thread")]
async fn what_others_removed_counts_only_until_shortly_after_it_is_closed() {
    let cluster = Cluster::start(3, 3).await;
    let (client, other) = (cluster.client("a").await, cluster.client("b").await);
    let (attr, file) = create(&client, "removed").await;
    let removed = other.unlink(&root(), InodeId::ROOT, &name("removed")).await;
    assert_eq!(removed.unwrap().map(|attr| attr.nlink), Some(0));
    file.close().await.unwrap();
    let closed = Instant::now();
    while cluster.namenode.inode_exists(attr.ino) {
        // A file with a name stays held for five seconds.
        assert!(closed.elapsed() < Duration::from_secs(3), "it is held on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// As when a process is killed that waits for its answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_whose_caller_stops_waiting_is_completed() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let session = &client.core().session;
    let (_, file) = create(&client, "removed").await;
    client
        .unlink(&root(), InodeId::ROOT, &name("removed"))
        .await
        .unwrap();
    cluster.namenode.hold(Some(Release::NAME));
    file.close().await.unwrap();
    let given_up = tokio::time::timeout(Duration::from_millis(50), session.release_now(0)).await;
    assert!(given_up.is_err());
    cluster.namenode.hold(None);
    let over = tokio::time::timeout(DEADLINE, session.release_now(0)).await;
    assert_eq!(over, Ok(true), "it waits for what nobody completes");
}

/// Refused data waits in memory until a flush is requested: it is not retried over and over.
#[tokio::test(flavor = "multi_thread")]
async fn refused_data_is_tried_again_when_it_is_flushed_and_not_before() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let root = root();
    let quota = b"user.harvestfs.quota_bytes";
    let limited = client.setxattr(&root, InodeId::ROOT, quota, b"0", SetXattrMode::Any);
    limited.await.unwrap();
    let (_, file) = create(&client, "large").await;
    // Enough for blocks of its own, without a flush.
    for at in 0..16 {
        let piece = Bytes::from(vec![1; 1 << 20]);
        if file.write(at << 20, piece).await.is_err() {
            // It was refused already.
            break;
        }
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let tried = cluster.namenode.calls("allocate_blocks");
    assert!((1..20).contains(&tried), "tried {tried} times");
    let refused = file.sync().await;
    let quota_exceeded = matches!(refused, Err(ClientError::Fs(FsError::QuotaExceeded)));
    assert!(quota_exceeded, "{refused:?}");
    let unlimited = client.setxattr(&root, InodeId::ROOT, quota, b"99999999", SetXattrMode::Any);
    unlimited.await.unwrap();
    file.sync().await.unwrap();
}

/// The writer gets the error, and does not fill the memory that all share.
#[tokio::test(flavor = "multi_thread")]
async fn a_writer_without_room_is_refused_and_does_not_stop_others() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.dirty_bytes_max = 4 << 20;
    let client = Client::connect(options).await.unwrap();
    let (_, refused) = create_without_room(&client).await;
    let mut result = Ok(());
    for at in 0..200 {
        let piece = Bytes::from(vec![1; 1 << 18]);
        result = refused.write(at << 18, piece).await;
        if result.is_err() {
            break;
        }
    }
    assert_eq!(result, quota_exceeded());
    // This is more than the memory, all of which the other file occupies.
    let content = pattern(12 << 20, 9);
    let (_, stored) = create(&client, "stored").await;
    write_all(&stored, &content).await;
    stored.sync().await.unwrap();
    assert!(read_elsewhere(&cluster, "/stored").await == content);
    // It was given up, which is reported.
    assert_eq!(refused.sync().await, quota_exceeded());
}

/// Data that is cut off needs no room.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_cut_though_its_data_is_refused() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, file) = create_without_room(&client).await;
    file.write(0, Bytes::from_static(b"refused")).await.unwrap();
    assert_eq!(file.sync().await, quota_exceeded());
    assert_eq!(file.truncate(0).await.unwrap().size_bytes, 0);
    assert_eq!(file.attr().await.unwrap().size_bytes, 0);
    assert_eq!(file.sync().await, Ok(()));
    limit(&client, full, b"99999999").await;
    file.write(3, Bytes::from_static(b"new")).await.unwrap();
    file.sync().await.unwrap();
    assert_eq!(read_elsewhere(&cluster, "/full/f").await, b"\0\0\0new");
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_that_are_refused_are_cut_off_with_everything() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, file) = create_without_room(&client).await;
    let log = client.open(&root(), file.ino(), APPEND).await.unwrap();
    append_refused(&log).await;
    // Only the namenode can tell where it ends.
    assert!(log.truncate(3).await.is_err());
    assert_eq!(log.truncate(0).await.unwrap().size_bytes, 0);
    assert_eq!(log.sync().await, Ok(()));
    limit(&client, full, b"99999999").await;
    log.append(Bytes::from_static(b"new")).await.unwrap();
    log.sync().await.unwrap();
    assert_eq!(read_elsewhere(&cluster, "/full/f").await, b"new");
}

/// A caller that looks at a log must not fail because of its writer.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_readable_though_appends_to_it_are_refused() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, file) = create_without_room(&client).await;
    limit(&client, full, b"6").await;
    file.write(0, Bytes::from_static(b"stored")).await.unwrap();
    file.sync().await.unwrap();
    let log = client.open(&root(), file.ino(), APPEND).await.unwrap();
    append_refused(&log).await;
    for reader in [&file, &log] {
        assert_eq!(&reader.read(2, 4).await.unwrap()[..], b"ored");
        assert_eq!(&reader.read(0, 100).await.unwrap()[..], b"stored");
        assert_eq!(reader.attr().await.unwrap().size_bytes, 6);
    }
    assert_eq!(log.sync().await, quota_exceeded());
    limit(&client, full, b"99999999").await;
    assert_eq!(&log.read(0, 100).await.unwrap()[..], b"storedrefused");
}

/// The append returned, and has not been refused.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_appended_after_a_refusal_is_seen_once_there_is_room() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (full, file) = create_without_room(&client).await;
    let (me, ino) = (root(), file.ino());
    let log = client.open(&me, ino, APPEND).await.unwrap();
    append_refused(&log).await;
    log.append(Bytes::from_static(b"too")).await.unwrap();
    assert_eq!(client.getattr(&me, ino).await.unwrap().size_bytes, 0);
    limit(&client, full, b"99999999").await;
    log.append(Bytes::from_static(b"stored")).await.unwrap();
    let found = client.lookup(&me, full, &name("f")).await.unwrap();
    assert_eq!(found.size_bytes, 16);
    assert_eq!(&file.read(0, 100).await.unwrap()[..], b"refusedtoostored");
}

/// If appends that were not refused cannot be tried, only their writer gets the error.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_seen_linked_and_changed_though_appends_after_a_refusal_cannot_be_tried() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (full, _file) = create_without_room(&client).await;
    let me = root();
    let mut logs = Vec::new();
    for text in ["seen", "linked", "changed"] {
        let text = name(text);
        let created = client.create_file(&me, full, &text, 0o644, APPEND);
        let (_, log) = created.await.unwrap();
        append_refused(&log).await;
        log.append(Bytes::from_static(b"more")).await.unwrap();
        logs.push(log);
    }
    limit(&client, full, b"99999999").await;
    for datanode in &cluster.datanodes {
        datanode.set_mood(Mood::Busy);
    }
    let [seen, linked, changed] = [0, 1, 2].map(|index: usize| logs[index].ino());
    assert_eq!(client.getattr(&me, seen).await.unwrap().nlink, 1);
    let link = client.link(&me, linked, full, &name("link")).await;
    assert_eq!(link.unwrap().nlink, 2);
    let mode = AttrChanges {
        mode: Some(0o600),
        ..AttrChanges::default()
    };
    let changed = client.setattr(&me, changed, mode).await;
    assert_eq!(changed.unwrap().mode, 0o600);
    assert!(logs[0].sync().await.is_err(), "its writer is not told");
}

/// As `cp` does on one mount.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_copied_and_searched_for_holes_though_appends_to_it_are_refused() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, file) = create_without_room(&client).await;
    limit(&client, full, b"6").await;
    file.write(0, Bytes::from_static(b"stored")).await.unwrap();
    file.sync().await.unwrap();
    let log = client.open(&root(), file.ino(), APPEND).await.unwrap();
    let (_, copy) = create(&client, "copy").await;
    log.append(Bytes::from_static(b"refused")).await.unwrap();
    // Only then it turns out whether there is room.
    assert_eq!(log.copy_range(0, &copy, 0, 13).await, Ok(6));
    assert_eq!(log.sync().await, quota_exceeded());
    log.clone_range(0, &copy, 6, u64::MAX).await.unwrap();
    assert_eq!(&copy.read(0, 100).await.unwrap()[..], b"storedstored");
    assert_eq!(log.seek_data(2).await, Ok(Some(2)));
    assert_eq!(log.seek_hole(0).await, Ok(Some(6)));
    assert_eq!(log.seek_data(6).await, Ok(None));
    limit(&client, full, b"99999999").await;
    assert_eq!(log.copy_range(0, &copy, 0, 100).await, Ok(13));
    assert_eq!(&copy.read(0, 100).await.unwrap()[..], b"storedrefused");
}

/// A reader sees the refused data.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_not_copied_without_what_is_refused_at_an_offset() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = refused_behind_stored(&client).await;
    let (_, copy) = create(&client, "copy").await;
    assert_eq!(&file.read(0, 100).await.unwrap()[..], b"storedrefused");
    assert_eq!(file.copy_range(0, &copy, 0, 6).await, quota_exceeded());
    assert_eq!(file.seek_hole(0).await, quota_exceeded());
    assert_eq!(copy.attr().await.unwrap().size_bytes, 0);
}

/// Committed data precedes all appends.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_of_what_is_committed_commits_no_appends() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (attr, file) = create(&client, "log").await;
    file.write(0, Bytes::from_static(b"stored")).await.unwrap();
    file.sync().await.unwrap();
    let log = client.open(&root(), attr.ino, APPEND).await.unwrap();
    log.append(Bytes::from_static(b"more")).await.unwrap();
    assert_eq!(&log.read(2, 4).await.unwrap()[..], b"ored");
    assert_eq!(cluster.namenode.size_bytes(attr.ino), 6);
    assert_eq!(&log.read(2, 5).await.unwrap()[..], b"oredm");
    assert_eq!(cluster.namenode.size_bytes(attr.ino), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_is_refused_stays_where_the_file_is_not_cut() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, file) = create_without_room(&client).await;
    file.write(0, Bytes::from_static(b"refused")).await.unwrap();
    assert_eq!(file.sync().await, quota_exceeded());
    let somebody = Credentials {
        uid: 1_000,
        gid: 1_000,
        groups: Vec::new(),
    };
    let all = AttrChanges {
        size_bytes: Some(0),
        ..AttrChanges::default()
    };
    let denied = client.setattr(&somebody, file.ino(), all).await;
    assert_eq!(denied, Err(FsError::PermissionDenied.into()));
    assert_eq!(file.truncate(4).await.unwrap().size_bytes, 4);
    assert_eq!(file.sync().await, quota_exceeded());
    limit(&client, full, b"99999999").await;
    file.sync().await.unwrap();
    assert_eq!(read_elsewhere(&cluster, "/full/f").await, b"refu");
}

/// Creates a file with stored data, followed by refused data.
async fn refused_behind_stored(client: &Client) -> (InodeId, File) {
    let (full, file) = create_without_room(client).await;
    limit(client, full, b"6").await;
    file.write(0, Bytes::from_static(b"stored")).await.unwrap();
    file.sync().await.unwrap();
    file.write(6, Bytes::from_static(b"refused")).await.unwrap();
    assert_eq!(file.sync().await, quota_exceeded());
    (full, file)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cut_off_does_not_come_back_when_nobody_waits_for_the_cut() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, file) = refused_behind_stored(&client).await;
    cluster.namenode.hold(Some(SetAttr::NAME));
    let truncated = file.truncate(0);
    let gone = async {
        while cluster.namenode.size_bytes(file.ino()) > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        result = truncated => panic!("it was answered: {result:?}"),
        () = gone => {}
    }
    limit(&client, full, b"99999999").await;
    let syncing = tokio::spawn({
        let file = file.clone();
        async move {
            // It must not be cut off together with earlier data.
            file.write(0, Bytes::from_static(b"after")).await?;
            file.sync().await
        }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    cluster.namenode.hold(None);
    let synced = tokio::time::timeout(DEADLINE, syncing).await;
    assert_eq!(synced.unwrap().unwrap(), Ok(()));
    assert_eq!(read_elsewhere(&cluster, "/full/f").await, b"after");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_be_cut_off_is_reported_as_lost_and_does_not_come_back() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_secs(1);
    let client = Client::connect(unhurried(options)).await.unwrap();
    let (full, file) = refused_behind_stored(&client).await;
    cluster.namenode.hold(Some(SetAttr::NAME));
    let truncated = file.truncate(0).await;
    let is_named = matches!(truncated, Err(ClientError::Unreachable { .. }));
    assert!(is_named, "{truncated:?}");
    cluster.namenode.hold(None);
    let other = cluster.client("b").await;
    limit(&other, full, b"99999999").await;
    let lost = file.sync().await;
    let is_named = matches!(lost, Err(ClientError::DataLost { .. }));
    assert!(is_named, "{lost:?}");
    let began = Instant::now();
    while let Err(error) = file.sync().await {
        let is_away = matches!(error, ClientError::Unreachable { .. });
        assert!(is_away && began.elapsed() < DEADLINE, "{error:?}");
    }
    assert_eq!(read_elsewhere(&cluster, "/full/f").await, b"");
}

/// No caller was left to receive the error.
#[tokio::test(flavor = "multi_thread")]
async fn fsync_of_a_reopened_file_tells_of_data_that_was_given_up_after_it_was_closed() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.dirty_age_max = Duration::from_millis(1);
    let client = Client::connect(options).await.unwrap();
    let root = root();
    let quota = b"user.harvestfs.quota_bytes";
    let limited = client.setxattr(&root, InodeId::ROOT, quota, b"0", SetXattrMode::Any);
    limited.await.unwrap();
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"data")).await.unwrap();
    drop(file);
    let began = Instant::now();
    while client.core().files.get(attr.ino).is_some() {
        assert!(began.elapsed() < DEADLINE, "it is never given up");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let open = || client.open(&root, attr.ino, OpenFlags::READ);
    // A handle that only reads does not get the report.
    open().await.unwrap().close().await.unwrap();
    let reopened = open().await.unwrap();
    let told = reopened.sync().await;
    assert_eq!(told, Err(FsError::QuotaExceeded.into()));
    assert_eq!(reopened.sync().await, Ok(()));
    drop(reopened);
    assert_eq!(open().await.unwrap().sync().await, Ok(()));
}

/// The commit of a removed file fails for that file; data that shares its block is stored.
#[tokio::test(flavor = "multi_thread")]
async fn data_of_a_file_that_is_gone_does_not_fail_other_data() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (gone, lost) = create(&client, "gone").await;
    let (_, stored) = create(&client, "stored").await;
    for file in [&lost, &stored] {
        file.write(0, Bytes::from_static(b"data")).await.unwrap();
    }
    client
        .unlink(&root(), InodeId::ROOT, &name("gone"))
        .await
        .unwrap();
    cluster.namenode.release(gone.ino);
    assert!(!cluster.namenode.inode_exists(gone.ino));
    let (lost, stored) = tokio::join!(lost.sync(), stored.sync());
    assert!(lost.is_err());
    stored.unwrap();
}

/// No reader can find the data that it waits for any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_truncate_that_waits_for_data_ends_when_that_is_given_up_with_the_last_name() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    // Longer than the test waits.
    options.unreachable_timeout = 2 * DEADLINE;
    let client = Client::connect(options).await.unwrap();
    let (full, file) = create_without_room(&client).await;
    let ino = file.ino();
    file.write(0, Bytes::from_static(b"refused")).await.unwrap();
    assert_eq!(file.sync().await, quota_exceeded());
    let tried = cluster.namenode.calls(AllocateBlocks::NAME);
    cluster.namenode.hold(Some(AllocateBlocks::NAME));
    drop(file);
    let began = Instant::now();
    while cluster.namenode.calls(AllocateBlocks::NAME) == tried {
        assert!(began.elapsed() < DEADLINE, "it is not tried again");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let truncating = tokio::spawn({
        let client = client.clone();
        let all = AttrChanges {
            size_bytes: Some(0),
            ..AttrChanges::default()
        };
        async move { client.setattr(&root(), ino, all).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!truncating.is_finished());
    client.unlink(&root(), full, &name("f")).await.unwrap();
    let ended = tokio::time::timeout(DEADLINE, truncating).await;
    cluster.namenode.hold(None);
    assert!(ended.is_ok(), "it waits for what was given up");
}

/// As `copy_file_range(2)` has it, and `FICLONERANGE`.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_in_parts_ends_where_there_is_no_more_room_and_a_clone_fails() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (full, copy) = create_without_room(&client).await;
    // There is room for the first half only.
    limit(&client, full, b"100000").await;
    let (_, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"x")).await.unwrap();
    let mut pieces = 1;
    // This is more than the namenode shares in one request.
    for _ in 0..17 {
        file.clone_range(0, &file, pieces, pieces).await.unwrap();
        pieces *= 2;
    }
    let half = pieces / 2;
    assert_eq!(file.copy_range(0, &copy, 0, pieces).await, Ok(half));
    assert_eq!(copy.attr().await.unwrap().size_bytes, half);
    let nothing = file.copy_range(half, &copy, half, half).await;
    assert_eq!(nothing, quota_exceeded());
    let cloned = file.clone_range(0, &copy, 0, u64::MAX).await;
    assert_eq!(cloned, quota_exceeded());
}
