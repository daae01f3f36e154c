//! Modes, owners and times.

use super::*;
use harvestfs_protocol::meta::SetTime;
use harvestfs_protocol::types::FileBlock;

const DENIED: FsError = FsError::PermissionDenied;
const NOT_OWNER: FsError = FsError::NotPermitted;

/// A world-writable directory `/d` and in it a file of user 1, group 1.
fn with_file(mode: u16) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.make_dir("/d", 0o777).unwrap();
    fixture.become_user(1);
    fixture.create("/d/f", FileKind::Regular, mode).unwrap();
    fixture
}

fn access(fixture: &Fixture, caller: &Credentials, path: &str, mask: u8) -> bool {
    let ino = fixture.ino(path);
    let reply = fixture
        .namespace
        .query(caller, &Query::Access(query::Access { ino, mask }));
    match reply {
        Ok(MetaReply::Done) => true,
        Err(FsError::PermissionDenied) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_class_that_fits_the_caller_decides() {
    let fixture = with_file(0o461);
    // (caller, read, write, execute)
    let cases = [
        (user(1, 1, &[]), [true, false, false]),
        (user(1, 9, &[1]), [true, false, false]),
        (user(2, 1, &[]), [true, true, false]),
        (user(2, 9, &[8, 1]), [true, true, false]),
        (user(2, 2, &[]), [false, false, true]),
        (user(0, 0, &[]), [true, true, true]),
    ];
    for (caller, expected) in cases {
        let granted = [4, 2, 1].map(|mask| access(&fixture, &caller, "/d/f", mask));
        assert_eq!(granted, expected, "{caller:?}");
        let all = expected.iter().all(|&granted| granted);
        assert_eq!(access(&fixture, &caller, "/d/f", 7), all);
        assert!(access(&fixture, &caller, "/d/f", 0));
    }
}

#[test]
fn root_runs_only_what_somebody_may_run() {
    let mut fixture = with_file(0o600);
    fixture.make_dir("/d/closed", 0).unwrap();
    let root = Credentials::root();
    assert!(!access(&fixture, &root, "/d/f", 1));
    assert!(access(&fixture, &root, "/d/f", 6));
    assert!(access(&fixture, &root, "/d/closed", 7));
    fixture.chmod("/d/f", 0o010).unwrap();
    assert!(access(&fixture, &root, "/d/f", 7));
}

#[test]
fn opening_checks_what_is_asked_for() {
    let mut fixture = with_file(0o640);
    let open_to = |fixture: &Fixture, read, write, execute| {
        let ino = fixture.ino("/d/f");
        let open = Query::Open(query::Open {
            ino,
            read,
            write,
            execute,
        });
        fixture.query(&open).map(|_| ())
    };
    let open = |fixture: &Fixture, read, write| open_to(fixture, read, write, false);
    assert_eq!(open(&fixture, true, true), Ok(()));
    fixture.caller = user(2, 1, &[]);
    assert_eq!(open(&fixture, true, false), Ok(()));
    assert_eq!(open(&fixture, true, true), Err(DENIED));
    fixture.become_user(3);
    assert_eq!(open(&fixture, true, false), Err(DENIED));
    let for_nothing = open(&fixture, false, false);
    assert!(matches!(for_nothing, Err(FsError::InvalidArgument(_))));
    assert_eq!(open_to(&fixture, false, false, true), Err(DENIED));
    fixture.become_root();
    fixture.chmod("/d/f", 0o641).unwrap();
    fixture.become_user(3);
    assert_eq!(open_to(&fixture, false, false, true), Ok(()));
    assert_eq!(open_to(&fixture, true, false, true), Err(DENIED));

    let directory = fixture.ino("/d");
    let op = Query::Open(query::Open {
        ino: directory,
        read: true,
        write: false,
        execute: false,
    });
    assert_eq!(fixture.query(&op), Err(FsError::IsADirectory));
}

#[test]
fn only_those_that_may_read_a_file_get_its_blocks() {
    let mut fixture = with_file(0o640);
    let ino = fixture.ino("/d/f");
    let block = fixture.allocate(1)[0];
    fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    let at = FileBlock {
        block,
        file_offset: 9,
    };
    for (caller, may_read) in [
        (user(1, 1, &[]), true),
        (user(2, 9, &[1]), true),
        (user(0, 0, &[]), true),
        (user(2, 2, &[]), false),
    ] {
        fixture.caller = caller;
        let extents = fixture.query(&Query::GetExtents(query::GetExtents {
            ino,
            from_offset: 0,
        }));
        let blocks = vec![at];
        let located = fixture.query(&Query::Locate(query::Locate { ino, blocks }));
        let blocks = fixture
            .namespace
            .readable_blocks(&fixture.caller, ino, &[at]);
        if may_read {
            assert!(extents.is_ok() && located.is_ok());
            assert_eq!(blocks, Ok(vec![block]));
        } else {
            assert_eq!((extents, located), (Err(DENIED), Err(DENIED)));
            assert_eq!(blocks, Err(DENIED));
        }
    }
}

#[test]
fn names_need_search_and_changes_need_write_permission() {
    // (mode of the directory for others, lookup, create, unlink, list)
    let cases = [
        (0o0, false, false, false, false),
        (0o1, true, false, false, false),
        (0o2, false, false, false, false),
        (0o3, true, true, true, false),
        (0o4, false, false, false, true),
        (0o5, true, false, false, true),
        (0o7, true, true, true, true),
    ];
    for (mode, lookup, create, unlink, list) in cases {
        let mut fixture = Fixture::new();
        let ino = fixture.make_dir("/d", 0o700 | mode).unwrap().ino;
        fixture.file("/d/f");
        fixture.become_user(1);
        let found = fixture.query(&Query::Lookup(query::Lookup {
            parent: ino,
            name: name("f"),
        }));
        assert_eq!(found.is_ok(), lookup, "{mode:o}");
        let new = fixture.create("/d/new", FileKind::Regular, FILE);
        assert_eq!(new.is_ok(), create, "{mode:o}");
        // A user that may search learns that the name is taken, whether it may write or not.
        let taken = fixture.create("/d/f", FileKind::Regular, FILE).err();
        let expected = if lookup { FsError::Exists } else { DENIED };
        assert_eq!(taken, Some(expected), "{mode:o}");
        assert_eq!(fixture.unlink("/d/f").is_ok(), unlink, "{mode:o}");
        let op = Query::ReadDir(query::ReadDir {
            ino,
            after: None,
            max_entries: 10,
            with_attributes: true,
        });
        match fixture.query(&op) {
            Ok(MetaReply::Entries { entries, .. }) => {
                assert!(list, "{mode:o}");
                // Attributes are only for callers that may search.
                assert!(entries.iter().all(|entry| entry.attr.is_some() == lookup));
            }
            other => assert!(!list && other == Err(DENIED), "{mode:o}"),
        }
    }
}

#[test]
fn in_a_sticky_directory_only_owners_remove() {
    // (caller, may remove the file of user 1 from the directory of user 2)
    let cases = [(0, true), (1, true), (2, true), (3, false)];
    for (uid, allowed) in cases {
        for sticky in [false, true] {
            let mut fixture = Fixture::new();
            fixture.make_dir("/d", 0o777).unwrap();
            fixture.chown("/d", Some(2), Some(2)).unwrap();
            fixture
                .chmod("/d", if sticky { 0o1777 } else { 0o777 })
                .unwrap();
            fixture.make_dir("/other", 0o777).unwrap();
            fixture.become_user(1);
            fixture.file("/d/f");
            fixture.file("/d/g");
            fixture.dir("/d/dir");
            fixture.become_user(uid);
            fixture.file("/other/mine");
            let expected = if allowed || !sticky {
                Ok(())
            } else {
                Err(NOT_OWNER)
            };
            let replace = RenameMode::Replace;
            let over = fixture.rename("/other/mine", "/d/g", replace).map(|_| ());
            assert_eq!(over, expected);
            let away = fixture.rename("/d/f", "/d/h", replace).map(|_| ());
            assert_eq!(away, expected);
            assert_eq!(fixture.remove_dir("/d/dir").map(|_| ()), expected);
            let left = if expected.is_ok() { "/d/h" } else { "/d/f" };
            assert_eq!(fixture.unlink(left).map(|_| ()), expected);
        }
    }
}

#[test]
fn only_the_owner_changes_the_mode() {
    let mut fixture = with_file(0o644);
    assert_eq!(fixture.chmod("/d/f", 0o7777).unwrap().mode, 0o7777);
    fixture.become_user(2);
    assert_eq!(fixture.chmod("/d/f", 0o644), Err(NOT_OWNER));
    fixture.become_root();
    assert_eq!(fixture.chmod("/d/f", 0o644).unwrap().mode, 0o644);
    fixture.symlink("/d/s", b"f").unwrap();
    assert!(matches!(
        fixture.chmod("/d/s", 0o600),
        Err(FsError::NotSupported(_))
    ));
}

#[test]
fn set_group_id_is_for_members_of_the_group() {
    let mut fixture = with_file(0o755);
    fixture.become_root();
    fixture.chown("/d/f", Some(1), Some(5)).unwrap();
    fixture.caller = user(1, 1, &[5]);
    assert_eq!(fixture.chmod("/d/f", 0o2755).unwrap().mode, 0o2755);
    fixture.caller = user(1, 1, &[6]);
    assert_eq!(fixture.chmod("/d/f", 0o2755).unwrap().mode, 0o755);
    fixture.become_root();
    assert_eq!(fixture.chmod("/d/f", 0o2755).unwrap().mode, 0o2755);
}

#[test]
fn only_root_gives_files_away() {
    // (caller's uid, gid, groups, new uid, new gid, allowed), the file is of user 1, group 1
    type Case = (u32, u32, &'static [u32], Option<u32>, Option<u32>, bool);
    let cases: [Case; 13] = [
        (0, 0, &[], Some(2), Some(2), true),
        (1, 1, &[], Some(2), None, false),
        (1, 1, &[], Some(1), None, true),
        (1, 1, &[], None, Some(1), true),
        (1, 1, &[], None, Some(2), false),
        (1, 1, &[2], None, Some(2), true),
        (1, 2, &[], None, Some(2), true),
        (1, 2, &[], Some(1), Some(2), true),
        (1, 2, &[], Some(3), Some(2), false),
        (1, 2, &[], None, Some(1), true),
        (2, 1, &[], None, Some(1), false),
        (2, 2, &[], Some(1), None, false),
        (2, 2, &[], Some(2), None, false),
    ];
    for (uid, gid, groups, new_uid, new_gid, allowed) in cases {
        let mut fixture = with_file(0o666);
        let before = fixture.attr("/d/f");
        fixture.caller = user(uid, gid, groups);
        let result = fixture.chown("/d/f", new_uid, new_gid);
        let case = (uid, gid, groups, new_uid, new_gid);
        if allowed {
            let attr = result.unwrap();
            assert_eq!(attr.uid, new_uid.unwrap_or(1), "{case:?}");
            assert_eq!(attr.gid, new_gid.unwrap_or(1), "{case:?}");
            assert_eq!(attr.ctime, Timestamp(fixture.now));
        } else {
            assert_eq!(result, Err(NOT_OWNER), "{case:?}");
            assert_eq!(fixture.attr("/d/f"), before);
        }
    }
}

#[test]
fn privileges_go_when_a_file_changes_hands() {
    for (mode, left) in [
        (0o6755, 0o755),
        (0o4755, 0o755),
        (0o2755, 0o755),
        (0o2745, 0o2745),
    ] {
        let mut fixture = with_file(0o600);
        fixture.chmod("/d/f", mode).unwrap();
        fixture.become_root();
        assert_eq!(fixture.chown("/d/f", None, Some(2)).unwrap().mode, left);
    }
    // Directories keep theirs.
    let mut fixture = with_file(0o600);
    fixture.become_root();
    fixture.chmod("/d", 0o6777).unwrap();
    assert_eq!(fixture.chown("/d", Some(4), None).unwrap().mode, 0o6777);
    // A mode that comes with the new owner counts.
    let changes = AttrChanges {
        uid: Some(3),
        mode: Some(0o4711),
        ..AttrChanges::default()
    };
    assert_eq!(fixture.set("/d/f", changes).unwrap().mode, 0o4711);
}

#[test]
fn privileges_go_when_the_content_changes() {
    let mut fixture = with_file(0o777);
    let ino = fixture.ino("/d/f");
    let block = fixture.allocate(1)[0];
    let write = |fixture: &mut Fixture| {
        fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    };
    let truncate = |fixture: &mut Fixture| {
        fixture.truncate("/d/f", 5).unwrap();
    };
    for change in [&write as &dyn Fn(&mut Fixture), &truncate] {
        fixture.become_root();
        fixture.chmod("/d/f", 0o6777).unwrap();
        change(&mut fixture);
        assert_eq!(fixture.attr("/d/f").mode, 0o6777);
        fixture.become_user(2);
        change(&mut fixture);
        assert_eq!(fixture.attr("/d/f").mode, 0o777);
    }
}

#[test]
fn the_set_group_id_bit_of_a_directory_is_inherited() {
    let mut fixture = Fixture::new();
    fixture.make_dir("/d", 0o777).unwrap();
    fixture.chown("/d", Some(9), Some(5)).unwrap();
    fixture.chmod("/d", 0o2777).unwrap();
    fixture.become_user(1);
    let file = fixture.create("/d/f", FileKind::Regular, 0o2755).unwrap();
    // User 1 is not in group 5, so that the file does not run as it.
    assert_eq!((file.uid, file.gid, file.mode), (1, 5, 0o755));
    let below = fixture.make_dir("/d/below", 0o755).unwrap();
    assert_eq!((below.gid, below.mode), (5, 0o2755));
    let link = fixture.symlink("/d/s", b"x").unwrap();
    assert_eq!((link.gid, link.mode), (5, 0o777));
    fixture.caller = user(1, 1, &[5]);
    let file = fixture.create("/d/g", FileKind::Regular, 0o2755).unwrap();
    assert_eq!((file.gid, file.mode), (5, 0o2755));

    fixture.become_root();
    fixture.make_dir("/plain", 0o777).unwrap();
    fixture.become_user(1);
    // Without the bit: the caller's group, and mkdir sets no such bits.
    let plain = fixture.make_dir("/plain/d", 0o7777).unwrap();
    assert_eq!((plain.gid, plain.mode), (1, 0o1777));
}

#[test]
fn devices_are_for_root() {
    let mut fixture = with_file(0o644);
    for kind in [FileKind::CharDevice, FileKind::BlockDevice] {
        assert_eq!(fixture.create("/d/dev", kind, 0o600), Err(NOT_OWNER));
        assert_eq!(fixture.create("/d/f", kind, 0o600), Err(FsError::Exists));
    }
    for kind in [FileKind::Fifo, FileKind::Socket] {
        let attr = fixture.create("/d/x", kind, 0o640).unwrap();
        assert_eq!((attr.kind, attr.mode, attr.rdev), (kind, 0o640, 0));
        fixture.unlink("/d/x").unwrap();
    }
    fixture.become_root();
    let attr = fixture.create("/d/dev", FileKind::CharDevice, 0o600);
    assert_eq!(attr.map(|attr| attr.rdev), Ok(0x0102));
}

#[test]
fn times_are_for_the_owner_and_now_for_writers() {
    let to = Some(SetTime::To(Timestamp(-5)));
    let now = Some(SetTime::Now);
    // (caller, mode, atime, mtime, expected)
    let cases = [
        (1, 0o400, to, to, Ok(())),
        (1, 0o400, now, now, Ok(())),
        (0, 0o000, to, to, Ok(())),
        (2, 0o666, now, now, Ok(())),
        (2, 0o644, now, now, Err(DENIED)),
        (2, 0o666, to, None, Err(NOT_OWNER)),
        (2, 0o666, None, to, Err(NOT_OWNER)),
        (2, 0o666, now, to, Err(NOT_OWNER)),
        (2, 0o644, None, None, Ok(())),
    ];
    for (uid, mode, atime, mtime, expected) in cases {
        let mut fixture = with_file(mode);
        let before = fixture.attr("/d/f");
        fixture.become_user(uid);
        let changes = AttrChanges {
            atime,
            mtime,
            ..AttrChanges::default()
        };
        let result = fixture.set("/d/f", changes);
        assert_eq!(result.map(|_| ()), expected);
        let time = |set, before| match set {
            None => before,
            Some(SetTime::Now) => Timestamp(fixture.now),
            Some(SetTime::To(time)) => time,
        };
        let after = fixture.attr("/d/f");
        if expected.is_ok() {
            assert_eq!(after.atime, time(atime, before.atime));
            assert_eq!(after.mtime, time(mtime, before.mtime));
            let changed = atime.is_some() || mtime.is_some();
            assert_eq!(after.ctime == Timestamp(fixture.now), changed);
        } else {
            assert_eq!(after, before);
        }
    }
}

#[test]
fn who_writes_a_file_says_when() {
    let mut fixture = with_file(0o666);
    fixture.become_user(2);
    let written = Timestamp(-7);
    let mtime = Some(SetTime::To(written));
    let with_size = AttrChanges {
        size_bytes: Some(10),
        mtime,
        ..AttrChanges::default()
    };
    let through_file = AttrChanges {
        opened_for_writing: true,
        mtime,
        ..AttrChanges::default()
    };
    for changes in [with_size, through_file] {
        assert_eq!(fixture.set("/d/f", changes.clone()).unwrap().mtime, written);
        // Not so the time of access.
        let atime = mtime;
        let changes = AttrChanges { atime, ..changes };
        assert_eq!(fixture.set("/d/f", changes), Err(NOT_OWNER));
    }
}

#[test]
fn truncation_needs_write_permission_or_an_open_file() {
    let mut fixture = with_file(0o444);
    fixture.become_user(2);
    assert_eq!(fixture.truncate("/d/f", 1), Err(DENIED));
    let opened = AttrChanges {
        size_bytes: Some(10),
        opened_for_writing: true,
        ..AttrChanges::default()
    };
    let attr = fixture.set("/d/f", opened).unwrap();
    let now = Timestamp(fixture.now);
    assert_eq!((attr.size_bytes, attr.mtime, attr.ctime), (10, now, now));
    assert_eq!(fixture.truncate("/d", 1), Err(FsError::IsADirectory));
    fixture.create("/d/fifo", FileKind::Fifo, 0o666).unwrap();
    assert!(matches!(
        fixture.truncate("/d/fifo", 1),
        Err(FsError::InvalidArgument(_))
    ));
}

#[test]
fn a_failed_change_changes_nothing() {
    let mut fixture = with_file(0o666);
    fixture.become_user(2);
    let before = fixture.attr("/d/f");
    // The size may be changed, the mode may not: neither is.
    let changes = AttrChanges {
        size_bytes: Some(10),
        mode: Some(0o777),
        ..AttrChanges::default()
    };
    assert_eq!(fixture.set("/d/f", changes), Err(NOT_OWNER));
    assert_eq!(fixture.attr("/d/f"), before);
}
