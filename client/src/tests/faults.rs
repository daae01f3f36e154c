//! Files and names while things fail.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::AttrChanges;

use super::{APPEND, create, name, pattern, root, unhurried_client};
use crate::testing::{Cluster, Mood};
use crate::{Client, ClientError, File, OpenFlags};

/// Anything that is due within milliseconds happens within this on any machine.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// How slow a slow datanode is.
const SLOW: Duration = Duration::from_secs(60);

/// Writes a file in pieces of 256 KiB.
pub(super) async fn write_all(file: &File, content: &[u8]) {
    for (index, piece) in content.chunks(256 << 10).enumerate() {
        let offset = index as u64 * (256 << 10);
        file.write(offset, Bytes::copy_from_slice(piece))
            .await
            .unwrap();
    }
}

/// Reads the file with a new client, whose cache is empty.
pub(super) async fn read_elsewhere(cluster: &Cluster, path: &str) -> Vec<u8> {
    let other = cluster.client("elsewhere").await;
    other.read_file(&root(), path.as_bytes()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mutation_without_an_answer_is_executed_once() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    for round in 0..5 {
        cluster.namenode.lose_replies(1 + round % 2);
        let made = client
            .mkdir(
                &root(),
                InodeId::ROOT,
                &name(&format!("dir-{round}")),
                0o755,
            )
            .await;
        made.unwrap();
    }
    let (_, file) = create(&client, "log").await;
    drop(file);
    let log = client
        .open_path(&root(), b"/log", APPEND, None)
        .await
        .unwrap();
    for _ in 0..3 {
        log.append(Bytes::from_static(b"once\n")).await.unwrap();
        cluster.namenode.lose_replies(1);
        log.flush().await.unwrap();
    }
    assert_eq!(
        read_elsewhere(&cluster, "/log").await,
        b"once\nonce\nonce\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_namenode_is_ridden_out() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let content = pattern(3 << 20, 1);
    write_all(&file, &content).await;
    // It is visible but not durable: the crash loses the commit.
    file.flush().await.unwrap();
    cluster.namenode.crash().await;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move {
            client
                .mkdir(&root(), InodeId::ROOT, &name("dir"), 0o755)
                .await
        }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.namenode.restart().await;
    waiting.await.unwrap().unwrap();
    file.sync().await.unwrap();
    assert!(file.read(0, 4 << 20).await.unwrap() == content);
    cluster.namenode.crash().await;
    cluster.namenode.restart().await;
    assert!(read_elsewhere(&cluster, "/file").await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_that_are_set_before_the_first_commit_outlive_a_crash() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (attr, file) = create(&client, "file").await;
    let session = &client.core().session;
    // As with a namenode that grants delegations.
    let delegations = &session.delegations;
    delegations.given(attr.ino, delegations.takings());
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    let mode = |mode| AttrChanges {
        mode: Some(mode),
        ..AttrChanges::default()
    };
    client
        .setattr(&root(), attr.ino, mode(0o640))
        .await
        .unwrap();
    assert!(session.has_unconfirmed());
    // As when its first commit is sent.
    delegations.returned(attr.ino);
    // The crash loses it, and the client replays it: until then the namenode shows the file to no other session.
    cluster.namenode.crash().await;
    cluster.namenode.restart().await;
    client
        .mkdir(&root(), InodeId::ROOT, &name("durable"), 0o755)
        .await
        .unwrap();
    let seen = client.getattr(&root(), attr.ino).await.unwrap();
    assert_eq!(seen.permission_bits(), 0o640);
    assert_eq!(cluster.namenode.declared(), [attr.ino]);

    delegations.given(attr.ino, delegations.takings());
    client
        .setattr(&root(), attr.ino, mode(0o600))
        .await
        .unwrap();
    file.sync().await.unwrap();
    assert!(!session.has_unconfirmed());
    // Once it has content, a change waits until it is durable, also with data in memory.
    file.write(0, Bytes::from_static(b"changed")).await.unwrap();
    client
        .setattr(&root(), attr.ino, mode(0o644))
        .await
        .unwrap();
    assert!(!session.has_unconfirmed());
    cluster.namenode.crash().await;
    cluster.namenode.restart().await;
    let other = cluster.client("other").await;
    let seen = other.getattr(&root(), attr.ino).await.unwrap();
    assert_eq!((seen.permission_bits(), seen.size_bytes), (0o644, 7));
}

/// Simulates a power failure of all servers.
pub(super) async fn lose_power(cluster: &Cluster) {
    for datanode in &cluster.datanodes {
        datanode.lose_unstable();
    }
    cluster.namenode.crash().await;
    cluster.namenode.restart().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_of_a_reopened_file_covers_what_was_written_before() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    file.close().await.unwrap();
    let (_, other) = create(&client, "other").await;
    other.write(0, Bytes::from_static(b"noise")).await.unwrap();
    other.close().await.unwrap();

    let reopened = client
        .open(&root(), attr.ino, OpenFlags::READ)
        .await
        .unwrap();
    reopened.sync().await.unwrap();
    lose_power(&cluster).await;
    assert_eq!(read_elsewhere(&cluster, "/file").await, b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn fsync_of_a_clone_covers_the_data_that_it_shares() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let (_, clone) = create(&client, "clone").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    // The earlier sync does not cover data that is shared now.
    clone.sync().await.unwrap();
    file.clone_range(0, &clone, 0, u64::MAX).await.unwrap();
    clone.sync().await.unwrap();
    lose_power(&cluster).await;
    assert_eq!(read_elsewhere(&cluster, "/clone").await, b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_expired_session_had_not_committed_is_written_again() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, small) = create(&client, "small").await;
    let (_, large) = create(&client, "large").await;
    small.write(0, Bytes::from_static(b"small")).await.unwrap();
    small.flush().await.unwrap();
    let content = pattern(12 << 20, 1);
    write_all(&large, &content).await;
    cluster.namenode.expire_sessions();
    small.write(5, Bytes::from_static(b" file")).await.unwrap();
    small.sync().await.unwrap();
    large.sync().await.unwrap();
    assert_eq!(read_elsewhere(&cluster, "/small").await, b"small file");
    assert!(read_elsewhere(&cluster, "/large").await == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_datanode_is_written_around() {
    for (len, fails_at) in [(300_000, 1), (300_000, 2), (13 << 20, 1), (13 << 20, 3)] {
        let cluster = Cluster::start(5, 3).await;
        let client = cluster.client("a").await;
        let (_, file) = create(&client, "file").await;
        cluster.datanode(3).set_mood(Mood::FailsAtPacket(fails_at));
        let content = pattern(len, fails_at);
        for (index, piece) in content.chunks(100_000).enumerate() {
            let offset = index as u64 * 100_000;
            file.write(offset, Bytes::copy_from_slice(piece))
                .await
                .unwrap();
            if len < 1 << 20 {
                file.flush().await.unwrap();
            }
        }
        file.sync().await.unwrap();
        assert!(file.read(0, len + 1).await.unwrap() == content);
        // It is on stable storage of the healthy datanodes.
        cluster.datanode(3).stop();
        for datanode in &cluster.datanodes {
            datanode.lose_unstable();
        }
        assert!(read_elsewhere(&cluster, "/file").await == content);
        // Each broken block was sealed at the length that all its replicas had.
        for (block, length) in cluster.namenode.sealed() {
            if !cluster.namenode.used_blocks().contains(&block) {
                continue;
            }
            for datanode in cluster.datanodes.iter().filter(|d| d.info().node.0 != 3) {
                if let Some((have, sealed)) = datanode.replicas().get(&block) {
                    assert!(*sealed && *have as u64 == length);
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_datanode_that_disappears_is_written_and_read_around() {
    let cluster = Cluster::start(5, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let content = pattern(24 << 20, 9);
    for (index, piece) in content.chunks(1 << 20).enumerate() {
        if index == 10 {
            cluster.datanode(2).stop();
        }
        let offset = (index as u64) << 20;
        file.write(offset, Bytes::copy_from_slice(piece))
            .await
            .unwrap();
    }
    file.sync().await.unwrap();
    let mut read = Vec::new();
    while read.len() < content.len() {
        if read.len() == 8 << 20 {
            cluster.datanode(4).stop();
        }
        let piece = file.read(read.len() as u64, 1 << 20).await.unwrap();
        read.extend_from_slice(&piece);
    }
    assert!(read == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_datanode_is_left_alone() {
    let cluster = Cluster::start(4, 3).await;
    let client = cluster.client("a").await;
    cluster.datanode(2).set_mood(Mood::Busy);
    client
        .write_file(&root(), b"/file", b"content")
        .await
        .unwrap();
    assert!(cluster.datanode(2).replicas().is_empty());
    cluster.datanode(1).set_mood(Mood::Busy);
    assert_eq!(read_elsewhere(&cluster, "/file").await, b"content");
    // A busy datanode does not count as failed.
    assert_eq!(cluster.namenode.bad_replicas(), []);

    for datanode in &cluster.datanodes {
        datanode.set_mood(Mood::Busy);
    }
    let began = Instant::now();
    let other = cluster.client("b").await;
    let refused = other.read_file(&root(), b"/file").await;
    assert!(
        matches!(refused, Err(ClientError::AllReplicasBusy { .. })),
        "{refused:?}"
    );
    assert!(began.elapsed() >= Duration::from_millis(250));
    let refused = client.write_file(&root(), b"/other", b"content").await;
    assert!(
        matches!(refused, Err(ClientError::AllServersBusy { .. })),
        "{refused:?}"
    );
    // Data that could not be written was not lost.
    for datanode in &cluster.datanodes {
        datanode.set_mood(Mood::Well);
    }
    let file = other
        .open_path(&root(), b"/other", OpenFlags::READ, None)
        .await
        .unwrap();
    let began = Instant::now();
    while file.read(0, 100).await.unwrap() != b"content"[..] {
        assert!(began.elapsed() < DEADLINE);
        client
            .open_path(&root(), b"/other", OpenFlags::WRITE, None)
            .await
            .unwrap()
            .flush()
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_datanode_that_becomes_busy_is_written_and_read_around() {
    let cluster = Cluster::start(5, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let content = pattern(24 << 20, 9);
    let mut held = None;
    for (index, piece) in content.chunks(1 << 20).enumerate() {
        if index == 10 {
            cluster.datanode(2).set_mood(Mood::Busy);
            held = Some(cluster.datanode(2).replicas().len());
        }
        let offset = (index as u64) << 20;
        file.write(offset, Bytes::copy_from_slice(piece))
            .await
            .unwrap();
    }
    file.sync().await.unwrap();
    // It may have at most what was requested before the client knew that it is busy.
    let held_after = cluster.datanode(2).replicas().len();
    assert!(held_after <= held.unwrap() + 2, "{held:?}, {held_after}");
    assert!(read_elsewhere(&cluster, "/file").await == content);
    assert_eq!(cluster.namenode.bad_replicas(), []);
    // A reader resumes where the busy datanode stopped.
    cluster.datanode(2).set_mood(Mood::Well);
    let other = cluster.client("b").await;
    let file = other
        .open_path(&root(), b"/file", OpenFlags::READ, None)
        .await
        .unwrap();
    let mut read = Vec::new();
    while read.len() < content.len() {
        for number in 1..=5 {
            let busy = read.len() >> 20 != 0 && (read.len() >> 20) % 5 + 1 == number as usize;
            let mood = if busy { Mood::Busy } else { Mood::Well };
            cluster.datanode(number).set_mood(mood);
        }
        let piece = file.read(read.len() as u64, 1 << 20).await.unwrap();
        read.extend_from_slice(&piece);
    }
    assert!(read == content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_without_an_alternative_is_reported_in_bounded_time() {
    for len in [100_000, 6 << 20] {
        let cluster = Cluster::start(2, 2).await;
        let mut options = cluster.options("a");
        options.unreachable_timeout = Duration::from_secs(2);
        let client = Client::connect(options).await.unwrap();
        let (_, file) = create(&client, "file").await;
        cluster.datanode(2).set_mood(Mood::Full);
        let content = pattern(len, 5);
        write_all(&file, &content).await;
        let refused = tokio::time::timeout(DEADLINE, file.sync()).await;
        assert_eq!(refused, Ok(Err(FsError::NoSpace.into())));
        let asked = cluster.namenode.calls("allocate_blocks");
        assert!(
            asked < 20,
            "the namenode was asked {asked} times for blocks"
        );
        // Nothing is lost: once there is room, it is written. The failure that attempts in flight
        // met before is still to be reported.
        cluster.datanode(2).set_mood(Mood::Well);
        let began = Instant::now();
        while let Err(error) = file.sync().await {
            assert_eq!(error, FsError::NoSpace.into());
            assert!(began.elapsed() < DEADLINE);
        }
        assert!(read_elsewhere(&cluster, "/file").await == content);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_goes_on_with_two_of_three_and_with_one_waits_and_says_why() {
    for len in [100_000, 6 << 20] {
        let cluster = Cluster::start(3, 3).await;
        let mut options = cluster.options("a");
        options.unreachable_timeout = Duration::from_secs(2);
        let client = Client::connect(options).await.unwrap();
        let (_, file) = create(&client, "file").await;
        let content = pattern(len, 5);
        cluster.datanode(2).set_mood(Mood::FailsAtPacket(1));
        write_all(&file, &content).await;
        let written = tokio::time::timeout(DEADLINE, file.sync()).await;
        assert_eq!(written, Ok(Ok(())));

        let (_, other) = create(&client, "other").await;
        cluster.datanode(3).set_mood(Mood::FailsAtPacket(1));
        write_all(&other, &content).await;
        let refused = tokio::time::timeout(DEADLINE, other.sync()).await;
        // Between attempts to place it, datanodes that failed a moment ago are tried too.
        assert!(
            matches!(
                refused,
                Ok(Err(
                    ClientError::Write(_) | ClientError::Fs(FsError::TooFewDatanodes(_))
                ))
            ),
            "{refused:?}"
        );
        assert!(read_elsewhere(&cluster, "/file").await == content);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn corrupt_missing_and_slow_replicas_are_passed_over() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let content = pattern(700_000, 3);
    client
        .write_file(&root(), b"/file", &content)
        .await
        .unwrap();
    for mood in [Mood::Corrupt, Mood::Empty] {
        cluster.datanode(1).set_mood(mood);
        cluster.datanode(2).set_mood(mood);
        let before = cluster.namenode.bad_replicas().len();
        assert!(read_elsewhere(&cluster, "/file").await == content);
        let began = Instant::now();
        while cluster.namenode.bad_replicas().len() == before {
            assert!(began.elapsed() < DEADLINE);
            tokio::time::sleep(Duration::from_millis(5)).await;
            // It may have asked the good one first.
            assert!(read_elsewhere(&cluster, "/file").await == content);
        }
        assert!(
            cluster.namenode.bad_replicas()[before..]
                .iter()
                .all(|(_, _, corrupt)| *corrupt)
        );
    }
    for mood in [Mood::Slow(SLOW), Mood::Silent] {
        for number in 1..=3 {
            cluster.datanode(number).set_mood(mood);
        }
        cluster.datanode(2).set_mood(Mood::Well);
        let began = Instant::now();
        assert!(read_elsewhere(&cluster, "/file").await == content);
        assert!(began.elapsed() < SLOW / 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn written_data_stays_within_its_budget() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.dirty_bytes_max = 4 << 20;
    let client = Client::connect(options).await.unwrap();
    let mut files = Vec::new();
    for index in 0..8 {
        files.push(create(&client, &format!("file-{index}")).await.1);
    }
    let content = pattern(3 << 20, 4);
    let mut highest = 0;
    for (index, piece) in content.chunks(64 << 10).enumerate() {
        for file in &files {
            let offset = index as u64 * (64 << 10);
            file.write(offset, Bytes::copy_from_slice(piece))
                .await
                .unwrap();
            highest = highest.max(client.core().files.dirty.used());
        }
    }
    assert!(highest <= 4 << 20, "{highest}");
    for file in &files {
        file.flush().await.unwrap();
        assert!(file.read(0, 4 << 20).await.unwrap() == content);
    }
    assert_eq!(client.core().files.dirty.used(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_data_is_flushed_without_being_asked_for() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.dirty_age_max = Duration::from_millis(10);
    let client = Client::connect(options).await.unwrap();
    let (_, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"data")).await.unwrap();
    let began = Instant::now();
    while read_elsewhere(&cluster, "/file").await != b"data" {
        assert!(began.elapsed() < DEADLINE);
    }
    // Dropping the client flushes too.
    file.write(4, Bytes::from_static(b" and more"))
        .await
        .unwrap();
    drop((file, client));
    let began = Instant::now();
    while read_elsewhere(&cluster, "/file").await != b"data and more" {
        assert!(began.elapsed() < DEADLINE);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_mutation_does_not_leave_a_wrong_cache() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    client.getattr(&root(), InodeId::ROOT).await.unwrap();
    for round in 0..20 {
        let (attr, _) = create(&client, &format!("file-{round}")).await;
        let (me, file_name) = (root(), name(&format!("file-{round}")));
        // It is polled once: whether or not it was sent, no caller waits for it any more.
        tokio::select! {
            biased;
            // On a busy machine the answer may be there before the poll is over.
            _ = client.unlink(&me, InodeId::ROOT, &file_name) => {}
            () = std::future::ready(()) => {}
        }
        let began = Instant::now();
        loop {
            let found = client
                .lookup(&root(), InodeId::ROOT, &name(&format!("file-{round}")))
                .await;
            if found == Err(FsError::NotFound.into()) {
                break;
            }
            assert_eq!(found.unwrap().ino, attr.ino);
            assert!(began.elapsed() < DEADLINE);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_ends_with_the_namenode() {
    let cluster = Cluster::start(3, 3).await;
    let mut options = cluster.options("a");
    options.unreachable_timeout = Duration::from_millis(200);
    let client = Client::connect(options).await.unwrap();
    let (attr, _) = create(&client, "file").await;
    assert!(client.lease_remaining() > Duration::from_secs(5));
    assert!(client.try_getattr(attr.ino).is_some());
    cluster.namenode.crash().await;
    // Still granted, so still cached.
    assert!(client.try_getattr(attr.ino).is_some());
    client.core().session.end_lease();
    assert!(client.try_getattr(attr.ino).is_none());
    let refused = client.getattr(&root(), attr.ino).await;
    assert!(
        matches!(refused, Err(ClientError::Unreachable { .. })),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_turned_away_at_once() {
    let (here, elsewhere) = (Cluster::start(1, 1).await, Cluster::start(1, 1).await);
    let mut options = elsewhere.options("a");
    options.namenodes = here.options("a").namenodes;
    let refused = Client::connect(options).await;
    assert!(
        matches!(refused, Err(ClientError::Connect(_))),
        "{refused:?}"
    );
    let reads = here.datanode(1).reads.load(Ordering::Relaxed);
    assert_eq!(reads, 0);
}
