//! Sparse blocks, and moving the data that is still used in them.

use super::*;
use harvestfs_protocol::limits::{INODES_PER_SEARCH_MAX, RELOCATIONS_PER_REQUEST_MAX};
use harvestfs_protocol::meta::{Relocation, SparsePiece};

const MIB: u64 = 1 << 20;

fn sparse(fixture: &Fixture, from: Option<InodeId>) -> (Vec<SparsePiece>, Option<InodeId>) {
    match fixture
        .query(&Query::FindSparse(query::FindSparse { from }))
        .unwrap()
    {
        MetaReply::SparsePieces { pieces, next } => (pieces, next),
        other => panic!("{other:?}"),
    }
}

/// `/a` and `/b` use a tenth each of a sealed block; the rest of it is dead.
fn with_sparse_block() -> (Fixture, InodeId, InodeId, BlockId) {
    let mut fixture = Fixture::new();
    let (a, b) = (fixture.file("/a"), fixture.file("/b"));
    let dead = fixture.file("/dead");
    let block = fixture.allocate(1)[0];
    fixture.commit(a, &[extent(0, MIB, block, 0)]).unwrap();
    fixture
        .commit(b, &[extent(5 * MIB, MIB, block, MIB)])
        .unwrap();
    fixture
        .commit(dead, &[extent(0, 8 * MIB, block, 2 * MIB)])
        .unwrap();
    fixture.seal(block, 10 * MIB).unwrap();
    assert_eq!(sparse(&fixture, None), (vec![], None));
    fixture.unlink("/dead").unwrap();
    (fixture, a, b, block)
}

fn scratch(fixture: &mut Fixture) -> InodeId {
    fixture
        .change(Mutation::CreateScratch(mutation::CreateScratch {
            rules: RULES,
        }))
        .unwrap()
        .ino
}

fn relocate(fixture: &mut Fixture, scratch: InodeId, pieces: Vec<Relocation>) -> u32 {
    match fixture
        .run(Mutation::Relocate(mutation::Relocate { scratch, pieces }))
        .unwrap()
    {
        Outcome::Meta(MetaReply::Relocated(moved)) => moved,
        other => panic!("{other:?}"),
    }
}

/// Copies all pieces one after the other into a scratch file with blocks of 1.5 MiB.
fn copy(fixture: &mut Fixture, pieces: &[SparsePiece]) -> (InodeId, Vec<Relocation>) {
    const BLOCK: u64 = 3 * MIB / 2;
    let scratch = scratch(fixture);
    let mut relocations = Vec::new();
    let mut end = 0;
    for piece in pieces {
        relocations.push(Relocation {
            ino: piece.ino,
            extent: piece.extent,
            scratch_offset: end,
        });
        end += piece.extent.length_bytes;
    }
    for at in (0..end).step_by(BLOCK as usize) {
        let length = BLOCK.min(end - at);
        let block = fixture.allocate(1)[0];
        fixture
            .commit(scratch, &[extent(at, length, block, 0)])
            .unwrap();
        fixture.seal(block, length).unwrap();
    }
    (scratch, relocations)
}

#[test]
fn what_is_left_moves_and_the_block_is_freed() {
    let (mut fixture, a, b, block) = with_sparse_block();
    let (pieces, next) = sparse(&fixture, None);
    let found: Vec<_> = pieces
        .iter()
        .map(|piece| (piece.ino, piece.extent))
        .collect();
    assert_eq!(
        found,
        [
            (a, extent(0, MIB, block, 0)),
            (b, extent(5 * MIB, MIB, block, MIB))
        ]
    );
    assert!(pieces.iter().all(|piece| piece.rules == RULES));
    assert_eq!(next, None);
    let before = (fixture.attr("/a"), fixture.attr("/b"));
    let (scratch, relocations) = copy(&mut fixture, &pieces);
    assert_eq!(relocate(&mut fixture, scratch, relocations), 2);
    assert_eq!(fixture.effects.inodes, [a, b]);
    assert_eq!(
        changes_of(&fixture.effects, block),
        [BlockChange::Freed { block }]
    );
    // The attributes do not show it.
    assert_eq!((fixture.attr("/a"), fixture.attr("/b")), before);
    let first = fixture.extents(a)[0].block;
    assert_eq!(fixture.extents(a), [extent(0, MIB, first, 0)]);
    // Its copy crosses from one block into the next.
    let second = fixture.extents(b)[1].block;
    assert_eq!(
        fixture.extents(b),
        [
            extent(5 * MIB, MIB / 2, first, MIB),
            extent(5 * MIB + MIB / 2, MIB / 2, second, 0)
        ]
    );
    // The files keep the copies when the scratch file goes.
    let command = Command::ReleaseOrphans {
        inodes: vec![scratch],
        now: Timestamp(fixture.now),
    };
    fixture.apply(&command).unwrap();
    assert_eq!(fixture.attr_of(a), before.0);
    assert_eq!(sparse(&fixture, None), (vec![], None));
    let copy = Namespace::read_snapshot(&mut &fixture.snapshot()[..]).unwrap();
    assert_eq!(snapshot(&copy), fixture.snapshot());
}

#[test]
fn what_changed_meanwhile_stays_as_it_is() {
    let (mut fixture, a, b, block) = with_sparse_block();
    let (pieces, _) = sparse(&fixture, None);
    let (scratch, mut relocations) = copy(&mut fixture, &pieces);
    // A part of one is overwritten; the other moves to another place in its file.
    let new = fixture.allocate(1)[0];
    fixture.commit(a, &[extent(10, 10, new, 0)]).unwrap();
    let elsewhere = fixture.file("/c");
    fixture
        .change(Mutation::CloneRange(mutation::CloneRange {
            source: b,
            source_offset: 5 * MIB,
            destination: elsewhere,
            destination_offset: 0,
            length_bytes: MIB,
        }))
        .unwrap();
    fixture.truncate("/b", 0).unwrap();
    let files = [a, b, elsewhere].map(|ino| fixture.extents(ino));
    // A file that was removed, an incomplete copy, and the scratch file itself.
    fixture.file("/gone");
    let gone = fixture.ino("/gone");
    fixture.unlink("/gone").unwrap();
    relocations.push(Relocation {
        ino: gone,
        ..relocations[0]
    });
    relocations.push(Relocation {
        ino: elsewhere,
        extent: extent(0, MIB, block, MIB),
        scratch_offset: 3 * MIB / 2,
    });
    relocations.push(Relocation {
        ino: scratch,
        extent: fixture.extents(scratch)[0],
        scratch_offset: 0,
    });
    assert_eq!(relocate(&mut fixture, scratch, relocations), 0);
    assert_eq!([a, b, elsewhere].map(|ino| fixture.extents(ino)), files);
    // What is still there can be moved from a part of a longer piece.
    let tail = Relocation {
        ino: a,
        extent: extent(MIB / 2, MIB / 2, block, MIB / 2),
        scratch_offset: MIB / 2,
    };
    assert_eq!(relocate(&mut fixture, scratch, vec![tail]), 1);
    assert_eq!(fixture.extents(a).len(), 4);
}

#[test]
fn only_root_and_only_within_limits() {
    let (mut fixture, a, _, block) = with_sparse_block();
    let file = scratch(&mut fixture);
    let one = Relocation {
        ino: a,
        extent: extent(0, MIB, block, 0),
        scratch_offset: 0,
    };
    let pieces = vec![one; RELOCATIONS_PER_REQUEST_MAX + 1];
    let too_many = fixture.run(Mutation::Relocate(mutation::Relocate {
        scratch: file,
        pieces,
    }));
    assert!(matches!(too_many, Err(FsError::InvalidArgument(_))));
    let not_scratch = fixture.run(Mutation::Relocate(mutation::Relocate {
        scratch: a,
        pieces: vec![one],
    }));
    assert!(matches!(not_scratch, Err(FsError::InvalidArgument(_))));
    fixture.become_user(1000);
    for op in [
        Mutation::CreateScratch(mutation::CreateScratch { rules: RULES }),
        Mutation::Relocate(mutation::Relocate {
            scratch: file,
            pieces: vec![one],
        }),
    ] {
        assert_eq!(fixture.run(op), Err(FsError::NotPermitted));
    }
    let op = Query::FindSparse(query::FindSparse { from: None });
    assert_eq!(fixture.query(&op), Err(FsError::NotPermitted));
}

#[test]
fn a_search_goes_on_where_it_stopped() {
    let (mut fixture, a, b, _) = with_sparse_block();
    for number in 0..INODES_PER_SEARCH_MAX {
        let command = fixture.command(Mutation::Create(mutation::Create {
            parent: InodeId::ROOT,
            name: name(&format!("f{number}")),
            kind: FileKind::Regular,
            mode: FILE,
            rdev: 0,
        }));
        // Without checking all invariants after each.
        fixture.namespace.apply(&command).unwrap();
        fixture.sequence += 1;
    }
    let (first, next) = sparse(&fixture, None);
    assert_eq!(first.len(), 2);
    let (rest, end) = sparse(&fixture, next);
    assert_eq!((rest, end), (vec![], None));
    let (from_b, _) = sparse(&fixture, Some(b));
    assert_eq!(from_b.len(), 1);
    assert!(next > Some(a));
}
