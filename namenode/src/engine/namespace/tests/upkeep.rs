//! Timed work on files: raising replication, ending lifetimes.

use super::xattrs::ANY;
use super::*;

const REPLICATION: &str = "user.harvestfs.replication";
const RAISE: &str = "user.harvestfs.raise_replication";
const AFTER: &str = "user.harvestfs.raise_after_s";
const LIFETIME: &str = "user.harvestfs.lifetime_s";
const SECOND: i64 = 1_000_000_000;

impl Fixture {
    fn due(&self, now: i64) -> Vec<InodeId> {
        let (due, next) = self
            .namespace
            .due_raises(Timestamp(now), InodeId(0), usize::MAX);
        assert_eq!(next, None);
        due
    }

    /// Carries out the work that is due at a time.
    fn keep_up(&mut self, now: i64) {
        let inodes = self.due(now);
        let now = Timestamp(now);
        self.apply(&Command::RaiseReplication { inodes, now })
            .unwrap();
        let first = (InodeId(0), None);
        let (entries, _) = self.namespace.expired_entries(now, &first, usize::MAX);
        self.apply(&Command::RemoveExpired { entries, now })
            .unwrap();
    }
}

#[test]
fn a_file_gets_its_last_replicas_some_time_after_its_last_change() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    for (name, value) in [(REPLICATION, "1"), (RAISE, "3"), (AFTER, "10")] {
        fixture
            .set_xattr("/d", name, value.as_bytes(), ANY)
            .unwrap();
    }
    let f = fixture.file("/d/f");
    assert_eq!(fixture.get_xattr("/d/f", RAISE).unwrap(), "3");
    let block = fixture.allocate(1)[0];
    fixture.commit(f, &[extent(0, 100, block, 0)]).unwrap();
    let changed = fixture.now;
    let replicas = |fixture: &Fixture| fixture.namespace.block(block).unwrap().rules.replication;
    assert_eq!(replicas(&fixture), 1);
    assert_eq!(fixture.due(changed + 10 * SECOND - 1), []);
    fixture.keep_up(changed + 10 * SECOND);
    assert_eq!(replicas(&fixture), 3);
    assert_eq!(fixture.get_xattr("/d/f", REPLICATION).unwrap(), "3");
    assert_eq!(
        fixture.get_xattr("/d/f", RAISE),
        Err(FsError::NoAttribute),
        "it is done"
    );
    assert_eq!(fixture.due(i64::MAX), []);
}

#[test]
fn only_what_has_fewer_replicas_is_raised_and_a_minute_later_unless_set() {
    let mut fixture = Fixture::new();
    fixture.file("/f");
    fixture.set_xattr("/f", RAISE, b"2", ANY).unwrap();
    assert_eq!(fixture.due(i64::MAX), [], "it has three");
    fixture.set_xattr("/f", REPLICATION, b"1", ANY).unwrap();
    let f = fixture.ino("/f");
    assert_eq!(fixture.due(fixture.now + 60 * SECOND - 1), []);
    assert_eq!(fixture.due(fixture.now + 60 * SECOND), [f]);
    fixture.unlink("/f").unwrap();
    assert_eq!(fixture.due(i64::MAX), []);
}

#[test]
fn raised_replicas_and_lifetimes_are_in_the_state_as_bytes() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.file("/d/f");
    fixture.set_xattr("/d/f", REPLICATION, b"1", ANY).unwrap();
    for (path, name) in [("/d/f", RAISE), ("/d", AFTER), ("/d", LIFETIME)] {
        fixture.set_xattr(path, name, b"9", ANY).unwrap();
    }
    let bytes = fixture.snapshot();
    fixture.namespace = Namespace::read_snapshot(&mut bytes.as_slice()).unwrap();
    assert!(fixture.snapshot() == bytes);
    for (path, name) in [("/d/f", RAISE), ("/d", AFTER), ("/d", LIFETIME)] {
        assert_eq!(fixture.get_xattr(path, name).unwrap(), "9");
    }
    assert_eq!(fixture.due(i64::MAX), [fixture.ino("/d/f")]);
}

#[test]
fn what_has_outlived_its_lifetime_goes_as_one() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.set_xattr("/d", LIFETIME, b"10", ANY).unwrap();
    fixture.dir("/d/tree");
    fixture.file("/d/tree/below");
    fixture.file("/d/.lock");
    let made = fixture.now;
    fixture.now += 5 * SECOND;
    fixture.file("/d/later");
    fixture.keep_up(made + 10 * SECOND - 2);
    assert_eq!(fixture.list("/d"), [".lock", "later", "tree"]);
    fixture.keep_up(made + 10 * SECOND);
    assert_eq!(fixture.list("/d"), [".lock", "later"]);
    let expired: Vec<_> = fixture
        .namespace
        .expired_trash(Timestamp(made + 10 * SECOND))
        .collect();
    assert_eq!(expired.len(), 1, "the tree, which is purged in steps");
    // A change counts.
    fixture.chmod("/d/later", 0o600).unwrap();
    fixture.keep_up(fixture.now + 10 * SECOND - 1);
    assert_eq!(fixture.list("/d"), [".lock", "later"]);
    fixture.keep_up(fixture.now + 10 * SECOND);
    assert_eq!(fixture.list("/d"), [".lock"]);
}

#[test]
fn a_search_goes_on_where_it_was() {
    let mut fixture = Fixture::new();
    for dir in ["/a", "/b"] {
        fixture.dir(dir);
        fixture.set_xattr(dir, LIFETIME, b"1", ANY).unwrap();
        for name in ["x", "y", "z"] {
            fixture.file(&format!("{dir}/{name}"));
        }
    }
    let mut found = Vec::new();
    let mut from = Some((InodeId(0), None));
    let mut searches = 0;
    while let Some(cursor) = from {
        let now = Timestamp(i64::MAX);
        let (some, next) = fixture.namespace.expired_entries(now, &cursor, 2);
        assert!(some.len() <= 2);
        found.extend(some);
        from = next;
        searches += 1;
    }
    assert_eq!((found.len(), searches), (6, 3));
}

#[test]
fn bad_lifetimes_are_refused() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.file("/f");
    for name in [LIFETIME, AFTER] {
        for bad in ["0", "-1", "1h", ""] {
            let refused = fixture.set_xattr("/d", name, bad.as_bytes(), ANY);
            assert!(
                matches!(refused, Err(FsError::InvalidArgument(_))),
                "{name}={bad}: {refused:?}"
            );
        }
    }
    assert_eq!(
        fixture.set_xattr("/f", LIFETIME, b"1", ANY),
        Err(FsError::NotADirectory)
    );
    fixture.set_xattr("/d", LIFETIME, b"1", ANY).unwrap();
    fixture.remove_xattr("/d", LIFETIME).unwrap();
    assert_eq!(fixture.get_xattr("/d", LIFETIME), Err(FsError::NoAttribute));
}

#[test]
fn two_names_of_one_file_are_one_in_the_trash() {
    let mut fixture = Fixture::new();
    fixture.dir("/d");
    fixture.file("/f");
    fixture.link("/f", "/d/f").unwrap();
    fixture.trash("/f", 60).unwrap();
    fixture.trash("/d/f", 60).unwrap();
    assert_eq!(fixture.list("/.trash/0").len(), 1);
}
