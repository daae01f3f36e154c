//! Quotas of directories: what counts where, and what is refused.

use super::xattrs::ANY;
use super::*;
use crate::engine::namespace::SnapshotError;
use harvestfs_protocol::meta::StatFs;

const BYTES: &str = "user.harvestfs.quota_bytes";
const FILES: &str = "user.harvestfs.quota_files";

impl Fixture {
    fn limit(&mut self, path: &str, name: &str, quota: u64) {
        let quota = quota.to_string();
        self.set_xattr(path, name, quota.as_bytes(), ANY).unwrap();
    }

    /// Bytes and inodes below a directory.
    fn used(&self, path: &str) -> (u64, u64) {
        let number = |name: &str| self.get_xattr(path, name).unwrap().parse().unwrap();
        (
            number("user.harvestfs.used_bytes"),
            number("user.harvestfs.used_files"),
        )
    }

    /// Puts bytes at an offset of a file.
    fn put(&mut self, path: &str, offset: u64, length_bytes: u64) -> Result<Attr, FsError> {
        let block = self.allocate(1)[0];
        let ino = self.ino(path);
        self.commit(ino, &[extent(offset, length_bytes, block, 0)])
    }

    fn room(&self, path: &str) -> StatFs {
        let ino = self.ino(path);
        match self.query(&Query::StatFs(query::StatFs { ino })).unwrap() {
            MetaReply::StatFs(totals) => totals,
            other => panic!("{other:?}"),
        }
    }
}

const FULL: FsError = FsError::QuotaExceeded;

/// `/q` with a directory `/q/d` and a file `/q/d/f` of 100 bytes.
fn with_data() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.dir("/q");
    fixture.dir("/q/d");
    fixture.file("/q/d/f");
    fixture.put("/q/d/f", 0, 100).unwrap();
    fixture
}

#[test]
fn what_is_below_counts_in_every_directory_above() {
    let mut fixture = with_data();
    fixture.symlink("/q/s", b"anywhere").unwrap();
    assert_eq!(fixture.used("/q/d"), (100, 1));
    assert_eq!(fixture.used("/q"), (100, 3));
    assert_eq!(fixture.used("/"), (100, 4));
    fixture.rename("/q/d", "/d", RenameMode::Replace).unwrap();
    assert_eq!(fixture.used("/q"), (0, 1));
    assert_eq!(fixture.used("/"), (100, 4));
    fixture.truncate("/d/f", 40).unwrap();
    assert_eq!(fixture.used("/"), (40, 4));
    fixture.unlink("/d/f").unwrap();
    assert_eq!(fixture.used("/d"), (0, 0));
}

#[test]
fn bytes_are_refused_beyond_the_quota_and_not_before() {
    let mut fixture = with_data();
    fixture.limit("/q", BYTES, 150);
    assert_eq!(fixture.put("/q/d/f", 100, 51), Err(FULL));
    fixture.put("/q/d/f", 100, 50).unwrap();
    // Written over, and so no more.
    fixture.put("/q/d/f", 0, 150).unwrap();
    assert_eq!(fixture.put("/q/d/f", 1, 150), Err(FULL));
    assert_eq!(fixture.attr("/q/d/f").size_bytes, 150);
    // Pieces of one commit that hide each other count once.
    let block = fixture.allocate(1)[0];
    fixture.truncate("/q/d/f", 0).unwrap();
    let ino = fixture.ino("/q/d/f");
    let twice = [extent(0, 100, block, 0), extent(50, 100, block, 4096)];
    fixture.commit(ino, &twice).unwrap();
}

#[test]
fn blocks_are_for_what_a_quota_leaves_room_for_or_can_be_overwritten() {
    let mut fixture = with_data();
    fixture.file("/q/new");
    let room = |fixture: &Fixture, path| fixture.namespace.check_room_for_data(fixture.ino(path));
    fixture.limit("/q", BYTES, 101);
    for path in ["/q", "/q/new", "/q/d/f"] {
        assert_eq!(room(&fixture, path), Ok(()), "{path}");
    }
    fixture.limit("/q", BYTES, 100);
    for (path, expected) in [
        ("/q", Err(FULL)),
        ("/q/new", Err(FULL)),
        ("/q/d", Err(FULL)),
        ("/q/d/f", Ok(())),
        ("/", Ok(())),
    ] {
        assert_eq!(room(&fixture, path), expected, "{path}");
    }
    let nothing = fixture.namespace.check_room_for_data(InodeId(99));
    assert_eq!(nothing, Ok(()));
}

impl Fixture {
    fn release(&mut self, inodes: Vec<InodeId>) {
        let now = Timestamp(self.now);
        self.apply(&Command::ReleaseOrphans { inodes, now })
            .unwrap();
    }

    fn write(&mut self, ino: InodeId, from: u64, length: u64) -> Result<(), FsError> {
        let block = self.allocate(1)[0];
        self.commit(ino, &[extent(from, length, block, 0)])
            .map(drop)
    }
}

#[test]
fn what_has_no_name_counts_where_it_was_until_no_session_holds_it() {
    let mut fixture = with_data();
    fixture.limit("/q", BYTES, 150);
    let (file, d) = (fixture.ino("/q/d/f"), fixture.ino("/q/d"));
    fixture.held_elsewhere = true;
    fixture.unlink("/q/d/f").unwrap();
    assert_eq!(fixture.used("/q"), (100, 2));
    assert_eq!(fixture.write(file, 100, 51), Err(FULL));
    fixture.write(file, 100, 50).unwrap();
    fixture.file("/q/g");
    assert_eq!(fixture.put("/q/g", 0, 1), Err(FULL));
    // Also after its directory was removed, which is kept for that.
    fixture.held_elsewhere = false;
    fixture.remove_dir("/q/d").unwrap();
    assert_eq!(fixture.try_ino("/q/d"), Err(FsError::NotFound));
    assert!(fixture.namespace.exists(d));
    assert_eq!(fixture.namespace.orphans().collect::<Vec<_>>(), [file]);
    assert_eq!(fixture.write(file, 150, 1), Err(FULL));
    let bytes = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut &bytes[..]).unwrap();
    assert_eq!(fixture.snapshot(), bytes);
    fixture.release(vec![file]);
    assert!(!fixture.namespace.exists(d));
    assert_eq!(fixture.used("/q").0, 0);
}

#[test]
fn what_is_in_the_trash_counts_where_it_was() {
    let mut fixture = with_data();
    fixture.limit("/q", BYTES, 150);
    let before = fixture.used("/q");
    let there = fixture.trash("/q/d", 60).unwrap();
    assert_eq!(fixture.used("/q"), before);
    assert_eq!(fixture.used("/.trash/0"), (0, 0));
    fixture.file("/q/g");
    assert_eq!(fixture.put("/q/g", 0, 51), Err(FULL));
    fixture.unlink("/q/g").unwrap();
    // In the trash it can shrink and grow; what leaves the trash counts at its new place.
    assert_eq!(fixture.put(&format!("{there}/f"), 100, 51), Err(FULL));
    fixture.dir("/elsewhere");
    let taken = fixture.rename(&format!("{there}/f"), "/elsewhere/f", RenameMode::Replace);
    taken.unwrap();
    assert_eq!(fixture.used("/elsewhere"), (100, 1));
    assert_eq!(fixture.used("/q").0, 0);
    fixture
        .rename("/elsewhere/f", "/q/f", RenameMode::Replace)
        .unwrap();
    let file = fixture.trash("/q/f", 60).unwrap();
    assert_eq!(fixture.used("/q").0, 100);
    fixture.unlink(&file).unwrap();
    assert_eq!(fixture.used("/q").0, 0);
}

#[test]
fn directories_do_not_count_in_each_other() {
    let mut fixture = with_data();
    let there = fixture.trash("/q/d", 60).unwrap();
    // It counts in `/q`, which can so not be below it.
    let moved = fixture.rename("/q", &format!("{there}/q"), RenameMode::Replace);
    assert!(
        matches!(moved, Err(FsError::InvalidArgument(_))),
        "{moved:?}"
    );
    fixture.rename(&there, "/d", RenameMode::Replace).unwrap();
    fixture.rename("/q", "/d/q", RenameMode::Replace).unwrap();
}

#[test]
fn a_directory_that_is_replaced_by_what_counted_in_it_is_gone() {
    let mut fixture = with_data();
    let there = fixture.trash("/q/d", 60).unwrap();
    let q = fixture.ino("/q");
    fixture.limit("/", FILES, 4);
    fixture.rename(&there, "/q", RenameMode::Replace).unwrap();
    assert!(!fixture.namespace.exists(q));
    assert_eq!(fixture.list("/q"), ["f"]);
}

#[test]
fn inodes_are_refused_beyond_the_quota_and_not_before() {
    let mut fixture = with_data();
    fixture.limit("/q", FILES, 3);
    fixture.file("/q/g");
    assert_eq!(fixture.make_dir("/q/d/e", 0o755), Err(FULL));
    assert_eq!(fixture.symlink("/q/s", b"x"), Err(FULL));
    assert_eq!(fixture.create("/q/h", FileKind::Fifo, 0o600), Err(FULL));
    // Another name is not another inode.
    fixture.link("/q/g", "/q/d/g").unwrap();
    fixture.unlink("/q/d/f").unwrap();
    fixture.file("/q/h");
}

#[test]
fn a_lower_quota_refuses_growth_and_nothing_else() {
    let mut fixture = with_data();
    fixture.limit("/q", BYTES, 10);
    fixture.limit("/q", FILES, 0);
    assert_eq!(fixture.put("/q/d/f", 100, 1), Err(FULL));
    fixture.put("/q/d/f", 0, 100).unwrap();
    fixture
        .rename("/q/d/f", "/q/f", RenameMode::Replace)
        .unwrap();
    fixture.truncate("/q/f", 1000).unwrap();
    fixture.remove_dir("/q/d").unwrap();
    fixture.remove_xattr("/q", BYTES).unwrap();
    fixture.put("/q/f", 100, 1).unwrap();
    assert_eq!(fixture.create("/q/x", FileKind::Regular, FILE), Err(FULL));
}

#[test]
fn a_rename_into_a_quota_needs_room_there() {
    let mut fixture = with_data();
    fixture.dir("/small");
    fixture.limit("/small", BYTES, 99);
    let into = |fixture: &mut Fixture, mode| fixture.rename("/q/d", "/small/d", mode);
    assert_eq!(into(&mut fixture, RenameMode::Replace), Err(FULL));
    assert_eq!(fixture.used("/q"), (100, 2));
    fixture.truncate("/q/d/f", 99).unwrap();
    into(&mut fixture, RenameMode::Replace).unwrap();
    assert_eq!(fixture.used("/small"), (99, 2));
    assert_eq!(fixture.used("/q"), (0, 0));
    // Exchanged for something smaller, and back.
    fixture.file("/q/g");
    fixture.put("/q/g", 0, 100).unwrap();
    let exchange = RenameMode::Exchange;
    assert_eq!(fixture.rename("/q/g", "/small/d/f", exchange), Err(FULL));
    fixture.truncate("/q/g", 5).unwrap();
    fixture.rename("/q/g", "/small/d/f", exchange).unwrap();
    assert_eq!(fixture.used("/small"), (5, 2));
    fixture.rename("/q/g", "/small/d/f", exchange).unwrap();
    assert_eq!(fixture.used("/q"), (5, 1));
}

#[test]
fn a_file_with_several_names_counts_in_the_first_directory() {
    let mut fixture = with_data();
    fixture.dir("/later");
    fixture.link("/q/d/f", "/later/f").unwrap();
    assert_eq!(fixture.used("/later"), (0, 0));
    fixture.unlink("/q/d/f").unwrap();
    assert_eq!(fixture.used("/q"), (0, 1));
    assert_eq!(fixture.used("/later"), (100, 1));
    fixture.link("/later/f", "/q/d/back").unwrap();
    assert_eq!(fixture.used("/q"), (100, 2));
    assert_eq!(fixture.used("/later"), (0, 0));
    // A removal is never refused, even when the file counts elsewhere from then on.
    fixture.limit("/later", BYTES, 1);
    fixture.unlink("/q/d/back").unwrap();
    assert_eq!(fixture.used("/later"), (100, 1));
}

#[test]
fn a_file_that_counts_in_the_directory_that_it_is_exchanged_for_counts_once() {
    // The invariants are checked after each step.
    for (from, to) in [("/a/f", "/d"), ("/d", "/a/f")] {
        let mut fixture = Fixture::new();
        fixture.dir("/d");
        fixture.dir("/a");
        fixture.file("/d/f");
        fixture.put("/d/f", 0, 100).unwrap();
        fixture.link("/d/f", "/a/f").unwrap();
        fixture.limit("/a", FILES, 1);
        fixture.limit("/a", BYTES, 0);
        fixture.rename(from, to, RenameMode::Exchange).unwrap();
        assert_eq!(fixture.used("/a"), (0, 1));
    }
}

#[test]
fn a_clone_counts_as_much_as_its_source() {
    let mut fixture = with_data();
    fixture.limit("/q", BYTES, 180);
    let copy = fixture.file("/q/copy");
    let source = fixture.ino("/q/d/f");
    let clone = |length_bytes| {
        Mutation::CloneRange(mutation::CloneRange {
            source,
            source_offset: 0,
            destination: copy,
            destination_offset: 0,
            length_bytes,
        })
    };
    assert_eq!(fixture.change(clone(81)), Err(FULL));
    fixture.change(clone(80)).unwrap();
    fixture.change(clone(80)).unwrap();
    assert_eq!(fixture.used("/q"), (180, 3));
}

#[test]
fn only_root_sets_quotas_and_only_on_directories() {
    let mut fixture = with_data();
    let path = "/q/d/f";
    assert_eq!(
        fixture.set_xattr(path, BYTES, b"1", ANY),
        Err(FsError::NotADirectory)
    );
    for bad in ["", "-1", "1k", "99999999999999999999"] {
        let answer = fixture.set_xattr("/q", BYTES, bad.as_bytes(), ANY);
        assert!(matches!(answer, Err(FsError::InvalidArgument(_))), "{bad}");
    }
    for name in ["used_bytes", "used_files"] {
        let name = format!("user.harvestfs.{name}");
        let answer = fixture.set_xattr("/q", &name, b"1", ANY);
        assert_eq!(answer, Err(FsError::NotPermitted));
        assert_eq!(fixture.get_xattr(path, &name), Err(FsError::NoAttribute));
    }
    fixture.limit("/q", BYTES, 7);
    fixture.chown("/q", Some(1), None).unwrap();
    fixture.become_user(1);
    assert_eq!(fixture.get_xattr("/q", BYTES).unwrap(), "7");
    assert_eq!(
        fixture.set_xattr("/q", BYTES, b"8", ANY),
        Err(FsError::NotPermitted)
    );
    assert_eq!(
        fixture.remove_xattr("/q", BYTES),
        Err(FsError::NotPermitted)
    );
}

#[test]
fn the_nearest_quota_is_the_total_and_the_tightest_leaves_the_rest() {
    let mut fixture = with_data();
    assert_eq!(fixture.room("/q").total_bytes, u64::MAX);
    fixture.limit("/", BYTES, 110);
    fixture.limit("/q", BYTES, 1_000);
    fixture.limit("/q", FILES, 5);
    let room = fixture.room("/q/d/f");
    assert_eq!((room.total_bytes, room.free_bytes), (1_000, 10));
    assert_eq!((room.total_inodes, room.free_inodes), (5, 3));
    assert_eq!(fixture.room("/").total_bytes, 110);
}

#[test]
fn a_snapshot_has_quotas_and_those_of_versions_before_are_read() {
    let mut fixture = with_data();
    for version in [1, 2] {
        let mut old = fixture.snapshot();
        old[8] = version;
        let read = Namespace::read_snapshot(&mut &old[..]).unwrap();
        assert_eq!(snapshot(&read), fixture.snapshot());
    }
    fixture.limit("/q", BYTES, 100);
    fixture.link("/q/d/f", "/q/f").unwrap();
    let bytes = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut &bytes[..]).unwrap();
    assert_eq!(fixture.snapshot(), bytes);
    assert_eq!(fixture.used("/q"), (100, 2));
    assert_eq!(fixture.put("/q/d/f", 100, 1), Err(FULL));
    let mut newer = bytes;
    newer[8] = 5;
    let read = Namespace::read_snapshot(&mut &newer[..]);
    assert!(matches!(read, Err(SnapshotError::Version(_))));
}
