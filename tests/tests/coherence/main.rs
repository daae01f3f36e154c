//! A file is a single inode on a mount, whatever other mounts do, and shows their changes.

mod handles;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, StoreOnDrop, wait_until};
use rustix::fs::{RawDir, RawDirEntry, Timespec, Timestamps, UTIME_NOW, XattrFlags};
use rustix::io::Errno;

/// Time within which an open descriptor shows changes by another mount (SEMANTICS, "Consistency").
const FOLLOWS_WITHIN: Duration = Duration::from_secs(2);

/// Longer than a file without a name is kept after its last `close` (SEMANTICS, "Quotas").
const STAYS_AFTER_CLOSE: Duration = Duration::from_secs(1);

/// Maximum time for what is counted to have happened often enough on a busy machine.
const OFTEN_WITHIN: Duration = Duration::from_secs(120);

/// Whether programs that run against each other go on: for a while, and until enough has happened.
fn goes_on(began: Instant, at_least: Duration, is_enough: bool) -> bool {
    let elapsed = began.elapsed();
    elapsed < at_least || (!is_enough && elapsed < OFTEN_WITHIN)
}

fn open_both_ways(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .expect("open")
}

fn range(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    file.read_exact_at(&mut data, offset).expect("read");
    data
}

fn touch(path: &Path) {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: now,
    };
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::empty())
        .expect("utimensat");
}

/// Opens a file before and after something happens: both descriptors refer to one inode, each immediately
/// reads what the other writes, and all of it is in the file.
fn check_one_inode(
    what: &str,
    (one, other): (&Path, &Path),
    elsewhere: u8,
    meanwhile: impl FnOnce(&Path, &File),
) {
    const SIZE_BYTES: usize = 8192;
    let (here, there) = (one.join(what), other.join(what));
    let old = open_both_ways(&here);
    old.write_all_at(&[b'0'; SIZE_BYTES], 0).expect("write");
    old.sync_all().expect("fsync");
    meanwhile(&there, &old);
    let new = open_both_ways(&here);
    let inode = |file: &File| file.metadata().expect("fstat").ino();
    assert_eq!(inode(&old), inode(&new), "{what}");
    old.write_all_at(b"AAAA", 0).expect("write");
    assert_eq!(range(&new, 0, 4), b"AAAA", "{what}");
    new.write_all_at(b"BBBB", 4).expect("write");
    assert_eq!(range(&old, 0, 8), b"AAAABBBB", "{what}");
    for file in [&old, &new] {
        file.sync_data().expect("fdatasync");
    }
    new.write_all_at(b"CCCC", 8).expect("write");
    new.sync_data().expect("fdatasync");
    drop(new);
    old.write_all_at(b"DDDD", 12).expect("write");
    old.sync_data().expect("fdatasync");
    drop(old);
    for path in [here, there] {
        let content = fs::read(&path).expect("read");
        assert_eq!(&content[..16], b"AAAABBBBCCCCDDDD", "{what} at {path:?}");
        assert_eq!(content[5000], elsewhere, "{what} at {path:?}");
        assert_eq!(content.len(), SIZE_BYTES, "{what} at {path:?}");
    }
}

#[test]
fn a_file_stays_one_inode_whatever_other_mounts_do() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let mounts = (&*one, &*other);
    check_one_inode("nothing", mounts, b'0', |_, _| {});
    check_one_inode("read", mounts, b'0', |there, _| {
        assert_eq!(fs::read(there).expect("read").len(), 8192);
    });
    check_one_inode("chmod", mounts, b'0', |there, _| {
        fs::set_permissions(there, Permissions::from_mode(0o600)).expect("chmod");
    });
    check_one_inode("utimes", mounts, b'0', |there, _| touch(there));
    check_one_inode("setxattr", mounts, b'0', |there, _| {
        rustix::fs::setxattr(there, "user.a", b"1", XattrFlags::empty()).expect("setxattr");
    });
    check_one_inode("rename", mounts, b'0', |there, _| {
        let moved = there.with_file_name("moved");
        fs::rename(there, &moved).expect("rename");
        fs::rename(&moved, there).expect("rename");
    });
    check_one_inode("link", mounts, b'0', |there, _| {
        let second = there.with_file_name("second");
        fs::hard_link(there, &second).expect("link");
        fs::remove_file(&second).expect("unlink");
    });
    check_one_inode("write", mounts, b'z', |there, _| {
        open_both_ways(there)
            .write_all_at(b"z", 5000)
            .expect("write");
    });
}

#[test]
fn a_file_stays_one_inode_when_the_namenode_restarts_and_the_lease_ends() {
    let Some((mut cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let mounts = (&*one, &*other);
    check_one_inode("killed", mounts, b'0', |_, _| {
        cluster.kill("namenode");
        cluster.start_namenode();
    });
    check_one_inode("lease", mounts, b'0', |there, _| {
        cluster.pause("one");
        // The other mount waits until the lease of the hung one has expired.
        fs::set_permissions(there, Permissions::from_mode(0o600)).expect("chmod");
        cluster.resume("one");
    });
}

/// Required by `tail -f`.
#[test]
fn an_open_file_follows_what_another_mount_appends() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    fs::write(one.join("log"), "first\n").expect("write");
    let mut follower = File::open(other.join("log")).expect("open");
    let mut seen = Vec::new();
    follower.read_to_end(&mut seen).expect("read");
    let mut expected = b"first\n".to_vec();
    for number in 0..20 {
        let line = format!("line {number}\n");
        let mut log = OpenOptions::new()
            .append(number % 2 == 0)
            .write(true)
            .open(one.join("log"))
            .expect("open");
        if number % 2 == 0 {
            log.write_all(line.as_bytes()).expect("append");
        } else {
            log.write_all_at(line.as_bytes(), expected.len() as u64)
                .expect("write");
        }
        log.sync_data().expect("fdatasync");
        expected.extend(line.as_bytes());
        wait_until("what was appended to be read", FOLLOWS_WITHIN, || {
            follower.read_to_end(&mut seen).expect("read");
            seen.len() >= expected.len()
        });
        assert_eq!(seen, expected);
        let size_bytes = follower.metadata().expect("fstat").len();
        assert_eq!(size_bytes, expected.len() as u64);
    }
}

#[test]
fn what_another_mount_cuts_and_rewrites_never_reads_as_zeros() {
    const READS: u64 = 100;
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    fs::write(one.join("f"), [b'x'; 100]).expect("write");
    let end = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    thread::scope(|scope| {
        let _end = StoreOnDrop(&end);
        for mount in [&one, &other] {
            let (end, reads) = (&end, &reads);
            scope.spawn(move || {
                while !end.load(Ordering::Relaxed) {
                    let content = match fs::read(mount.join("f")) {
                        Ok(content) => content,
                        // It changed while it was read.
                        Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                        Err(error) => panic!("read: {error}"),
                    };
                    reads.fetch_add(1, Ordering::Relaxed);
                    let zeros = content.iter().filter(|byte| **byte != b'x').count();
                    assert_eq!(zeros, 0, "of {} bytes", content.len());
                }
            });
        }
        let began = Instant::now();
        let mut length = 1;
        let is_enough = || reads.load(Ordering::Relaxed) > READS;
        while goes_on(began, Duration::from_secs(8), is_enough()) {
            length = (length * 7 + 13) % 9000 + 1;
            fs::write(one.join("f"), vec![b'x'; length]).expect("write");
        }
    });
    assert!(reads.into_inner() > READS);
}

/// A removed directory that is open or current is empty, as on other file systems.
#[test]
fn a_removed_directory_that_is_open_is_empty_and_has_no_link() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    for remover in [&one, &other] {
        fs::create_dir(one.join("d")).expect("mkdir");
        let open = File::open(one.join("d")).expect("open");
        assert_ne!(open.metadata().expect("fstat").nlink(), 0);
        fs::remove_dir(remover.join("d")).expect("rmdir");
        assert_eq!(open.metadata().expect("fstat").nlink(), 0);
        let names = rustix::fs::Dir::read_from(&open).expect("readdir");
        let names: Vec<_> = names
            .map(|entry| entry.expect("an entry").file_name().to_owned())
            .filter(|name| name.as_c_str() != c"." && name.as_c_str() != c"..")
            .collect();
        assert!(names.is_empty(), "{names:?}");
    }
}

/// A file system that is mounted below a mount stays there while other mounts work around it.
#[test]
fn what_is_mounted_in_a_mount_stays() {
    if !rustix::process::geteuid().is_root() {
        harvestfs_tests::skip("only root can mount a tmpfs");
        return;
    }
    let Some((mut cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let below = one.join("a/b");
    fs::create_dir_all(&below).expect("mkdir");
    run(Command::new("mount")
        .args(["-t", "tmpfs", "none"])
        .arg(&below));
    fs::write(below.join("inside"), "tmpfs").expect("write");
    let look = |what: &str| {
        let content = fs::read_to_string(below.join("inside"));
        assert_eq!(content.ok().as_deref(), Some("tmpfs"), "after {what}");
    };
    fs::write(other.join("a/new"), "1").expect("write");
    look("a new file above it");
    assert_eq!(fs::read_to_string(one.join("a/new")).expect("read"), "1");
    fs::set_permissions(other.join("a/b"), Permissions::from_mode(0o700)).expect("chmod");
    look("a chmod of what it is mounted on");
    fs::write(other.join("new"), "2").expect("write");
    fs::remove_file(other.join("a/new")).expect("unlink");
    assert!(!one.join("a/new").exists());
    look("an unlink");
    assert_eq!(fs::read_dir(other.join("a")).expect("list").count(), 1);
    look("a listing");
    cluster.kill("namenode");
    cluster.start_namenode();
    fs::write(other.join("a/again"), "3").expect("write");
    assert_eq!(fs::read_to_string(one.join("a/again")).expect("read"), "3");
    look("a restart of the namenode");
    run(Command::new("umount").arg(&below));
    assert!(!below.join("inside").exists());
    fs::write(other.join("a/b/inside"), "4").expect("write");
    assert_eq!(fs::read_to_string(below.join("inside")).expect("read"), "4");
}

/// A file that was just removed is `ENOENT`, and a version that replaces another one is complete.
#[test]
fn two_mounts_that_replace_and_link_the_same_names_see_whole_files_or_none() {
    /// Among fewer, some more may by chance be of a name that was replaced twice meanwhile.
    const OFTEN: u64 = 500;
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let began = Instant::now();
    let version = |letter: u8| vec![letter; 70];
    fs::write(one.join("file"), version(b'a')).expect("write");
    let [linked, stale, whole, refused] = <[AtomicU64; 4]>::default();
    let goes_on = || {
        let is_enough = [&linked, &whole].map(|it| it.load(Ordering::Relaxed) >= OFTEN);
        goes_on(began, Duration::from_secs(10), is_enough == [true; 2])
    };
    thread::scope(|scope| {
        for (mount, letter) in [(&one, b'a'), (&other, b'b')] {
            let goes_on = &goes_on;
            scope.spawn(move || {
                while goes_on() {
                    let new = mount.join(format!("new-{letter}"));
                    fs::write(&new, version(letter)).expect("write");
                    fs::rename(&new, mount.join("file")).expect("rename");
                }
            });
            let [linked, stale, whole, refused] = [&linked, &stale, &whole, &refused];
            scope.spawn(move || {
                let link = mount.join(format!("link-{letter}"));
                while goes_on() {
                    match fs::hard_link(mount.join("file"), &link) {
                        Ok(()) => {
                            linked.fetch_add(1, Ordering::Relaxed);
                            fs::remove_file(&link).expect("unlink");
                        }
                        // Replaced twice during one `link`; see the exceptions in SEMANTICS.
                        Err(error) if error.kind() == ErrorKind::StaleNetworkFileHandle => {
                            stale.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "link"),
                    }
                }
            });
            scope.spawn(move || {
                while goes_on() {
                    let content = match fs::read(mount.join("file")) {
                        Ok(content) => content,
                        // Replaced twice during one `open`; see the exceptions in SEMANTICS.
                        Err(error) if error.kind() == ErrorKind::StaleNetworkFileHandle => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                        Err(error) => panic!("read: {error}"),
                    };
                    whole.fetch_add(1, Ordering::Relaxed);
                    let is_whole = content == version(b'a') || content == version(b'b');
                    assert!(is_whole, "{} bytes: {content:?}", content.len());
                }
            });
        }
    });
    let counts = [linked, stale, whole, refused];
    let [linked, stale, whole, refused] = counts.map(AtomicU64::into_inner);
    println!("{linked} links, {stale} of names that were replaced twice meanwhile");
    assert!(linked > 100);
    assert!(
        stale * 50 <= linked,
        "{stale} of {linked} links are of a name replaced twice"
    );
    assert!(whole > 100);
    assert!(refused * 50 <= whole, "{refused} beside {whole} read files");
}

fn run(command: &mut Command) {
    let status = command.status().expect("it runs");
    assert!(status.success(), "{command:?}: {status}");
}

/// Runs a script in a directory as a user other than root.
fn as_other(directory: &Path, script: &str) {
    use std::os::unix::process::CommandExt;
    let status = Command::new("sh")
        .args(["-ec", script])
        .current_dir(directory)
        .uid(65_534)
        .gid(65_534)
        .status();
    assert!(status.expect("sh runs").success(), "{script}");
}

/// A file with a mode that does not depend on the umask.
fn put(directory: &Path, name: &str, content: &[u8], mode: u32) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, content).expect("write");
    fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
    path
}

/// Two mounts that users other than root can use.
fn with_others() -> Option<(Cluster, PathBuf, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        harvestfs_tests::skip("only root can be several users");
        return None;
    }
    let (cluster, one, other) = Cluster::with_two_mounts()?;
    // The temporary directory may be accessible only to root.
    fs::set_permissions(cluster.path(""), Permissions::from_mode(0o755)).expect("chmod");
    Some((cluster, one, other))
}

/// Permissions other than read are sufficient for their purpose.
#[test]
fn others_may_do_what_the_mode_says() {
    let Some((_cluster, one, _other)) = with_others() else {
        return;
    };
    let put = |name: &str, content: &[u8], mode: u32| put(&one, name, content, mode);
    let as_other = |script: &str| as_other(&one, script);
    let written = put("write-only", b"before", 0o622);
    as_other("printf after > write-only");
    assert_eq!(fs::read(&written).expect("read"), b"after");
    as_other("printf more >> write-only");
    assert_eq!(fs::read(&written).expect("read"), b"aftermore");
    as_other("touch write-only");

    let program = fs::read("/bin/true").expect("a program");
    put("execute-only", &program, 0o111);
    as_other("./execute-only");
    as_other("! cat execute-only 2>/dev/null");

    let set_id = put("set-id", b"x", 0o6777);
    as_other("printf y > set-id");
    assert_eq!(fs::metadata(&set_id).expect("stat").mode() & 0o7777, 0o777);
}

/// The capabilities of a file are dropped when it is written, and do not prevent writing.
#[test]
fn capabilities_of_a_file_are_dropped_by_whoever_changes_it() {
    const NAME: &str = "security.capability";
    // `cap_net_raw=ep`, as `setcap` writes it (version 2 of the format).
    let capability: Vec<u8> = [0x0200_0001_u32, 1 << 13, 0, 0, 0]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    let Some((_cluster, one, other)) = with_others() else {
        return;
    };
    for (number, change) in [
        "printf more >> FILE",
        "printf x | dd of=FILE conv=notrunc status=none",
        "fallocate -l 100 FILE",
        "fallocate -p -o 0 -l 4 FILE",
        "truncate -s 3 FILE",
        ": > FILE",
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("file-{number}");
        let path = put(&one, &name, b"before", 0o777);
        rustix::fs::setxattr(&path, NAME, &capability, XattrFlags::empty()).expect("setxattr");
        let mut value = [0; 64];
        let found = rustix::fs::getxattr(other.join(&name), NAME, &mut value);
        assert_eq!(found, Ok(capability.len()), "before {change}");
        as_other(&one, &change.replace("FILE", &name));
        for mount in [&one, &other] {
            let found = rustix::fs::getxattr(mount.join(&name), NAME, &mut value);
            assert_eq!(found, Err(Errno::NODATA), "{change}, on {mount:?}");
        }
    }
}

/// Files that are replaced while a program lists their directory are not missing from the list.
#[test]
fn names_that_are_replaced_meanwhile_are_listed() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    for (replacing, listing) in [(&one, &other), (&one, &one)] {
        replace_while_listed(replacing, listing);
    }
}

/// Replaces files on a mount while they are listed on another mount, or on the same.
fn replace_while_listed(one: &Path, other: &Path) {
    let names: Vec<String> = (0..30).map(|number| format!("{number:0200}")).collect();
    for name in &names {
        File::create(one.join(name)).expect("create");
    }
    let directory = File::open(other).expect("open");
    // Too small for all, so that the kernel has to ask twice.
    let mut buffer = Vec::with_capacity(8 << 10);
    let mut listing = RawDir::new(&directory, buffer.spare_capacity_mut());
    let mut listed = Vec::new();
    // `readdir(3)` ignores a name with the inode number 0.
    let mut keep = |entry: &RawDirEntry<'_>| {
        if entry.ino() != 0 {
            listed.push(entry.file_name().to_owned());
        }
    };
    keep(&listing.next().expect("an entry").expect("it is read"));
    // After attributes were read, the next entries are returned with theirs.
    let first = fs::metadata(other.join(&names[0]));
    first.expect("its attributes");
    for replaced in &names[10..] {
        fs::write(one.join("next"), "new").expect("write");
        fs::rename(one.join("next"), one.join(replaced)).expect("rename");
    }
    // Then those that were listed are gone.
    thread::sleep(2 * STAYS_AFTER_CLOSE);
    while let Some(entry) = listing.next() {
        keep(&entry.expect("it is read"));
    }
    let is_listed = |name: &String| listed.iter().any(|it| it.to_bytes() == name.as_bytes());
    let missing: Vec<_> = names.iter().filter(|name| !is_listed(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
