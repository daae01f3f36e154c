//! Snapshots: complete, identical, and safe to read when damaged.

use super::*;
use crate::engine::namespace::SnapshotError;
use crate::engine::namespace::directory::Directory;
use crate::engine::namespace::inode::{Body, Inode};
use harvestfs_protocol::meta::SetXattrMode;
use proptest::prelude::*;

/// Snapshots do not contain the usage of directories: one of a release that counted wrongly is right once
/// it is read.
#[test]
fn what_was_counted_wrongly_is_counted_anew_when_a_snapshot_is_read() {
    let mut fixture = full();
    let right = fixture.snapshot();
    let dir = fixture.ino("/d");
    let used = fixture.namespace.inodes.known_directory(dir).used;
    fixture
        .namespace
        .inodes
        .known_directory_mut(dir)
        .used
        .inodes += 3;
    assert_ne!(fixture.namespace.check(), []);
    let wrong = fixture.snapshot();
    assert_eq!(wrong, right);
    let read = Namespace::read_snapshot(&mut &wrong[..]).unwrap();
    assert_eq!(read.inodes.known_directory(dir).used, used);
    assert_eq!(read.check(), []);
}

/// State that resulted from a wrong count is refused, and the error names the inode.
#[test]
fn a_removed_directory_that_was_kept_because_of_a_wrong_count_is_refused() {
    let mut fixture = Fixture::new();
    let dir = fixture.dir("/d");
    fixture.held_elsewhere = true;
    fixture.remove_dir("/d").unwrap();
    fixture
        .namespace
        .inodes
        .known_directory_mut(dir)
        .used
        .inodes += 1;
    let now = Timestamp(fixture.now);
    let inodes = vec![dir];
    let release = Command::ReleaseOrphans { inodes, now };
    fixture.namespace.apply(&release).unwrap();
    let bytes = fixture.snapshot();
    let Err(SnapshotError::Damaged(reason)) = Namespace::read_snapshot(&mut &bytes[..]) else {
        panic!("a directory is kept for nothing");
    };
    assert!(reason.contains("kept for nothing"), "{reason}");
    assert!(reason.contains(&format!("{dir:?}")), "{reason}");
}

/// A namespace with at least one object of every kind.
fn full() -> Fixture {
    let mut fixture = Fixture::new();
    let directory = fixture.make_dir("/d", 0o2755).unwrap().ino;
    for number in 0..30 {
        fixture.file(&format!("/d/{number}-{}", "x".repeat(number * 8)));
    }
    for kind in [FileKind::Fifo, FileKind::Socket, FileKind::BlockDevice] {
        fixture.create(&format!("/{kind:?}"), kind, 0o600).unwrap();
    }
    fixture.symlink("/s", b"target").unwrap();
    fixture.link("/d/0-", "/linked").unwrap();
    for path in ["/d/1-xxxxxxxx", "/d/2-xxxxxxxxxxxxxxxx"] {
        fixture.unlink(path).unwrap();
    }
    for (ino, name) in [
        (directory, "user.harvestfs.replication"),
        (directory, "user.harvestfs.trash_s"),
        (fixture.ino("/linked"), "user.a"),
    ] {
        fixture
            .done(Mutation::SetXattr(mutation::SetXattr {
                ino,
                name: name.into(),
                value: b"2".to_vec(),
                mode: SetXattrMode::Any,
            }))
            .unwrap();
    }
    fixture
        .set_xattr(
            "/d",
            "user.harvestfs.quota_files",
            b"100",
            SetXattrMode::Any,
        )
        .unwrap();
    let blocks = fixture.allocate(3);
    let ino = fixture.ino("/linked");
    let pieces: Vec<_> = (0..3000)
        .map(|piece| extent(piece * 10, 5, blocks[0], piece * 4096))
        .collect();
    fixture.commit(ino, &pieces).unwrap();
    fixture.seal(blocks[0], 3000 * 4096).unwrap();
    let orphan = fixture.file("/orphan");
    fixture
        .commit(orphan, &[extent(0, 9, blocks[1], 0)])
        .unwrap();
    fixture.file("/d/trashed");
    fixture.trash("/d/trashed", 60).unwrap();
    fixture
        .change(Mutation::CreateSnapshot(mutation::CreateSnapshot {
            ino: directory,
            name: name("frozen"),
        }))
        .unwrap();
    fixture.held_elsewhere = true;
    fixture.unlink("/orphan").unwrap();
    fixture
}

fn read(bytes: &[u8]) -> Result<Namespace, SnapshotError> {
    Namespace::read_snapshot(&mut &bytes[..])
}

#[test]
fn what_was_written_is_read() {
    for fixture in [Fixture::new(), full()] {
        let bytes = fixture.snapshot();
        let copy = read(&bytes).unwrap();
        assert_eq!(snapshot(&copy), bytes);
        let counts = copy.counts();
        assert_eq!(counts.live_bytes, fixture.namespace.counts().live_bytes);
        assert_eq!(counts.files, fixture.namespace.counts().files);
    }
    let empty = snapshot(&Namespace::new());
    assert_eq!(snapshot(&read(&empty).unwrap()), empty);
}

#[test]
fn a_copy_goes_on_as_the_original() {
    let mut original = full();
    let mut copy = full();
    copy.namespace = read(&original.snapshot()).unwrap();
    for fixture in [&mut original, &mut copy] {
        // Reuses slots, inherits settings, uses and frees blocks, answers again.
        let ino = fixture.file("/d/new");
        let block = fixture.allocate(1)[0];
        fixture.commit(ino, &[extent(0, 7, block, 0)]).unwrap();
        fixture.unlink("/linked").unwrap();
        fixture.close_session(fixture.session);
        let session = fixture.open_session();
        assert_eq!(fixture.namespace.sessions().count(), 1);
        fixture.session = session;
    }
    assert_eq!(original.snapshot(), copy.snapshot());
}

#[test]
fn reading_stops_at_the_end() {
    let mut bytes = full().snapshot();
    bytes.extend(b"what follows");
    let mut rest = &bytes[..];
    Namespace::read_snapshot(&mut rest).unwrap();
    assert_eq!(rest, b"what follows");
}

#[test]
fn whose_leases_have_run_out_follows_a_snapshot() {
    fn behind(namespace: &Namespace) -> Vec<u8> {
        let mut bytes = Vec::new();
        namespace.write_behind_snapshot(&mut bytes).unwrap();
        bytes
    }
    let mut fixture = Fixture::new();
    let sessions = [fixture.open_session(), fixture.open_session()];
    let before = fixture.snapshot();
    assert_eq!(behind(&fixture.namespace), b"");
    let note = Command::NoteLease {
        session: sessions[0],
        has_lapsed: true,
    };
    fixture.apply(&note).unwrap();
    // 0.2.0 reads this.
    assert_eq!(fixture.snapshot(), before);
    let follows = behind(&fixture.namespace);
    let whole = [before, follows.clone()].concat();
    let mut rest = &whole[..];
    let mut copy = Namespace::read_snapshot(&mut rest).unwrap();
    assert!(!copy.has_lapsed(sessions[0]));
    copy.read_behind_snapshot(&mut rest).unwrap();
    assert_eq!(sessions.map(|it| copy.has_lapsed(it)), [true, false]);
    assert_eq!(behind(&copy), follows);
    for at in 0..follows.len() {
        let mut damaged = follows.clone();
        damaged[at] ^= 1;
        let read = copy.read_behind_snapshot(&mut &damaged[..]);
        assert!(read.is_err(), "{at}");
    }
    fixture.close_session(sessions[0]);
    let read = fixture.namespace.read_behind_snapshot(&mut &follows[..]);
    assert!(matches!(read, Err(SnapshotError::Damaged(_))), "{read:?}");
}

#[test]
fn other_files_and_versions_are_refused() {
    let bytes = full().snapshot();
    for at in [0, 8] {
        let mut other = bytes.clone();
        other[at] ^= 4;
        assert!(matches!(read(&other), Err(SnapshotError::Version(_))));
    }
    assert!(matches!(read(b"short"), Err(SnapshotError::Io(_))));
}

#[test]
fn contradictions_are_found_behind_good_checksums() {
    type Spoil = fn(&mut Fixture);
    let spoils: [(&str, Spoil); 17] = [
        ("a link too many", |f| f.inode("/linked").nlink += 1),
        ("a file cut short", |f| {
            let Body::Regular(file) = &mut f.inode("/linked").body else {
                panic!();
            };
            file.size_bytes -= 1000;
        }),
        ("a wrong parent", |f| {
            let file = f.ino("/linked");
            f.inode("/d").parent = file;
        }),
        ("an entry that leads nowhere", |f| {
            f.directory("/d").insert(&name("nowhere"), InodeId(1 << 40));
        }),
        ("a second name of a directory", |f| {
            let directory = f.ino("/d");
            f.directory("/").insert(&name("again"), directory);
        }),
        ("a loop of directories", |f| {
            let directory = f.ino("/d");
            f.inode("/d").parent = directory;
            f.directory("/d").insert(&name("d"), directory);
            f.directory("/").remove(&name("d"));
        }),
        ("no orphan", |f| f.namespace.orphans.clear()),
        ("an orphan that is none", |f| {
            let ino = f.ino("/s");
            f.namespace.orphans.insert(ino);
        }),
        ("a writer that is gone", |f| {
            f.namespace.sessions.sessions.clear()
        }),
        ("a session of the future", |f| f.namespace.sessions.last = 0),
        ("a block of the future", |f| f.namespace.blocks.set_last(1)),
        ("sessions at their end", |f| {
            f.namespace.sessions.last = u64::MAX
        }),
        ("blocks at their end", |f| {
            f.namespace.blocks.set_last(u64::MAX)
        }),
        ("versions at their end", |f| {
            f.inode("/linked").content_version = u64::MAX
        }),
        ("something in the trash that is not kept", |f| {
            let there = f.namespace.trash.iter().next().unwrap().0;
            f.namespace.trash.remove(there)
        }),
        ("something kept that is not in the trash", |f| {
            let (_, kept) = f.namespace.trash.iter().next().unwrap();
            let kept = kept.clone();
            f.namespace.trash.insert(InodeId::ROOT, kept);
        }),
        ("no trash, but something in it", |f| {
            f.namespace.trash.directory = None
        }),
    ];
    for (what, spoil) in spoils {
        let mut fixture = full();
        spoil(&mut fixture);
        let result = read(&fixture.snapshot());
        assert!(matches!(result, Err(SnapshotError::Damaged(_))), "{what}");
    }
}

impl Fixture {
    fn inode(&mut self, path: &str) -> &mut Inode {
        let ino = self.ino(path);
        self.namespace.inodes.get_mut(ino).unwrap()
    }

    fn directory(&mut self, path: &str) -> &mut Directory {
        match &mut self.inode(path).body {
            Body::Directory(directory) => directory,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn every_cut_is_noticed() {
    let bytes = full().snapshot();
    for end in (0..100).chain((100..bytes.len()).step_by(97)) {
        assert!(read(&bytes[..end]).is_err(), "{end}");
    }
}

/// Found by the fuzz target `namespace_snapshot`.
#[test]
fn a_count_of_records_at_its_end_is_damage() {
    let mut bytes = Fixture::new().snapshot()[..12].to_vec();
    let mut frame = vec![0, 0, 0, 0, 12];
    frame.extend([0xff; 9]);
    frame.push(1);
    bytes.extend(u32::try_from(frame.len()).unwrap().to_le_bytes());
    bytes.extend(crc32fast::hash(&frame).to_le_bytes());
    bytes.extend(frame);
    assert!(matches!(read(&bytes), Err(SnapshotError::Damaged(_))));
}

#[test]
fn lengths_that_are_merely_claimed_are_not_allocated() {
    let mut bytes = full().snapshot()[..12].to_vec();
    bytes.extend(u32::MAX.to_le_bytes());
    bytes.extend([0; 100]);
    assert!(matches!(read(&bytes), Err(SnapshotError::Damaged(_))));
}

proptest! {
    #[test]
    fn every_flipped_bit_is_noticed(at in any::<prop::sample::Index>(), bit in 0..8u8) {
        let mut bytes = Fixture::new().snapshot();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn no_bytes_make_the_reader_panic(
        payload in proptest::collection::vec(any::<u8>(), 1..300),
        kind in 0..16u8,
    ) {
        // A frame with a good checksum: a header, then one record of each kind.
        let mut bytes = Fixture::new().snapshot()[..12].to_vec();
        let mut frame = vec![0, 0, 0, 0, kind];
        frame.extend(payload);
        bytes.extend(u32::try_from(frame.len()).unwrap().to_le_bytes());
        bytes.extend(crc32fast::hash(&frame).to_le_bytes());
        bytes.extend(frame);
        let _ = read(&bytes);
    }
}
