//! Snapshots of directories.

use harvestfs_protocol::limits::SNAPSHOT_ITEMS_MAX;
use harvestfs_protocol::meta::FallocateMode;

use super::xattrs::ANY;
use super::*;

impl Fixture {
    fn create_snapshot(&mut self, path: &str, called: &str) -> Result<Attr, FsError> {
        let ino = self.ino(path);
        let name = name(called);
        self.change(Mutation::CreateSnapshot(mutation::CreateSnapshot {
            ino,
            name,
        }))
    }

    fn remove_snapshot(&mut self, path: &str, called: &str) -> Result<(), FsError> {
        let ino = self.ino(path);
        let name = name(called);
        self.done(Mutation::RemoveSnapshot(mutation::RemoveSnapshot {
            ino,
            name,
        }))
    }

    /// Permanently removes the entries of the trash whose retention is over.
    fn empty_trash(&mut self) {
        let now = Timestamp(self.now);
        let inodes = self.namespace.expired_trash(now).collect();
        self.apply(&Command::PurgeTrash { inodes, now }).unwrap();
        let inodes = self.namespace.orphans().collect();
        self.apply(&Command::ReleaseOrphans { inodes, now })
            .unwrap();
    }
}

/// `/d` with the file `f` in one block, and `sub/g` with two names in another.
fn with_tree() -> (Fixture, [BlockId; 2]) {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.dir("/d/sub");
    let blocks = fixture.allocate(2);
    let f = fixture.file("/d/f");
    fixture.commit(f, &[extent(0, 100, blocks[0], 0)]).unwrap();
    let g = fixture.file("/d/sub/g");
    fixture.commit(g, &[extent(0, 30, blocks[1], 0)]).unwrap();
    fixture.link("/d/sub/g", "/d/g").unwrap();
    for block in &blocks {
        fixture.seal(*block, 4096).unwrap();
        fixture.seal(*block, 0).unwrap();
    }
    (fixture, [blocks[0], blocks[1]])
}

#[test]
fn a_snapshot_stays_as_the_directory_was() {
    let (mut fixture, [block, _]) = with_tree();
    fixture
        .set_xattr("/d/sub", "user.note", b"then", ANY)
        .unwrap();
    let before = fixture.attr("/d/f");
    let top = fixture.create_snapshot("/d", "one").unwrap();
    assert_eq!(fixture.ino("/d/.snapshot/one"), top.ino);

    fixture.truncate("/d/f", 0).unwrap();
    fixture.chmod("/d/f", 0o600).unwrap();
    fixture
        .set_xattr("/d/sub", "user.note", b"now", ANY)
        .unwrap();
    fixture.unlink("/d/sub/g").unwrap();
    fixture
        .rename("/d/sub", "/elsewhere", RenameMode::Replace)
        .unwrap();
    fixture.file("/d/new");
    assert_eq!(fixture.list("/d"), ["f", "g", "new"]);

    assert_eq!(fixture.list("/d/.snapshot/one"), ["f", "g", "sub"]);
    assert_eq!(fixture.list("/d/.snapshot/one/sub"), ["g"]);
    let kept = fixture.attr("/d/.snapshot/one/f");
    let as_then = Attr {
        ino: kept.ino,
        mode: before.mode | MODE_FROZEN,
        ..before
    };
    assert_eq!(kept, as_then);
    assert_eq!(fixture.extents(kept.ino), [extent(0, 100, block, 0)]);
    let linked = fixture.attr("/d/.snapshot/one/g");
    assert_eq!(linked.ino, fixture.ino("/d/.snapshot/one/sub/g"));
    assert_eq!(linked.nlink, 2);
    let note = fixture.query(&Query::GetXattr(query::GetXattr {
        ino: fixture.ino("/d/.snapshot/one/sub"),
        name: b"user.note".to_vec(),
    }));
    assert_eq!(note, Ok(MetaReply::Bytes(b"then".to_vec())));
}

#[test]
fn nothing_changes_a_snapshot() {
    let (mut fixture, [block, _]) = with_tree();
    fixture.create_snapshot("/d", "one").unwrap();
    let f = fixture.ino("/d/.snapshot/one/f");
    let parent = fixture.ino("/d/.snapshot/one");
    let live = fixture.ino("/d/f");
    let outside = fixture.dir("/outside");
    let place = |parent| (parent, name("x"));
    let (root, snapshots) = (fixture.ino("/d"), fixture.ino("/d/.snapshot"));
    let ops = [
        Mutation::SetAttr(mutation::SetAttr {
            ino: f,
            changes: AttrChanges {
                mode: Some(0o777),
                ..AttrChanges::default()
            },
        }),
        Mutation::Create(mutation::Create {
            parent,
            name: name("x"),
            kind: FileKind::Regular,
            mode: FILE,
            rdev: 0,
        }),
        Mutation::MakeDir(mutation::MakeDir {
            parent: snapshots,
            name: name("x"),
            mode: 0o755,
        }),
        Mutation::Symlink(mutation::Symlink {
            parent,
            name: name("x"),
            target: b"y".to_vec(),
        }),
        Mutation::Link(mutation::Link {
            ino: f,
            parent: outside,
            name: name("x"),
        }),
        Mutation::Link(mutation::Link {
            ino: live,
            parent,
            name: name("x"),
        }),
        Mutation::Unlink(mutation::Unlink {
            parent,
            name: name("f"),
        }),
        Mutation::RemoveDir(mutation::RemoveDir {
            parent: root,
            name: name(".snapshot"),
        }),
        Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent: snapshots,
            name: name("one"),
            retention_s: 60,
        }),
        Mutation::Rename(mutation::Rename {
            parent: root,
            name: name(".snapshot"),
            new_parent: place(outside).0,
            new_name: place(outside).1,
            mode: RenameMode::Replace,
        }),
        Mutation::Rename(mutation::Rename {
            parent: root,
            name: name("f"),
            new_parent: parent,
            new_name: name("f"),
            mode: RenameMode::Exchange,
        }),
        Mutation::SetXattr(mutation::SetXattr {
            ino: f,
            name: b"user.harvestfs.replication".to_vec(),
            value: b"1".to_vec(),
            mode: ANY,
        }),
        Mutation::RemoveXattr(mutation::RemoveXattr {
            ino: f,
            name: b"user.a".to_vec(),
        }),
        Mutation::Fallocate(mutation::Fallocate {
            ino: f,
            offset: 0,
            length_bytes: 10,
            mode: FallocateMode::PunchHole,
        }),
        Mutation::CloneRange(mutation::CloneRange {
            source: live,
            source_offset: 0,
            destination: f,
            destination_offset: 0,
            length_bytes: 10,
        }),
        Mutation::CreateSnapshot(mutation::CreateSnapshot {
            ino: parent,
            name: name("x"),
        }),
        Mutation::RemoveSnapshot(mutation::RemoveSnapshot {
            ino: snapshots,
            name: name("one"),
        }),
    ];
    let before = fixture.snapshot();
    for op in ops {
        assert_eq!(fixture.run(op.clone()), Err(FsError::ReadOnly), "{op:?}");
    }
    let write = Query::Open(query::Open {
        ino: f,
        read: false,
        write: true,
        execute: false,
    });
    assert_eq!(fixture.query(&write), Err(FsError::ReadOnly));
    assert_eq!(
        fixture.query(&Query::Access(query::Access { ino: f, mask: 2 })),
        Err(FsError::ReadOnly)
    );
    assert!(fixture.snapshot() == before, "nothing was changed");
    let commit = fixture.commit(f, &[extent(0, 10, block, 0)]);
    assert_eq!(commit, Err(FsError::ReadOnly));
}

#[test]
fn blocks_stay_while_a_snapshot_needs_them() {
    let (mut fixture, blocks) = with_tree();
    fixture.create_snapshot("/d", "one").unwrap();
    fixture.create_snapshot("/d", "two").unwrap();
    for path in ["/d/f", "/d/g", "/d/sub/g"] {
        fixture.unlink(path).unwrap();
    }
    fixture.remove_snapshot("/d", "one").unwrap();
    fixture.empty_trash();
    for block in blocks {
        assert!(fixture.namespace.block(block).is_some());
    }
    fixture.remove_snapshot("/d", "two").unwrap();
    assert_eq!(fixture.try_ino("/d/.snapshot"), Err(FsError::NotFound));
    fixture.empty_trash();
    for block in blocks {
        assert!(fixture.namespace.block(block).is_none());
    }
    assert_eq!(fixture.list("/.trash/0"), Vec::<String>::new());
    fixture.remove_dir("/d/sub").unwrap();
    fixture.remove_dir("/d").unwrap();
}

#[test]
fn a_snapshot_has_neither_snapshots_nor_the_trash() {
    let (mut fixture, _) = with_tree();
    fixture.create_snapshot("/d/sub", "below").unwrap();
    fixture.create_snapshot("/", "one").unwrap();
    fixture.trash("/d/f", 60).unwrap();
    fixture.create_snapshot("/", "two").unwrap();
    assert_eq!(fixture.list("/.snapshot/two"), ["d"]);
    let nested = fixture.try_ino("/.snapshot/two/d/sub/.snapshot");
    assert_eq!(nested, Err(FsError::NotFound));
    let refused = fixture.create_snapshot("/.trash", "three");
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
}

#[test]
fn snapshots_go_with_their_directory_and_keep_it_from_being_removed() {
    let (mut fixture, _) = with_tree();
    fixture.dir("/e");
    fixture.create_snapshot("/e", "one").unwrap();
    assert_eq!(fixture.list("/e"), Vec::<String>::new());
    assert_eq!(fixture.remove_dir("/e"), Err(FsError::NotEmpty));
    fixture.rename("/e", "/d/e", RenameMode::Replace).unwrap();
    fixture.ino("/d/e/.snapshot/one");
    fixture.trash("/d", 0).unwrap();
    fixture.empty_trash();
    assert_eq!(
        fixture.namespace.counts().inodes,
        3,
        "the root, the trash, the directory in it"
    );
}

#[test]
fn only_the_owner_makes_and_removes_snapshots() {
    let (mut fixture, _) = with_tree();
    fixture.chown("/d", Some(1), None).unwrap();
    fixture.become_user(2);
    let refused = fixture.create_snapshot("/d", "one");
    assert_eq!(refused, Err(FsError::NotPermitted));
    fixture.become_user(1);
    fixture.create_snapshot("/d", "one").unwrap();
    fixture.become_user(2);
    let refused = fixture.remove_snapshot("/d", "one");
    assert_eq!(refused, Err(FsError::NotPermitted));
    fixture.become_root();
    fixture.remove_snapshot("/d", "one").unwrap();
}

#[test]
fn the_directory_of_snapshots_has_the_mode_and_owner_of_the_directory_above() {
    let (mut fixture, _) = with_tree();
    fixture.chmod("/d", 0o755).unwrap();
    fixture.create_snapshot("/d", "open").unwrap();
    fixture.chmod("/d", 0o700).unwrap();
    fixture.chown("/d", Some(1), Some(5)).unwrap();
    let snapshots = fixture.ino("/d/.snapshot");
    assert_eq!(fixture.effects.inodes, [fixture.ino("/d"), snapshots]);
    let seen = |fixture: &Fixture| {
        let attr = fixture.attr("/d/.snapshot");
        (attr.mode, attr.uid, attr.gid)
    };
    assert_eq!(seen(&fixture), (MODE_FROZEN | 0o500, 1, 5));
    let look = Query::Lookup(query::Lookup {
        parent: snapshots,
        name: name("open"),
    });
    let list = Query::ReadDir(query::ReadDir {
        ino: snapshots,
        after: None,
        max_entries: 10,
        with_attributes: true,
    });
    let access = |mask| {
        Query::Access(query::Access {
            ino: snapshots,
            mask,
        })
    };
    fixture.become_user(2);
    for op in [&look, &list, &access(4)] {
        assert_eq!(fixture.query(op), Err(FsError::PermissionDenied), "{op:?}");
    }
    fixture.become_root();
    fixture.chmod("/d", 0o775).unwrap();
    assert_eq!(seen(&fixture), (MODE_FROZEN | 0o555, 1, 5));
    fixture.become_user(2);
    for op in [&look, &list, &access(5)] {
        fixture.query(op).unwrap();
    }
    assert_eq!(fixture.query(&access(2)), Err(FsError::ReadOnly));
    // The copies have the mode that the originals had then.
    assert_eq!(fixture.attr("/d/.snapshot/open").mode, MODE_FROZEN | 0o755);
}

#[test]
fn a_snapshot_counts_as_a_copy_does() {
    let (mut fixture, _) = with_tree();
    let used = |fixture: &Fixture, attribute: &str| {
        let name = format!("user.harvestfs.used_{attribute}").into_bytes();
        let ino = fixture.ino("/d");
        let Ok(MetaReply::Bytes(value)) =
            fixture.query(&Query::GetXattr(query::GetXattr { ino, name }))
        else {
            panic!("it has one");
        };
        String::from_utf8(value).unwrap()
    };
    assert_eq!(
        (used(&fixture, "bytes"), used(&fixture, "files")),
        ("130".into(), "3".into())
    );
    let set = |fixture: &mut Fixture, limit: &[u8]| {
        let attribute = "user.harvestfs.quota_files";
        fixture.set_xattr("/d", attribute, limit, ANY).unwrap();
    };
    // The three, the directory itself, and the directory of the snapshots.
    set(&mut fixture, b"7");
    let refused = fixture.create_snapshot("/d", "one");
    assert_eq!(refused, Err(FsError::QuotaExceeded));
    set(&mut fixture, b"8");
    fixture.create_snapshot("/d", "one").unwrap();
    assert_eq!(
        (used(&fixture, "bytes"), used(&fixture, "files")),
        ("260".into(), "8".into())
    );
    fixture.remove_snapshot("/d", "one").unwrap();
    fixture.empty_trash();
    assert_eq!(
        (used(&fixture, "bytes"), used(&fixture, "files")),
        ("130".into(), "3".into())
    );
}

#[test]
fn what_is_called_like_it_and_names_with_dots_are_refused() {
    let (mut fixture, _) = with_tree();
    fixture.file("/d/.snapshot");
    for (path, called) in [("/d", "one"), ("/d/sub", ".one")] {
        let refused = fixture.create_snapshot(path, called);
        assert!(
            matches!(refused, Err(FsError::InvalidArgument(_))),
            "{refused:?}"
        );
    }
    assert_eq!(
        fixture.create_snapshot("/d/f", "one"),
        Err(FsError::NotADirectory)
    );
    fixture.create_snapshot("/d/sub", "one").unwrap();
    assert_eq!(
        fixture.create_snapshot("/d/sub", "one"),
        Err(FsError::Exists)
    );
    assert_eq!(
        fixture.remove_snapshot("/d/sub", "two"),
        Err(FsError::NotFound)
    );
    let taken = fixture.create("/d/sub/.snapshot", FileKind::Regular, FILE);
    assert_eq!(taken.map(|attr| attr.ino), Err(FsError::Exists));
}

#[test]
fn a_large_tree_is_refused() {
    let mut fixture = Fixture::new();
    let source = fixture.file("/0");
    let block = fixture.allocate(1)[0];
    let pieces: Vec<_> = (0..8192)
        .map(|piece| extent(piece * 10, 5, block, piece * 8))
        .collect();
    fixture.commit(source, &pieces).unwrap();
    // With their names and inodes, so many are too much.
    let copies = SNAPSHOT_ITEMS_MAX / 8192;
    for number in 1..copies {
        let destination = fixture.file(&format!("/{number}"));
        let op = Mutation::CloneRange(mutation::CloneRange {
            source,
            source_offset: 0,
            destination,
            destination_offset: 0,
            length_bytes: u64::MAX,
        });
        fixture.change(op).unwrap();
    }
    let before = fixture.namespace.counts();
    let refused = fixture.create_snapshot("/", "x");
    assert!(
        matches!(&refused, Err(FsError::InvalidArgument(why)) if why.contains("further down")),
        "{refused:?}"
    );
    assert_eq!(fixture.namespace.counts(), before);
    fixture.unlink("/1").unwrap();
    fixture.create_snapshot("/", "x").unwrap();
}
