//! Writing and reading files when nothing fails.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{AttrChanges, FallocateMode, RenameMode, SetTime};
use harvestfs_protocol::types::Timestamp;

use super::{APPEND, create, name, pattern, root, unhurried_client};
use crate::testing::Cluster;
use crate::{ClientError, OpenFlags};

#[tokio::test(flavor = "multi_thread")]
async fn a_small_file_is_read_back_before_and_after_its_commit() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "small").await;
    file.write(0, Bytes::from_static(b"hello, world"))
        .await
        .unwrap();
    assert_eq!(&file.read(7, 100).await.unwrap()[..], b"world");
    assert_eq!(file.attr().await.unwrap().size_bytes, 12);
    assert_eq!(cluster.namenode.calls("commit"), 0);
    file.flush().await.unwrap();
    assert_eq!(cluster.namenode.calls("commit"), 1);
    assert_eq!(&file.read(7, 100).await.unwrap()[..], b"world");
    assert_eq!(file.attr().await.unwrap().size_bytes, 12);
    for datanode in &cluster.datanodes {
        assert_eq!(datanode.packets.load(Ordering::Relaxed), 1);
        assert_eq!(datanode.syncs.load(Ordering::Relaxed), 0);
    }
    file.sync().await.unwrap();
    // The commit was answered before it was durable; the second commit, an empty one, confirms it.
    assert_eq!(cluster.namenode.calls("commit"), 2);
    for datanode in &cluster.datanodes {
        assert_eq!(datanode.syncs.load(Ordering::Relaxed), 1);
    }
    // Another client sees it.
    let other = cluster.client("b").await;
    assert_eq!(
        other.read_file(&root(), b"/small").await.unwrap(),
        b"hello, world"
    );
    client.close().await.unwrap();
    assert_eq!(file.flush().await, Ok(()));
    let late = file.write(0, Bytes::from_static(b"x")).await;
    late.unwrap();
    assert_eq!(file.flush().await, Err(ClientError::Closed));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_committed_lately_is_read_back_from_memory() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "small").await;
    file.write(0, Bytes::from_static(b"hello, world"))
        .await
        .unwrap();
    file.close().await.unwrap();
    let (me, path) = (root(), b"/small");
    let again = client.open_path(&me, path, OpenFlags::READ, None);
    let again = again.await.unwrap();
    let pieces = again.try_read_pieces(7, 100).expect("without waiting");
    assert_eq!(pieces.concat(), b"world");
    assert_eq!(&again.read(0, 5).await.unwrap()[..], b"hello");
    assert_eq!(client.counters().network_bytes, 0);
    // Another client has to fetch it.
    let other = cluster.client("b").await;
    assert_eq!(other.read_file(&me, path).await.unwrap(), b"hello, world");
    assert_ne!(other.counters().network_bytes, 0);
    // What another one writes over it is in another block.
    let theirs = other.open_path(&me, path, OpenFlags::WRITE, None);
    let theirs = theirs.await.unwrap();
    theirs.write(0, Bytes::from_static(b"HELLO")).await.unwrap();
    theirs.close().await.unwrap();
    assert_eq!(client.read_file(&me, path).await.unwrap(), b"HELLO, world");
}

/// There are more of them than a session may have unconfirmed: they have to be confirmed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn relaxed_commits_do_not_use_up_the_session() {
    let cluster = Cluster::start(1, 1).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    for index in 0..2_000u64 {
        file.write(index * 10, Bytes::from_static(b"0123456789"))
            .await
            .unwrap();
        let flushed = tokio::time::timeout(Duration::from_secs(30), file.flush()).await;
        flushed.expect("a flush comes to its end").unwrap();
    }
    assert!(cluster.namenode.calls("commit") > 2_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_streams_through_several_blocks() {
    let cluster = Cluster::start(4, 3).await;
    let client = cluster.client("a").await;
    let (attr, file) = create(&client, "large").await;
    let content = pattern(21 << 20, 1);
    for (index, piece) in content.chunks(300_000).enumerate() {
        let offset = index as u64 * 300_000;
        file.write(offset, Bytes::copy_from_slice(piece))
            .await
            .unwrap();
    }
    file.sync().await.unwrap();
    assert!(cluster.namenode.used_blocks().len() >= 5);
    let read = file.read(0, 22 << 20).await.unwrap();
    assert!(read == content);
    drop(file);
    let other = cluster.client("b").await;
    let file = other
        .open(&root(), attr.ino, OpenFlags::READ)
        .await
        .unwrap();
    let mut at = 0;
    while at < content.len() {
        let piece = file.read(at as u64, 100_000).await.unwrap();
        assert!(piece[..] == content[at..at + piece.len()]);
        at += piece.len();
    }
    assert!(file.read(at as u64, 1).await.unwrap().is_empty());
    // Read-ahead requests whole units, not each piece.
    let reads: u64 = cluster
        .datanodes
        .iter()
        .map(|d| d.reads.load(Ordering::Relaxed))
        .sum();
    assert!(reads < 90, "{reads}");
}

#[tokio::test(flavor = "multi_thread")]
async fn full_blocks_are_sealed_on_all_their_datanodes() {
    let cluster = Cluster::with_block_bytes(4, 3, 1 << 20).await;
    let client = cluster.client("a").await;
    for index in 0..12 {
        let (_, file) = create(&client, &format!("file-{index}")).await;
        file.write(0, pattern(700_000, index).into()).await.unwrap();
        file.flush().await.unwrap();
    }
    let began = Instant::now();
    while cluster.namenode.sealed().len() < 11 {
        assert!(began.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for (block, length) in cluster.namenode.sealed() {
        assert_eq!(length, 700_000);
        let holds = |datanode: &&std::sync::Arc<crate::testing::Datanode>| {
            datanode.replicas().get(&block) == Some(&(700_000, true))
        };
        assert_eq!(cluster.datanodes.iter().filter(holds).count(), 3);
    }
    // Nothing failed meanwhile.
    assert!(client.core().reads.avoided().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn flushes_of_many_files_share_packets_and_commits() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let mut files = Vec::new();
    for index in 0..200 {
        let (_, file) = create(&client, &format!("file-{index}")).await;
        file.write(0, pattern(3_000, index).into()).await.unwrap();
        files.push(file);
    }
    let mut flushes = tokio::task::JoinSet::new();
    for file in &files {
        let file = file.clone();
        flushes.spawn(async move { file.flush().await });
    }
    while let Some(flushed) = flushes.join_next().await {
        flushed.unwrap().unwrap();
    }
    let packets = cluster.datanode(1).packets.load(Ordering::Relaxed);
    let commits = cluster.namenode.calls("commit");
    assert!(
        packets < 150 && commits < 150,
        "{packets} packets, {commits} commits"
    );
    assert_eq!(cluster.namenode.used_blocks().len(), 1);
    for (index, file) in files.iter().enumerate() {
        assert!(file.read(0, 4_000).await.unwrap() == pattern(3_000, index as u64));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cache_saves_trips() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let calls = |op: &str| cluster.namenode.calls(op);
    let directory = client
        .mkdir(&root(), InodeId::ROOT, &name("dir"), 0o755)
        .await
        .unwrap();
    // The contents of a new directory are completely known.
    let missing = client.try_lookup(&root(), directory.ino, &name("x"));
    assert_eq!(missing, Some(Err(FsError::NotFound)));
    let (attr, file) = client
        .create_file(
            &root(),
            directory.ino,
            &name("x"),
            0o644,
            OpenFlags::READ_WRITE,
        )
        .await
        .unwrap();
    assert_eq!(
        client.try_lookup(&root(), directory.ino, &name("x")),
        Some(Ok(attr.clone()))
    );
    assert_eq!(
        client.try_getxattr(&root(), attr.ino, b"security.capability"),
        Some(Err(FsError::NoAttribute))
    );
    let listed = client
        .readdir(&root(), directory.ino, None, 10, true)
        .await
        .unwrap();
    assert_eq!((listed.entries.len(), listed.end), (1, true));
    let parent = client.try_getattr(directory.ino).unwrap();
    assert_eq!(parent.mtime, attr.ctime);
    file.write(0, Bytes::from_static(b"data")).await.unwrap();
    file.close().await.unwrap();
    // Opened again while the namenode still holds it.
    let file = client
        .open(&root(), attr.ino, OpenFlags::READ)
        .await
        .unwrap();
    assert_eq!(&file.read(0, 10).await.unwrap()[..], b"data");
    for op in [
        "lookup",
        "getattr",
        "readdir",
        "open",
        "get_extents",
        "locate",
    ] {
        assert_eq!(calls(op), 0, "{op}");
    }
    // The reply to a rename has the attributes of everything that it changed, and the reply to
    // `mkdir` those of the directory.
    client.getattr(&root(), InodeId::ROOT).await.unwrap();
    client
        .rename(
            &root(),
            directory.ino,
            &name("x"),
            InodeId::ROOT,
            &name("y"),
            RenameMode::NoReplace,
        )
        .await
        .unwrap();
    let moved = client.try_lookup(&root(), InodeId::ROOT, &name("y"));
    let moved = moved.unwrap().unwrap();
    let emptied = client.try_getattr(directory.ino).unwrap();
    assert_eq!((emptied.size_bytes, emptied.mtime), (0, moved.ctime));
    for (op, expected) in [("lookup", 0), ("getattr", 0), ("setattr", 0)] {
        assert_eq!(calls(op), expected, "{op}");
    }
    client
        .rename(
            &root(),
            InodeId::ROOT,
            &name("y"),
            directory.ino,
            &name("x"),
            RenameMode::NoReplace,
        )
        .await
        .unwrap();
    client
        .unlink(&root(), directory.ino, &name("x"))
        .await
        .unwrap();
    assert_eq!(
        client.try_lookup(&root(), directory.ino, &name("x")),
        Some(Err(FsError::NotFound))
    );
    // The file has no name any more, but is still readable.
    assert_eq!(&file.read(0, 10).await.unwrap()[..], b"data");
    assert_eq!(file.attr().await.unwrap().nlink, 0);
    assert!(cluster.namenode.inode_exists(attr.ino));
    drop(file);
    let mut waited = 0;
    while cluster.namenode.inode_exists(attr.ino) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        waited += 1;
        assert!(waited < 200, "the file was never released");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listed_directory_answers_for_what_it_does_not_have() {
    let cluster = Cluster::start(3, 3).await;
    let writer = cluster.client("writer").await;
    for index in 0..25 {
        create(&writer, &format!("{index:02}")).await;
    }
    let client = cluster.client("a").await;
    client.getattr(&root(), InodeId::ROOT).await.unwrap();
    let mut after = None;
    let mut found = Vec::new();
    loop {
        let page = client
            .readdir(&root(), InodeId::ROOT, after.as_ref(), 10, false)
            .await
            .unwrap();
        after = page.entries.last().map(|entry| entry.name.clone());
        found.extend(page.entries);
        if page.end {
            break;
        }
    }
    assert_eq!(found.len(), 25);
    let lookups = cluster.namenode.calls("lookup");
    let missing = client
        .lookup(&root(), InodeId::ROOT, &name("nothing"))
        .await;
    assert_eq!(missing, Err(FsError::NotFound.into()));
    client
        .lookup(&root(), InodeId::ROOT, &name("07"))
        .await
        .unwrap();
    assert_eq!(cluster.namenode.calls("lookup"), lookups);
    // Until another client adds something.
    create(&writer, "nothing").await;
    client
        .lookup(&root(), InodeId::ROOT, &name("nothing"))
        .await
        .unwrap();
    assert_eq!(cluster.namenode.calls("lookup"), lookups + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_flush_returned_for_is_seen_elsewhere() {
    let cluster = Cluster::start(3, 3).await;
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    let (attr, written) = create(&a, "shared").await;
    let read = b.open(&root(), attr.ino, OpenFlags::READ).await.unwrap();
    for round in 0..20_u8 {
        let data = vec![round; 1000 * (1 + usize::from(round))];
        written.write(0, data.clone().into()).await.unwrap();
        written.flush().await.unwrap();
        assert!(read.read(0, 1 << 20).await.unwrap() == data);
        assert_eq!(read.attr().await.unwrap().size_bytes, data.len() as u64);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_of_two_clients_are_ordered_and_whole() {
    let cluster = Cluster::start(3, 3).await;
    let (a, b) = (cluster.client("a").await, cluster.client("b").await);
    let (attr, _first) = create(&a, "log").await;
    let mut writers = tokio::task::JoinSet::new();
    for (client, letter) in [(&a, b'a'), (&b, b'b')] {
        let file = client.open(&root(), attr.ino, APPEND).await.unwrap();
        writers.spawn(async move {
            for _ in 0..30 {
                let mut line = vec![letter; 99];
                line.push(b'\n');
                file.append(line.into()).await.unwrap();
                file.flush().await.unwrap();
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
    let content = a.read_file(&root(), b"/log").await.unwrap();
    assert_eq!(content.len(), 6_000);
    for line in content.chunks(100) {
        assert!(line[..99] == [b'a'; 99] || line[..99] == [b'b'; 99]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn truncation_holes_and_clones() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let content = pattern(50_000, 5);
    file.write(0, content.clone().into()).await.unwrap();
    file.truncate(20_000).await.unwrap();
    assert_eq!(file.attr().await.unwrap().size_bytes, 20_000);
    file.truncate(40_000).await.unwrap();
    let mut expected = content[..20_000].to_vec();
    expected.resize(40_000, 0);
    assert!(file.read(0, 50_000).await.unwrap() == expected);
    assert_eq!(file.seek_hole(0).await.unwrap(), Some(20_000));
    assert_eq!(file.seek_data(20_000).await.unwrap(), None);
    file.fallocate(1_000, 2_000, FallocateMode::PunchHole)
        .await
        .unwrap();
    expected[1_000..3_000].fill(0);
    assert!(file.read(0, 50_000).await.unwrap() == expected);
    assert_eq!(file.seek_hole(0).await.unwrap(), Some(1_000));
    assert_eq!(file.seek_data(1_000).await.unwrap(), Some(3_000));
    assert_eq!(file.seek_hole(40_000).await.unwrap(), None);
    file.fallocate(0, 60_000, FallocateMode::Allocate)
        .await
        .unwrap();
    expected.resize(60_000, 0);
    assert_eq!(file.attr().await.unwrap().size_bytes, 60_000);

    let (_, copy) = create(&client, "copy").await;
    copy.write(0, pattern(100, 6).into()).await.unwrap();
    file.clone_range(0, &copy, 0, u64::MAX).await.unwrap();
    assert!(copy.read(0, 1 << 20).await.unwrap() == expected);
    copy.write(10, Bytes::from_static(b"changed"))
        .await
        .unwrap();
    copy.sync().await.unwrap();
    assert!(file.read(0, 1 << 20).await.unwrap() == expected);
}

/// The namenode refuses to share so many extents in one request.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_in_very_many_pieces_is_shared_in_parts() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"x")).await.unwrap();
    let mut pieces = 1;
    for _ in 0..17 {
        file.clone_range(0, &file, pieces, pieces).await.unwrap();
        pieces *= 2;
    }
    let (_, copy) = create(&client, "copy").await;
    let before = cluster.namenode.calls("clone_range");
    let attr = file.clone_range(0, &copy, 5, u64::MAX).await.unwrap();
    assert_eq!(
        (attr.size_bytes, attr.allocated_bytes),
        (pieces + 5, pieces)
    );
    // The whole range is refused, but its two halves are not.
    assert_eq!(cluster.namenode.calls("clone_range"), before + 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_is_set_survives_the_commit() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"old file"))
        .await
        .unwrap();
    let mtime = Timestamp(123_456_789);
    let changes = AttrChanges {
        mtime: Some(SetTime::To(mtime)),
        ..AttrChanges::default()
    };
    let shown = client
        .setattr(&root(), attr.ino, changes.clone())
        .await
        .unwrap();
    assert_eq!(shown.mtime, mtime);
    // The change was made with the commit.
    assert_eq!(cluster.namenode.calls("setattr"), 0);
    file.close().await.unwrap();
    assert_eq!(
        client.getattr(&root(), attr.ino).await.unwrap().mtime,
        mtime
    );
    client.setattr(&root(), attr.ino, changes).await.unwrap();
    assert_eq!(cluster.namenode.calls("setattr"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_and_mode_are_set_without_waiting_for_the_content() {
    let cluster = Cluster::start(3, 3).await;
    let client = unhurried_client(&cluster).await;
    let (attr, file) = create(&client, "file").await;
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    let as_it_is = AttrChanges {
        mode: Some(attr.permission_bits()),
        uid: Some(attr.uid),
        gid: Some(attr.gid),
        ..AttrChanges::default()
    };
    let shown = client
        .setattr(&root(), attr.ino, as_it_is.clone())
        .await
        .unwrap();
    assert_eq!((shown.uid, shown.size_bytes), (attr.uid, 7));
    let mode = |mode| AttrChanges {
        mode: Some(mode),
        ..AttrChanges::default()
    };
    let shown = client
        .setattr(&root(), attr.ino, mode(0o640))
        .await
        .unwrap();
    assert_eq!((shown.permission_bits(), shown.size_bytes), (0o640, 7));
    let calls = ["setattr", "commit"].map(|op| cluster.namenode.calls(op));
    assert_eq!(calls, [1, 0]);
    file.close().await.unwrap();
    let seen = client.getattr(&root(), attr.ino).await.unwrap();
    assert_eq!((seen.permission_bits(), seen.size_bytes), (0o640, 7));
    let read = client.read_file(&root(), b"/file").await.unwrap();
    assert_eq!(&read[..], b"content");

    // There is nothing left to commit: the namenode has to count the change.
    client.setattr(&root(), attr.ino, as_it_is).await.unwrap();
    assert_eq!(cluster.namenode.calls("setattr"), 2);
    // Writing clears this bit, so earlier writes are committed first.
    let file = client
        .open(&root(), attr.ino, OpenFlags::WRITE)
        .await
        .unwrap();
    file.write(0, Bytes::from_static(b"changed")).await.unwrap();
    let commits = cluster.namenode.calls("commit");
    client
        .setattr(&root(), attr.ino, mode(0o4755))
        .await
        .unwrap();
    assert_eq!(cluster.namenode.calls("commit"), commits + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_overtakes_attributes_is_not_forgotten() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    let (old, file) = create(&client, "file").await;
    let ticket = client.core().session.cache.ticket();
    let size_bytes = |attr: &harvestfs_protocol::types::Attr| {
        let seen = client.with_memory(&ticket, attr.clone());
        seen.map(|attr| attr.size_bytes)
    };
    assert_eq!(size_bytes(&old), Some(0));
    file.write(0, Bytes::from_static(b"content")).await.unwrap();
    assert_eq!(size_bytes(&old), Some(7));
    file.flush().await.unwrap();
    // A caller that asked before the commit got the state before it, even if the cache forgot it.
    assert_eq!(size_bytes(&old), None);
    client.core().session.cache.invalidate(&[old.ino], &[]);
    drop(file);
    assert_eq!(size_bytes(&old), None);
    let now = client.getattr(&root(), old.ino).await.unwrap();
    assert_eq!(now.size_bytes, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_closed_has_sealed_its_blocks() {
    let cluster = Cluster::start(3, 3).await;
    let client = cluster.client("a").await;
    client
        .write_file(&root(), b"/small", b"packed")
        .await
        .unwrap();
    let (_, file) = create(&client, "open").await;
    file.write(0, pattern(9 << 20, 1).into()).await.unwrap();
    client.close().await.unwrap();
    // One block is shared by small files, and three are the file's own.
    let (used, sealed) = (cluster.namenode.used_blocks(), cluster.namenode.sealed());
    assert!(used.len() >= 4, "{used:?}");
    let open: Vec<_> = used.iter().filter(|it| !sealed.contains_key(it)).collect();
    assert!(open.is_empty(), "{open:?}");
}
