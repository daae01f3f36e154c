//! Every metadata operation once, over the wire.

use std::collections::BTreeSet;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::PIECES_PER_CLONE_MAX;
use harvestfs_protocol::meta::{
    AttrChanges, FallocateMode, FileCommit, Housekeeping, MetaReply, Mutation, Query, Relocation,
    RenameMode, SealedBlock, SetXattrMode, housekeeping, mutation, query,
};
use harvestfs_protocol::rpc::Request;
use harvestfs_protocol::token::{Right, TokenVerifier};
use harvestfs_protocol::types::{Credentials, Extent, FileBlock, FileKind};

use crate::harness::*;

const ROOT: InodeId = InodeId::ROOT;

pub struct Session {
    pub client: Client,
    seen: BTreeSet<&'static str>,
}

impl Session {
    pub async fn ok(&mut self, op: impl Into<Op>) -> MetaReply {
        let op = op.into();
        self.seen.insert(op.name());
        let what = format!("{op:?}");
        match self.client.call(op).await {
            Ok(reply) => reply,
            Err(error) => panic!("{what}: {error}"),
        }
    }

    pub async fn ino(&mut self, op: impl Into<Op>) -> InodeId {
        match self.ok(op).await {
            MetaReply::Attr(attr) | MetaReply::Created { attr, .. } => attr.ino,
            other => panic!("unexpected {other:?}"),
        }
    }
}

#[tokio::test]
async fn every_operation_works_over_the_wire() {
    let cluster = Cluster::new().await;
    let (s, _node) = every_operation(&cluster).await;
    let all = [Query::NAMES, Mutation::NAMES, Housekeeping::NAMES];
    let all: BTreeSet<_> = all.into_iter().flatten().copied().collect();
    assert_eq!(s.seen, all);
}

/// Otherwise, copies of copies of single bytes would double the content of a file with each request.
#[tokio::test]
async fn a_clone_of_too_many_pieces_is_refused() {
    let cluster = Cluster::new().await;
    let _node = Datanode::register(&cluster, "dn-1").await;
    let mut client = cluster.client("alice").await;
    let file = client.create(ROOT, "file").await.ino;
    let block = client.allocate(1).await.unwrap().blocks[0].block;
    let byte = Extent {
        file_offset: 0,
        length_bytes: 1,
        block,
        block_offset: 0,
    };
    let files = vec![FileCommit {
        ino: file,
        extents: vec![byte],
        append: false,
        mtime: None,
    }];
    let durable = true;
    let commit = Mutation::Commit(mutation::Commit { files, durable });
    client.call(commit).await.unwrap();
    let clone = |destination, destination_offset, length_bytes| {
        Mutation::CloneRange(mutation::CloneRange {
            source: file,
            source_offset: 0,
            destination,
            destination_offset,
            length_bytes,
        })
    };
    let max = PIECES_PER_CLONE_MAX as u64;
    let mut pieces = 1;
    while pieces <= max {
        client.attr(clone(file, pieces, pieces)).await;
        pieces *= 2;
    }
    let copy = client.create(ROOT, "copy").await.ino;
    let refused = client.call(clone(copy, 0, u64::MAX)).await;
    assert!(
        matches!(refused, Err(FsError::NotSupported(_))),
        "{refused:?}"
    );
    let attr = client.attr(clone(copy, 0, max)).await;
    assert_eq!(attr.size_bytes, max);
}

/// Users that may not compact do not get the turn, and a session that ends gives it up.
#[tokio::test]
async fn nobody_is_kept_from_compacting_by_those_who_do_not_compact() {
    let cluster = Cluster::new().await;
    let find = || Query::FindSparse(query::FindSparse { from: None });
    let mut mallory = cluster.client("mallory").await;
    let mut call = mallory.number(find());
    call.credentials = Credentials {
        uid: 1,
        gid: 1,
        groups: vec![],
    };
    let refused = mallory.link.ask(Request::Meta(call)).await;
    assert_eq!(refused, Err(FsError::NotPermitted));
    for name in ["alice", "bob"] {
        let mut client = cluster.client(name).await;
        let call = Request::Meta(client.number(find()));
        let found = client.link.ask(call).await;
        assert!(found.is_ok(), "{name}: {found:?}");
        client.close().await;
    }
}

/// Every operation, once or more often.
pub async fn every_operation(cluster: &Cluster) -> (Session, Datanode) {
    let node = Datanode::register(cluster, "dn-1").await;
    let mut s = Session {
        client: cluster.client("alice").await,
        seen: BTreeSet::new(),
    };
    let file = s.ino(create(ROOT, "file")).await;
    write_and_read_back(&mut s, &node, file).await;
    name_things(&mut s, file).await;
    set_attributes(&mut s, file).await;
    compact(&mut s, cluster, file).await;
    s.ok(Housekeeping::ReturnDelegations(
        housekeeping::ReturnDelegations { inodes: vec![file] },
    ))
    .await;
    s.ok(Housekeeping::Release(housekeeping::Release {
        inodes: vec![file],
    }))
    .await;
    (s, node)
}

async fn compact(s: &mut Session, cluster: &Cluster, file: InodeId) {
    let find = Query::FindSparse(query::FindSparse { from: None });
    s.ok(find.clone()).await;
    // One at a time; the others have to wait.
    let mut other = cluster.client("bob").await;
    let call = Request::Meta(other.number(find.clone()));
    let refused = other.link.ask(call).await;
    assert!(matches!(refused, Err(FsError::Busy { .. })), "{refused:?}");
    s.ok(find).await;
    let scratch = s
        .ino(Mutation::CreateScratch(mutation::CreateScratch {
            rules: RULES,
        }))
        .await;
    let pieces = vec![Relocation {
        ino: file,
        extent: Extent {
            file_offset: 0,
            length_bytes: 5_000,
            block: BlockId(1),
            block_offset: 0,
        },
        scratch_offset: 0,
    }];
    // Nothing was copied.
    let relocated = s
        .ok(Mutation::Relocate(mutation::Relocate { scratch, pieces }))
        .await;
    assert_eq!(relocated, MetaReply::Relocated(0));
    // It exists until it is released, and not any longer.
    s.ok(Query::GetAttr(query::GetAttr { ino: scratch })).await;
    let inodes = vec![scratch];
    s.ok(Housekeeping::Release(housekeeping::Release { inodes }))
        .await;
    let gone = s
        .client
        .call(Query::GetAttr(query::GetAttr { ino: scratch }))
        .await;
    assert_eq!(gone, Err(FsError::Stale));
}

async fn write_and_read_back(s: &mut Session, node: &Datanode, file: InodeId) {
    let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
        count: 2,
        rules: RULES,
        exclude: vec![],
    });
    let MetaReply::Located(allocated) = s.ok(op).await else {
        panic!("blocks were expected");
    };
    assert_eq!(allocated.blocks.len(), 2);
    assert_eq!(allocated.nodes[0].name, "dn-1");
    let verifier = TokenVerifier::new(&node.registered.keys);
    for info in &allocated.blocks {
        assert_eq!(info.replicas, vec![node.registered.node]);
        verifier
            .verify(&info.token, info.block, Right::Write, 0)
            .unwrap();
    }
    let [first, second] = [allocated.blocks[0].block, allocated.blocks[1].block];
    let extent = |file_offset, block| Extent {
        file_offset,
        length_bytes: 5_000,
        block,
        block_offset: 0,
    };
    for (durable, file_offset, block) in [(true, 0, first), (false, 5_000, second)] {
        let commit = FileCommit {
            ino: file,
            extents: vec![extent(file_offset, block)],
            append: false,
            mtime: None,
        };
        let files = vec![commit];
        let MetaReply::Committed(committed) = s
            .ok(Mutation::Commit(mutation::Commit { files, durable }))
            .await
        else {
            panic!("a commit was expected");
        };
        assert!(committed[0].is_ok());
    }
    let blocks = [first, second]
        .map(|block| SealedBlock {
            block,
            length_bytes: 5_000,
            replicas: vec![node.registered.node],
        })
        .to_vec();
    s.ok(Mutation::SealBlocks(mutation::SealBlocks { blocks }))
        .await;

    let MetaReply::Opened {
        attr,
        extents,
        end,
        located,
    } = s.ok(open_to_read(file)).await
    else {
        panic!("an open file was expected");
    };
    assert_eq!((attr.size_bytes, extents.len(), end), (10_000, 2, true));
    assert_eq!(located.blocks.len(), 2);
    assert_eq!(located.blocks[0].replicas, vec![node.registered.node]);
    let token = &located.blocks[0].token;
    verifier.verify(token, first, Right::Read, 0).unwrap();
    assert!(verifier.verify(token, first, Right::Write, 0).is_err());

    let op = Query::GetExtents(query::GetExtents {
        ino: file,
        from_offset: 5_000,
    });
    let MetaReply::Extents { extents, .. } = s.ok(op).await else {
        panic!("extents were expected");
    };
    assert_eq!(extents[0].block, second);
    let unknown = harvestfs_protocol::ids::BlockId(u64::MAX);
    let at = |block, file_offset| FileBlock { block, file_offset };
    let blocks = vec![at(second, 9_999), at(second, 4_999), at(unknown, 9_999)];
    let MetaReply::Located(located) = s
        .ok(Query::Locate(query::Locate { ino: file, blocks }))
        .await
    else {
        panic!("locations were expected");
    };
    assert_eq!(located.blocks.len(), 1, "what is not there is left out");

    let op = Query::GetXattr(query::GetXattr {
        ino: file,
        name: b"user.harvestfs.locations".to_vec(),
    });
    let text = format!("0 5000 {first} dn-1\n5000 5000 {second} dn-1\n");
    assert_eq!(s.ok(op).await, MetaReply::Bytes(text.into_bytes()));
    s.ok(Housekeeping::ReportBadReplica(
        housekeeping::ReportBadReplica {
            block: first,
            node: node.registered.node,
            corrupt: false,
        },
    ))
    .await;
}

async fn name_things(s: &mut Session, file: InodeId) {
    let usage = s.ok(Query::GetUsage(query::GetUsage { ino: ROOT })).await;
    let MetaReply::Usage(usage) = usage else {
        panic!("{usage:?}");
    };
    assert_eq!((usage.used_inodes, usage.quota_inodes), (1, None));
    let dir = s
        .ino(Mutation::MakeDir(mutation::MakeDir {
            parent: ROOT,
            name: name("dir"),
            mode: 0o755,
        }))
        .await;
    let link = s
        .ino(Mutation::Symlink(mutation::Symlink {
            parent: dir,
            name: name("symlink"),
            target: b"../file".to_vec(),
        }))
        .await;
    let target = s.ok(Query::ReadLink(query::ReadLink { ino: link })).await;
    assert_eq!(target, MetaReply::Bytes(b"../file".to_vec()));
    let linked = s
        .ino(Mutation::Link(mutation::Link {
            ino: file,
            parent: dir,
            name: name("hard"),
        }))
        .await;
    assert_eq!(linked, file);
    s.ok(Mutation::Rename(mutation::Rename {
        parent: dir,
        name: name("hard"),
        new_parent: ROOT,
        new_name: name("renamed"),
        mode: RenameMode::NoReplace,
    }))
    .await;
    let found = s
        .ino(Query::Lookup(query::Lookup {
            parent: ROOT,
            name: name("renamed"),
        }))
        .await;
    assert_eq!(found, file);
    let op = Query::ReadDir(query::ReadDir {
        ino: ROOT,
        after: None,
        max_entries: 10,
        with_attributes: true,
    });
    let MetaReply::Entries { entries, end, .. } = s.ok(op).await else {
        panic!("entries were expected");
    };
    let names: Vec<String> = entries.iter().map(|entry| entry.name.to_string()).collect();
    assert_eq!(
        (names, end),
        (vec!["dir".into(), "file".into(), "renamed".into()], true)
    );
    assert_eq!(entries[1].attr.as_ref().unwrap().nlink, 2);
    s.ok(unlink(dir, "symlink")).await;
    s.ok(Mutation::RemoveDir(mutation::RemoveDir {
        parent: ROOT,
        name: name("dir"),
    }))
    .await;
    let fifo = s
        .ino(Mutation::Create(mutation::Create {
            parent: ROOT,
            name: name("fifo"),
            kind: FileKind::Fifo,
            mode: 0o600,
            rdev: 0,
        }))
        .await;
    let MetaReply::Attr(attr) = s.ok(Query::GetAttr(query::GetAttr { ino: fifo })).await else {
        panic!("attributes were expected");
    };
    assert_eq!((attr.kind, attr.mode), (FileKind::Fifo, 0o600));
}

async fn set_attributes(s: &mut Session, file: InodeId) {
    s.ok(Query::Access(query::Access { ino: file, mask: 4 }))
        .await;
    let changes = AttrChanges {
        mode: Some(0o600),
        uid: Some(7),
        ..AttrChanges::default()
    };
    let MetaReply::Attr(attr) = s
        .ok(Mutation::SetAttr(mutation::SetAttr { ino: file, changes }))
        .await
    else {
        panic!("attributes were expected");
    };
    assert_eq!((attr.mode, attr.uid), (0o600, 7));
    let xattr = b"user.colour".to_vec();
    s.ok(Mutation::SetXattr(mutation::SetXattr {
        ino: file,
        name: xattr.clone(),
        value: b"green".to_vec(),
        mode: SetXattrMode::Create,
    }))
    .await;
    let op = Query::GetXattr(query::GetXattr {
        ino: file,
        name: xattr.clone(),
    });
    assert_eq!(s.ok(op.clone()).await, MetaReply::Bytes(b"green".to_vec()));
    let MetaReply::Names(names) = s.ok(Query::ListXattr(query::ListXattr { ino: file })).await
    else {
        panic!("names were expected");
    };
    assert!(names.contains(&xattr));
    s.ok(Mutation::RemoveXattr(mutation::RemoveXattr {
        ino: file,
        name: xattr,
    }))
    .await;
    assert_eq!(s.client.call(op).await, Err(FsError::NoAttribute));
    let MetaReply::Attr(attr) = s
        .ok(Mutation::Fallocate(mutation::Fallocate {
            ino: file,
            offset: 0,
            length_bytes: 20_000,
            mode: FallocateMode::Allocate,
        }))
        .await
    else {
        panic!("attributes were expected");
    };
    assert_eq!(attr.size_bytes, 20_000);
    let copy = s.ino(create(ROOT, "copy")).await;
    let MetaReply::Attr(attr) = s
        .ok(Mutation::CloneRange(mutation::CloneRange {
            source: file,
            source_offset: 0,
            destination: copy,
            destination_offset: 0,
            length_bytes: u64::MAX,
        }))
        .await
    else {
        panic!("attributes were expected");
    };
    assert_eq!(attr.size_bytes, 20_000);
    let MetaReply::StatFs(totals) = s
        .ok(Query::StatFs(query::StatFs { ino: InodeId::ROOT }))
        .await
    else {
        panic!("totals were expected");
    };
    assert_eq!(totals.total_bytes, 1 << 30);
    let inodes = totals.total_inodes - totals.free_inodes;
    assert_eq!(inodes, 4, "the root, two files and a FIFO");
    s.ok(Mutation::RemoveToTrash(mutation::RemoveToTrash {
        parent: ROOT,
        name: name("fifo"),
        retention_s: 60,
    }))
    .await;
    let ino = ROOT;
    let name = name("snapshot");
    s.ok(Mutation::CreateSnapshot(mutation::CreateSnapshot {
        ino,
        name: name.clone(),
    }))
    .await;
    s.ok(Mutation::RemoveSnapshot(mutation::RemoveSnapshot {
        ino,
        name,
    }))
    .await;
}
