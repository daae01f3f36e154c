//! Requests that exceed a limit are refused, each with a specific error.

use super::*;
use harvestfs_protocol::limits::{
    BLOCKS_PER_REQUEST_MAX, DIRECTORY_DEPTH_MAX, EXTENTS_PER_COMMIT_MAX, FILE_BYTES_MAX,
    FILES_PER_COMMIT_MAX, GROUPS_MAX, LINKS_MAX, PIECES_OF_CLONES_MAX, PIECES_PER_CLONE_MAX,
    SYMLINK_BYTES_MAX,
};
use harvestfs_protocol::meta::FallocateMode;

/// Runs a mutation without checking all invariants after it, since it takes many to reach a limit.
fn run_unchecked(fixture: &mut Fixture, op: Mutation) -> Result<Attr, FsError> {
    fixture.now += 1;
    fixture.sequence += 1;
    match fixture.namespace.apply(&fixture.command(op))?.reply {
        Outcome::Meta(MetaReply::Attr(attr)) => Ok(attr),
        other => panic!("{other:?}"),
    }
}

#[test]
fn directories_have_a_greatest_depth() {
    let mut fixture = Fixture::new();
    let mut parent = InodeId::ROOT;
    let mut middle = parent;
    for depth in 0..DIRECTORY_DEPTH_MAX {
        let op = Mutation::MakeDir(mutation::MakeDir {
            parent,
            name: name("d"),
            mode: 0o755,
        });
        parent = run_unchecked(&mut fixture, op).unwrap().ino;
        if depth == DIRECTORY_DEPTH_MAX / 2 {
            middle = parent;
        }
    }
    let op = Mutation::MakeDir(mutation::MakeDir {
        parent,
        name: name("d"),
        mode: 0o755,
    });
    assert_eq!(fixture.run(op), Err(FsError::TooDeep));
    // A file may be there, a directory may not be moved there.
    let op = Mutation::Create(mutation::Create {
        parent,
        name: name("f"),
        kind: FileKind::Regular,
        mode: 0o644,
        rdev: 0,
    });
    fixture.run(op).unwrap();
    fixture.dir("/other");
    let into = |new_parent| {
        Mutation::Rename(mutation::Rename {
            parent: InodeId::ROOT,
            name: name("other"),
            new_parent,
            new_name: name("other"),
            mode: RenameMode::Replace,
        })
    };
    assert_eq!(fixture.run(into(parent)), Err(FsError::TooDeep));
    fixture.run(into(middle)).unwrap();
}

#[test]
fn files_have_a_greatest_number_of_links() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    for link in 1..LINKS_MAX {
        let op = Mutation::Link(mutation::Link {
            ino,
            parent: InodeId::ROOT,
            name: name(&link.to_string()),
        });
        run_unchecked(&mut fixture, op).unwrap();
    }
    assert_eq!(fixture.link("/f", "/more"), Err(FsError::TooManyLinks));
    fixture.unlink("/1").unwrap();
    assert_eq!(fixture.link("/f", "/more").unwrap().nlink, LINKS_MAX);
}

#[test]
fn files_have_a_greatest_size() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    let too_large = Err(FsError::FileTooLarge);
    assert!(fixture.truncate("/f", FILE_BYTES_MAX).is_ok());
    assert_eq!(fixture.truncate("/f", FILE_BYTES_MAX + 1), too_large);
    for (offset, length_bytes) in [(FILE_BYTES_MAX, 1), (1, FILE_BYTES_MAX), (u64::MAX, 1)] {
        let op = Mutation::Fallocate(mutation::Fallocate {
            ino,
            offset,
            length_bytes,
            mode: FallocateMode::Allocate,
        });
        assert_eq!(fixture.change(op), too_large);
    }
    let block = fixture.allocate(1)[0];
    for offset in [FILE_BYTES_MAX, FILE_BYTES_MAX - 4, u64::MAX, u64::MAX - 4] {
        let result = fixture.commit(ino, &[extent(offset, 5, block, 0)]);
        assert_eq!(result, too_large, "{offset}");
    }
    let end = fixture.commit(ino, &[extent(FILE_BYTES_MAX - 5, 5, block, 0)]);
    assert_eq!(end.unwrap().size_bytes, FILE_BYTES_MAX);
    let append = Mutation::Commit(mutation::Commit {
        files: vec![FileCommit {
            ino,
            extents: vec![extent(0, 5, block, 0)],
            append: true,
            mtime: None,
        }],
        durable: true,
    });
    let reply = MetaReply::Committed(vec![Err(FsError::FileTooLarge)]);
    assert_eq!(fixture.run(append), Ok(Outcome::Meta(reply)));
    let clone = Mutation::CloneRange(mutation::CloneRange {
        source: ino,
        source_offset: 0,
        destination: ino,
        destination_offset: FILE_BYTES_MAX,
        length_bytes: 1,
    });
    assert_eq!(fixture.change(clone), too_large);
}

#[test]
fn clones_have_a_greatest_number_of_pieces() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    let copy = fixture.file("/copy");
    let block = fixture.allocate(1)[0];
    fixture.commit(ino, &[extent(0, 1, block, 0)]).unwrap();
    let clone = |destination, destination_offset, length_bytes| mutation::CloneRange {
        source: ino,
        source_offset: 0,
        destination,
        destination_offset,
        length_bytes,
    };
    // The same byte again and again, so that no piece continues another one.
    let max = PIECES_PER_CLONE_MAX as u64;
    let mut pieces = 1;
    while pieces <= max {
        let doubled = clone(ino, pieces, pieces);
        fixture.namespace.check_clone(&doubled).unwrap();
        run_unchecked(&mut fixture, Mutation::CloneRange(doubled)).unwrap();
        pieces *= 2;
    }
    let refused = |op: mutation::CloneRange| {
        let checked = fixture.namespace.check_clone(&op);
        matches!(checked, Err(FsError::NotSupported(_)))
    };
    assert!(refused(clone(copy, 0, u64::MAX)) && refused(clone(copy, 7, max + 1)));
    assert!(!refused(clone(copy, 7, max)));
    // A clone that is refused anyway gets that error.
    assert!(!refused(clone(ino, 1, u64::MAX)) && !refused(clone(copy, u64::MAX, max + 1)));
    // Records of earlier releases are carried out.
    let mut there = 0;
    while there < PIECES_OF_CLONES_MAX as u64 {
        let op = Mutation::CloneRange(clone(copy, there, u64::MAX));
        run_unchecked(&mut fixture, op).unwrap();
        there += pieces;
    }
    let op = clone(copy, there, 1);
    let full = fixture.namespace.check_clone(&op);
    assert!(matches!(full, Err(FsError::NotSupported(_))), "{full:?}");
    fixture
        .namespace
        .check_clone(&clone(ino, pieces, 1))
        .unwrap();
}

#[test]
fn requests_have_a_greatest_size() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    let block = fixture.allocate(1)[0];
    assert_eq!(
        fixture.symlink("/s", &vec![b'x'; SYMLINK_BYTES_MAX + 1]),
        Err(FsError::NameTooLong)
    );
    assert!(
        fixture
            .symlink("/s", &vec![b'x'; SYMLINK_BYTES_MAX])
            .is_ok()
    );

    let one = extent(0, 1, block, 0);
    let file = |extents: usize| FileCommit {
        ino,
        extents: vec![one; extents],
        append: false,
        mtime: None,
    };
    let too_many = [
        vec![file(EXTENTS_PER_COMMIT_MAX + 1)],
        vec![file(1); FILES_PER_COMMIT_MAX + 1],
    ];
    for files in too_many {
        let op = Mutation::Commit(mutation::Commit {
            files,
            durable: false,
        });
        assert!(matches!(fixture.run(op), Err(FsError::InvalidArgument(_))));
    }
    for count in [0, BLOCKS_PER_REQUEST_MAX as u32 + 1, u32::MAX] {
        let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count,
            rules: RULES,
            exclude: Vec::new(),
        });
        assert!(matches!(fixture.run(op), Err(FsError::InvalidArgument(_))));
    }
    for replication in [0, 11] {
        let op = Mutation::AllocateBlocks(mutation::AllocateBlocks {
            count: 1,
            rules: PlacementRules {
                replication,
                ..RULES
            },
            exclude: Vec::new(),
        });
        assert!(matches!(fixture.run(op), Err(FsError::InvalidArgument(_))));
    }
    fixture.caller.groups = vec![1; GROUPS_MAX + 1];
    assert!(matches!(
        fixture.make_dir("/d", 0o755),
        Err(FsError::InvalidArgument(_))
    ));
}
