//! Files that are closed before their content is committed.

use std::time::{Duration, Instant};

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{
    AttrChanges, FileCommit, Housekeeping, MetaReply, Mutation, Notice, Query, RenameMode,
    housekeeping, mutation, query,
};
use harvestfs_protocol::name::{Name, SNAPSHOTS_NAME};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::types::Extent;
use tokio::task::JoinHandle;

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;

async fn create_delegated(client: &mut Client, text: &str) -> InodeId {
    create_delegated_in(client, ROOT, text).await
}

async fn create_delegated_in(client: &mut Client, parent: InodeId, text: &str) -> InodeId {
    match client.call(create(parent, text)).await {
        Ok(MetaReply::Created {
            attr,
            delegated: true,
            ..
        }) => attr.ino,
        other => panic!("a delegation was expected, not {other:?}"),
    }
}

/// Commits 5,000 bytes.
async fn commit(client: &mut Client, ino: InodeId) {
    let located = client.allocate(1).await.unwrap();
    let extent = Extent {
        file_offset: 0,
        length_bytes: 5_000,
        block: located.blocks[0].block,
        block_offset: 0,
    };
    let file = FileCommit {
        ino,
        extents: vec![extent],
        append: false,
        mtime: None,
    };
    let op = Mutation::Commit(mutation::Commit {
        files: vec![file],
        durable: false,
    });
    client.call(op).await.unwrap();
}

/// Asks in a task, since the answer may be held back.
fn ask(client: &mut Client, op: impl Into<Op>) -> JoinHandle<MetaReply> {
    let call = client.number(op);
    let link = client.link.clone();
    tokio::spawn(async move { meta(&link, call).await.unwrap() })
}

fn lookup(text: &str) -> Query {
    Query::Lookup(query::Lookup {
        parent: ROOT,
        name: name(text),
    })
}

async fn make_dir(client: &mut Client, text: &str) -> InodeId {
    let op = Mutation::MakeDir(mutation::MakeDir {
        parent: ROOT,
        name: name(text),
        mode: 0o755,
    });
    client.attr(op).await.ino
}

fn snapshot(ino: InodeId) -> Mutation {
    Mutation::CreateSnapshot(mutation::CreateSnapshot {
        ino,
        name: name("snapshot"),
    })
}

/// The size of a file in the snapshot of a directory.
async fn size_in_snapshot(client: &mut Client, directory: InodeId, text: &str) -> u64 {
    let mut at = directory;
    for part in [SNAPSHOTS_NAME, b"snapshot"] {
        let op = Query::Lookup(query::Lookup {
            parent: at,
            name: Name::new(part).unwrap(),
        });
        at = client.attr(op).await.ino;
    }
    client.lookup(at, text).await.unwrap().size_bytes
}

/// Waits until the client is asked to commit a file; acknowledges the notices before that.
async fn recalled(client: &mut Client, file: InodeId) {
    loop {
        match client.notice().await {
            Notice::Recall { inodes } => return assert_eq!(inodes, [file]),
            other => client.ack(&other).await,
        }
    }
}

/// The answer to a question that waits until the client has been asked to commit a file, and has done so.
async fn answered_by_commit(
    client: &mut Client,
    file: InodeId,
    answer: JoinHandle<MetaReply>,
) -> MetaReply {
    recalled(client, file).await;
    assert!(!answer.is_finished(), "nothing was committed yet");
    client.acknowledge_all();
    commit(client, file).await;
    answer.await.unwrap()
}

fn size_bytes(reply: &MetaReply) -> u64 {
    match reply {
        MetaReply::Attr(attr) => attr.size_bytes,
        MetaReply::Renamed { moved, .. } => moved.size_bytes,
        MetaReply::Entries { entries, .. } => {
            let attrs = entries.iter().filter_map(|entry| entry.attr.as_ref());
            attrs.map(|attr| attr.size_bytes).max().unwrap_or(0)
        }
        other => panic!("unexpected {other:?}"),
    }
}

async fn cluster_with_two() -> (Cluster, Datanode, Client, Client) {
    let cluster = Cluster::new().await;
    let node = Datanode::register(&cluster, "dn-1").await;
    let alice = cluster.open_as("alice", None, vec![], Some(vec![]));
    let alice = alice.await.unwrap();
    let bob = cluster.client("bob").await;
    (cluster, node, alice, bob)
}

#[tokio::test]
async fn a_session_that_asks_waits_for_the_commit() {
    let (cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    bob.acknowledge_all();
    let list = Query::ReadDir(query::ReadDir {
        ino: ROOT,
        after: None,
        max_entries: 10,
        with_attributes: true,
    });
    let rename = Mutation::Rename(mutation::Rename {
        parent: ROOT,
        name: name("file-2"),
        new_parent: ROOT,
        new_name: name("moved"),
        mode: RenameMode::Replace,
    });
    for (i, question) in [Op::from(lookup("file-0")), list.into(), rename.into()]
        .into_iter()
        .enumerate()
    {
        let file = create_delegated(&mut alice, &format!("file-{i}")).await;
        let answer = ask(&mut bob, question);
        let reply = answered_by_commit(&mut alice, file, answer).await;
        assert_eq!(size_bytes(&reply), 5_000);
        alice = reopened(&cluster, alice).await;
    }
}

/// The same session on a new connection, whose notices are not acknowledged by themselves.
async fn reopened(cluster: &Cluster, client: Client) -> Client {
    client.link.cut();
    let sequence = client.last_sequence();
    let again = cluster.open_as("alice", Some(client.session), vec![], Some(vec![]));
    let mut again = again.await.unwrap();
    again.set_sequence(sequence);
    again
}

#[tokio::test]
async fn a_file_that_is_given_back_empty_is_reported_as_it_is() {
    let (_cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    let file = create_delegated(&mut alice, "file").await;
    // Its creator itself waits for no other session.
    assert_eq!(
        alice
            .attr(Query::GetAttr(query::GetAttr { ino: file }))
            .await
            .size_bytes,
        0
    );
    let answer = ask(&mut bob, lookup("file"));
    assert!(matches!(alice.notice().await, Notice::Recall { .. }));
    let inodes = vec![file];
    alice
        .call(Housekeeping::ReturnDelegations(
            housekeeping::ReturnDelegations { inodes },
        ))
        .await
        .unwrap();
    assert_eq!(size_bytes(&answer.await.unwrap()), 0);
}

#[tokio::test]
async fn no_mutation_waits_for_a_session_that_ended() {
    let (_cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    create_delegated(&mut alice, "file").await;
    let answer = ask(&mut bob, lookup("file"));
    assert!(matches!(alice.notice().await, Notice::Recall { .. }));
    alice.close().await;
    assert_eq!(size_bytes(&answer.await.unwrap()), 0);
}

/// Otherwise others would wait longer for a session that is gone.
#[tokio::test]
async fn a_question_that_waits_renews_no_lease() {
    const LEASE: Duration = Duration::from_secs(1);
    let cluster = Cluster::with(|options| options.lease = LEASE).await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut carol = cluster.client("carol").await;
    let other = carol.create(ROOT, "other").await.ino;
    carol.acknowledge_all();
    let alice = cluster.open_as("alice", None, vec![], Some(vec![]));
    let mut alice = alice.await.unwrap();
    let file = create_delegated(&mut alice, "file").await;
    let link = alice.link.clone();
    let alive = tokio::spawn(async move {
        while link.ask(Request::KeepAlive).await.is_ok() {
            tokio::time::sleep(LEASE / 10).await;
        }
    });
    let mut bob = cluster.client("bob").await;
    bob.lookup(ROOT, "other").await.unwrap();
    let (link, call) = (bob.link.clone(), bob.number(lookup("file")));
    let question = tokio::spawn(async move { meta(&link, call).await });
    // She does not commit it, and Bob sends nothing any more.
    recalled(&mut alice, file).await;
    alice.acknowledge_all();
    let started = Instant::now();
    let changes = AttrChanges {
        mode: Some(0o600),
        ..AttrChanges::default()
    };
    let change = mutation::SetAttr {
        ino: other,
        changes,
    };
    carol.call(Mutation::SetAttr(change)).await.unwrap();
    let waited = started.elapsed();
    assert!(waited < LEASE * 3 / 2, "{waited:?}");
    // The question came to an end, too.
    let _ = question.await.unwrap();
    alive.abort();
}

#[tokio::test]
async fn a_relaxed_change_comes_before_what_is_durable_after_it() {
    let (mut cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    let new = create_delegated(&mut alice, "new").await;
    let old = create_delegated(&mut alice, "old").await;
    commit(&mut alice, old).await;
    // Whether it may be relaxed is for the namenode to decide; either way it is executed.
    for (client, ino) in [(&mut alice, new), (&mut bob, old)] {
        let changes = AttrChanges {
            mode: Some(0o640),
            ..AttrChanges::default()
        };
        let mut call = client.number(Mutation::SetAttr(mutation::SetAttr { ino, changes }));
        numbered(&mut call).relaxed = true;
        let Ok(MetaReply::Attr(attr)) = meta(&client.link, call).await else {
            panic!("attributes were expected");
        };
        assert_eq!(attr.permission_bits(), 0o640);
    }
    commit(&mut alice, new).await;
    cluster.kill_and_start().await;
    let mut carol = cluster.client("carol").await;
    for name in ["new", "old"] {
        let attr = carol.lookup(ROOT, name).await.unwrap();
        assert_eq!((attr.permission_bits(), attr.size_bytes), (0o640, 5_000));
    }
}

#[tokio::test]
async fn delegations_outlive_a_restart_of_the_namenode() {
    let (mut cluster, _node, mut alice, bob) = cluster_with_two().await;
    let file = create_delegated(&mut alice, "file").await;
    let sequence = alice.last_sequence();
    cluster.kill_and_start().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut bob = cluster
        .open("bob", Some(bob.session), vec![])
        .await
        .unwrap();
    bob.set_sequence(10);
    // Alice has not come back, and may have something to commit for it.
    let answer = ask(&mut bob, lookup("file"));
    let alice = cluster.open_as("alice", Some(alice.session), vec![file], Some(vec![file]));
    let mut alice = alice.await.unwrap();
    alice.set_sequence(sequence);
    let reply = answered_by_commit(&mut alice, file, answer).await;
    assert_eq!(size_bytes(&reply), 5_000);
}

#[tokio::test]
async fn a_snapshot_has_the_content_of_what_was_closed_before() {
    let (_cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    bob.acknowledge_all();
    let directory = make_dir(&mut alice, "directory").await;
    let file = create_delegated_in(&mut alice, directory, "file").await;
    let answer = ask(&mut bob, snapshot(directory));
    answered_by_commit(&mut alice, file, answer).await;
    let size_bytes = size_in_snapshot(&mut bob, directory, "file").await;
    assert_eq!(size_bytes, 5_000);
}

#[tokio::test]
async fn a_snapshot_waits_for_what_was_closed_before_a_restart() {
    let (mut cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    let directory = make_dir(&mut alice, "directory").await;
    let file = create_delegated_in(&mut alice, directory, "file").await;
    let sequence = alice.last_sequence();
    cluster.kill_and_start().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    bob = cluster
        .open("bob", Some(bob.session), vec![])
        .await
        .unwrap();
    bob.set_sequence(10);
    bob.acknowledge_all();
    // No session knows of the delegation until Alice comes back.
    let answer = ask(&mut bob, snapshot(directory));
    let alice = cluster.open_as("alice", Some(alice.session), vec![file], Some(vec![file]));
    let mut alice = alice.await.unwrap();
    alice.set_sequence(sequence);
    answered_by_commit(&mut alice, file, answer).await;
    let size_bytes = size_in_snapshot(&mut bob, directory, "file").await;
    assert_eq!(size_bytes, 5_000);
}

#[tokio::test]
async fn what_is_removed_before_its_commit_is_whole_in_the_trash() {
    let (_cluster, _node, mut alice, mut bob) = cluster_with_two().await;
    bob.acknowledge_all();
    let directory = make_dir(&mut alice, "directory").await;
    let file = create_delegated_in(&mut alice, directory, "file").await;
    let removed = ask(
        &mut bob,
        Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent: ROOT,
            name: name("directory"),
            retention_s: 3_600,
        }),
    );
    while !removed.is_finished() {
        tokio::select! {
            notice = alice.notices.recv() => alice.ack(&notice.unwrap()).await,
            () = tokio::time::sleep(std::time::Duration::from_millis(10)) => {}
        }
    }
    removed.await.unwrap();
    let answer = ask(
        &mut bob,
        Query::Lookup(query::Lookup {
            parent: directory,
            name: name("file"),
        }),
    );
    let reply = answered_by_commit(&mut alice, file, answer).await;
    assert_eq!(size_bytes(&reply), 5_000);
}
