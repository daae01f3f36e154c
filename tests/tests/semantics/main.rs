//! Tests the promises of `docs/SEMANTICS.md` on real mounts.

mod attributes;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, wait_until};
use rustix::fs::{FallocateFlags, OFlags, RawDir, RenameFlags, SeekFrom as RawSeek};

#[test]
fn what_close_returned_for_is_seen_by_the_next_open_of_another_mount() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    for round in 0..50 {
        // The file grows, shrinks and is replaced, while the other mount has it cached.
        let content = format!("round {round} ").repeat(1 + (round * 37) % 400);
        fs::write(one.join("f"), &content).expect("write");
        assert_eq!(fs::read_to_string(other.join("f")).expect("read"), content);
        assert_eq!(
            fs::metadata(other.join("f")).expect("stat").len(),
            content.len() as u64
        );
        let replaced = format!("replaced in {round}");
        fs::write(other.join("g"), &replaced).expect("write");
        fs::rename(other.join("g"), other.join("f")).expect("rename");
        assert_eq!(fs::read_to_string(one.join("f")).expect("read"), replaced);
    }
}

/// Small new files are closed before they are committed; others must not notice.
#[test]
fn small_files_are_whole_on_another_mount_as_soon_as_they_are_closed() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    for round in 0..40 {
        // Several files, so that blocks are open and `close` need not wait.
        let content = |i: usize| format!("file {i} of round {round} ").repeat(1 + i * 9);
        for i in 0..10 {
            let name = format!("s{round}-{i}");
            fs::write(one.join(&name), content(i)).expect("write");
        }
        match round % 3 {
            0 => {
                let name = format!("s{round}-9");
                assert_eq!(
                    fs::read_to_string(other.join(&name)).expect("read"),
                    content(9)
                );
            }
            1 => {
                let listed = fs::read_dir(&other).expect("list");
                let mut count = 0;
                for entry in listed.map(|entry| entry.expect("entry")) {
                    let name = entry.file_name().into_string().expect("name");
                    if name.starts_with(&format!("s{round}-")) {
                        assert_ne!(entry.metadata().expect("stat").len(), 0, "{name}");
                        count += 1;
                    }
                }
                assert_eq!(count, 10, "round {round}");
            }
            _ => {
                let moved = other.join("moved");
                fs::rename(other.join(format!("s{round}-9")), &moved).expect("rename");
                assert_eq!(fs::read_to_string(&moved).expect("read"), content(9));
                fs::remove_file(&moved).expect("unlink");
                continue;
            }
        }
        for i in 0..10 {
            let name = format!("s{round}-{i}");
            assert_eq!(
                fs::read_to_string(other.join(&name)).expect("read"),
                content(i)
            );
        }
    }
}

#[test]
fn names_are_seen_by_other_mounts_at_once() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    for round in 0..50 {
        let name = format!("d{round}");
        assert!(
            !other.join(&name).exists(),
            "also cached: it does not exist"
        );
        fs::create_dir(one.join(&name)).expect("mkdir");
        assert!(other.join(&name).exists());
        assert_eq!(
            fs::create_dir(other.join(&name))
                .expect_err("it exists")
                .kind(),
            ErrorKind::AlreadyExists
        );
        fs::rename(other.join(&name), other.join("moved")).expect("rename");
        assert!(!one.join(&name).exists());
        assert!(one.join("moved").is_dir());
        fs::set_permissions(one.join("moved"), fs::Permissions::from_mode(0o700)).expect("chmod");
        let mode = fs::metadata(other.join("moved")).expect("stat").mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::remove_dir(other.join("moved")).expect("rmdir");
        assert!(!one.join("moved").exists());
    }
}

#[test]
fn attributes_are_current_also_of_what_was_opened_before_another_mount_wrote_it() {
    let Some((_cluster, here, there)) = Cluster::with_two_mounts() else {
        return;
    };
    let (here, there) = (here.join("file"), there.join("file"));
    fs::write(&here, "before").unwrap();
    let open = File::open(&here).unwrap();
    fs::write(&there, "and after").unwrap();
    // Data that the kernel may cache.
    open.metadata().unwrap();
    fs::set_permissions(&there, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(open.metadata().unwrap().mode() & 0o777, 0o600);
}

#[test]
fn two_mounts_that_create_in_one_directory_do_not_wait_for_each_other() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let started = Instant::now();
    thread::scope(|scope| {
        for (number, mount) in [&one, &other].into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..100 {
                    fs::write(mount.join(format!("{number}-{round}")), "x").expect("write");
                }
            });
        }
    });
    let taken = started.elapsed();
    // A single wait for a lease to expire would take ten seconds.
    assert!(taken < Duration::from_secs(9), "it took {taken:?}");
    let names = |mount: &PathBuf| -> BTreeSet<_> {
        fs::read_dir(mount)
            .expect("readdir")
            .map(|entry| entry.expect("an entry").file_name())
            .collect()
    };
    assert_eq!(names(&one).len(), 200);
    assert_eq!(names(&one), names(&other));
}

/// Lets two mounts do something simultaneously, of which exactly one must succeed. Returns the number of that
/// one, and the error of the other.
fn compete(
    mounts: [&Path; 2],
    act: impl Fn(usize, &Path) -> io::Result<()> + Sync,
) -> (usize, ErrorKind) {
    let barrier = Barrier::new(2);
    let act = |number: usize| {
        barrier.wait();
        act(number, mounts[number])
    };
    let results = thread::scope(|scope| {
        [scope.spawn(|| act(0)), scope.spawn(|| act(1))].map(|it| it.join().expect("no panic"))
    });
    match results {
        [Ok(()), Err(error)] => (0, error.kind()),
        [Err(error), Ok(())] => (1, error.kind()),
        both => panic!("not one of both succeeds: {both:?}"),
    }
}

#[test]
fn creation_is_exclusive_across_mounts() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let mounts = [&*one, &*other];
    fs::write(one.join("source"), "x").expect("write");
    let mut wins = [0; 2];
    for round in 0..50 {
        for how in ["create", "mkdir", "link"] {
            let (won, error) = compete(mounts, |_, mount| {
                let path = mount.join(format!("{how}-{round}"));
                match how {
                    "create" => File::create_new(path).map(drop),
                    "mkdir" => fs::create_dir(path),
                    _ => fs::hard_link(mount.join("source"), path),
                }
            });
            assert_eq!(error, ErrorKind::AlreadyExists, "{how}");
            wins[won] += 1;
        }
        let source = format!("source-{round}");
        let target = |number: usize| format!("target-{round}-{number}");
        fs::write(one.join(&source), "x").expect("write");
        let (won, error) = compete(mounts, |number, mount| {
            fs::rename(mount.join(&source), mount.join(target(number)))
        });
        assert_eq!(error, ErrorKind::NotFound, "rename");
        for mount in mounts {
            assert!(mount.join(target(won)).exists());
            assert!(!mount.join(target(1 - won)).exists());
        }
        wins[won] += 1;
    }
    eprintln!("the mounts won {wins:?} times");
}

#[test]
fn appends_of_two_mounts_are_ordered_and_none_is_lost() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    fs::write(one.join("log"), "").expect("create");
    thread::scope(|scope| {
        for (number, mount) in [&one, &other].into_iter().enumerate() {
            scope.spawn(move || {
                let mut log = OpenOptions::new()
                    .append(true)
                    .open(mount.join("log"))
                    .expect("open");
                for round in 0..100 {
                    log.write_all(format!("{number}:{round:04}\n").as_bytes())
                        .expect("append");
                    log.sync_all().expect("fsync");
                }
            });
        }
    });
    let text = fs::read_to_string(other.join("log")).expect("read");
    assert_eq!(text, fs::read_to_string(one.join("log")).expect("read"));
    for number in 0..2 {
        let own: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with(&format!("{number}:")))
            .collect();
        assert_eq!(own.len(), 100);
        assert!(own.is_sorted(), "each writer's lines are in its order");
    }
    assert_eq!(text.len(), 200 * 7, "no line is torn");
    append_the_longest(&one, &other);
}

/// Appends on two mounts, with the maximum length of an atomic append.
fn append_the_longest(one: &Path, other: &Path) {
    /// Length that the kernel sends as one request if it begins at a page.
    const PIECE_BYTES: usize = 1 << 20;
    const PAGE_BYTES: usize = 4096;
    const ROUNDS: u8 = 8;
    fs::write(one.join("long"), "").expect("create");
    // The bytes with which each mount fills its pieces.
    let bytes_of = |number: u8| number * ROUNDS..(number + 1) * ROUNDS;
    thread::scope(|scope| {
        for (number, mount) in [(0, one), (1, other)] {
            scope.spawn(move || {
                let mut log = OpenOptions::new()
                    .append(true)
                    .open(mount.join("long"))
                    .expect("open");
                let mut memory = vec![0_u8; PIECE_BYTES + PAGE_BYTES];
                let start = memory.as_ptr().align_offset(PAGE_BYTES);
                let piece = &mut memory[start..start + PIECE_BYTES];
                for byte in bytes_of(number) {
                    piece.fill(byte);
                    assert_eq!(log.write(piece).expect("append"), PIECE_BYTES);
                    log.sync_all().expect("fsync");
                }
            });
        }
    });
    let content = fs::read(other.join("long")).expect("read");
    assert_eq!(content.len(), 2 * usize::from(ROUNDS) * PIECE_BYTES);
    let mut pieces = Vec::new();
    for piece in content.chunks_exact(PIECE_BYTES) {
        let is_whole = piece.iter().all(|byte| *byte == piece[0]);
        assert!(is_whole, "the piece after {pieces:?} is torn");
        pieces.push(piece[0]);
    }
    for number in [0, 1] {
        let expected = bytes_of(number);
        let own = pieces.iter().filter(|byte| expected.contains(*byte));
        assert!(own.copied().eq(bytes_of(number)), "{pieces:?}");
    }
}

#[test]
fn what_is_written_after_o_append_was_taken_away_goes_to_its_offset() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let mut log = OpenOptions::new()
        .append(true)
        .create(true)
        .open(one.join("log"))
        .expect("open");
    log.write_all(b"a line\n").expect("append");
    rustix::fs::fcntl_setfl(&log, OFlags::empty()).expect("F_SETFL");
    log.write_all_at(b"A", 0).expect("pwrite");
    rustix::fs::fcntl_setfl(&log, OFlags::APPEND).expect("F_SETFL");
    log.write_all(b"another\n").expect("append");
    log.sync_all().expect("fsync");
    let text = fs::read_to_string(other.join("log")).expect("read");
    assert_eq!(text, "A line\nanother\n");
}

#[test]
fn an_unlinked_file_stays_readable_until_it_is_closed() {
    /// Time within which an open descriptor shows changes by another mount (SEMANTICS, "Consistency").
    const FOLLOWS_WITHIN: Duration = Duration::from_secs(2);
    const NEW: &[u8] = b"replaced";
    let Some((mut cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let pattern = Pattern { seed: 3 };
    fs::write(one.join("f"), pattern.bytes(3 << 20)).expect("write");
    let here = File::open(one.join("f")).expect("open");
    let there = OpenOptions::new()
        .read(true)
        .write(true)
        .open(other.join("f"))
        .expect("open");
    fs::remove_file(one.join("f")).expect("unlink");
    assert!(!other.join("f").exists());
    pattern.check(&here, 0, 3 << 20);
    pattern.check(&there, 0, 3 << 20);
    assert_eq!(here.metadata().expect("stat").nlink(), 0);

    there.write_all_at(NEW, 0).expect("write");
    there.sync_all().expect("fsync");
    let begins_anew = |file: &File| {
        let mut start = [0_u8; NEW.len()];
        file.read_exact_at(&mut start, 0).expect("read");
        start == NEW
    };
    assert!(begins_anew(&there));
    wait_until("the other mount shows it", FOLLOWS_WITHIN, || {
        begins_anew(&here)
    });
    drop((here, there));
    // A closed file is kept for some seconds in case it is opened again, and a block as long as a mount
    // may write to it.
    cluster.stop("one");
    cluster.stop("other");
    wait_until("its data is freed", Duration::from_secs(120), || {
        let fsck = cluster.fsck();
        fsck["files"] == 0 && fsck["blocks"] == 0 && fsck["orphan_blocks"] == 0
    });
}

#[test]
fn a_hung_mount_delays_others_no_longer_than_its_lease() {
    let Some((cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    fs::write(one.join("f"), "before").expect("write");
    assert_eq!(fs::read(other.join("f")).expect("read"), b"before");
    cluster.pause("other");
    let started = Instant::now();
    fs::write(one.join("f"), "after").expect("write");
    let taken = started.elapsed();
    cluster.resume("other");
    assert!(taken < Duration::from_secs(15), "it took {taken:?}");
    assert_eq!(fs::read(other.join("f")).expect("read"), b"after");
}

#[test]
fn what_changes_while_a_directory_is_read_is_seen() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    change_while_read(&one, &other);
}

#[test]
fn what_the_same_mount_changes_while_a_directory_is_read_is_seen() {
    let Some((_cluster, mount)) = Cluster::mounted(&ClusterOptions::default()) else {
        return;
    };
    change_while_read(&mount, &mount);
}

/// A directory is read in pages, and passed to the kernel in smaller ones. Entries of an older page must not hide
/// changes made in between.
fn change_while_read(one: &Path, other: &Path) {
    let name = |index: usize| format!("file-{index:03}");
    for index in 0..80 {
        fs::write(one.join(name(index)), "before").expect("write");
    }
    let directory = File::open(other).expect("open");
    let mut buffer = Vec::with_capacity(2048);
    let mut entries = RawDir::new(&directory, buffer.spare_capacity_mut());
    let first = entries.next().expect("an entry").expect("readdir");
    assert_eq!(first.file_name().to_bytes(), b".");
    // The kernel has about the first 20 now. Reading the attributes of one makes it request them for the next.
    fs::metadata(other.join(name(0))).expect("stat");
    let open = File::open(one.join(name(30))).expect("open");
    fs::remove_file(one.join(name(30))).expect("unlink");
    fs::write(one.join(name(31)), "and after").expect("write");
    fs::write(one.join("new"), "another one").expect("write");
    fs::rename(one.join("new"), one.join(name(32))).expect("rename");
    while let Some(entry) = entries.next() {
        entry.expect("readdir");
    }
    let removed = fs::metadata(other.join(name(30))).map_err(|error| error.kind());
    assert_eq!(removed.err(), Some(ErrorKind::NotFound));
    drop(open);
    for (index, content) in [(31, "and after"), (32, "another one")] {
        let written = fs::metadata(other.join(name(index))).expect("stat");
        assert_eq!(written.len(), content.len() as u64);
        let found = fs::read(other.join(name(index))).expect("read");
        assert_eq!(found, content.as_bytes());
    }
}

/// The mount that creates a directory knows that it is empty, until another mount creates something in it.
#[test]
fn what_another_mount_puts_into_a_new_directory_is_seen() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    // Repeated often, since a session whose caches are tracked loosely gets every invalidation at first.
    for round in 0..100 {
        let name = format!("directory-{round}");
        fs::create_dir(other.join(&name)).expect("mkdir");
        fs::write(one.join(&name).join("f"), "content").expect("write");
        let found = fs::read(other.join(&name).join("f"));
        assert_eq!(found.expect("read"), b"content", "round {round}");
        assert_eq!(fs::read_dir(other.join(&name)).expect("list").count(), 1);
    }
}

/// Two versions of one file are open on a mount after another mount wrote it in between.
#[test]
fn what_is_written_through_an_older_descriptor_is_seen_by_the_next_open() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    const PAGE_BYTES: usize = 4096;
    fs::write(one.join("f"), [1; PAGE_BYTES]).expect("write");
    let old = OpenOptions::new()
        .write(true)
        .open(one.join("f"))
        .expect("open");
    fs::write(other.join("f"), [2; 2 * PAGE_BYTES]).expect("write");
    let mut newer = File::open(one.join("f")).expect("open");
    let mut content = Vec::new();
    newer.read_to_end(&mut content).expect("read");
    assert!(content == [2; 2 * PAGE_BYTES]);

    old.write_all_at(&[3; PAGE_BYTES], 0).expect("write");
    old.sync_all().expect("fsync");
    content[..PAGE_BYTES].fill(3);
    assert!(fs::read(other.join("f")).expect("read") == content);
    assert!(fs::read(one.join("f")).expect("read") == content);
    old.set_len(3).expect("truncate");
    assert_eq!(fs::read(other.join("f")).expect("read"), [3; 3]);
    assert_eq!(fs::metadata(one.join("f")).expect("stat").len(), 3);
    assert_eq!(fs::read(one.join("f")).expect("read"), [3; 3]);
    // Without a lookup.
    let old = format!("/proc/self/fd/{}", old.as_raw_fd());
    fs::write(old, "").expect("truncate");
    assert_eq!(fs::metadata(one.join("f")).expect("stat").len(), 0);
    assert_eq!(fs::read(one.join("f")).expect("read"), b"");
}

#[test]
fn holes_are_found_and_made() {
    let Some((_cluster, one, _other)) = Cluster::with_two_mounts() else {
        return;
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(one.join("f"))
        .expect("create");
    let pattern = Pattern { seed: 4 };
    let mut data = vec![0; 1 << 20];
    pattern.fill(0, &mut data);
    file.write_all_at(&data, 0).expect("write");
    file.write_all_at(&data, 8 << 20).expect("write");
    file.sync_all().expect("fsync");
    assert!(
        file.metadata().expect("stat").blocks() * 512 < 4 << 20,
        "a hole takes no space"
    );
    let seek = |from| rustix::fs::seek(&file, from).map_err(|error| error.raw_os_error());
    assert_eq!(seek(RawSeek::Hole(0)), Ok(1 << 20));
    assert_eq!(seek(RawSeek::Data(1 << 20)), Ok(8 << 20));
    assert_eq!(seek(RawSeek::Hole(8 << 20)), Ok(9 << 20));
    assert_eq!(seek(RawSeek::Data(9 << 20)), Err(libc_enxio()));
    // Before the beginning of the file.
    assert_eq!(seek(RawSeek::Data(u64::MAX)), Err(libc_enxio()));

    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 256 << 10, 256 << 10).expect("punch");
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 8 << 20, 4096).expect("zero");
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 16 << 20).expect("allocate");
    assert_eq!(file.metadata().expect("stat").len(), 16 << 20);
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 32 << 20).expect("allocate");
    assert_eq!(file.metadata().expect("stat").len(), 16 << 20);
    assert_eq!(seek(RawSeek::Hole(0)), Ok(256 << 10));
    data[256 << 10..512 << 10].fill(0);
    let mut found = vec![0; 1 << 20];
    file.read_exact_at(&mut found, 0).expect("read");
    assert!(
        found == data,
        "the punched range reads as zeros, the rest as before"
    );
    let mut zeroed = vec![1; 2 * 4096];
    file.read_exact_at(&mut zeroed, 8 << 20).expect("read");
    assert!(
        zeroed[..4096].iter().all(|&byte| byte == 0) && zeroed[4096..] == data[4096..2 * 4096],
        "the zeroed range reads as zeros, the rest as before"
    );
    file.seek(SeekFrom::Start(15 << 20)).expect("seek");
    file.read_exact(&mut found).expect("read");
    assert!(found.iter().all(|&byte| byte == 0));
}

fn libc_enxio() -> i32 {
    rustix::io::Errno::NXIO.raw_os_error()
}

#[test]
fn copies_within_the_file_system_share_their_data() {
    let Some((cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let pattern = Pattern { seed: 5 };
    fs::write(one.join("f"), pattern.bytes(20 << 20)).expect("write");
    let used = || -> u64 {
        let status: serde_json::Value =
            serde_json::from_str(&cluster.output_of(&["admin", "status", "--json"])).expect("JSON");
        status["blocks"].as_u64().expect("a number")
    };
    let before = used();
    // std::fs::copy uses copy_file_range.
    fs::copy(one.join("f"), one.join("g")).expect("copy");
    cluster.output_of(&["fs", "cp", "/f", "/h"]);
    assert_eq!(used(), before, "no block was written");
    pattern.check_file(&other.join("g"), 20 << 20);
    pattern.check_file(&other.join("h"), 20 << 20);
    // A copy is independent.
    let copy = OpenOptions::new()
        .write(true)
        .open(one.join("g"))
        .expect("open");
    copy.write_all_at(b"changed!", 0).expect("write");
    drop(copy);
    fs::remove_file(one.join("h")).expect("unlink");
    pattern.check_file(&other.join("f"), 20 << 20);
    let mut start = [0; 8];
    File::open(other.join("g"))
        .and_then(|mut f| f.read_exact(&mut start))
        .expect("read");
    assert_eq!(&start, b"changed!");
}

#[test]
fn rename_does_not_replace_and_exchanges_when_asked() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    fs::write(one.join("a"), "a").expect("write");
    fs::create_dir(one.join("b")).expect("mkdir");
    let dir = File::open(&one).expect("the root");
    let refused = rustix::fs::renameat_with(&dir, "a", &dir, "b", RenameFlags::NOREPLACE);
    assert_eq!(refused, Err(rustix::io::Errno::EXIST));
    rustix::fs::renameat_with(&dir, "a", &dir, "b", RenameFlags::EXCHANGE).expect("exchange");
    assert!(other.join("a").is_dir());
    assert_eq!(fs::read(other.join("b")).expect("read"), b"a");
}
