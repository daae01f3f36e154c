//! Appends whose commit is not answered, and what continues meanwhile.

use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::mutation::Commit;
use tokio::time::Instant;

use super::faults::{DEADLINE, read_elsewhere};
use super::waiting::{begin_unanswered, impatient_log, sync_in_the_end};
use super::{APPEND, create, name, root};
use crate::ClientError;
use crate::engine::session::sequences::WINDOW;
use crate::testing::Cluster;

/// An unanswered append keeps its number, and those of other mutations are at most a window after it.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_number_behind_an_append_that_is_not_answered_fails_in_time() {
    let cluster = Cluster::start(3, 3).await;
    let (client, log) = impatient_log(&cluster).await;
    let (_, other) = create(&client, "other").await;
    let syncing = begin_unanswered(&cluster, &log, b"once\n").await;
    let beyond = 50;
    let mut making = Vec::new();
    for index in 0..WINDOW + beyond {
        let (client, directory) = (client.clone(), name(&format!("directory-{index}")));
        making.push(tokio::spawn(async move {
            let (me, parent) = (root(), InodeId::ROOT);
            client.mkdir(&me, parent, &directory, 0o755).await
        }));
    }
    let mut refused = 0;
    for made in making {
        let made = tokio::time::timeout(DEADLINE, made).await;
        if let Err(error) = made.unwrap().unwrap() {
            let is_named = matches!(error, ClientError::Unreachable { .. });
            assert!(is_named, "{error:?}");
            refused += 1;
        }
    }
    assert!(refused >= beyond, "{refused}");
    other.write(0, Bytes::from_static(b"more")).await.unwrap();
    let synced = tokio::time::timeout(DEADLINE, other.sync()).await;
    assert!(synced.unwrap().is_err());
    assert!(syncing.await.unwrap().is_err());
    cluster.namenode.hold(None);
    for file in [&log, &other] {
        sync_in_the_end(file).await;
    }
    assert_eq!(read_elsewhere(&cluster, "/log").await, b"once\n");
    assert_eq!(read_elsewhere(&cluster, "/other").await, b"more");
}

/// A program that gets the error may append the same data again.
#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_was_given_up_is_not_in_the_file_later() {
    let cluster = Cluster::start(3, 3).await;
    let (client, log) = impatient_log(&cluster).await;
    log.append(Bytes::from_static(b"one\n")).await.unwrap();
    log.sync().await.unwrap();
    let (ino, committed) = (log.ino(), cluster.namenode.calls(Commit::NAME));
    cluster.namenode.hold(Some(Commit::NAME));
    log.append(Bytes::from_static(b"lost\n")).await.unwrap();
    let flushing = tokio::spawn({
        let log = log.clone();
        async move { log.flush().await }
    });
    let began = Instant::now();
    while cluster.namenode.calls(Commit::NAME) == committed {
        assert!(began.elapsed() < DEADLINE, "nothing is committed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    cluster.namenode.crash().await;
    cluster.namenode.hold(None);
    assert_eq!(cluster.namenode.size_bytes(ino), 4, "it was durable");
    assert!(flushing.await.unwrap().is_err());
    let files = &client.core().files;
    let state = files.get(ino).unwrap();
    drop(log);
    while state.has_data() {
        assert!(began.elapsed() < DEADLINE, "it is not given up");
        files.start_flush(&state);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.namenode.restart().await;
    let log = loop {
        match client.open(&root(), ino, APPEND).await {
            Ok(log) => break log,
            Err(error) => assert!(began.elapsed() < DEADLINE, "{error:?}"),
        }
    };
    assert!(log.sync().await.is_err(), "nobody is told");
    log.append(Bytes::from_static(b"two\n")).await.unwrap();
    sync_in_the_end(&log).await;
    // This is longer than the pause between two attempts.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let content = read_elsewhere(&cluster, "/log").await;
    assert_eq!(content, b"one\ntwo\n");
}
