//! Rename in all its modes.

use super::*;

const REPLACE: RenameMode = RenameMode::Replace;
const EXCHANGE: RenameMode = RenameMode::Exchange;

fn assert_invalid<T: std::fmt::Debug>(result: Result<T, FsError>) {
    assert!(
        matches!(result, Err(FsError::InvalidArgument(_))),
        "{result:?}"
    );
}

/// `/a` and `/b` are directories, `/a/f` and `/b/g` are files, `/a/d` and `/b/e` are directories.
fn two_directories() -> Fixture {
    let mut fixture = Fixture::new();
    for path in ["/a", "/b", "/a/d", "/b/e"] {
        fixture.dir(path);
    }
    fixture.file("/a/f");
    fixture.file("/b/g");
    fixture
}

#[test]
fn a_file_moves_with_everything_it_has() {
    let mut fixture = two_directories();
    let before = fixture.attr("/a/f");
    assert_eq!(fixture.rename("/a/f", "/b/f", REPLACE), Ok(None));
    let now = Timestamp(fixture.now);
    let after = fixture.attr("/b/f");
    let expected = Attr {
        ctime: now,
        ..before
    };
    assert_eq!(after, expected);
    for directory in ["/a", "/b"] {
        let attr = fixture.attr(directory);
        assert_eq!((attr.mtime, attr.ctime), (now, now));
    }
    assert_eq!(fixture.list("/a"), ["d"]);
    let (a, b) = (fixture.ino("/a"), fixture.ino("/b"));
    assert_eq!(fixture.effects.entries, [(a, name("f")), (b, name("f"))]);
    assert_eq!(fixture.effects.inodes, [a, b, after.ino]);
}

#[test]
fn a_directory_moves_with_its_links() {
    let mut fixture = two_directories();
    fixture.file("/a/d/inside");
    fixture.rename("/a/d", "/b/d", REPLACE).unwrap();
    assert_eq!(fixture.attr("/a").nlink, 2);
    assert_eq!(fixture.attr("/b").nlink, 4);
    assert_eq!(fixture.list("/b/d"), ["inside"]);
    let op = Query::ReadDir(query::ReadDir {
        ino: fixture.ino("/b/d"),
        after: None,
        max_entries: 1,
        with_attributes: false,
    });
    let Ok(MetaReply::Entries { parent, .. }) = fixture.query(&op) else {
        panic!();
    };
    assert_eq!(parent, fixture.ino("/b"));
}

#[test]
fn what_is_replaced_loses_a_name() {
    let mut fixture = two_directories();
    fixture.link("/b/g", "/b/h").unwrap();
    let removed = fixture.rename("/a/f", "/b/g", REPLACE).unwrap().unwrap();
    assert_eq!((removed.nlink, removed.ctime), (1, Timestamp(fixture.now)));
    assert_eq!(removed, fixture.attr("/b/h"));

    let empty = fixture.ino("/b/e");
    fixture.file("/a/d/inside");
    let removed = fixture.rename("/a/d", "/b/e", REPLACE).unwrap().unwrap();
    assert_eq!((removed.ino, removed.nlink), (empty, 0));
    assert_eq!(fixture.attr("/a").nlink, 2);
    assert_eq!(fixture.attr("/b").nlink, 3);
    assert_eq!(fixture.list("/b/e"), ["inside"]);

    // Within one directory.
    fixture.dir("/a/x");
    fixture.dir("/a/y");
    fixture.rename("/a/x", "/a/y", REPLACE).unwrap();
    assert_eq!(fixture.attr("/a").nlink, 3);
}

#[test]
fn a_replaced_file_that_is_open_becomes_an_orphan() {
    let mut fixture = two_directories();
    let ino = fixture.ino("/b/g");
    let op = Mutation::Rename(mutation::Rename {
        parent: fixture.ino("/a"),
        name: name("f"),
        new_parent: fixture.ino("/b"),
        new_name: name("g"),
        mode: REPLACE,
    });
    assert_eq!(fixture.namespace.removal_target(&op), Some(ino));
    fixture.held_elsewhere = true;
    fixture.remove(op).unwrap();
    assert_eq!(fixture.namespace.orphans().collect::<Vec<_>>(), [ino]);
}

#[test]
fn kinds_must_fit() {
    let mut fixture = two_directories();
    fixture.file("/b/e/inside");
    let cases = [
        ("/a/f", "/b/e", FsError::IsADirectory),
        ("/a/d", "/b/g", FsError::NotADirectory),
        ("/a/d", "/b/e", FsError::NotEmpty),
        ("/a/none", "/b/x", FsError::NotFound),
        ("/b/g", "/b", FsError::IsADirectory),
        ("/b/e/inside", "/b", FsError::IsADirectory),
    ];
    for (old, new, expected) in cases {
        let before = fixture.snapshot();
        assert_eq!(fixture.rename(old, new, REPLACE), Err(expected));
        assert_eq!(fixture.snapshot(), before);
    }
}

#[test]
fn a_directory_does_not_move_into_itself() {
    let mut fixture = two_directories();
    fixture.dir("/a/d/deep");
    assert_invalid(fixture.rename("/a", "/a/d/x", REPLACE));
    assert_invalid(fixture.rename("/a", "/a/x", REPLACE));
    assert_invalid(fixture.rename("/a", "/a/d/deep", REPLACE));
    assert_invalid(fixture.rename("/a", "/a/d", EXCHANGE));
    assert_invalid(fixture.rename("/a/d/deep", "/a", EXCHANGE));
    assert_eq!(
        fixture.rename("/a/d/deep", "/a", REPLACE),
        Err(FsError::NotEmpty)
    );
    // A sibling whose name is longer is no descendant.
    fixture.dir("/ab");
    fixture.rename("/a", "/ab/a", REPLACE).unwrap();
}

#[test]
fn two_names_of_one_file_both_stay() {
    let mut fixture = two_directories();
    fixture.link("/a/f", "/b/f").unwrap();
    for (old, new) in [("/a/f", "/b/f"), ("/a/f", "/a/f"), ("/a/d", "/a/d")] {
        for mode in [REPLACE, EXCHANGE] {
            let before = fixture.attr(old);
            assert_eq!(fixture.rename(old, new, mode), Ok(None));
            assert_eq!(fixture.attr(old), before);
            assert_eq!(fixture.attr(new), before);
            // Nothing is changed. Clients that may not know yet that these are its names must be notified.
            let of_file = Effects {
                inodes: vec![before.ino],
                ..Effects::default()
            };
            assert_eq!(fixture.effects, of_file);
        }
    }
}

#[test]
fn no_replace_minds_what_is_there() {
    let mut fixture = two_directories();
    let mode = RenameMode::NoReplace;
    assert_eq!(fixture.rename("/a/f", "/b/g", mode), Err(FsError::Exists));
    assert_eq!(fixture.rename("/a/f", "/a/f", mode), Err(FsError::Exists));
    assert_eq!(fixture.rename("/a/x", "/b/g", mode), Err(FsError::NotFound));
    assert_eq!(fixture.rename("/a/f", "/b/new", mode), Ok(None));
    assert_eq!(fixture.list("/b"), ["e", "g", "new"]);
}

#[test]
fn an_exchange_swaps_anything() {
    let mut fixture = two_directories();
    fixture.file("/a/d/inside");
    let (directory, file) = (fixture.ino("/a/d"), fixture.ino("/b/g"));
    let other = fixture.rename("/a/d", "/b/g", EXCHANGE);
    assert_eq!(
        other.map(|other| other.map(|attr| attr.ino)),
        Ok(Some(file))
    );
    let now = Timestamp(fixture.now);
    assert_eq!(fixture.ino("/b/g"), directory);
    assert_eq!(fixture.ino("/a/d"), file);
    assert_eq!(fixture.list("/b/g"), ["inside"]);
    assert_eq!(fixture.attr("/a").nlink, 2);
    assert_eq!(fixture.attr("/b").nlink, 4);
    for path in ["/a", "/b", "/a/d", "/b/g"] {
        assert_eq!(fixture.attr(path).ctime, now, "{path}");
    }
    assert_eq!(fixture.attr("/a/d").nlink, 1);

    // Two directories, and back; then within one directory.
    fixture.rename("/b/g", "/b/e", EXCHANGE).unwrap();
    assert_eq!(fixture.list("/b/e"), ["inside"]);
    fixture.rename("/b/e", "/b", EXCHANGE).unwrap_err();
    fixture.rename("/a", "/b", EXCHANGE).unwrap();
    assert_eq!(fixture.list("/a/e"), ["inside"]);
    assert_eq!(
        fixture.rename("/a", "/none", EXCHANGE),
        Err(FsError::NotFound)
    );
}

#[test]
fn moving_a_directory_elsewhere_needs_the_right_to_write_it() {
    let mut fixture = Fixture::new();
    for path in ["/a", "/b"] {
        fixture.make_dir(path, 0o777).unwrap();
    }
    fixture.make_dir("/a/d", 0o755).unwrap();
    fixture.file("/a/f");
    fixture.become_user(1);
    fixture.rename("/a/d", "/a/e", REPLACE).unwrap();
    let denied = Err(FsError::PermissionDenied);
    assert_eq!(fixture.rename("/a/e", "/b/e", REPLACE), denied);
    fixture.make_dir("/b/mine", 0o755).unwrap();
    assert_eq!(fixture.rename("/b/mine", "/a/e", EXCHANGE), denied);
    assert_eq!(fixture.rename("/a/f", "/b/f", REPLACE), Ok(None));
}

#[test]
fn both_directories_need_write_permission() {
    for (a, b, expected) in [
        (0o777, 0o777, Ok(None)),
        (0o755, 0o777, Err(FsError::PermissionDenied)),
        (0o777, 0o755, Err(FsError::PermissionDenied)),
        (0o776, 0o777, Err(FsError::PermissionDenied)),
    ] {
        let mut fixture = Fixture::new();
        fixture.make_dir("/a", a).unwrap();
        fixture.make_dir("/b", b).unwrap();
        fixture.file("/a/f");
        fixture.become_user(1);
        assert_eq!(fixture.rename("/a/f", "/b/f", REPLACE), expected);
    }
}
