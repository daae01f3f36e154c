//! Editions: commands of earlier releases are replayed by their rules, then the state is converted.

use harvestfs_protocol::meta::FallocateMode;

use super::xattrs::ANY;
use super::*;
use crate::engine::namespace::SnapshotError;

const QUOTA_BYTES: &str = "user.harvestfs.quota_bytes";

/// The state that an earlier release left: two users' files in the trash, a file without a name, and one in
/// a directory that was removed.
fn of_before() -> (Fixture, [InodeId; 4]) {
    let mut fixture = Fixture::before_editions();
    fixture.dir("/d");
    fixture.dir("/d/sub");
    fixture.chmod("/d", 0o777).unwrap();
    fixture.chmod("/d/sub", 0o777).unwrap();
    let of_root = fixture.file("/d/root");
    fixture.become_user(1);
    let of_user = fixture
        .create("/d/user", FileKind::Regular, FILE)
        .unwrap()
        .ino;
    fixture.become_user(0);
    let nameless = fixture.file("/d/nameless");
    let gone = fixture.file("/d/sub/gone");
    for ino in [of_root, of_user, nameless, gone] {
        let block = fixture.allocate(1)[0];
        fixture.commit(ino, &[extent(0, 10, block, 0)]).unwrap();
    }
    for (name, parent) in [("root", "/d"), ("user", "/d")] {
        let parent = fixture.ino(parent);
        let removal = Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent,
            name: super::name(name),
            retention_s: 60,
        });
        fixture.remove(removal).unwrap();
    }
    fixture.held_elsewhere = true;
    fixture.unlink("/d/nameless").unwrap();
    fixture.unlink("/d/sub/gone").unwrap();
    fixture.held_elsewhere = false;
    fixture.remove_dir("/d/sub").unwrap();
    (fixture, [of_root, of_user, nameless, gone])
}

fn used_bytes(fixture: &Fixture, path: &str) -> String {
    fixture
        .get_xattr(path, "user.harvestfs.used_bytes")
        .unwrap()
}

#[test]
fn what_was_before_an_edition_is_as_it_was_then() {
    let (mut fixture, [of_root, of_user, nameless, _]) = of_before();
    assert_eq!(fixture.attr("/.trash").mode, 0o1777);
    assert_eq!(
        fixture.ino(&format!("/.trash/{:016x}-user", of_user.0)),
        of_user
    );
    assert_eq!(
        fixture.ino(&format!("/.trash/{:016x}-root", of_root.0)),
        of_root
    );
    assert_eq!(
        (used_bytes(&fixture, "/d"), used_bytes(&fixture, "/.trash")),
        ("0".into(), "20".into())
    );
    // A file without a name counts nowhere, so no quota stops it.
    fixture.set_xattr("/", QUOTA_BYTES, b"20", ANY).unwrap();
    let block = fixture.allocate(1)[0];
    fixture
        .commit(nameless, &[extent(10, 500, block, 0)])
        .unwrap();
}

#[test]
fn an_edition_gives_the_trash_to_its_users_and_counts_what_has_no_name() {
    let (mut fixture, [of_root, of_user, nameless, gone]) = of_before();
    let of_before = fixture.snapshot();
    fixture.apply(&edition_command()).unwrap();
    assert_eq!(fixture.namespace.edition(), EDITION);
    assert_eq!(fixture.list("/.trash"), ["0", "1"]);
    assert_eq!(
        fixture.ino(&format!("/.trash/1/{:016x}-user", of_user.0)),
        of_user
    );
    assert_eq!(
        fixture.ino(&format!("/.trash/0/{:016x}-root", of_root.0)),
        of_root
    );
    // The origin of the entries in the trash is not known; files without a name count where they were, or
    // at the root.
    let counts = ["/d", "/.trash", "/"].map(|path| used_bytes(&fixture, path));
    assert_eq!(counts, ["10", "20", "40"]);
    fixture.set_xattr("/d", QUOTA_BYTES, b"10", ANY).unwrap();
    let block = fixture.allocate(1)[0];
    let more = fixture.commit(nameless, &[extent(10, 1, block, 0)]);
    assert_eq!(more.map(drop), Err(FsError::QuotaExceeded));
    let now = Timestamp(fixture.now);
    let inodes = vec![nameless, gone];
    fixture
        .apply(&Command::ReleaseOrphans { inodes, now })
        .unwrap();
    assert_eq!(used_bytes(&fixture, "/"), "20");
    let expired: Vec<_> = fixture
        .namespace
        .expired_trash(Timestamp(i64::MAX))
        .collect();
    fixture
        .apply(&Command::PurgeTrash {
            inodes: expired,
            now,
        })
        .unwrap();
    let inodes = fixture.namespace.orphans().collect();
    fixture
        .apply(&Command::ReleaseOrphans { inodes, now })
        .unwrap();
    assert_eq!(used_bytes(&fixture, "/"), "0");

    // The snapshot that the earlier release wrote is read as such.
    let mut of_7 = of_before.clone();
    of_7[8] = 7;
    let read = Namespace::read_snapshot(&mut &of_7[..]).unwrap();
    assert_eq!(read.edition(), 0);
}

/// Later records of the journal name the directories by their inodes.
#[test]
fn an_edition_makes_the_directories_of_users_in_the_order_of_what_they_removed() {
    let mut fixture = Fixture::before_editions();
    fixture.dir("/d");
    fixture.chmod("/d", 0o777).unwrap();
    fixture.become_user(2);
    fixture.create("/d/of-2", FileKind::Regular, FILE).unwrap();
    fixture.become_user(1);
    fixture.create("/d/of-1", FileKind::Regular, FILE).unwrap();
    fixture.become_user(0);
    let parent = fixture.ino("/d");
    for name in ["of-1", "of-2"] {
        let removal = Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent,
            name: super::name(name),
            retention_s: 60,
        });
        fixture.remove(removal).unwrap();
    }
    fixture.apply(&edition_command()).unwrap();
    let [of_1, of_2] = ["/.trash/1", "/.trash/2"].map(|path| fixture.ino(path));
    assert!(of_2.0 < of_1.0, "{of_2} {of_1}");
}

/// The directories of users come on top of the entries of the trash: if they were refused, the namenode
/// would never start again.
#[test]
fn an_edition_begins_also_where_quotas_are_used_up() {
    let (mut fixture, [_, of_user, ..]) = of_before();
    for path in ["/.trash", "/"] {
        let used = fixture
            .get_xattr(path, "user.harvestfs.used_files")
            .unwrap();
        fixture
            .set_xattr(path, "user.harvestfs.quota_files", used.as_bytes(), ANY)
            .unwrap();
        let bytes = used_bytes(&fixture, path);
        fixture
            .set_xattr(path, QUOTA_BYTES, bytes.as_bytes(), ANY)
            .unwrap();
    }
    // As in a replay: the earlier commands, from a snapshot, and then the edition.
    let bytes = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut &bytes[..]).unwrap();
    fixture.apply(&edition_command()).unwrap();
    assert_eq!(
        fixture.ino(&format!("/.trash/1/{:016x}-user", of_user.0)),
        of_user
    );
    // From here on they limit as ever.
    let more = fixture.create("/more", FileKind::Regular, FILE);
    assert_eq!(more.map(drop), Err(FsError::QuotaExceeded));
}

#[test]
fn an_edition_that_is_not_known_or_not_later_is_refused() {
    let mut fixture = Fixture::new();
    for edition in [0, EDITION, EDITION + 1] {
        let now = Timestamp(9);
        let refused = fixture.apply(&Command::BeginEdition { edition, now });
        assert!(matches!(refused, Err(FsError::Internal(_))), "{refused:?}");
    }
    let known = fixture.snapshot();
    fixture.namespace.edition = EDITION + 1;
    let newer = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut &known[..]).unwrap();
    let read = Namespace::read_snapshot(&mut &newer[..]);
    assert!(matches!(read, Err(SnapshotError::Damaged(_))));
}

#[test]
fn allocating_is_writing_only_since_an_edition() {
    for (mut fixture, left) in [
        (Fixture::before_editions(), 0o6777),
        (Fixture::new(), 0o777),
    ] {
        let file = fixture.file("/f");
        fixture.chmod("/f", 0o6777).unwrap();
        fixture.become_user(1);
        fixture
            .change(Mutation::Fallocate(mutation::Fallocate {
                ino: file,
                offset: 0,
                length_bytes: 10,
                mode: FallocateMode::AllocateKeepSize,
            }))
            .unwrap();
        assert_eq!(fixture.attr("/f").mode, left);
    }
}
