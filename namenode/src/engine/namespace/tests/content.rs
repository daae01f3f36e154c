//! Extents and blocks, and the use of blocks by files.

use super::*;
use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, CHUNK_BYTES};
use harvestfs_protocol::meta::{FallocateMode, FileCommitted};

const CHUNK: u64 = CHUNK_BYTES as u64;

/// A file `/f` and an open block.
fn with_block() -> (Fixture, InodeId, BlockId) {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    let block = fixture.allocate(1)[0];
    (fixture, ino, block)
}

fn live_bytes(fixture: &Fixture, block: BlockId) -> u64 {
    fixture.namespace.block(block).unwrap().live_bytes
}

fn fallocate(
    fixture: &mut Fixture,
    ino: InodeId,
    offset: u64,
    length_bytes: u64,
    mode: FallocateMode,
) -> Attr {
    fixture
        .change(Mutation::Fallocate(mutation::Fallocate {
            ino,
            offset,
            length_bytes,
            mode,
        }))
        .unwrap()
}

fn clone(
    fixture: &mut Fixture,
    (source, source_offset): (InodeId, u64),
    (destination, destination_offset): (InodeId, u64),
    length_bytes: u64,
) -> Result<Attr, FsError> {
    fixture.change(Mutation::CloneRange(mutation::CloneRange {
        source,
        source_offset,
        destination,
        destination_offset,
        length_bytes,
    }))
}

#[test]
fn a_commit_makes_data_visible() {
    let (mut fixture, ino, block) = with_block();
    let version = fixture.attr_of(ino).content_version;
    let attr = fixture.commit(ino, &[extent(100, 50, block, 0)]).unwrap();
    let now = Timestamp(fixture.now);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (150, 50));
    assert_eq!((attr.mtime, attr.ctime), (now, now));
    assert!(attr.content_version > version);
    assert_eq!(fixture.extents(ino), [extent(100, 50, block, 0)]);
    assert_eq!(fixture.effects.inodes, [ino]);
    let grew = BlockChange::Grew {
        block,
        committed_bytes: 50,
    };
    assert_eq!(fixture.effects.blocks, [grew]);
    // What lies below the committed length needs no more.
    fixture.commit(ino, &[extent(0, 10, block, 20)]).unwrap();
    assert_eq!(fixture.effects.blocks, []);
    assert_eq!(live_bytes(&fixture, block), 60);
}

#[test]
fn later_pieces_hide_earlier_ones() {
    let (mut fixture, ino, block) = with_block();
    let pieces = [extent(0, 100, block, 0), extent(40, 20, block, 4096)];
    fixture.commit(ino, &pieces).unwrap();
    let expected = [
        extent(0, 40, block, 0),
        extent(40, 20, block, 4096),
        extent(60, 40, block, 60),
    ];
    assert_eq!(fixture.extents(ino), expected);
    assert_eq!(live_bytes(&fixture, block), 100);
    // One that covers all of them, and neighbours.
    fixture.commit(ino, &[extent(0, 200, block, 8192)]).unwrap();
    assert_eq!(fixture.extents(ino), [extent(0, 200, block, 8192)]);
    assert_eq!(live_bytes(&fixture, block), 200);
}

#[test]
fn pieces_that_continue_each_other_become_one() {
    let (mut fixture, ino, block) = with_block();
    let order = [0u64, 3, 1, 2, 4];
    for chunk in order {
        let offset = chunk * CHUNK;
        fixture
            .commit(ino, &[extent(offset, CHUNK, block, offset)])
            .unwrap();
    }
    assert_eq!(fixture.extents(ino), [extent(0, 5 * CHUNK, block, 0)]);
    // Contiguous in the file only.
    fixture
        .commit(ino, &[extent(5 * CHUNK, CHUNK, block, 9 * CHUNK)])
        .unwrap();
    assert_eq!(fixture.extents(ino).len(), 2);
}

#[test]
fn appends_land_at_the_end() {
    let (mut fixture, ino, block) = with_block();
    let append = |length, offset| FileCommit {
        ino,
        extents: vec![extent(0, length, block, offset)],
        append: true,
        mtime: Some(Timestamp(-3)),
    };
    let op = Mutation::Commit(mutation::Commit {
        files: vec![append(10, 0), append(5, CHUNK), append(7, 2 * CHUNK)],
        durable: true,
    });
    let Ok(Outcome::Meta(MetaReply::Committed(files))) = fixture.run(op) else {
        panic!();
    };
    let files: Vec<FileCommitted> = files.into_iter().map(Result::unwrap).collect();
    let landed: Vec<_> = files.iter().map(|file| file.append_offset).collect();
    assert_eq!(landed, [0, 10, 15]);
    let attr = &files[2].attr;
    assert_eq!(attr.size_bytes, 22);
    assert_eq!(attr.mtime, Timestamp(-3));
    assert_eq!(attr.ctime, Timestamp(fixture.now));
    assert_eq!(*attr, fixture.attr_of(ino));
}

#[test]
fn one_bad_file_of_a_commit_does_not_spoil_the_others() {
    let (mut fixture, ino, block) = with_block();
    let directory = fixture.dir("/d");
    let good = extent(0, 10, block, 0);
    let file = |ino, extents: &[Extent]| FileCommit {
        ino,
        extents: extents.to_vec(),
        append: false,
        mtime: None,
    };
    let op = Mutation::Commit(mutation::Commit {
        files: vec![
            file(directory, &[good]),
            file(InodeId(77), &[good]),
            // All of its extents, or none.
            file(ino, &[good, extent(0, 0, block, 0)]),
            file(ino, &[extent(5, 1, block, 0)]),
        ],
        durable: true,
    });
    let Ok(Outcome::Meta(MetaReply::Committed(files))) = fixture.run(op) else {
        panic!();
    };
    assert_eq!(files[0], Err(FsError::IsADirectory));
    assert_eq!(files[1], Err(FsError::Stale));
    assert!(matches!(files[2], Err(FsError::InvalidArgument(_))));
    assert_eq!(files[3].as_ref().unwrap().attr.size_bytes, 6);
    assert_eq!(fixture.extents(ino), [extent(5, 1, block, 0)]);
}

#[test]
fn a_commit_names_only_what_its_session_wrote() {
    let (mut fixture, ino, block) = with_block();
    let other = fixture.open_session();
    let mine = std::mem::replace(&mut fixture.session, other);
    let foreign = fixture.allocate(1)[0];
    fixture.session = mine;
    fixture.sequence += 1;
    fixture.commit(ino, &[extent(0, 100, block, 0)]).unwrap();
    let bad = [
        extent(0, 10, foreign, 0),
        extent(0, 10, BlockId(99), 0),
        extent(0, 0, block, 0),
        extent(0, 2, block, BLOCK_BYTES_MAX - 1),
        extent(0, BLOCK_BYTES_MAX + 1, block, 0),
        extent(0, 1, block, u64::MAX),
        extent(0, u64::MAX, block, 1),
    ];
    for extent in bad {
        let result = fixture.commit(ino, &[extent]);
        assert!(
            matches!(
                result,
                Err(FsError::InvalidArgument(_) | FsError::FileTooLarge)
            ),
            "{extent:?}"
        );
    }
    // Sealed: nothing beyond the end.
    fixture.seal(block, 200).unwrap();
    assert!(fixture.commit(ino, &[extent(0, 10, block, 190)]).is_ok());
    assert!(fixture.commit(ino, &[extent(0, 10, block, 191)]).is_err());
    // A session that has ended commits nothing.
    fixture.close_session(mine);
    assert_eq!(
        fixture.commit(ino, &[extent(0, 10, block, 0)]),
        Err(FsError::SessionExpired)
    );
}

#[test]
fn truncation_cuts_and_extends() {
    let (mut fixture, ino, block) = with_block();
    let version = fixture
        .commit(
            ino,
            &[extent(0, 100, block, 0), extent(200, 100, block, 100)],
        )
        .unwrap()
        .content_version;
    let attr = fixture.truncate("/f", 250).unwrap();
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (250, 150));
    assert!(attr.content_version > version);
    let attr = fixture.truncate("/f", 150).unwrap();
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (150, 100));
    // What was cut off does not come back.
    let attr = fixture.truncate("/f", 300).unwrap();
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (300, 100));
    assert_eq!(fixture.extents(ino), [extent(0, 100, block, 0)]);
    let same = fixture.truncate("/f", 300).unwrap();
    assert_eq!(same.content_version, attr.content_version);
    assert_eq!(same.mtime, Timestamp(fixture.now));
    assert_eq!(fixture.truncate("/f", 0).unwrap().allocated_bytes, 0);
    assert_eq!(live_bytes(&fixture, block), 0);
}

#[test]
fn ranges_are_punched_and_zeroed() {
    let (mut fixture, ino, block) = with_block();
    fixture.commit(ino, &[extent(0, 100, block, 0)]).unwrap();
    let attr = fallocate(&mut fixture, ino, 10, 20, FallocateMode::PunchHole);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (100, 80));
    assert_eq!(
        fixture.extents(ino),
        [extent(0, 10, block, 0), extent(30, 70, block, 30)]
    );
    let attr = fallocate(&mut fixture, ino, 90, 500, FallocateMode::PunchHole);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (100, 70));
    let mode = FallocateMode::ZeroRangeKeepSize;
    let attr = fallocate(&mut fixture, ino, 80, 500, mode);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (100, 60));
    let attr = fallocate(&mut fixture, ino, 70, 80, FallocateMode::ZeroRange);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (150, 50));
    // Allocation leaves the content.
    let before = attr.content_version;
    let mode = FallocateMode::AllocateKeepSize;
    let attr = fallocate(&mut fixture, ino, 0, 1000, mode);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (150, 50));
    assert_eq!(attr.content_version, before);
    assert_eq!(attr.ctime, Timestamp(fixture.now));
    let attr = fallocate(&mut fixture, ino, 0, 1000, FallocateMode::Allocate);
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (1000, 50));
    assert!(attr.content_version > before);
    let empty = Mutation::Fallocate(mutation::Fallocate {
        ino,
        offset: 0,
        length_bytes: 0,
        mode,
    });
    assert!(matches!(
        fixture.change(empty),
        Err(FsError::InvalidArgument(_))
    ));
}

#[test]
fn clones_share_blocks() {
    let (mut fixture, ino, block) = with_block();
    let copy = fixture.file("/copy");
    fixture
        .commit(
            ino,
            &[extent(0, 100, block, 0), extent(200, 100, block, 100)],
        )
        .unwrap();
    let attr = clone(&mut fixture, (ino, 0), (copy, 0), u64::MAX).unwrap();
    assert_eq!((attr.size_bytes, attr.allocated_bytes), (300, 200));
    assert_eq!(fixture.extents(copy), fixture.extents(ino));
    assert_eq!(live_bytes(&fixture, block), 400);

    // A hole hides what was there; what lies beyond the source's end is cut off.
    let attr = clone(&mut fixture, (ino, 150), (copy, 250), 1000).unwrap();
    assert_eq!(attr.size_bytes, 400);
    assert_eq!(
        fixture.extents(copy),
        [
            extent(0, 100, block, 0),
            extent(200, 50, block, 100),
            extent(300, 100, block, 100),
        ]
    );
    // Within one file.
    assert!(clone(&mut fixture, (copy, 0), (copy, 99), 100).is_err());
    clone(&mut fixture, (copy, 0), (copy, 100), 100).unwrap();
    // It continues in the block what follows it in the file, so that they become one.
    assert_eq!(fixture.extents(copy)[1], extent(100, 150, block, 0));
    // Beyond the end there is nothing to clone.
    let before = fixture.attr_of(copy);
    assert_eq!(clone(&mut fixture, (ino, 300), (copy, 0), 10), Ok(before));

    // The block lives as long as one of them.
    fixture.seal(block, 200).unwrap();
    fixture.unlink("/f").unwrap();
    assert_eq!(fixture.effects.blocks, []);
    fixture.unlink("/copy").unwrap();
    assert_eq!(fixture.effects.blocks, [BlockChange::Freed { block }]);
}

#[test]
fn a_block_is_freed_when_no_file_needs_it() {
    let (mut fixture, ino, block) = with_block();
    let freed = [BlockChange::Freed { block }];
    let sealed = |length_bytes| BlockChange::Sealed {
        block,
        length_bytes,
    };
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    // Its writer may still commit more of it.
    fixture.truncate("/f", 0).unwrap();
    assert_eq!(fixture.effects.blocks, []);
    fixture.seal(block, 10).unwrap();
    assert_eq!(
        fixture.effects.blocks,
        [sealed(10), BlockChange::Freed { block }]
    );
    assert_eq!(fixture.namespace.block(block), None);

    // Sealed first, then out of use.
    let (mut fixture, ino, _) = with_block();
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    fixture.seal(block, 4096).unwrap();
    assert_eq!(fixture.effects.blocks, [sealed(4096)]);
    fixture.unlink("/f").unwrap();
    assert_eq!(fixture.effects.blocks, freed);

    // Never written.
    let (mut fixture, ..) = with_block();
    fixture.seal(block, 0).unwrap();
    assert_eq!(fixture.effects.blocks, freed);

    // Sealed, and committed afterwards.
    let (mut fixture, ino, _) = with_block();
    fixture.seal(block, 10).unwrap();
    assert_eq!(fixture.effects.blocks, [sealed(10)]);
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    assert_eq!(live_bytes(&fixture, block), 10);

    // Sealed, and then given up.
    let (mut fixture, ..) = with_block();
    fixture.seal(block, 10).unwrap();
    fixture.seal(block, 0).unwrap();
    assert_eq!(fixture.effects.blocks, freed);
}

#[test]
fn what_was_written_but_not_committed_keeps_a_block() {
    // Two small files share the block; the first is removed before the second is committed.
    let (mut fixture, ino, block) = with_block();
    let second = fixture.file("/second");
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    fixture.seal(block, CHUNK + 20).unwrap();
    fixture.unlink("/f").unwrap();
    assert_eq!(fixture.effects.blocks, []);
    fixture
        .commit(second, &[extent(0, 20, block, CHUNK)])
        .unwrap();
    fixture.unlink("/second").unwrap();
    assert_eq!(fixture.effects.blocks, [BlockChange::Freed { block }]);

    // The same, but the second one is never committed: its writer reports that.
    let (mut fixture, ino, _) = with_block();
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    fixture.seal(block, CHUNK + 20).unwrap();
    fixture.unlink("/f").unwrap();
    fixture.seal(block, 0).unwrap();
    assert_eq!(fixture.effects.blocks, [BlockChange::Freed { block }]);

    // It may also report that while the block is in use.
    let (mut fixture, ino, _) = with_block();
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    fixture.seal(block, CHUNK + 20).unwrap();
    fixture.seal(block, 0).unwrap();
    let view = fixture.namespace.block(block).unwrap();
    assert_eq!((view.writer, view.sealed_bytes), (None, Some(CHUNK + 20)));
    assert!(fixture.commit(ino, &[extent(0, 10, block, 0)]).is_err());
    fixture.unlink("/f").unwrap();
    assert_eq!(fixture.effects.blocks, [BlockChange::Freed { block }]);
}

#[test]
fn sealing_minds_what_was_committed() {
    let (mut fixture, ino, block) = with_block();
    fixture.commit(ino, &[extent(0, 10, block, 90)]).unwrap();
    for length_bytes in [0, 99, BLOCK_BYTES_MAX + 1, u64::MAX] {
        assert!(fixture.seal(block, length_bytes).is_err(), "{length_bytes}");
    }
    fixture.seal(block, 100).unwrap();
    fixture.seal(block, 100).unwrap();
    assert!(fixture.seal(block, 101).is_err());
    assert!(fixture.seal(BlockId(50), 1).is_err());
    let other = fixture.allocate(1)[0];
    let twice = SealedBlock {
        block: other,
        length_bytes: 1,
        replicas: Vec::new(),
    };
    let op = Mutation::SealBlocks(mutation::SealBlocks {
        blocks: vec![twice.clone(), twice],
    });
    assert!(fixture.run(op).is_err());
}

#[test]
fn the_end_of_a_session_ends_its_blocks() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    let blocks = fixture.allocate(5);
    let [used, untouched, sealed, unused, waiting] = blocks[..] else {
        panic!();
    };
    fixture
        .commit(
            ino,
            &[
                extent(0, 10, used, 5),
                extent(20, 10, sealed, 0),
                extent(40, 10, unused, 0),
            ],
        )
        .unwrap();
    fixture.truncate("/f", 40).unwrap();
    fixture.seal(sealed, 4096).unwrap();
    fixture.seal(waiting, 4096).unwrap();
    fixture.close_session(fixture.session);
    assert_eq!(
        changes_of(&fixture.effects, used),
        [BlockChange::Sealed {
            block: used,
            length_bytes: 15
        }]
    );
    assert_eq!(changes_of(&fixture.effects, sealed), []);
    for block in [untouched, unused, waiting] {
        assert_eq!(
            changes_of(&fixture.effects, block),
            [BlockChange::Freed { block }]
        );
    }
    assert_eq!(fixture.namespace.blocks().count(), 2);
    let view = fixture.namespace.block(used).unwrap();
    assert_eq!((view.writer, view.sealed()), (None, true));
    // No block is ever allocated twice.
    fixture.session = fixture.open_session();
    fixture.sequence = 0;
    assert!(fixture.allocate(1)[0] > waiting);
}

#[test]
fn extents_are_answered_from_an_offset() {
    let (mut fixture, ino, block) = with_block();
    let pieces = [
        extent(0, 10, block, 0),
        extent(20, 10, block, 4096),
        extent(40, 10, block, 8192),
    ];
    for count in 1..=3 {
        fixture.commit(ino, &pieces[..count]).unwrap();
        for (from_offset, first) in [(0, 0), (9, 0), (10, 1), (29, 1), (30, 2), (49, 2), (50, 3)] {
            let reply = fixture.query(&Query::GetExtents(query::GetExtents { ino, from_offset }));
            let extents = pieces[..count].get(first..).unwrap_or_default().to_vec();
            assert_eq!(reply, Ok(MetaReply::Extents { extents, end: true }));
        }
    }
}
