//! What remains after a stop, a crash, and damage.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use harvestfs_namenode::server::{Namenode, NamenodeError, format};
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::meta::{
    FileCommit, MetaReply, Mutation, Query, SetXattrMode, mutation, query,
};
use harvestfs_protocol::node::{NodeCommand, ReplicaChange};
use harvestfs_protocol::rpc::{Reply, Request};
use harvestfs_protocol::types::{Extent, PlacementRules};

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;

fn journal_files(cluster: &Cluster, prefix: &str) -> Vec<PathBuf> {
    let dir = cluster.data_dir().join("journal");
    let mut files: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with(prefix)
        })
        .collect();
    files.sort();
    files
}

async fn names(cluster: &Cluster) -> Vec<String> {
    let mut client = cluster.client("reader").await;
    let mut names = Vec::new();
    loop {
        let op = Query::ReadDir(query::ReadDir {
            ino: ROOT,
            after: names.last().map(|last: &String| name(last)),
            max_entries: 1_000,
            with_attributes: false,
        });
        let Ok(MetaReply::Entries { entries, end, .. }) = client.call(op).await else {
            panic!("entries were expected");
        };
        names.extend(entries.iter().map(|entry| entry.name.to_string()));
        if end {
            client.close().await;
            return names;
        }
    }
}

#[tokio::test]
async fn everything_is_there_after_a_restart() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    for i in 0..50 {
        alice.create(ROOT, &format!("file-{i:03}")).await;
    }
    let before = cluster.status().await;
    cluster.restart().await;
    let after = cluster.status().await;
    // That a term and an epoch began.
    assert_eq!(after.journal_lsn, before.journal_lsn + 2);
    assert!(after.epoch.number > before.epoch.number);
    assert_eq!(names(&cluster).await.len(), 50);
}

#[tokio::test]
async fn what_was_acknowledged_survives_a_crash() {
    // Writers of earlier rounds never come back; no mutation should wait for them for long.
    let mut cluster = Cluster::with(|options| options.lease = Duration::from_millis(300)).await;
    let mut expected: Vec<String> = Vec::new();
    for round in 0..5 {
        let mut writers = tokio::task::JoinSet::new();
        let total = Arc::new(AtomicUsize::new(0));
        for writer in 0..4 {
            let mut client = cluster.client(&format!("writer-{writer}")).await;
            client.acknowledge_all();
            let total = Arc::clone(&total);
            writers.spawn(async move {
                let mut acknowledged = Vec::new();
                for i in 0.. {
                    let file = format!("{round}-{writer}-{i:05}");
                    let call = client.number(create(ROOT, &file));
                    match client.link.try_ask(Request::Meta(call)).await {
                        Ok(Ok(_)) => {
                            acknowledged.push(file);
                            total.fetch_add(1, Ordering::Relaxed);
                        }
                        // The connection was lost with the namenode.
                        Err(_) => return acknowledged,
                        Ok(Err(error)) => panic!("{file}: {error}"),
                    }
                }
                acknowledged
            });
        }
        until("some are acknowledged", async || {
            total.load(Ordering::Relaxed) > 100
        })
        .await;
        cluster.kill().await;
        let acknowledged = writers.join_all().await.concat();
        expected.extend(acknowledged);
        cluster.start().await;
    }
    let found = names(&cluster).await;
    for file in &expected {
        assert!(
            found.binary_search(file).is_ok(),
            "{file} was acknowledged and is gone"
        );
    }
}

#[tokio::test]
async fn a_graceful_stop_answers_what_is_in_flight() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let mut calls = tokio::task::JoinSet::new();
    for i in 0..100 {
        let mut call = alice.number(create(ROOT, &format!("file-{i:03}")));
        numbered(&mut call).answered_below = 0;
        let link = alice.link.clone();
        calls.spawn(async move { link.try_ask(Request::Meta(call)).await });
    }
    // All of them have been sent before this one.
    assert_eq!(alice.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
    cluster.shutdown().await;
    let mut answered = 0;
    while let Some(call) = calls.join_next().await {
        answered += usize::from(matches!(call.unwrap(), Ok(Ok(_))));
    }
    cluster.start().await;
    assert!(names(&cluster).await.len() >= answered && answered > 0);
}

#[tokio::test]
async fn a_graceful_stop_waits_for_caches_to_be_invalidated() {
    let mut cluster = Cluster::new().await;
    let mut bob = cluster.client("bob").await;
    let mut alice = cluster.client("alice").await;
    assert_eq!(bob.lookup(ROOT, "file").await, Err(FsError::NotFound));
    let call = alice.number(create(ROOT, "file"));
    let link = alice.link.clone();
    let created = tokio::spawn(async move { link.try_ask(Request::Meta(call)).await });
    let notice = bob.notice().await;
    let ((), ()) = tokio::join!(cluster.shutdown(), bob.ack(&notice));
    assert!(matches!(created.await.unwrap(), Ok(Ok(_))));
}

#[tokio::test]
async fn a_relaxed_commit_becomes_durable_by_itself() {
    let mut cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    let located = alice.allocate(1).await.unwrap();
    let extent = Extent {
        file_offset: 0,
        length_bytes: 9,
        block: located.blocks[0].block,
        block_offset: 0,
    };
    let commit = FileCommit {
        ino: file,
        extents: vec![extent],
        append: false,
        mtime: None,
    };
    let files = vec![commit];
    let committed = alice
        .call(Mutation::Commit(mutation::Commit {
            files,
            durable: false,
        }))
        .await;
    assert!(matches!(committed, Ok(MetaReply::Committed(_))));
    assert_eq!(alice.lookup(ROOT, "file").await.unwrap().size_bytes, 9);
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.kill_and_start().await;
    let mut bob = cluster.client("bob").await;
    assert_eq!(bob.lookup(ROOT, "file").await.unwrap().size_bytes, 9);
}

/// Only sealed blocks are repaired, and each restart gives sessions their full time again, while servers lose one
/// replica after another.
#[tokio::test]
async fn a_silent_session_ends_when_one_replica_is_left_of_what_it_writes() {
    let mut cluster = Cluster::with(|options| {
        // More than a loaded machine takes until both replicas are reported.
        options.lease = Duration::from_secs(3);
        options.session_timeout = Duration::from_secs(3_600);
        options.cluster.safe_mode_max_ms = 0;
        // How often missing servers are looked for follows from it: until both are back after the restart, most
        // are missing, which is a storm.
        options.cluster.stale_after_ms = 20_000;
    })
    .await;
    let _nodes = [
        Datanode::register(&cluster, "dn-1").await,
        Datanode::register(&cluster, "dn-2").await,
    ];
    let mut silent = cluster.client("silent").await;
    let mut live = cluster.client("live").await;
    let (of_silent, of_live) = (write(&mut silent).await, write(&mut live).await);

    cluster.kill_and_start().await;
    let nodes = [
        Datanode::register(&cluster, "dn-1").await,
        Datanode::register(&cluster, "dn-2").await,
    ];
    let live = cluster
        .open("live", Some(live.session), vec![])
        .await
        .unwrap();
    let sessions = async || {
        assert_eq!(live.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
        for node in &nodes {
            node.heartbeat().await;
        }
        cluster.status().await.sessions
    };
    for block in [of_silent, of_live] {
        nodes[0].has(block, 9).await;
        nodes[1].has(block, 9).await;
    }
    let after_the_lease = tokio::time::Instant::now() + Duration::from_secs(4);
    while tokio::time::Instant::now() < after_the_lease {
        assert_eq!(sessions().await, 2, "two replicas are left of each block");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    for block in [of_silent, of_live] {
        nodes[1].changed(ReplicaChange::Deleted(block)).await;
    }
    until("the silent session has ended", async || {
        sessions().await == 1
    })
    .await;
    let mut sealed = Vec::new();
    until("its block is sealed", async || {
        assert_eq!(live.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
        let commands = nodes[0].heartbeat().await.commands.into_iter();
        // Which namenodes there are is said beside it.
        sealed.extend(commands.filter(|it| !matches!(it, NodeCommand::Namenodes { .. })));
        !sealed.is_empty()
    })
    .await;
    let expected = NodeCommand::Seal {
        block: of_silent,
        length_bytes: 9,
    };
    assert_eq!(sealed, [expected], "the live session goes on writing");
}

/// A file of nine bytes in a block that is to have two replicas and stays open.
async fn write(client: &mut Client) -> BlockId {
    let file = client.create(ROOT, &client.session.to_string()).await.ino;
    let replication = mutation::SetXattr {
        ino: file,
        name: b"user.harvestfs.replication".to_vec(),
        value: b"2".to_vec(),
        mode: SetXattrMode::Create,
    };
    let set = client.call(Mutation::SetXattr(replication)).await;
    set.unwrap();
    let allocate = mutation::AllocateBlocks {
        count: 1,
        rules: PlacementRules {
            replication: 2,
            ..RULES
        },
        exclude: vec![],
    };
    let located = client.call(Mutation::AllocateBlocks(allocate)).await;
    let Ok(MetaReply::Located(located)) = located else {
        panic!("a block was expected: {located:?}");
    };
    let block = located.blocks[0].block;
    let commit = FileCommit {
        ino: file,
        extents: vec![Extent {
            file_offset: 0,
            length_bytes: 9,
            block,
            block_offset: 0,
        }],
        append: false,
        mtime: None,
    };
    let commit = mutation::Commit {
        files: vec![commit],
        durable: true,
    };
    client.call(Mutation::Commit(commit)).await.unwrap();
    block
}

#[tokio::test]
async fn snapshots_carry_everything_and_let_old_segments_go() {
    let mut cluster = Cluster::with(|options| options.snapshots.records = 40).await;
    let mut alice = cluster.client("alice").await;
    for i in 0..100 {
        alice.create(ROOT, &format!("file-{i:03}")).await;
    }
    until("a snapshot on its own", async || {
        !journal_files(&cluster, "snapshot-").is_empty()
    })
    .await;
    for i in 100..108 {
        alice.create(ROOT, &format!("file-{i:03}")).await;
        let done = cluster.admin(AdminRequest::Snapshot).await;
        // A repair that began by itself may have been faster.
        assert_eq!(done, Ok(AdminReply::Done));
    }
    // They are removed after the answer.
    until("what the last two replaced is gone", async || {
        journal_files(&cluster, "snapshot-").len() <= 2
            && journal_files(&cluster, "segment-").len() <= 4
    })
    .await;
    cluster.kill_and_start().await;
    assert_eq!(names(&cluster).await.len(), 108);
    assert_eq!(
        cluster.admin(AdminRequest::Snapshot).await,
        Ok(AdminReply::Done)
    );
}

#[tokio::test]
async fn a_torn_tail_is_dropped_and_damage_is_refused() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    for i in 0..20 {
        alice.create(ROOT, &format!("file-{i:03}")).await;
    }
    cluster.shutdown().await;
    let segment = journal_files(&cluster, "segment-").pop().unwrap();
    let good = fs::read(&segment).unwrap();
    let end = good.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    let open = || fs::OpenOptions::new().write(true).open(&segment).unwrap();

    // Half a record after the last one, as a crash leaves it.
    open().write_all_at(&[0x55; 40], end as u64 + 8).unwrap();
    cluster.start().await;
    assert_eq!(names(&cluster).await.len(), 20);
    cluster.shutdown().await;

    // One flipped bit in the middle of what was acknowledged, in the file that the start has written.
    let good = fs::read(&segment).unwrap();
    let file = open();
    let middle = 4_096 + (end - 4_096) / 2;
    file.write_all_at(&[good[middle] ^ 1], middle as u64)
        .unwrap();
    let refused = Namenode::start(cluster.options()).await.err().unwrap();
    let text = refused.to_string();
    assert!(
        text.contains("damaged") && text.contains("acknowledged"),
        "{text}"
    );

    file.write_all_at(&good[middle..=middle], middle as u64)
        .unwrap();
    cluster.start().await;
    assert_eq!(names(&cluster).await.len(), 20);
}

#[tokio::test]
async fn a_directory_that_is_not_right_is_refused() {
    let mut cluster = Cluster::new().await;
    let again = format(&cluster.data_dir(), &format_options());
    assert!(matches!(again, Err(NamenodeError::AlreadyFormatted { .. })));
    let second = Namenode::start(cluster.options()).await.err().unwrap();
    assert!(second.to_string().contains("in use"), "{second}");
    cluster.shutdown().await;

    let id_file = cluster.data_dir().join("cluster-id");
    let id = fs::read_to_string(&id_file).unwrap();
    for (content, expected) in [
        ("nonsense\n", "does not hold the id"),
        ("000000000000000000000000000000ff\n", "belongs to cluster"),
    ] {
        fs::write(&id_file, content).unwrap();
        let refused = Namenode::start(cluster.options()).await.err().unwrap();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    fs::write(&id_file, id).unwrap();

    let mut options = cluster.options();
    options.data_dir = cluster.data_dir().join("elsewhere");
    let refused = Namenode::start(options.clone()).await.err().unwrap();
    assert!(
        matches!(refused, NamenodeError::NotFormatted { .. }),
        "{refused}"
    );

    // An attempt to format that was interrupted is repeated.
    fs::create_dir_all(options.data_dir.join("formatting")).unwrap();
    fs::write(options.data_dir.join("formatting/segment-1"), b"half").unwrap();
    format(&options.data_dir, &format_options()).unwrap();
    Namenode::start(options)
        .await
        .unwrap()
        .shutdown()
        .await
        .unwrap();

    for (block_bytes, replication) in [(5, 1), ((1 << 20) + 1, 1), (1 << 20, 0), (1 << 20, 11)] {
        let mut options = format_options();
        options.block_bytes = block_bytes;
        options.default_rules.replication = replication;
        let refused = format(&cluster.data_dir().join("bad"), &options);
        assert!(matches!(refused, Err(NamenodeError::Option { .. })));
    }
}

#[tokio::test]
async fn a_failed_journal_ends_the_namenode_and_acknowledges_nothing() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    alice.create(ROOT, "file").await;
    // The next segment cannot be created once the directory is removed.
    let dir = cluster.data_dir().join("journal");
    let hidden = cluster.data_dir().join("hidden");
    fs::create_dir(&hidden).unwrap();
    for file in fs::read_dir(&dir).unwrap() {
        let file = file.unwrap();
        fs::rename(file.path(), hidden.join(file.file_name())).unwrap();
    }
    fs::remove_dir(&dir).unwrap();
    let mut acknowledged = 0;
    // Several segments.
    for i in 0..10_000 {
        let call = alice.number(Mutation::SetXattr(mutation::SetXattr {
            ino: ROOT,
            name: b"user.x".to_vec(),
            value: format!("{i:0>60000}").into_bytes(),
            mode: SetXattrMode::Any,
        }));
        match alice.link.try_ask(Request::Meta(call)).await {
            Ok(Ok(_)) => acknowledged = i,
            Ok(Err(FsError::Internal(_))) | Err(_) => break,
            Ok(Err(error)) => panic!("{error}"),
        }
    }
    assert!(cluster.ended().await.is_err());
    fs::rename(&hidden, &dir).unwrap();
    cluster.start().await;
    let op = Query::GetXattr(query::GetXattr {
        ino: ROOT,
        name: b"user.x".to_vec(),
    });
    let mut bob = cluster.client("bob").await;
    let Ok(MetaReply::Bytes(value)) = bob.call(op).await else {
        panic!("a value was expected");
    };
    let value: i32 = String::from_utf8(value).unwrap().parse().unwrap();
    // One more may have been written without being acknowledged.
    assert!((acknowledged..=acknowledged + 1).contains(&value));
}
