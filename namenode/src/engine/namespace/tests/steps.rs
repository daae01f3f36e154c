//! Random operations. They name what they act on by its place among what exists, so that most of
//! them make sense.

use harvestfs_protocol::meta::{FallocateMode, SetTime, SetXattrMode};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt};

use super::model::Model;
use super::*;

/// Beyond this many inodes, more is removed than made.
const INODES_WANTED: usize = 40;

pub fn caller(rng: &mut StdRng) -> Credentials {
    match rng.random_range(0..6) {
        0..=2 => Credentials::root(),
        3 => user(1, 10, &[20]),
        4 => user(2, 10, &[]),
        _ => user(3, 30, &[20, 40]),
    }
}

fn some_name(rng: &mut StdRng) -> Name {
    let names = ["a", "b", "c", "d", "a name of more than 22 bytes"];
    name(names.choose(rng).unwrap())
}

fn some_mode(rng: &mut StdRng) -> u16 {
    *[
        0o777, 0o755, 0o700, 0o070, 0o1777, 0o2775, 0o6755, 0o2744, 0o444, 0,
    ]
    .choose(rng)
    .unwrap()
}

fn any_inode(rng: &mut StdRng, model: &Model) -> InodeId {
    if rng.random_ratio(1, 100) {
        return InodeId(rng.next_u64() >> rng.random_range(0..63));
    }
    let all: Vec<_> = model.inodes.keys().copied().collect();
    *all.choose(rng).unwrap()
}

fn any_of(rng: &mut StdRng, model: &Model, kind: FileKind) -> InodeId {
    let fitting: Vec<_> = model
        .inodes
        .iter()
        .filter(|(_, node)| node.kind == kind)
        .map(|(&ino, _)| ino)
        .collect();
    match fitting.choose(rng) {
        Some(&ino) if !rng.random_ratio(1, 40) => ino,
        _ => any_inode(rng, model),
    }
}

/// A directory and a name in it, mostly one that exists.
fn existing_place(rng: &mut StdRng, model: &Model) -> (InodeId, Name) {
    let all: Vec<_> = model
        .inodes
        .iter()
        .flat_map(|(&dir, node)| node.entries.keys().map(move |name| (dir, name.clone())))
        .collect();
    match all.choose(rng) {
        Some(place) if !rng.random_ratio(1, 10) => place.clone(),
        _ => any_place(rng, model),
    }
}

fn any_place(rng: &mut StdRng, model: &Model) -> (InodeId, Name) {
    (any_of(rng, model, FileKind::Directory), some_name(rng))
}

fn some_time(rng: &mut StdRng) -> Option<SetTime> {
    match rng.random_range(0..4) {
        0 => Some(SetTime::Now),
        1 => Some(SetTime::To(Timestamp(rng.random_range(-1000..1000)))),
        _ => None,
    }
}

fn some_changes(rng: &mut StdRng) -> AttrChanges {
    let mut changes = AttrChanges {
        opened_for_writing: rng.random(),
        ..AttrChanges::default()
    };
    if rng.random_ratio(1, 2) {
        changes.size_bytes = Some(rng.random_range(0..1500));
    }
    if rng.random_ratio(1, 3) {
        changes.mode = Some(some_mode(rng));
    }
    if rng.random_ratio(1, 4) {
        changes.uid = Some(rng.random_range(0..4));
    }
    if rng.random_ratio(1, 4) {
        changes.gid = Some(rng.random_range(0..5) * 10);
    }
    if rng.random_ratio(1, 3) {
        changes.atime = some_time(rng);
        changes.mtime = some_time(rng);
    }
    changes
}

fn some_block(rng: &mut StdRng, model: &Model, session: SessionId) -> BlockId {
    let own: Vec<_> = model
        .blocks
        .iter()
        .filter(|(_, block)| block.writer == Some(session))
        .map(|(&id, _)| id)
        .collect();
    match own.choose(rng) {
        Some(&block) if !rng.random_ratio(1, 50) => block,
        _ => BlockId(rng.random_range(0..200)),
    }
}

fn some_extent(rng: &mut StdRng, model: &Model, session: SessionId) -> Extent {
    // On a coarse raster, so that pieces meet.
    let length_bytes = if rng.random_ratio(1, 100) {
        0
    } else {
        rng.random_range(1..6) * 50
    };
    extent(
        rng.random_range(0..20) * 50,
        length_bytes,
        some_block(rng, model, session),
        rng.random_range(0..4) * 4096 + rng.random_range(0..20) * 50,
    )
}

/// Pieces that follow each other in the file and in a block, as a writer makes them.
fn stream(rng: &mut StdRng, model: &Model, session: SessionId) -> Vec<Extent> {
    let first = some_extent(rng, model, session);
    let count = rng.random_range(1..4);
    (0..count)
        .map(|piece| {
            let skipped = piece * first.length_bytes;
            extent(
                first.file_offset + skipped,
                first.length_bytes,
                first.block,
                first.block_offset + skipped,
            )
        })
        .collect()
}

fn some_commit(rng: &mut StdRng, model: &Model, session: SessionId) -> Mutation {
    let file = |rng: &mut StdRng| FileCommit {
        ino: any_of(rng, model, FileKind::Regular),
        extents: match rng.random_range(0..10) {
            0 => Vec::new(),
            1..=5 => stream(rng, model, session),
            _ => (0..rng.random_range(1..4))
                .map(|_| some_extent(rng, model, session))
                .collect(),
        },
        append: rng.random_ratio(1, 3),
        mtime: rng
            .random_ratio(1, 4)
            .then(|| Timestamp(rng.random_range(-9..9))),
    };
    Mutation::Commit(mutation::Commit {
        files: (0..rng.random_range(1..4)).map(|_| file(rng)).collect(),
        durable: rng.random(),
    })
}

fn some_xattr(rng: &mut StdRng) -> (Vec<u8>, Vec<u8>) {
    let choices: [(&str, &[&str]); 12] = [
        ("user.a", &["", "1", "value"]),
        ("user.b", &["2"]),
        ("trusted.t", &["3"]),
        ("security.capability", &["4"]),
        (
            "user.harvestfs.replication",
            &["1", "2", "5", "10", "11", "x"],
        ),
        ("user.harvestfs.durability", &["strict", "space", "loose"]),
        ("user.harvestfs.quota_bytes", &["0", "700", "5000", "x"]),
        ("user.harvestfs.quota_files", &["0", "5", "20", "-1"]),
        ("user.harvestfs.trash_s", &["0", "60", "x"]),
        ("user.harvestfs.raise_replication", &["2", "4", "0"]),
        ("user.harvestfs.raise_after_s", &["1", "90", "0"]),
        ("user.harvestfs.lifetime_s", &["1", "90", "0"]),
    ];
    let (name, values) = choices.choose(rng).unwrap();
    (
        name.as_bytes().to_vec(),
        values.choose(rng).unwrap().as_bytes().to_vec(),
    )
}

fn some_range(rng: &mut StdRng) -> (u64, u64) {
    (rng.random_range(0..1500), rng.random_range(0..600))
}

pub fn operation(rng: &mut StdRng, model: &Model, session: SessionId) -> Mutation {
    let crowded = model.inodes.len() > INODES_WANTED;
    match rng.random_range(0..100) {
        0..=13 if !crowded => {
            let (parent, name) = any_place(rng, model);
            let kinds = [
                FileKind::Regular,
                FileKind::Regular,
                FileKind::Regular,
                FileKind::Fifo,
                FileKind::Socket,
                FileKind::CharDevice,
            ];
            Mutation::Create(mutation::Create {
                parent,
                name,
                kind: *kinds.choose(rng).unwrap(),
                mode: some_mode(rng),
                rdev: rng.random(),
            })
        }
        14..=19 if !crowded => {
            let (parent, name) = any_place(rng, model);
            let mode = some_mode(rng);
            Mutation::MakeDir(mutation::MakeDir { parent, name, mode })
        }
        20..=22 if !crowded => {
            let (parent, name) = any_place(rng, model);
            let target = b"some/where".to_vec();
            Mutation::Symlink(mutation::Symlink {
                parent,
                name,
                target,
            })
        }
        23..=26 => {
            let (parent, name) = any_place(rng, model);
            let ino = any_inode(rng, model);
            Mutation::Link(mutation::Link { ino, parent, name })
        }
        0..=31 => {
            let (parent, name) = existing_place(rng, model);
            Mutation::Unlink(mutation::Unlink { parent, name })
        }
        32..=33 => {
            let (parent, name) = existing_place(rng, model);
            Mutation::RemoveDir(mutation::RemoveDir { parent, name })
        }
        34 => {
            let (parent, name) = existing_place(rng, model);
            let retention_s = 7;
            Mutation::RemoveToTrash(mutation::RemoveToTrash {
                parent,
                name,
                retention_s,
            })
        }
        35..=46 => {
            let (parent, name) = existing_place(rng, model);
            let (new_parent, new_name) = if rng.random() {
                existing_place(rng, model)
            } else {
                any_place(rng, model)
            };
            let modes = [
                RenameMode::Replace,
                RenameMode::Replace,
                RenameMode::NoReplace,
                RenameMode::Exchange,
            ];
            Mutation::Rename(mutation::Rename {
                parent,
                name,
                new_parent,
                new_name,
                mode: *modes.choose(rng).unwrap(),
            })
        }
        47..=56 => Mutation::SetAttr(mutation::SetAttr {
            ino: any_inode(rng, model),
            changes: some_changes(rng),
        }),
        57..=62 => {
            let (name, value) = some_xattr(rng);
            let modes = [
                SetXattrMode::Any,
                SetXattrMode::Create,
                SetXattrMode::Replace,
            ];
            Mutation::SetXattr(mutation::SetXattr {
                ino: any_inode(rng, model),
                name,
                value,
                mode: *modes.choose(rng).unwrap(),
            })
        }
        // Or soon nothing could be added.
        63..=65 if !model.quotas().is_empty() => {
            let quotas = model.quotas();
            let (ino, name, _) = quotas.choose(rng).unwrap().clone();
            Mutation::RemoveXattr(mutation::RemoveXattr { ino, name })
        }
        63..=65 => Mutation::RemoveXattr(mutation::RemoveXattr {
            ino: any_inode(rng, model),
            name: some_xattr(rng).0,
        }),
        66..=70 => {
            let (offset, length_bytes) = some_range(rng);
            let modes = [
                FallocateMode::Allocate,
                FallocateMode::AllocateKeepSize,
                FallocateMode::PunchHole,
                FallocateMode::ZeroRange,
                FallocateMode::ZeroRangeKeepSize,
            ];
            Mutation::Fallocate(mutation::Fallocate {
                ino: any_of(rng, model, FileKind::Regular),
                offset,
                length_bytes,
                mode: *modes.choose(rng).unwrap(),
            })
        }
        71..=74 => {
            let (source_offset, length) = some_range(rng);
            Mutation::CloneRange(mutation::CloneRange {
                source: any_of(rng, model, FileKind::Regular),
                source_offset,
                destination: any_of(rng, model, FileKind::Regular),
                destination_offset: some_range(rng).0,
                length_bytes: if rng.random_ratio(1, 3) {
                    u64::MAX
                } else {
                    length
                },
            })
        }
        75..=77 => Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count: rng.random_range(1..4),
            rules: PlacementRules {
                replication: rng.random_range(1..5),
                ..RULES
            },
            exclude: Vec::new(),
        }),
        78..=81 => {
            let block = some_block(rng, model, session);
            let committed = model.blocks.get(&block).map_or(0, |block| block.committed);
            let choices = [committed, committed, committed + 50, 0, 10_000];
            Mutation::SealBlocks(mutation::SealBlocks {
                blocks: vec![SealedBlock {
                    block,
                    length_bytes: *choices.choose(rng).unwrap(),
                    replicas: Vec::new(),
                }],
            })
        }
        82..=83 if !crowded => {
            let ino = any_of(rng, model, FileKind::Directory);
            let name = some_name(rng);
            Mutation::CreateSnapshot(mutation::CreateSnapshot { ino, name })
        }
        // Or soon there were nothing else.
        82..=83 => {
            let all = model.snapshots();
            let (ino, name) = match all.choose(rng) {
                Some(snapshot) => snapshot.clone(),
                None => any_place(rng, model),
            };
            Mutation::RemoveSnapshot(mutation::RemoveSnapshot { ino, name })
        }
        _ => some_commit(rng, model, session),
    }
}
