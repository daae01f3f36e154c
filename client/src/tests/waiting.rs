//! Callers that wait for an unreachable namenode, or give up waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::meta::mutation::{Commit, Link, SetAttr, Unlink};
use harvestfs_protocol::meta::query::GetAttr;
use harvestfs_protocol::types::Attr;

use super::faults::{DEADLINE, read_elsewhere, write_all};
use super::{APPEND, create, name, pattern, root, unhurried, unhurried_client};
use crate::testing::Cluster;
use crate::{
    CacheListener, Client, ClientError, ClientOptions, File, Invalidated, Invalidation, OpenFlags,
};

/// Counts the notices that it receives: for names, and for everything.
#[derive(Default)]
struct Heard {
    names: AtomicU64,
    all: AtomicU64,
}

impl CacheListener for Heard {
    fn invalidate(&self, what: Vec<Invalidation>) -> Invalidated {
        for one in what {
            let count = match one {
                Invalidation::Entry(..) => &self.names,
                Invalidation::All => &self.all,
                Invalidation::Inode(_) => continue,
            };
            count.fetch_add(1, Ordering::Relaxed);
        }
        Box::pin(std::future::ready(()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_caller_waits_for_is_reported_and_not_held() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let heard = Arc::new(Heard::default());
    client.set_cache_listener(heard.clone());
    let (me, file_name) = (root(), name("file"));
    tokio::select! {
        biased;
        _ = client.create_file(&me, InodeId::ROOT, &file_name, 0o644, OpenFlags::READ) => {
            // The answer arrived before the poll was over: this run cannot show the effect.
            return;
        }
        () = std::future::ready(()) => {}
    }
    let began = Instant::now();
    while heard.names.load(Ordering::Relaxed) == 0 {
        assert!(began.elapsed() < DEADLINE, "no notice of the name came");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let attr = client.lookup(&me, InodeId::ROOT, &file_name).await.unwrap();
    client.unlink(&me, InodeId::ROOT, &file_name).await.unwrap();
    while cluster.namenode.inode_exists(attr.ino) {
        assert!(began.elapsed() < DEADLINE, "it is held without being open");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Others see the change as soon as it is executed, but this client's cache was older.
#[tokio::test(flavor = "multi_thread")]
async fn what_no_caller_waits_for_is_seen_as_others_see_it_before_it_is_answered() {
    let cluster = Cluster::start(3, 3).await;
    let (client, other) = (cluster.client("a").await, cluster.client("b").await);
    let (me, [one, two]) = (root(), ["one", "two"].map(name));
    let file = create(&client, "one").await.0.ino;
    client.link(&me, file, InodeId::ROOT, &two).await.unwrap();
    cluster.namenode.hold(Some(Unlink::NAME));
    let removed = client.unlink(&me, InodeId::ROOT, &one);
    let gone = async {
        while other.lookup(&me, InodeId::ROOT, &one).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        result = removed => panic!("it was answered: {result:?}"),
        () = gone => {}
    }
    let asked = cluster.namenode.calls(GetAttr::NAME);
    for _ in 0..2 {
        let found = client.lookup(&me, InodeId::ROOT, &one).await;
        assert!(
            matches!(&found, Err(ClientError::Fs(FsError::NotFound))),
            "{found:?}"
        );
        assert_eq!(client.getattr(&me, file).await.unwrap().nlink, 1);
        assert_eq!(
            client.cacheable_for(),
            Duration::ZERO,
            "the kernel may cache it"
        );
    }
    let asked = cluster.namenode.calls(GetAttr::NAME) - asked;
    assert_eq!(asked, 2, "an answer was not believed");
    cluster.namenode.hold(None);
    let began = Instant::now();
    while client.cacheable_for().is_zero() {
        assert!(began.elapsed() < DEADLINE, "nothing is cached any more");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(client.getattr(&me, file).await.unwrap().nlink, 1);
}

/// The caller gets no answer although there was one: it waits for the current state of the file.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_changed_already_is_reported_when_no_caller_waits_any_more() {
    let cluster = Cluster::start(3, 3).await;
    let (client, log) = log_of(cluster.options("a")).await;
    let heard = Arc::new(Heard::default());
    client.set_cache_listener(heard.clone());
    let syncing = begin_unanswered(&cluster, &log, b"one\n").await;
    let (me, second) = (root(), name("second"));
    let linking = client.link(&me, log.ino(), InodeId::ROOT, &second);
    let linked = async {
        while cluster.namenode.calls(Link::NAME) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Long enough for the answer.
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    tokio::select! {
        biased;
        result = linking => panic!("it is known what the log will be: {result:?}"),
        () = linked => {}
    }
    let began = Instant::now();
    while heard.names.load(Ordering::Relaxed) == 0 {
        assert!(began.elapsed() < DEADLINE, "no notice of the name came");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    cluster.namenode.hold(None);
    syncing.await.unwrap().unwrap();
}

/// Content that the kernel reads meanwhile must not stay in its pages.
#[tokio::test(flavor = "multi_thread")]
async fn the_content_of_a_file_is_not_cached_while_a_change_of_it_may_happen_that_no_caller_waits_for()
 {
    let cluster = Cluster::start(3, 3).await;
    let (client, other) = (cluster.client("a").await, cluster.client("b").await);
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    file.flush().await.unwrap();
    let (unchanged, _) = create(&client, "unchanged").await;
    let may_cache = |attr: &Attr| client.may_cache_content(attr.ino);
    assert!(may_cache(&attr));
    cluster.namenode.hold(Some(SetAttr::NAME));
    let truncated = file.truncate(0);
    let gone = async {
        while other.getattr(&root(), attr.ino).await.unwrap().size_bytes > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        result = truncated => panic!("it was answered: {result:?}"),
        () = gone => {}
    }
    assert!(!may_cache(&attr) && may_cache(&unchanged));
    assert_eq!(file.read(0, 100).await.unwrap(), Bytes::new());
    cluster.namenode.hold(None);
    let began = Instant::now();
    while !may_cache(&attr) {
        assert!(began.elapsed() < DEADLINE, "nothing is cached any more");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// It may still be executed, of which this client would receive no notice.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_known_before_a_change_was_given_up_is_forgotten() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_millis(500);
    let client = Client::connect(options).await.unwrap();
    let heard = Arc::new(Heard::default());
    client.set_cache_listener(heard.clone());
    let me = root();
    create(&client, "file").await;
    cluster.namenode.hold(Some(Unlink::NAME));
    let removed = client.unlink(&me, InodeId::ROOT, &name("file")).await;
    let is_named = matches!(removed, Err(ClientError::Unreachable { .. }));
    assert!(is_named, "{removed:?}");
    let began = Instant::now();
    while heard.all.load(Ordering::Relaxed) == 0 {
        assert!(began.elapsed() < DEADLINE, "the kernel keeps what it knew");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_waits_for_the_namenode_as_long_as_it_is_configured_to() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_millis(500);
    options.dirty_bytes_max = 1 << 20;
    let impatient = Client::connect(options).await.unwrap();
    let mut options = cluster.options("b");
    options.unreachable_timeout = Duration::MAX;
    options.dirty_bytes_max = 1 << 20;
    let patient = Client::connect(options).await.unwrap();
    let (_, refused) = create(&impatient, "refused").await;
    let (_, stored) = create(&patient, "stored").await;
    cluster.namenode.crash().await;
    let content = pattern(4 << 20, 8);
    let waits = {
        let (stored, content) = (stored.clone(), content.clone());
        tokio::spawn(async move {
            write_all(&stored, &content).await;
            stored.sync().await
        })
    };
    // Memory is full after a while, and its data cannot be stored.
    let began = Instant::now();
    let mut result = Ok(());
    for offset in 0..16 {
        let data = Bytes::from(content[..256 << 10].to_vec());
        result = refused.write(offset * (256 << 10), data).await;
        if result.is_err() {
            break;
        }
    }
    let synced = refused.sync().await;
    for error in [result, synced].map(Result::unwrap_err) {
        let is_named = matches!(error, ClientError::Unreachable { .. });
        assert!(is_named, "{error:?}");
    }
    let waited = began.elapsed();
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    assert!(!waits.is_finished());
    cluster.namenode.restart().await;
    let stored = tokio::time::timeout(DEADLINE, waits).await;
    stored.unwrap().unwrap().unwrap();
    assert!(read_elsewhere(&cluster, "/stored").await == content);
}

/// The kernel drops the pages once it gets an error.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_kernel_writes_back_waits_for_as_long_as_the_namenode_is_away() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_millis(300);
    options.dirty_bytes_max = 1 << 20;
    let client = Client::connect(options).await.unwrap();
    let (_, file) = create(&client, "file").await;
    let content = pattern(2 << 20, 8);
    let (first, second) = content.split_at(1 << 20);
    file.write(0, Bytes::copy_from_slice(first)).await.unwrap();
    cluster.namenode.crash().await;
    let second = Bytes::copy_from_slice(second);
    assert!(file.write(1 << 20, second.clone()).await.is_err());
    let waits = {
        let file = file.clone();
        tokio::spawn(async move { file.write_back(1 << 20, second).await })
    };
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!waits.is_finished());
    cluster.namenode.restart().await;
    let written = tokio::time::timeout(DEADLINE, waits).await;
    written.unwrap().unwrap().unwrap();
    file.sync().await.unwrap();
    assert!(read_elsewhere(&cluster, "/file").await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_kernel_writes_back_ends_with_the_client() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_millis(300);
    options.dirty_bytes_max = 1 << 20;
    let client = Client::connect(options).await.unwrap();
    let (_, file) = create(&client, "file").await;
    let much = || Bytes::from(vec![1; 1 << 20]);
    file.write(0, much()).await.unwrap();
    cluster.namenode.crash().await;
    let waits = {
        let file = file.clone();
        tokio::spawn(async move { file.write_back(1 << 20, much()).await })
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!waits.is_finished());
    client.will_close();
    let ended = tokio::time::timeout(DEADLINE, waits).await;
    assert!(ended.unwrap().unwrap().is_err());
}

/// Creates a file to append to, of which nothing is flushed except by the test.
async fn log_of(options: ClientOptions) -> (Client, File) {
    let client = Client::connect(unhurried(options)).await.unwrap();
    let (_, log) = client
        .create_file(&root(), InodeId::ROOT, &name("log"), 0o644, APPEND)
        .await
        .unwrap();
    (client, log)
}

/// The same with a client that soon gives up waiting.
pub(super) async fn impatient_log(cluster: &Cluster) -> (Client, File) {
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_secs(1);
    log_of(options).await
}

fn begin_sync(log: &File) -> JoinHandle<Result<(), ClientError>> {
    let log = log.clone();
    tokio::spawn(async move { log.sync().await })
}

pub(super) async fn commit_is_called(cluster: &Cluster) {
    let began = Instant::now();
    while cluster.namenode.calls(Commit::NAME) == 0 {
        assert!(began.elapsed() < DEADLINE, "nothing is committed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Appends a line whose commit the namenode does not answer, and begins to wait for that.
pub(super) async fn begin_unanswered(
    cluster: &Cluster,
    log: &File,
    line: &'static [u8],
) -> JoinHandle<Result<(), ClientError>> {
    cluster.namenode.hold(Some(Commit::NAME));
    log.append(Bytes::from_static(line)).await.unwrap();
    let syncing = begin_sync(log);
    commit_is_called(cluster).await;
    syncing
}

/// The client connects again, and then stores what it has in memory.
pub(super) async fn sync_in_the_end(log: &File) {
    let began = Instant::now();
    while let Err(error) = log.sync().await {
        let is_named = matches!(error, ClientError::Unreachable { .. });
        assert!(is_named && began.elapsed() < DEADLINE, "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_stay_in_memory_while_the_namenode_is_away() {
    let cluster = Cluster::start(3, 3).await;
    let (client, log) = impatient_log(&cluster).await;
    log.append(Bytes::from_static(b"one\n")).await.unwrap();
    log.sync().await.unwrap();
    cluster.namenode.crash().await;
    // From here on, no commit can be sent.
    client.core().session.unreachable().await;
    for line in [&b"two\n"[..], b"three\n"] {
        log.append(Bytes::from_static(line)).await.unwrap();
        let refused = log.sync().await;
        let is_named = matches!(refused, Err(ClientError::Unreachable { .. }));
        assert!(is_named, "{refused:?}");
    }
    cluster.namenode.restart().await;
    log.append(Bytes::from_static(b"four\n")).await.unwrap();
    sync_in_the_end(&log).await;
    let content = read_elsewhere(&cluster, "/log").await;
    assert_eq!(content, b"one\ntwo\nthree\nfour\n");
}

/// Lets the namenode answer, and checks that both appended lines are in the file.
async fn assert_stored_once(cluster: &Cluster, log: &File) {
    cluster.namenode.hold(None);
    sync_in_the_end(log).await;
    let content = read_elsewhere(cluster, "/log").await;
    assert_eq!(content, b"one\ntwo\n", "each once");
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_without_an_answer_are_in_the_file_once_when_the_namenode_is_back() {
    let cluster = Cluster::start(3, 3).await;
    let (_client, log) = impatient_log(&cluster).await;
    let syncing = begin_unanswered(&cluster, &log, b"one\n").await;
    log.append(Bytes::from_static(b"two\n")).await.unwrap();
    // As long as no namenode answers, each fails in time.
    for synced in [syncing.await.unwrap(), log.sync().await] {
        let is_named = matches!(synced, Err(ClientError::Unreachable { .. }));
        assert!(is_named, "{synced:?}");
    }
    assert_stored_once(&cluster, &log).await;
}

/// There are more of them than requests in flight.
#[tokio::test(flavor = "multi_thread")]
async fn fsync_of_a_file_ends_behind_appends_to_others_that_are_not_answered() {
    let cluster = Cluster::start(3, 3).await;
    let (client, log) = impatient_log(&cluster).await;
    let mut logs = vec![log];
    for other in ["log-1", "log-2", "log-3"].map(name) {
        let (me, parent) = (root(), InodeId::ROOT);
        let created = client.create_file(&me, parent, &other, 0o644, APPEND);
        logs.push(created.await.unwrap().1);
    }
    cluster.namenode.hold(Some(Commit::NAME));
    let mut syncing = Vec::new();
    for log in &logs {
        log.append(Bytes::from_static(b"once\n")).await.unwrap();
        syncing.push(begin_sync(log));
    }
    for syncing in syncing {
        let synced = tokio::time::timeout(DEADLINE, syncing).await;
        let synced = synced.unwrap().unwrap();
        let is_named = matches!(synced, Err(ClientError::Unreachable { .. }));
        assert!(is_named, "{synced:?}");
    }
    cluster.namenode.hold(None);
    for log in &logs {
        sync_in_the_end(log).await;
    }
    for path in ["/log", "/log-1", "/log-2", "/log-3"] {
        assert_eq!(read_elsewhere(&cluster, path).await, b"once\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_appends_those_are_given_up_that_may_have_been_executed_when_the_session_ends() {
    let cluster = Cluster::start(3, 3).await;
    let (_client, log) = impatient_log(&cluster).await;
    let syncing = begin_unanswered(&cluster, &log, b"one\n").await;
    log.append(Bytes::from_static(b"two\n")).await.unwrap();
    cluster.namenode.expire_sessions();
    let began = Instant::now();
    let mut lost = syncing.await.unwrap();
    while matches!(lost, Err(ClientError::Unreachable { .. })) {
        assert!(began.elapsed() < DEADLINE, "it is not reported");
        lost = log.sync().await;
    }
    let is_named = matches!(lost, Err(ClientError::DataLost { .. }));
    assert!(is_named, "{lost:?}");
    assert_stored_once(&cluster, &log).await;
}

/// Appends arrive while a write waits for earlier ones.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_and_what_is_appended_are_stored_in_the_order_in_which_they_were_acknowledged()
 {
    let cluster = Cluster::start(3, 3).await;
    let (_client, log) = log_of(cluster.options("a")).await;
    cluster.namenode.hold(Some(Commit::NAME));
    log.append(Bytes::from_static(b"one\n")).await.unwrap();
    let writing = tokio::spawn({
        let log = log.clone();
        async move { log.write(8, Bytes::from_static(b"three\n")).await }
    });
    commit_is_called(&cluster).await;
    log.append(Bytes::from_static(b"two\n")).await.unwrap();
    cluster.namenode.hold(None);
    let written = tokio::time::timeout(DEADLINE, writing).await;
    written.unwrap().unwrap().unwrap();
    assert!(!log.state().has_appends(), "held with an append");
    log.append(Bytes::from_static(b"four\n")).await.unwrap();
    log.sync().await.unwrap();
    let content = read_elsewhere(&cluster, "/log").await;
    assert_eq!(content, b"one\ntwo\nthree\nfour\n");
}

/// After an attribute was set, the placement rules are no longer known, and the data has to be sent elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_whose_data_is_sent_again_ends_after_an_attribute_was_set() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (attr, file) = create(&client, "file").await;
    cluster.namenode.hold(Some(Commit::NAME));
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    let syncing = tokio::spawn({
        let file = file.clone();
        async move { file.sync().await }
    });
    commit_is_called(&cluster).await;
    client
        .setxattr(&root(), attr.ino, b"user.a", b"b", SetXattrMode::Any)
        .await
        .unwrap();
    // As when the session is replaced.
    client.core().files.begin_session();
    cluster.namenode.hold(None);
    let synced = tokio::time::timeout(DEADLINE, syncing).await;
    synced.unwrap().unwrap().unwrap();
    assert_eq!(read_elsewhere(&cluster, "/file").await, b"content");
}

/// Lets a change be given up while the namenode is unreachable.
async fn give_up<T>(change: impl Future<Output = T>) {
    let change = tokio::time::timeout(Duration::from_millis(20), change);
    assert!(change.await.is_err(), "it was answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_was_given_up_happens_before_those_that_are_asked_for_after_it() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let me = root();
    let mut files = Vec::new();
    // Each has its own chance to be overtaken.
    for index in 0..8 {
        let (_, file) = create(&client, &format!("file-{index}")).await;
        write_all(&file, b"before").await;
        file.sync().await.unwrap();
        let removed = name(&format!("removed-{index}"));
        create(&client, &format!("removed-{index}")).await;
        files.push((file, removed));
    }
    cluster.namenode.crash().await;
    for (file, removed) in &files {
        give_up(file.truncate(0)).await;
        give_up(client.unlink(&me, InodeId::ROOT, removed)).await;
    }
    let mut after = Vec::new();
    for (file, removed) in files {
        after.push(tokio::spawn(async move {
            file.write(0, Bytes::from_static(b"after")).await?;
            file.sync().await
        }));
        let (client, me) = (client.clone(), me.clone());
        after.push(tokio::spawn(async move {
            let (parent, mode) = (InodeId::ROOT, 0o644);
            let made = client.create_file(&me, parent, &removed, mode, OpenFlags::READ);
            made.await.map(|_| ())
        }));
    }
    cluster.namenode.restart().await;
    for task in after {
        let done = tokio::time::timeout(DEADLINE, task).await;
        done.unwrap().unwrap().unwrap();
    }
    let other = cluster.client("b").await;
    for index in 0..8 {
        let path = format!("/file-{index}");
        assert_eq!(read_elsewhere(&cluster, &path).await, b"after");
        let removed = name(&format!("removed-{index}"));
        let found = other.lookup(&me, InodeId::ROOT, &removed).await;
        assert!(found.is_ok(), "{found:?}");
    }
}
