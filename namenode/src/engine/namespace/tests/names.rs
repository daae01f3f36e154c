//! Creating, linking and removing names.

use super::*;

const KINDS: [FileKind; 5] = [
    FileKind::Regular,
    FileKind::Fifo,
    FileKind::Socket,
    FileKind::CharDevice,
    FileKind::BlockDevice,
];

/// Asserts that the directory's times are the last command's.
fn assert_touched(fixture: &Fixture, path: &str) {
    let attr = fixture.attr(path);
    let now = Timestamp(fixture.now);
    assert_eq!((attr.mtime, attr.ctime), (now, now), "{path}");
}

#[test]
fn a_new_inode_has_what_was_asked_for_and_its_parent_knows() {
    let mut fixture = Fixture::new();
    fixture.make_dir("/d", 0o777).unwrap();
    fixture.caller = user(1, 2, &[3]);
    for kind in KINDS {
        if matches!(kind, FileKind::CharDevice | FileKind::BlockDevice) {
            fixture.become_root();
        }
        let version = fixture.attr("/d").content_version;
        let attr = fixture.create("/d/x", kind, 0o4751).unwrap();
        let now = Timestamp(fixture.now);
        assert_eq!((attr.kind, attr.mode, attr.nlink), (kind, 0o4751, 1));
        assert_eq!(attr.uid, fixture.caller.uid);
        assert_eq!(attr.gid, fixture.caller.gid);
        assert_eq!((attr.atime, attr.mtime, attr.ctime), (now, now, now));
        assert_eq!((attr.size_bytes, attr.allocated_bytes), (0, 0));
        assert_eq!(attr, fixture.attr("/d/x"));
        assert_touched(&fixture, "/d");
        assert!(fixture.attr("/d").content_version > version);
        assert_eq!(fixture.effects.inodes, [fixture.ino("/d"), attr.ino]);
        assert_eq!(fixture.effects.entries, [(fixture.ino("/d"), name("x"))]);
        fixture.unlink("/d/x").unwrap();
    }
    for kind in [FileKind::Directory, FileKind::Symlink] {
        assert!(matches!(
            fixture.create("/d/x", kind, 0o755),
            Err(FsError::InvalidArgument(_))
        ));
    }
}

#[test]
fn directories_count_their_subdirectories_as_links() {
    let mut fixture = Fixture::new();
    let root_links = fixture.attr("/").nlink;
    assert_eq!(fixture.make_dir("/d", 0o751).unwrap().nlink, 2);
    assert_touched(&fixture, "/");
    fixture.dir("/d/a");
    fixture.dir("/d/b");
    fixture.file("/d/f");
    assert_eq!(fixture.attr("/d").nlink, 4);
    assert_eq!(fixture.attr("/d").size_bytes, 3);
    fixture.remove_dir("/d/a").unwrap();
    assert_eq!(fixture.attr("/d").nlink, 3);
    assert_touched(&fixture, "/d");
    assert_eq!(fixture.attr("/").nlink, root_links + 1);
}

#[test]
fn a_taken_name_is_refused_for_each_kind_of_inode() {
    let mut fixture = Fixture::new();
    for kind in KINDS {
        fixture.create("/taken", kind, 0o644).unwrap();
        for new in KINDS {
            assert_eq!(fixture.create("/taken", new, 0o644), Err(FsError::Exists));
        }
        assert_eq!(fixture.make_dir("/taken", 0o755), Err(FsError::Exists));
        assert_eq!(fixture.symlink("/taken", b"x"), Err(FsError::Exists));
        assert_eq!(fixture.link("/taken", "/taken"), Err(FsError::Exists));
        fixture.unlink("/taken").unwrap();
    }
    fixture.dir("/taken");
    assert_eq!(fixture.make_dir("/taken", 0o755), Err(FsError::Exists));
    assert_eq!(fixture.symlink("/taken", b"x"), Err(FsError::Exists));
}

#[test]
fn what_is_no_directory_has_no_entries() {
    let mut fixture = Fixture::new();
    fixture.symlink("/s", b"target").unwrap();
    fixture.file("/f");
    for parent in [fixture.ino("/f"), fixture.ino("/s")] {
        let name = name("x");
        let lookup = Query::Lookup(query::Lookup {
            parent,
            name: name.clone(),
        });
        assert_eq!(fixture.query(&lookup), Err(FsError::NotADirectory));
        let make_dir = Mutation::MakeDir(mutation::MakeDir {
            parent,
            name: name.clone(),
            mode: 0o755,
        });
        assert_eq!(fixture.run(make_dir), Err(FsError::NotADirectory));
        let unlink = Mutation::Unlink(mutation::Unlink { parent, name });
        assert_eq!(fixture.run(unlink), Err(FsError::NotADirectory));
    }
    assert_eq!(fixture.try_ino("/none"), Err(FsError::NotFound));
    let gone = InodeId(999);
    let op = Query::GetAttr(query::GetAttr { ino: gone });
    assert_eq!(fixture.query(&op), Err(FsError::Stale));
}

#[test]
fn symlinks_keep_their_target() {
    let mut fixture = Fixture::new();
    let target = b"../some\xff/where";
    let attr = fixture.symlink("/s", target).unwrap();
    assert_eq!((attr.mode, attr.nlink), (0o777, 1));
    assert_eq!(attr.size_bytes, target.len() as u64);
    let op = Query::ReadLink(query::ReadLink { ino: attr.ino });
    assert_eq!(fixture.query(&op), Ok(MetaReply::Bytes(target.to_vec())));
    let file = fixture.file("/f");
    assert!(matches!(
        fixture.query(&Query::ReadLink(query::ReadLink { ino: file })),
        Err(FsError::InvalidArgument(_))
    ));
    for bad in [&b""[..], b"a\0b"] {
        assert!(matches!(
            fixture.symlink("/t", bad),
            Err(FsError::InvalidArgument(_))
        ));
    }
}

#[test]
fn links_share_an_inode() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    for kind in KINDS {
        let first = fixture.create("/a", kind, 0o644).unwrap();
        let second = fixture.link("/a", "/d/b").unwrap();
        assert_eq!(second.ino, first.ino);
        assert_eq!((second.nlink, second.ctime), (2, Timestamp(fixture.now)));
        assert_eq!(second.mtime, first.mtime);
        assert_touched(&fixture, "/d");
        let left = fixture.unlink("/a").unwrap().unwrap();
        assert_eq!((left.nlink, left.ctime), (1, Timestamp(fixture.now)));
        assert_eq!(fixture.attr("/d/b"), left);
        assert_eq!(fixture.unlink("/d/b").unwrap().unwrap().nlink, 0);
        assert_eq!(
            fixture.query(&Query::GetAttr(query::GetAttr { ino: first.ino })),
            Err(FsError::Stale)
        );
    }
    fixture.symlink("/s", b"x").unwrap();
    assert_eq!(fixture.link("/s", "/t").unwrap().kind, FileKind::Symlink);
    assert_eq!(fixture.link("/d", "/e"), Err(FsError::NotPermitted));
}

#[test]
fn unlink_and_rmdir_mind_what_they_remove() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.file("/d/f");
    assert_eq!(fixture.unlink("/d"), Err(FsError::IsADirectory));
    assert_eq!(fixture.remove_dir("/d/f"), Err(FsError::NotADirectory));
    assert_eq!(fixture.remove_dir("/d"), Err(FsError::NotEmpty));
    assert_eq!(fixture.unlink("/none"), Err(FsError::NotFound));
    assert_eq!(fixture.remove_dir("/none"), Err(FsError::NotFound));
    fixture.unlink("/d/f").unwrap();
    assert_touched(&fixture, "/d");
    assert_eq!(fixture.remove_dir("/d").unwrap().unwrap().nlink, 0);
    assert_touched(&fixture, "/");
}

#[test]
fn an_open_file_outlives_its_names() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    fixture.link("/f", "/g").unwrap();
    let unlink = |text: &str| {
        Mutation::Unlink(mutation::Unlink {
            parent: InodeId::ROOT,
            name: name(text),
        })
    };
    assert_eq!(fixture.namespace.removal_target(&unlink("f")), None);
    fixture.held_elsewhere = true;
    fixture.unlink("/f").unwrap();
    assert_eq!(fixture.namespace.orphans().count(), 0);
    assert_eq!(fixture.namespace.removal_target(&unlink("g")), Some(ino));
    assert_eq!(fixture.unlink("/g").unwrap().unwrap().nlink, 0);

    assert_eq!(fixture.namespace.orphans().collect::<Vec<_>>(), [ino]);
    assert_eq!(fixture.namespace.counts().orphans, 1);
    let block = fixture.allocate(1)[0];
    fixture.commit(ino, &[extent(0, 5, block, 0)]).unwrap();
    assert_eq!(fixture.attr_of(ino).size_bytes, 5);
    // It gets no name again.
    let op = Mutation::Link(mutation::Link {
        ino,
        parent: InodeId::ROOT,
        name: name("again"),
    });
    assert_eq!(fixture.run(op), Err(FsError::NotFound));

    let release = Command::ReleaseOrphans {
        inodes: vec![ino, InodeId::ROOT, InodeId(55), ino],
        now: Timestamp(fixture.now),
    };
    fixture.apply(&release).unwrap();
    assert_eq!(fixture.effects.inodes, [ino]);
    assert!(!fixture.namespace.exists(ino));
    assert!(fixture.namespace.exists(InodeId::ROOT));
    // Its writer still has the block.
    assert_eq!(fixture.namespace.block(block).unwrap().live_bytes, 0);
    fixture.close_session(fixture.session);
    assert_eq!(fixture.effects.blocks, [BlockChange::Freed { block }]);
}

#[test]
fn a_removed_directory_takes_no_entries() {
    let mut fixture = Fixture::new();
    let ino = fixture.dir("/d");
    let file = fixture.file("/f");
    fixture.held_elsewhere = true;
    fixture.remove_dir("/d").unwrap();
    assert_eq!(fixture.attr_of(ino).nlink, 0);
    let name = name("x");
    let attempts = [
        Mutation::Create(mutation::Create {
            parent: ino,
            name: name.clone(),
            kind: FileKind::Regular,
            mode: 0o644,
            rdev: 0,
        }),
        Mutation::MakeDir(mutation::MakeDir {
            parent: ino,
            name: name.clone(),
            mode: 0o755,
        }),
        Mutation::Link(mutation::Link {
            ino: file,
            parent: ino,
            name: name.clone(),
        }),
        Mutation::Rename(mutation::Rename {
            parent: InodeId::ROOT,
            name: self::name("f"),
            new_parent: ino,
            new_name: name,
            mode: RenameMode::Replace,
        }),
    ];
    for op in attempts {
        assert_eq!(fixture.run(op), Err(FsError::NotFound));
    }
    let release = Command::ReleaseOrphans {
        inodes: vec![ino],
        now: Timestamp(fixture.now),
    };
    fixture.apply(&release).unwrap();
    assert!(!fixture.namespace.exists(ino));
}

#[test]
fn inode_numbers_are_never_used_again() {
    let mut fixture = Fixture::new();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100 {
        assert!(seen.insert(fixture.file("/f")));
        assert!(seen.insert(fixture.file("/g")));
        fixture.unlink("/f").unwrap();
        fixture.unlink("/g").unwrap();
    }
    for ino in seen {
        assert!(!fixture.namespace.exists(ino));
    }
    // The slots are, though: memory does not grow.
    assert!(fixture.namespace.counts().memory_bytes < 200_000);
}

#[test]
fn directories_are_listed_in_pages_by_name() {
    let mut fixture = Fixture::new();
    let long = "n".repeat(255);
    let mut expected: Vec<String> = (0..50).map(|i| format!("file-{i:03}")).collect();
    expected.extend(["A".into(), "z".into(), long, "n".repeat(22), "n".repeat(23)]);
    for entry in &expected {
        fixture.file(&format!("/{entry}"));
    }
    expected.sort();
    let mut listed = Vec::new();
    let mut after = None;
    loop {
        let op = Query::ReadDir(query::ReadDir {
            ino: InodeId::ROOT,
            after: after.clone(),
            max_entries: 7,
            with_attributes: true,
        });
        let Ok(MetaReply::Entries {
            parent,
            entries,
            end,
        }) = fixture.query(&op)
        else {
            panic!();
        };
        assert_eq!(parent, InodeId::ROOT);
        assert!(entries.len() <= 7);
        for entry in &entries {
            let attr = entry.attr.clone().unwrap();
            assert_eq!((attr.ino, attr.kind), (entry.ino, entry.kind));
            listed.push(entry.name.to_string());
        }
        after = entries.last().map(|entry| entry.name.clone());
        // Removing what was listed does not disturb the rest.
        fixture.unlink(&format!("/{}", listed[0])).ok();
        if end {
            break;
        }
    }
    assert_eq!(listed, expected);
}
