//! Attributes of files: sizes, times, and extended attributes that are settings.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use harvestfs_tests::{Cluster, wait_until};
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, XattrFlags};

#[test]
fn special_files_links_and_attributes_are_kept() {
    let Some((mut cluster, one, _other)) = Cluster::with_two_mounts() else {
        return;
    };
    let dir = File::open(&one).expect("the root");
    let mode = rustix::fs::Mode::from_raw_mode(0o640);
    let make = |name: &str, kind| rustix::fs::mknodat(&dir, name, kind, mode, 0).expect("mknod");
    make("fifo", rustix::fs::FileType::Fifo);
    make("socket", rustix::fs::FileType::Socket);
    std::os::unix::fs::symlink("../target", one.join("link")).expect("symlink");
    fs::write(one.join("f"), "x").expect("write");
    fs::hard_link(one.join("f"), one.join("g")).expect("link");
    let file = File::open(one.join("f")).expect("open");
    rustix::fs::fsetxattr(&file, "user.note", b"kept", XattrFlags::CREATE).expect("setxattr");
    drop((file, dir));
    cluster.stop("one");
    cluster.stop("other");
    cluster.kill("namenode");
    cluster.start_namenode();
    let one = cluster.mount("one");
    assert!(
        fs::symlink_metadata(one.join("fifo"))
            .expect("stat")
            .file_type()
            .is_fifo()
    );
    assert!(
        fs::symlink_metadata(one.join("socket"))
            .expect("stat")
            .file_type()
            .is_socket()
    );
    assert_eq!(
        fs::read_link(one.join("link")).expect("readlink"),
        PathBuf::from("../target")
    );
    let (f, g) = (fs::metadata(one.join("f")), fs::metadata(one.join("g")));
    let (f, g) = (f.expect("stat"), g.expect("stat"));
    assert_eq!((f.ino(), f.nlink()), (g.ino(), 2));
    let mut value = [0; 16];
    let length = rustix::fs::getxattr(one.join("g"), "user.note", &mut value).expect("getxattr");
    assert_eq!(&value[..length], b"kept");
}

/// Uncommitted data counts as used space, since archivers do not read a file that has a size but uses no space.
#[test]
fn what_is_not_committed_yet_has_space() {
    let Some((_cluster, one, _other)) = Cluster::with_two_mounts() else {
        return;
    };
    let space_bytes = |file: &File| file.metadata().expect("stat").blocks() * 512;
    let file = File::create_new(one.join("f")).expect("create");
    file.write_all_at(&[1; 10_000], 0).expect("write");
    assert!(space_bytes(&file) >= 10_000, "{}", space_bytes(&file));
    file.sync_all().expect("fsync");
    let space_when_stored = space_bytes(&file);
    file.write_all_at(&[2; 10_000], 0).expect("write");
    assert_eq!(space_bytes(&file), space_when_stored);
    file.set_len(1 << 30).expect("truncate");
    file.write_all_at(&[3; 10_000], 1 << 20).expect("write");
    assert!(space_bytes(&file) >= 20_000, "{}", space_bytes(&file));
    assert!(space_bytes(&file) < 1 << 20, "{}", space_bytes(&file));
}

#[test]
fn times_of_one_machine_never_go_back() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    // Two clocks alternate: the namenode stamps created files, the kernel written and touched ones. Changing
    // a file elsewhere after reading its attributes makes the kernel use finer timestamps.
    let elsewhere = tempfile::NamedTempFile::new().expect("a file");
    let mut last = fs::metadata(&one).expect("stat").modified().expect("mtime");
    for number in 0..200 {
        elsewhere.as_file().metadata().expect("stat");
        fs::write(elsewhere.path(), "x").expect("write");
        let path = one.join(format!("created-{number}"));
        let file = File::create(&path).expect("create");
        let mut stamps = vec![file.metadata().expect("stat").modified()];
        rustix::fs::futimens(&file, &NOW).expect("futimens");
        stamps.push(file.metadata().expect("stat").modified());
        let path = other.join(format!("written-{number}"));
        fs::write(&path, "x").expect("write");
        stamps.push(fs::metadata(&path).expect("stat").modified());
        for stamp in stamps {
            let stamp = stamp.expect("mtime");
            assert!(stamp >= last, "round {number}: {stamp:?} after {last:?}");
            last = stamp;
        }
    }
}

const NOW: Timestamps = {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    Timestamps {
        last_access: now,
        last_modification: now,
    }
};

#[test]
fn replicas_are_raised_and_lifetimes_end_by_themselves() {
    let Some((mut cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let directory = one.join("d");
    fs::create_dir(&directory).expect("mkdir");
    let set = |path: &Path, name: &str, value: &str| {
        let name = format!("user.harvestfs.{name}");
        rustix::fs::setxattr(path, name, value.as_bytes(), XattrFlags::empty()).expect("setxattr");
    };
    let replicas = |path: &Path| {
        let mut value = vec![0; 4096];
        let name = "user.harvestfs.locations";
        let length = rustix::fs::getxattr(path, name, &mut value).expect("getxattr");
        let text = String::from_utf8_lossy(&value[..length]).into_owned();
        let line = text.lines().next().expect("a block").to_owned();
        line.split_whitespace().skip(3).count()
    };
    set(&directory, "replication", "1");
    set(&directory, "raise_replication", "2");
    set(&directory, "raise_after_s", "2000000000");
    let file = directory.join("f");
    fs::write(&file, vec![7; 1 << 20]).expect("write");
    assert_eq!(replicas(&file), 1);
    // Pending work survives a restart of the namenode.
    cluster.kill("namenode");
    cluster.start_namenode();
    set(&file, "raise_after_s", "1");
    wait_until("two replicas", Duration::from_secs(90), || {
        replicas(&other.join("d/f")) == 2
    });

    let kept = directory.join("tree/below");
    fs::create_dir_all(&kept).expect("mkdir");
    fs::write(kept.join("g"), "kept").expect("write");
    fs::write(directory.join(".hidden"), "").expect("write");
    let open = File::open(kept.join("g")).expect("open");
    set(&directory, "lifetime_s", "1");
    for mount in [&one, &other] {
        wait_until("all is gone", Duration::from_secs(90), || {
            fs::read_dir(mount.join("d")).expect("ls").count() == 1
        });
    }
    let mut content = String::new();
    (&open).read_to_string(&mut content).expect("read");
    assert_eq!(content, "kept");
    assert!(directory.join(".hidden").exists());
}

#[test]
fn settings_are_attributes_and_are_inherited() {
    let Some((cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let directory = one.join("d");
    fs::create_dir(&directory).expect("mkdir");
    let set = |path: &PathBuf, name: &str, value: &str| {
        rustix::fs::setxattr(path, name, value.as_bytes(), XattrFlags::empty())
    };
    let get = |path: &PathBuf, name: &str| {
        let mut value = vec![0; 4096];
        let length = rustix::fs::getxattr(path, name, &mut value).expect("getxattr");
        value.truncate(length);
        String::from_utf8(value).expect("text")
    };
    set(&directory, "user.harvestfs.replication", "1").expect("set");
    for wrong in ["0", "11", "many", ""] {
        let refused = set(&directory, "user.harvestfs.replication", wrong);
        assert_eq!(refused, Err(rustix::io::Errno::INVAL), "{wrong:?}");
    }
    let file = directory.join("f");
    fs::write(&file, "once").expect("write");
    assert_eq!(get(&file, "user.harvestfs.replication"), "1");
    let replicas = |path: &PathBuf| {
        let text = get(path, "user.harvestfs.locations");
        let line = text.lines().next().expect("a block").to_owned();
        line.split_whitespace().skip(3).count()
    };
    assert_eq!(replicas(&file), 1);
    // A directory without a setting passes on that of its ancestors, even when that changes.
    let below = directory.join("e/f");
    fs::create_dir_all(&below).expect("mkdir");
    for wanted in [1, 2, 3] {
        let wanted_text = wanted.to_string();
        set(&directory, "user.harvestfs.replication", &wanted_text).expect("set");
        for (number, at) in [&below, &other.join("d/e/f")].into_iter().enumerate() {
            let file = at.join(format!("{wanted}-{number}"));
            fs::write(&file, vec![7; 3 << 20]).expect("write");
            assert_eq!(replicas(&file), wanted);
        }
    }
    set(&file, "user.harvestfs.replication", "3").expect("set");
    // This happens once the mount has sealed the block, after writing has stopped.
    wait_until("three replicas", Duration::from_secs(90), || {
        replicas(&other.join("d/f")) == 3
    });
    cluster.wait_healthy();
}
