//! The trash: how files enter and leave it, and what no user may do to it.

use super::xattrs::ANY;
use super::*;
use crate::engine::namespace::trash::Trashed;

const TRASH_S: &str = "user.harvestfs.trash_s";
const ORIGIN: &str = "user.harvestfs.trash_origin";

impl Fixture {
    /// Removes to the trash; gives the path there.
    pub fn trash(&mut self, path: &str, retention_s: u32) -> Result<String, FsError> {
        let (parent, name) = self.place(path);
        let removed = self.remove(Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent,
            name: name.clone(),
            retention_s,
        }))?;
        let ino = removed.unwrap().ino;
        let uid = self.caller.uid;
        Ok(format!("/.trash/{uid}/{:016x}-{name}", ino.0))
    }

    fn purge(&mut self, inodes: Vec<InodeId>) {
        self.now += 1;
        let now = Timestamp(self.now);
        let purge = Command::PurgeTrash { inodes, now };
        assert_eq!(self.apply(&purge), Ok(Outcome::Done));
    }

    fn expired(&self, now: i64) -> Vec<InodeId> {
        self.namespace.expired_trash(Timestamp(now)).collect()
    }

    fn trashed(&self, ino: InodeId) -> Option<&Trashed> {
        self.namespace.trash.get(ino)
    }
}

/// `/d/f` with data, and `/d/sub/g`.
fn with_tree() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.dir("/d/sub");
    fixture.file("/d/sub/g");
    let file = fixture.file("/d/f");
    let block = fixture.allocate(1)[0];
    fixture.commit(file, &[extent(0, 9, block, 0)]).unwrap();
    fixture
}

#[test]
fn a_file_comes_back_with_its_data() {
    let mut fixture = with_tree();
    let file = fixture.ino("/d/f");
    let before = fixture.extents(file);
    let there = fixture.trash("/d/f", 60).unwrap();
    assert_eq!(fixture.try_ino("/d/f"), Err(FsError::NotFound));
    assert_eq!(fixture.ino(&there), file);
    assert_eq!(fixture.get_xattr(&there, ORIGIN).unwrap(), "/d/f");
    fixture
        .rename(&there, "/d/f", RenameMode::NoReplace)
        .unwrap();
    assert_eq!(fixture.ino("/d/f"), file);
    assert_eq!(fixture.extents(file), before);
    assert_eq!(fixture.trashed(file), None);
    assert_eq!(fixture.get_xattr("/d/f", ORIGIN), Err(FsError::NoAttribute));
}

#[test]
fn a_tree_goes_as_one_and_comes_back_as_one() {
    let mut fixture = with_tree();
    let there = fixture.trash("/d", 60).unwrap();
    assert_eq!(fixture.list("/"), [".trash"]);
    assert_eq!(fixture.list(&format!("{there}/sub")), ["g"]);
    assert_eq!(fixture.get_xattr(&there, ORIGIN).unwrap(), "/d");
    fixture
        .rename(&there, "/again", RenameMode::NoReplace)
        .unwrap();
    assert_eq!(fixture.list("/again"), ["f", "sub"]);
}

#[test]
fn unlink_keeps_the_last_name_where_a_directory_asks_for_it() {
    let mut fixture = with_tree();
    fixture.set_xattr("/d", TRASH_S, b"60", ANY).unwrap();
    fixture.link("/d/f", "/d/also").unwrap();
    fixture.unlink("/d/also").unwrap();
    assert_eq!(fixture.try_ino("/.trash"), Err(FsError::NotFound));
    let file = fixture.ino("/d/f");
    let kept = fixture.unlink("/d/f").unwrap().unwrap();
    assert_eq!((kept.ino, kept.nlink), (file, 1));
    let deeper = fixture.ino("/d/sub/g");
    fixture.unlink("/d/sub/g").unwrap();
    assert!(fixture.trashed(deeper).is_some(), "inherited");
    // In the trash, a removal is one.
    let name = format!("/.trash/0/{:016x}-f", file.0);
    assert_eq!(fixture.unlink(&name).unwrap().unwrap().nlink, 0);
    // A directory below can say no.
    fixture.set_xattr("/d/sub", TRASH_S, b"0", ANY).unwrap();
    fixture.file("/d/sub/h");
    assert_eq!(fixture.unlink("/d/sub/h").unwrap().unwrap().nlink, 0);
    fixture.remove_xattr("/d/sub", TRASH_S).unwrap();
    fixture.remove_xattr("/d", TRASH_S).unwrap();
    fixture.file("/d/sub/h");
    assert_eq!(fixture.unlink("/d/sub/h").unwrap().unwrap().nlink, 0);
}

#[test]
fn what_expired_is_purged_and_its_blocks_are_freed() {
    let mut fixture = with_tree();
    let block = fixture.extents(fixture.ino("/d/f"))[0].block;
    fixture.seal(block, 9).unwrap();
    let tree = fixture.ino("/d");
    fixture.trash("/d", 2).unwrap();
    let second = 1_000_000_000;
    assert_eq!(fixture.expired(second), []);
    assert_eq!(fixture.expired(3 * second), [tree]);
    fixture.purge(vec![tree, InodeId(77), InodeId::ROOT]);
    assert_eq!(fixture.list("/.trash/0"), [""; 0]);
    let orphans: Vec<_> = fixture.namespace.orphans().collect();
    assert_eq!(orphans.len(), 4, "two files, two directories");
    let now = Timestamp(fixture.now);
    let release = Command::ReleaseOrphans {
        inodes: orphans,
        now,
    };
    fixture.apply(&release).unwrap();
    assert_eq!(
        changes_of(&fixture.effects, block),
        [BlockChange::Freed { block }]
    );
    assert_eq!(fixture.expired(i64::MAX), []);
}

#[test]
fn a_large_tree_is_purged_in_steps() {
    let mut fixture = Fixture::new();
    let tree = fixture.dir("/t");
    for number in 0..1_500 {
        fixture.file(&format!("/t/{number}"));
    }
    fixture.trash("/t", 0).unwrap();
    fixture.purge(vec![tree]);
    assert_eq!(fixture.namespace.orphans().count(), 1_024);
    assert_eq!(fixture.expired(i64::MAX), [tree]);
    fixture.purge(vec![tree]);
    assert_eq!(fixture.namespace.orphans().count(), 1_501);
}

#[test]
fn the_trash_stays_where_it_is_and_takes_removals_only() {
    let mut fixture = with_tree();
    let there = fixture.trash("/d/f", 60).unwrap();
    let forbidden = Err(FsError::NotPermitted);
    assert_eq!(
        fixture.create("/.trash/x", FileKind::Fifo, FILE),
        forbidden.clone()
    );
    let forbidden = forbidden.map(|_: Attr| None);
    let replace = RenameMode::Replace;
    assert_eq!(fixture.rename("/d/sub", "/.trash/x", replace), forbidden);
    assert_eq!(fixture.rename("/.trash", "/x", replace), forbidden);
    let again = fixture.trash(&there, 60);
    assert!(
        matches!(again, Err(FsError::InvalidArgument(_))),
        "{again:?}"
    );
    assert_eq!(fixture.trash("/.trash", 60), Err(FsError::NotPermitted));
    fixture.unlink(&there).unwrap();
    assert_eq!(fixture.remove_dir("/.trash/0"), forbidden);
    let moved = fixture.rename("/.trash/0", "/x", replace);
    assert_eq!(moved, forbidden);
}

#[test]
fn removing_to_the_trash_and_taking_out_again_needs_the_right_to_remove() {
    let mut fixture = with_tree();
    fixture.chmod("/d", 0o1777).unwrap();
    fixture.become_user(1);
    assert_eq!(fixture.trash("/d/f", 60), Err(FsError::NotPermitted));
    fixture.create("/d/mine", FileKind::Regular, FILE).unwrap();
    let mine = fixture.trash("/d/mine", 60).unwrap();
    fixture.become_user(2);
    let take = fixture.rename(&mine, "/d/yours", RenameMode::Replace);
    assert_eq!(take, Err(FsError::PermissionDenied));
    fixture.become_user(1);
    fixture
        .rename(&mine, "/d/mine", RenameMode::Replace)
        .unwrap();
}

#[test]
fn where_the_trash_cannot_be_made_a_removal_removes() {
    let mut fixture = with_tree();
    fixture.set_xattr("/d", TRASH_S, b"60", ANY).unwrap();
    // One more inode could be added, and two are needed.
    let limit = "user.harvestfs.quota_files";
    fixture.set_xattr("/", limit, b"5", ANY).unwrap();
    assert_eq!(fixture.trash("/d/f", 60), Err(FsError::QuotaExceeded));
    assert_eq!(fixture.try_ino("/.trash"), Err(FsError::NotFound));
    assert_eq!(fixture.unlink("/d/f").unwrap().unwrap().nlink, 0);
}

#[test]
fn the_trash_of_each_user_is_theirs() {
    let mut fixture = with_tree();
    fixture.chmod("/d", 0o777).unwrap();
    fixture.become_user(1);
    fixture.create("/d/open", FileKind::Regular, FILE).unwrap();
    let open = fixture.trash("/d/open", 60).unwrap();
    let (part, name) = fixture.place(&open);
    let look = Query::Lookup(query::Lookup { parent: part, name });
    fixture.query(&look).unwrap();
    fixture.become_user(2);
    assert_eq!(fixture.query(&look), Err(FsError::PermissionDenied));
    // The user that removes a file has it, also when another one owned it.
    let of_root = fixture.trash("/d/f", 60).unwrap();
    let (part, name) = fixture.place(&of_root);
    let look = Query::Lookup(query::Lookup { parent: part, name });
    fixture.query(&look).unwrap();
    fixture.become_user(1);
    assert_eq!(fixture.query(&look), Err(FsError::PermissionDenied));
    fixture.become_user(0);
    let parts = fixture.list("/.trash");
    assert_eq!(parts, ["1", "2"]);
    for (part, uid) in [("/.trash/1", 1), ("/.trash/2", 2)] {
        let attr = fixture.attr(part);
        assert_eq!((attr.mode, attr.uid), (0o700, uid));
    }
    assert_eq!(fixture.attr("/.trash").mode, 0o755);
}

#[test]
fn a_file_with_names_in_the_trash_of_two_users_is_with_whom_removed_it_first() {
    let mut fixture = with_tree();
    fixture.chmod("/d", 0o777).unwrap();
    fixture.link("/d/f", "/d/also").unwrap();
    let file = fixture.ino("/d/f");
    fixture.become_user(1);
    let there = fixture.trash("/d/f", 60).unwrap();
    fixture.become_user(2);
    fixture.trash("/d/also", 60).unwrap();
    fixture.become_user(0);
    assert_eq!(fixture.ino(&there), file);
    assert_eq!(fixture.list("/.trash/2"), [""; 0]);
    assert_eq!(fixture.attr(&there).nlink, 1);
    fixture.purge(vec![file]);
    assert_eq!(fixture.list("/.trash/1"), [""; 0]);
}

#[test]
fn another_user_does_not_shorten_what_is_in_the_trash() {
    let mut fixture = with_tree();
    fixture.chmod("/d", 0o777).unwrap();
    fixture.link("/d/f", "/d/also").unwrap();
    fixture.link("/d/f", "/d/too").unwrap();
    let file = fixture.ino("/d/f");
    fixture.become_user(1);
    fixture.trash("/d/f", 60).unwrap();
    let before = fixture.trashed(file).cloned();
    let removal = |fixture: &Fixture, path, retention_s| {
        let (parent, name) = fixture.place(path);
        let op = Mutation::RemoveToTrash(mutation::RemoveToTrash {
            parent,
            name,
            retention_s,
        });
        let now = Timestamp(fixture.now);
        fixture.namespace.to_carry_out(&fixture.caller, op, now)
    };
    let by_themselves = removal(&fixture, "/d/also", 0);
    assert!(matches!(by_themselves, Mutation::RemoveToTrash(_)));
    fixture.become_user(2);
    let longer = removal(&fixture, "/d/also", 600);
    assert!(matches!(longer, Mutation::RemoveToTrash(_)));
    let shorter = removal(&fixture, "/d/also", 0);
    let attr = fixture.remove(shorter).unwrap().unwrap();
    assert_eq!((attr.ino, attr.nlink), (file, 2));
    assert_eq!(fixture.try_ino("/d/also"), Err(FsError::NotFound));
    assert_eq!(fixture.trashed(file).cloned(), before);
}

#[test]
fn something_else_of_its_name_is_left_alone() {
    let mut fixture = with_tree();
    fixture.file("/.trash");
    let refused = fixture.trash("/d/f", 60);
    assert!(
        matches!(refused, Err(FsError::InvalidArgument(_))),
        "{refused:?}"
    );
    fixture.ino("/d/f");
}

/// A file that counts through another of its names does not keep the directory that it was removed from.
#[test]
fn what_was_removed_from_a_directory_that_is_gone_counts_in_the_trash() {
    let mut fixture = Fixture::new();
    fixture.dir("/c");
    fixture.file("/f");
    fixture.link("/f", "/c/f").unwrap();
    let ino = fixture.ino("/f");
    // Makes the directory of the user, which is younger than the others.
    fixture.trash("/c/f", 60).unwrap();
    fixture.remove_dir("/c").unwrap();
    for path in ["/d", "/e"] {
        fixture.dir(path);
    }
    fixture.rename("/f", "/d/f", RenameMode::Replace).unwrap();
    fixture.unlink("/d/f").unwrap();
    let bytes = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut &bytes[..]).unwrap();
    fixture.now += 1_000_000_000_000;
    fixture.purge(vec![ino]);
    let now = Timestamp(fixture.now);
    let release = Command::ReleaseOrphans {
        inodes: vec![ino],
        now,
    };
    fixture.apply(&release).unwrap();
    assert!(!fixture.namespace.exists(ino));
}
