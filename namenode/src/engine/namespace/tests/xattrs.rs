//! Extended attributes and settings.

use super::*;
use harvestfs_protocol::limits::XATTR_VALUE_BYTES_MAX;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::types::StorageClass;

pub const ANY: SetXattrMode = SetXattrMode::Any;
const REPLICATION: &str = "user.harvestfs.replication";
const DURABILITY: &str = "user.harvestfs.durability";
const CLASS: &str = "user.harvestfs.class";

impl Fixture {
    pub fn set_xattr(
        &mut self,
        path: &str,
        name: &str,
        value: &[u8],
        mode: SetXattrMode,
    ) -> Result<(), FsError> {
        let ino = self.ino(path);
        self.done(Mutation::SetXattr(mutation::SetXattr {
            ino,
            name: name.into(),
            value: value.to_vec(),
            mode,
        }))
    }

    pub fn get_xattr(&self, path: &str, name: &str) -> Result<String, FsError> {
        let op = Query::GetXattr(query::GetXattr {
            ino: self.ino(path),
            name: name.into(),
        });
        match self.query(&op)? {
            MetaReply::Bytes(bytes) => Ok(String::from_utf8(bytes).unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub fn remove_xattr(&mut self, path: &str, name: &str) -> Result<(), FsError> {
        let ino = self.ino(path);
        self.done(Mutation::RemoveXattr(mutation::RemoveXattr {
            ino,
            name: name.into(),
        }))
    }

    fn list_xattr(&self, path: &str) -> Vec<String> {
        let ino = self.ino(path);
        match self
            .query(&Query::ListXattr(query::ListXattr { ino }))
            .unwrap()
        {
            MetaReply::Names(names) => names
                .into_iter()
                .map(|name| String::from_utf8(name).unwrap())
                .collect(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn values_are_set_read_listed_and_removed() {
    let mut fixture = Fixture::new();
    fixture.file("/f");
    let missing = Err(FsError::NoAttribute);
    assert_eq!(fixture.get_xattr("/f", "user.a"), missing);
    assert_eq!(
        fixture.remove_xattr("/f", "user.a"),
        missing.clone().map(drop)
    );
    fixture.set_xattr("/f", "user.a", b"1", ANY).unwrap();
    assert_eq!(fixture.attr("/f").ctime, Timestamp(fixture.now));
    assert_eq!(fixture.effects.inodes, [fixture.ino("/f")]);
    fixture.set_xattr("/f", "user.b", b"", ANY).unwrap();
    fixture.set_xattr("/f", "user.a", b"22", ANY).unwrap();
    assert_eq!(fixture.get_xattr("/f", "user.a").unwrap(), "22");
    assert_eq!(fixture.get_xattr("/f", "user.b").unwrap(), "");
    assert_eq!(fixture.list_xattr("/f"), ["user.a", "user.b"]);
    assert_eq!(
        fixture.set_xattr("/f", "user.a", b"", SetXattrMode::Create),
        Err(FsError::Exists)
    );
    assert_eq!(
        fixture.set_xattr("/f", "user.c", b"", SetXattrMode::Replace),
        Err(FsError::NoAttribute)
    );
    fixture.remove_xattr("/f", "user.a").unwrap();
    fixture.remove_xattr("/f", "user.b").unwrap();
    assert_eq!(fixture.list_xattr("/f"), [""; 0]);
}

#[test]
fn names_and_sizes_are_checked() {
    let mut fixture = Fixture::new();
    fixture.file("/f");
    for bad in [
        "user.",
        "trusted.",
        "user.a\0b",
        &format!("user.{}", "x".repeat(251)),
    ] {
        assert!(
            matches!(
                fixture.set_xattr("/f", bad, b"", ANY),
                Err(FsError::InvalidArgument(_))
            ),
            "{bad:?}"
        );
    }
    for bad in ["", "plain", "other.x", "system.posix_acl_access"] {
        assert!(matches!(
            fixture.set_xattr("/f", bad, b"", ANY),
            Err(FsError::NotSupported(_))
        ));
        assert!(matches!(
            fixture.get_xattr("/f", bad),
            Err(FsError::NotSupported(_))
        ));
    }
    let too_large = Err(FsError::AttributeTooLarge);
    let huge = vec![0; XATTR_VALUE_BYTES_MAX + 1];
    assert_eq!(fixture.set_xattr("/f", "user.a", &huge, ANY), too_large);
    // All together are limited too; replacing one makes room for itself.
    fixture
        .set_xattr("/f", "user.a", &huge[..60_000], ANY)
        .unwrap();
    assert_eq!(
        fixture.set_xattr("/f", "user.b", &huge[..6_000], ANY),
        too_large
    );
    fixture
        .set_xattr("/f", "user.a", &huge[..65_000], ANY)
        .unwrap();
}

#[test]
fn each_namespace_has_its_rules() {
    let mut fixture = Fixture::new();
    fixture.make_dir("/d", 0o777).unwrap();
    fixture.become_user(1);
    fixture.create("/d/f", FileKind::Regular, 0o644).unwrap();
    fixture.symlink("/d/s", b"x").unwrap();
    fixture.create("/d/fifo", FileKind::Fifo, 0o666).unwrap();
    let forbidden = Err(FsError::NotPermitted);

    for name in ["trusted.a", "security.a"] {
        assert_eq!(fixture.set_xattr("/d/f", name, b"1", ANY), forbidden);
        assert_eq!(fixture.remove_xattr("/d/f", name), forbidden);
    }
    for path in ["/d/s", "/d/fifo"] {
        assert_eq!(fixture.set_xattr(path, "user.a", b"1", ANY), forbidden);
        assert_eq!(fixture.get_xattr(path, "user.a"), Err(FsError::NoAttribute));
    }
    fixture.set_xattr("/d/f", "user.a", b"1", ANY).unwrap();

    fixture.become_root();
    for name in ["trusted.a", "security.a"] {
        fixture.set_xattr("/d/f", name, b"1", ANY).unwrap();
        fixture.set_xattr("/d/s", name, b"1", ANY).unwrap();
    }
    assert_eq!(
        fixture.list_xattr("/d/f"),
        ["security.a", "trusted.a", "user.a"]
    );

    fixture.become_user(2);
    let denied = Err(FsError::PermissionDenied);
    assert_eq!(fixture.set_xattr("/d/f", "user.a", b"2", ANY), denied);
    assert_eq!(fixture.get_xattr("/d/f", "user.a").unwrap(), "1");
    assert_eq!(fixture.get_xattr("/d/f", "security.a").unwrap(), "1");
    assert_eq!(
        fixture.get_xattr("/d/f", "trusted.a"),
        Err(FsError::NoAttribute)
    );
    assert_eq!(fixture.list_xattr("/d/f"), ["security.a", "user.a"]);

    fixture.set_xattr("/d", "user.a", b"1", ANY).unwrap();
    fixture.become_root();
    fixture.chmod("/d", 0o1777).unwrap();
    fixture.chmod("/d/f", 0o600).unwrap();
    fixture.become_user(2);
    assert_eq!(fixture.set_xattr("/d", "user.a", b"2", ANY), forbidden);
    assert_eq!(
        fixture.get_xattr("/d/f", "user.a"),
        Err(FsError::PermissionDenied)
    );
}

#[test]
fn file_capabilities_go_when_the_file_changes() {
    let mut fixture = Fixture::new();
    let ino = fixture.file("/f");
    let block = fixture.allocate(1)[0];
    let capability = "security.capability";
    type Change = fn(&mut Fixture, InodeId, BlockId);
    let changes: [Change; 3] = [
        |fixture, ino, block| drop(fixture.commit(ino, &[extent(0, 1, block, 0)])),
        |fixture, _, _| drop(fixture.truncate("/f", 0)),
        |fixture, _, _| drop(fixture.chown("/f", Some(5), None)),
    ];
    for change in changes {
        fixture.set_xattr("/f", capability, b"x", ANY).unwrap();
        change(&mut fixture, ino, block);
        assert_eq!(
            fixture.get_xattr("/f", capability),
            Err(FsError::NoAttribute)
        );
    }
}

#[test]
fn settings_are_checked_and_shown() {
    let mut fixture = Fixture::new();
    fixture.file("/f");
    fixture.dir("/d");
    for path in ["/f", "/d"] {
        let bad = [
            (REPLICATION, "0"),
            (REPLICATION, "11"),
            (REPLICATION, "-1"),
            (REPLICATION, "3 "),
            (REPLICATION, ""),
            (DURABILITY, "Strict"),
            (CLASS, "tape"),
            ("user.harvestfs.colour", "red"),
        ];
        for (name, value) in bad {
            assert!(
                matches!(
                    fixture.set_xattr(path, name, value.as_bytes(), ANY),
                    Err(FsError::InvalidArgument(_))
                ),
                "{name}={value}"
            );
        }
        let locations = "user.harvestfs.locations";
        assert_eq!(
            fixture.set_xattr(path, locations, b"", ANY),
            Err(FsError::NotPermitted)
        );
        assert_eq!(
            fixture.get_xattr(path, locations),
            Err(FsError::NoAttribute)
        );
        assert_eq!(
            fixture.remove_xattr(path, locations),
            Err(FsError::NotPermitted)
        );
    }
    // Files show the settings in effect, directories those that are set.
    assert_eq!(fixture.get_xattr("/f", REPLICATION).unwrap(), "3");
    assert_eq!(fixture.get_xattr("/f", DURABILITY).unwrap(), "strict");
    assert_eq!(fixture.get_xattr("/f", CLASS), Err(FsError::NoAttribute));
    assert_eq!(
        fixture.get_xattr("/d", REPLICATION),
        Err(FsError::NoAttribute)
    );
    assert_eq!(fixture.list_xattr("/f"), [""; 0]);

    for path in ["/f", "/d"] {
        for (name, value) in [(REPLICATION, "2"), (DURABILITY, "space"), (CLASS, "ssd")] {
            let value = value.as_bytes();
            assert_eq!(
                fixture.set_xattr(path, name, value, SetXattrMode::Replace),
                Err(FsError::NoAttribute)
            );
            fixture
                .set_xattr(path, name, value, SetXattrMode::Create)
                .unwrap();
            assert_eq!(
                fixture.set_xattr(path, name, value, SetXattrMode::Create),
                Err(FsError::Exists)
            );
            assert_eq!(fixture.get_xattr(path, name).unwrap().as_bytes(), value);
        }
        assert_eq!(fixture.list_xattr(path), [REPLICATION, DURABILITY, CLASS]);
        fixture.remove_xattr(path, DURABILITY).unwrap();
        assert_eq!(
            fixture.remove_xattr(path, DURABILITY),
            Err(FsError::NoAttribute)
        );
    }
    assert_eq!(fixture.get_xattr("/f", DURABILITY).unwrap(), "strict");
    let rules = fixture.namespace.rules_of(fixture.ino("/f")).unwrap();
    assert_eq!(
        (rules.replication, rules.class),
        (2, Some(StorageClass::Ssd))
    );
}

#[test]
fn files_inherit_from_the_nearest_directory_that_says_something() {
    let mut fixture = Fixture::new();
    fixture.dir("/a");
    fixture.dir("/a/b");
    fixture.file("/a/b/before");
    fixture.set_xattr("/a", REPLICATION, b"5", ANY).unwrap();
    fixture.set_xattr("/a", CLASS, b"memory", ANY).unwrap();
    fixture.set_xattr("/a/b", REPLICATION, b"2", ANY).unwrap();
    fixture.dir("/a/b/c");
    fixture.file("/a/b/c/f");
    assert_eq!(fixture.get_xattr("/a/b/c/f", REPLICATION).unwrap(), "2");
    assert_eq!(fixture.get_xattr("/a/b/c/f", CLASS).unwrap(), "memory");
    assert_eq!(fixture.get_xattr("/a/b/c/f", DURABILITY).unwrap(), "strict");
    assert_eq!(fixture.get_xattr("/a/b/before", REPLICATION).unwrap(), "3");
    // A file keeps the settings that it got at its creation.
    fixture.set_xattr("/a/b", REPLICATION, b"4", ANY).unwrap();
    fixture
        .rename("/a/b/c/f", "/f", RenameMode::Replace)
        .unwrap();
    assert_eq!(fixture.get_xattr("/f", REPLICATION).unwrap(), "2");
    // Only regular files have blocks.
    fixture.symlink("/a/s", b"x").unwrap();
    assert_eq!(fixture.list_xattr("/a/s"), [""; 0]);
    fixture.remove_xattr("/a", REPLICATION).unwrap();
    fixture.remove_xattr("/a", CLASS).unwrap();
    fixture.file("/a/after");
    assert_eq!(fixture.get_xattr("/a/after", REPLICATION).unwrap(), "3");
}

#[test]
fn the_rules_of_a_block_are_the_strongest_of_its_files() {
    let mut fixture = Fixture::new();
    let first = fixture.file("/first");
    let second = fixture.file("/second");
    let block = fixture.allocate(1)[0];
    fixture.commit(first, &[extent(0, 10, block, 0)]).unwrap();
    fixture.commit(second, &[extent(0, 10, block, 10)]).unwrap();
    let changed = |fixture: &Fixture| match changes_of(&fixture.effects, block)[..] {
        [] => None,
        [BlockChange::RulesChanged { rules, .. }] => Some((rules.replication, rules.durability)),
        ref other => panic!("{other:?}"),
    };
    let strict = Durability::Strict;
    fixture.set_xattr("/first", REPLICATION, b"5", ANY).unwrap();
    assert_eq!(changed(&fixture), Some((5, strict)));
    fixture
        .set_xattr("/second", REPLICATION, b"2", ANY)
        .unwrap();
    assert_eq!(changed(&fixture), None);
    fixture
        .set_xattr("/second", DURABILITY, b"space", ANY)
        .unwrap();
    assert_eq!(changed(&fixture), None);
    // The file that wanted most of it goes.
    fixture.truncate("/first", 0).unwrap();
    assert_eq!(changed(&fixture), Some((2, Durability::Space)));
    // A clone wants it again.
    let op = Mutation::CloneRange(mutation::CloneRange {
        source: second,
        source_offset: 0,
        destination: first,
        destination_offset: 0,
        length_bytes: u64::MAX,
    });
    fixture.change(op).unwrap();
    assert_eq!(changed(&fixture), Some((5, strict)));
    let rules = fixture.namespace.block(block).unwrap().rules;
    assert_eq!(rules.replication, 5);
}
