//! Sessions: exactly-once execution, resumption, holds, timeouts.

use std::collections::BTreeSet;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::meta::{
    Housekeeping, MetaReply, Mutated, Mutation, Query, SealedBlock, SetXattrMode, housekeeping,
    mutation, query,
};
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::rpc::{Reply, Request};

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;

#[tokio::test]
async fn a_repeated_mutation_is_answered_as_before() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let mut call = alice.number(create(ROOT, "file"));
    numbered(&mut call).answered_below = 0;
    let Ok(MetaReply::Created { attr, .. }) = meta(&alice.link, call.clone()).await else {
        panic!("it was not created");
    };
    // The client requests the remaining attributes of a new file at that point.
    let first = Ok(MetaReply::Attr(attr));
    assert_eq!(meta(&alice.link, call.clone()).await, first);

    alice.link.cut();
    let alice = cluster
        .open("alice", Some(alice.session), vec![])
        .await
        .unwrap();
    assert_eq!(meta(&alice.link, call.clone()).await, first);

    cluster.kill_and_start().await;
    let mut alice = cluster
        .open("alice", Some(alice.session), vec![])
        .await
        .unwrap();
    assert_eq!(meta(&alice.link, call.clone()).await, first);

    // With the next number it counts as a new request.
    alice.set_sequence(1);
    assert_eq!(alice.call(create(ROOT, "file")).await, Err(FsError::Exists));
}

#[tokio::test]
async fn a_mutation_repeated_while_it_is_held_is_answered_once() {
    let cluster = Cluster::new().await;
    let mut bob = cluster.client("bob").await;
    let mut alice = cluster.client("alice").await;
    // Alice's reply waits for Bob, who has cached that the name does not exist.
    assert_eq!(bob.lookup(ROOT, "file").await, Err(FsError::NotFound));
    let call = alice.number(create(ROOT, "file"));
    let first = tokio::spawn({
        let (link, call) = (alice.link.clone(), call.clone());
        async move { link.try_ask(Request::Meta(call)).await }
    });
    let notice = bob.notice().await;
    alice.link.cut();
    let alice = cluster
        .open("alice", Some(alice.session), vec![])
        .await
        .unwrap();
    let second = tokio::spawn({
        let (link, call) = (alice.link.clone(), call.clone());
        async move { link.try_ask(Request::Meta(call)).await }
    });
    // Requests of one connection are accepted in order: the repeated one has been accepted now.
    assert_eq!(alice.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
    bob.ack(&notice).await;
    assert!(first.await.unwrap().is_err(), "its connection was cut");
    assert!(matches!(
        second.await.unwrap(),
        Ok(Ok(Reply::Mutated(Mutated {
            reply: MetaReply::Created { .. },
            ..
        })))
    ));
}

#[tokio::test]
async fn allocated_blocks_are_located_again_even_after_a_restart() {
    let mut cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let call = alice.number(Mutation::AllocateBlocks(mutation::AllocateBlocks {
        count: 3,
        rules: RULES,
        exclude: vec![],
    }));
    let Ok(MetaReply::Located(first)) = meta(&alice.link, call.clone()).await else {
        panic!("blocks were expected");
    };
    cluster.kill_and_start().await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let alice = cluster
        .open("alice", Some(alice.session), vec![])
        .await
        .unwrap();
    let Ok(MetaReply::Located(again)) = meta(&alice.link, call).await else {
        panic!("blocks were expected");
    };
    let blocks = |located: &harvestfs_protocol::types::Located| -> Vec<_> {
        located.blocks.iter().map(|info| info.block).collect()
    };
    assert_eq!(blocks(&first), blocks(&again));
    assert!(
        again
            .blocks
            .iter()
            .all(|info| info.replicas == [node.registered.node])
    );
}

#[tokio::test]
async fn a_removed_file_stays_readable_while_it_is_held() {
    let mut cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let file = alice.create(ROOT, "file").await.ino;
    alice
        .call(Housekeeping::Release(housekeeping::Release {
            inodes: vec![file],
        }))
        .await
        .unwrap();
    alice.call(open_to_read(file)).await.unwrap();
    alice.call(unlink(ROOT, "file")).await.unwrap();
    assert_eq!(
        alice
            .attr(Query::GetAttr(query::GetAttr { ino: file }))
            .await
            .nlink,
        0
    );

    // Over a lost connection and over a crash, as long as the client comes back.
    alice.link.cut();
    let alice = cluster
        .open("alice", Some(alice.session), vec![file])
        .await
        .unwrap();
    cluster.kill_and_start().await;
    let session = alice.session;
    let mut alice = cluster
        .open("alice", Some(session), vec![file])
        .await
        .unwrap();
    assert_eq!(
        alice
            .attr(Query::GetAttr(query::GetAttr { ino: file }))
            .await
            .nlink,
        0
    );

    alice
        .call(Housekeeping::Release(housekeeping::Release {
            inodes: vec![file],
        }))
        .await
        .unwrap();
    assert_eq!(
        alice
            .call(Query::GetAttr(query::GetAttr { ino: file }))
            .await,
        Err(FsError::Stale)
    );
}

#[tokio::test]
async fn an_orphan_goes_when_its_holder_does_not_come_back() {
    let mut cluster = Cluster::with(|options| {
        options.lease = Duration::from_millis(200);
        options.session_timeout = Duration::from_millis(1_500);
    })
    .await;
    let mut alice = cluster.client("alice").await;
    alice.create(ROOT, "file").await;
    alice.call(unlink(ROOT, "file")).await.unwrap();
    cluster.kill_and_start().await;
    assert_eq!(cluster.status().await.files, 1, "its holder may come back");
    until("the orphan is gone", async || {
        cluster.status().await.files == 0
    })
    .await;
    assert_eq!(cluster.status().await.sessions, 0);
}

#[tokio::test]
async fn a_silent_session_ends_and_its_blocks_are_freed() {
    let cluster = Cluster::with(|options| {
        options.lease = Duration::from_millis(200);
        options.session_timeout = Duration::from_millis(1_500);
        options.cluster.safe_mode_max_ms = 0;
    })
    .await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let located = alice.allocate(2).await.unwrap();
    assert_eq!(cluster.status().await.blocks, 2);
    for info in &located.blocks {
        node.has(info.block, 0).await;
    }
    until("the session is ended", async || {
        cluster.status().await.sessions == 0
    })
    .await;
    assert_eq!(cluster.status().await.blocks, 0);
    assert_eq!(
        alice.link.ask(Request::KeepAlive).await,
        Err(FsError::SessionExpired)
    );
    let wanted: BTreeSet<_> = located.blocks.iter().map(|info| info.block).collect();
    let mut deleted = BTreeSet::new();
    until("the replicas are removed", async || {
        for command in node.heartbeat().await.commands {
            if let NodeCommand::Delete { blocks } = command {
                deleted.extend(blocks);
            }
        }
        deleted == wanted
    })
    .await;
}

#[tokio::test]
async fn a_live_session_without_requests_stays() {
    let cluster = Cluster::with(|options| {
        options.lease = Duration::from_millis(500);
        options.session_timeout = Duration::from_millis(1_500);
    })
    .await;
    let alice = cluster.client("alice").await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(alice.link.ask(Request::KeepAlive).await, Ok(Reply::Done));
    }
}

#[tokio::test]
async fn only_its_owner_resumes_a_session() {
    let cluster = Cluster::new().await;
    let mut alice = cluster.client("alice").await;
    let stolen = cluster.open("mallory", Some(alice.session), vec![]).await;
    assert_eq!(stolen.err(), Some(FsError::SessionExpired));
    let forged = cluster.open("alice", Some(SessionId(999)), vec![]).await;
    assert_eq!(forged.err(), Some(FsError::SessionExpired));
    assert!(
        alice
            .call(Query::StatFs(query::StatFs { ino: InodeId::ROOT }))
            .await
            .is_ok(),
        "undisturbed"
    );

    // Once resumed elsewhere, the session can no longer be used on the old connection.
    let mut elsewhere = cluster
        .open("alice", Some(alice.session), vec![])
        .await
        .unwrap();
    assert_eq!(
        alice
            .call(Query::StatFs(query::StatFs { ino: InodeId::ROOT }))
            .await,
        Err(FsError::SessionExpired)
    );
    assert!(
        elsewhere
            .call(Query::StatFs(query::StatFs { ino: InodeId::ROOT }))
            .await
            .is_ok()
    );

    let session = elsewhere.session;
    elsewhere.close().await;
    let ended = cluster.open("alice", Some(session), vec![]).await;
    assert_eq!(ended.err(), Some(FsError::SessionExpired));
}

#[tokio::test]
async fn one_peer_takes_neither_all_sessions_nor_all_blocks() {
    let cluster = Cluster::with(|options| {
        options.sessions_per_client_max = 2;
        options.blocks_per_session_max = 3;
    })
    .await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let limit = |what: &str, max| {
        Err(FsError::PeerLimit {
            what: what.to_owned(),
            max,
        })
    };
    let mut greedy = cluster.client("greedy").await;
    let other = cluster.client("greedy").await;
    let refused = cluster.open("greedy", None, vec![]).await;
    assert_eq!(refused.map(|_| ()), limit("sessions", 2));
    let mut alice = cluster.client("alice").await;
    other.close().await;
    cluster.client("greedy").await;

    greedy.allocate(2).await.unwrap();
    let refused = greedy.allocate(2).await;
    let blocks = limit("blocks that a session writes", 3);
    assert_eq!(refused.map(|_| ()), blocks);
    let located = greedy.allocate(1).await.unwrap();
    assert_eq!(greedy.allocate(1).await.map(|_| ()), blocks);
    alice.allocate(3).await.unwrap();
    // What is sealed can no longer be written.
    let block = located.blocks[0].block;
    let seal = SealedBlock {
        block,
        length_bytes: 0,
        replicas: located.blocks[0].replicas.clone(),
    };
    let sealed = greedy
        .call(Mutation::SealBlocks(mutation::SealBlocks {
            blocks: vec![seal],
        }))
        .await;
    sealed.unwrap();
    greedy.allocate(1).await.unwrap();
}

#[tokio::test]
async fn a_quota_without_room_refuses_blocks_for_new_data() {
    let cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut alice = cluster.client("alice").await;
    let full = Mutation::MakeDir(mutation::MakeDir {
        parent: ROOT,
        name: name("full"),
        mode: 0o755,
    });
    let full = alice.attr(full).await.ino;
    let limit = Mutation::SetXattr(mutation::SetXattr {
        ino: full,
        name: b"user.harvestfs.quota_bytes".to_vec(),
        value: b"0".to_vec(),
        mode: SetXattrMode::Any,
    });
    alice.call(limit).await.unwrap();
    let limited = alice.create(full, "limited").await.ino;
    let free = alice.create(ROOT, "free").await.ino;
    for (file, expected) in [
        (Some(limited), Err(FsError::QuotaExceeded)),
        (Some(full), Err(FsError::QuotaExceeded)),
        (Some(InodeId(999)), Ok(())),
        (Some(free), Ok(())),
    ] {
        let allocate = mutation::AllocateBlocks {
            count: 1,
            rules: RULES,
            exclude: vec![],
        };
        let mut call = alice.number(Mutation::AllocateBlocks(allocate.clone()));
        numbered(&mut call).file = file;
        let answer = meta(&alice.link, call).await;
        assert_eq!(answer.map(|_| ()), expected, "{file:?}");
        // Blocks allocated for no file would be usable for any.
        let mut call = alice.number(Mutation::AllocateBlocks(allocate));
        numbered(&mut call).file = None;
        let refused = meta(&alice.link, call).await;
        assert!(matches!(refused, Err(FsError::InvalidArgument(_))));
    }
}
