//! Space that runs out, never existed, or disappears; and names and paths that are too long.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, can_mount, skip, wait_until};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::io::Errno;

use crate::{assert_serves, edit, files_below, wait_for_log};

const DEADLINE: Duration = Duration::from_secs(120);
const FILE_BYTES: usize = 1 << 20;

fn write_synced(path: &Path, seed: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&Pattern { seed }.bytes(FILE_BYTES))?;
    file.sync_all()
}

fn check(path: &Path, seed: u64) {
    Pattern { seed }.check_file(path, FILE_BYTES as u64);
}

fn bytes_below(directory: &Path) -> u64 {
    files_below(directory)
        .iter()
        // It may have been removed in the meantime.
        .filter_map(|path| fs::metadata(path).ok())
        .map(|metadata| metadata.len())
        .sum()
}

fn volume(cluster: &Cluster, number: usize) -> PathBuf {
    cluster.path(&Cluster::datanode(number)).join("volume")
}

#[test]
fn a_full_cluster_says_so_keeps_its_quotas_and_what_it_has() {
    const QUOTA_BYTES: u64 = 48 << 20;
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        replication: 3,
        block_size: "4MiB",
        quota: "48MiB",
        ..ClusterOptions::default()
    }) else {
        return;
    };
    let file = |seed: u64| mount.join(format!("f{seed}"));
    let mut written = 0;
    let refused = loop {
        match write_synced(&file(written), written) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        assert!(written < 200, "a full cluster refuses");
    };
    assert_eq!(refused.kind(), ErrorKind::StorageFull, "{refused}");
    // With less than a third of the space in use, it must not count as full.
    assert!(written >= 16, "full with {written} files of 1 MiB");
    for number in 1..=3 {
        let used = bytes_below(&volume(&cluster, number));
        assert!(used <= QUOTA_BYTES, "datanode {number} uses {used} bytes");
    }
    for seed in 0..written {
        check(&file(seed), seed);
    }
    // Names need no space on the datanodes; existing files can be removed, which makes room.
    fs::create_dir(mount.join("directory")).expect("mkdir");
    fs::rename(file(0), mount.join("directory/f0")).expect("rename");
    fs::remove_file(file(written)).ok();
    for seed in 1..written {
        fs::remove_file(file(seed)).expect("remove");
    }
    wait_until("room for new files", DEADLINE, || {
        write_synced(&mount.join("again"), 7).is_ok()
    });
    check(&mount.join("again"), 7);
    check(&mount.join("directory/f0"), 0);
    assert_serves(&mut cluster, &mount, 5);
}

#[test]
fn a_quota_of_zero_takes_nothing_and_harms_nobody() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        replication: 2,
        ..ClusterOptions::default()
    });
    cluster.stop(&Cluster::datanode(4));
    edit(&cluster.path("datanode-4/datanode.toml"), |text| {
        assert!(text.contains("quota = \"8GiB\""), "{text}");
        text.replace("quota = \"8GiB\"", "quota = \"0\"")
    });
    cluster.start_datanode(4);
    cluster.wait_alive(4, DEADLINE);
    let mount = cluster.mount("mnt");
    for seed in 0..12 {
        write_synced(&mount.join(format!("f{seed}")), seed).expect("the others have room");
    }
    assert_eq!(cluster.node_status(4)["replicas"], 0);
    assert_serves(&mut cluster, &mount, 6);
    // The other datanodes have failed: writes wait for them, and `doctor` reports that.
    for number in 1..=3 {
        cluster.kill(&Cluster::datanode(number));
    }
    wait_until("it is told that writes wait", DEADLINE, || {
        let doctor = cluster.command(&["admin", "doctor"]);
        let told = "a write needs 2 datanodes, and 0 can take it now: 3 are silent, 1 is full";
        String::from_utf8_lossy(&doctor.stdout).contains(told)
    });
    // A clear refusal instead of an endless wait.
    let impatient = cluster.mount_with("impatient", &["--unreachable-timeout", "2"]);
    let error = write_synced(&impatient.join("nowhere"), 1).expect_err("there is no room");
    assert_eq!(
        error.raw_os_error(),
        Some(Errno::IO.raw_os_error()),
        "{error}"
    );
}

#[test]
fn a_volume_that_is_lost_takes_only_its_own_replicas_down() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        replication: 2,
        block_size: "1MiB",
        ..ClusterOptions::default()
    });
    cluster.stop(&Cluster::datanode(1));
    edit(&cluster.path("datanode-1/datanode.toml"), |text| {
        format!("{text}\n[[volume]]\npath = \"second\"\nquota = \"8GiB\"\n")
    });
    cluster.start_datanode(1);
    cluster.wait_alive(3, DEADLINE);
    let mount = cluster.mount("mnt");
    for seed in 0..24 {
        write_synced(&mount.join(format!("f{seed}")), seed).expect("write");
    }
    let second = cluster.path("datanode-1/second");
    wait_until("replicas on both volumes", DEADLINE, || {
        [&volume(&cluster, 1), &second]
            .iter()
            .all(|volume| !files_below(&volume.join("sealed")).is_empty())
    });
    // The disk under one of them has changed: its identity file is garbage.
    cluster.stop(&Cluster::datanode(1));
    fs::write(second.join("VERSION"), "no volume").expect("write");
    cluster.start_datanode(1);
    cluster.wait_alive(3, DEADLINE);
    wait_for_log(&cluster, "datanode-1", "a volume cannot be used");
    assert!(cluster.log("datanode-1").contains("second/VERSION"));
    for seed in 0..24 {
        check(&mount.join(format!("f{seed}")), seed);
    }
    // Its replicas are created again elsewhere.
    assert_serves(&mut cluster, &mount, 5);
    let replicas = cluster.node_status(1)["replicas"].as_u64();
    assert!(replicas > Some(0), "{replicas:?}");
}

/// A disk of a few megabytes, gone when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: &Path, bytes: u64) -> Option<Self> {
        fs::create_dir_all(path).expect("a directory");
        let options = std::ffi::CString::new(format!("size={bytes}")).expect("no NUL");
        match rustix::mount::mount(
            "tmpfs",
            path,
            "tmpfs",
            rustix::mount::MountFlags::empty(),
            options.as_c_str(),
        ) {
            Ok(()) => Some(Self(path.to_owned())),
            Err(error) => {
                skip(&format!("mounting a tmpfs: {error} (run as root)"));
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let detach = rustix::mount::UnmountFlags::DETACH;
        if let Err(error) = rustix::mount::unmount(&self.0, detach) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}

#[test]
fn a_disk_that_is_fuller_than_its_quota_is_written_around() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        replication: 2,
        block_size: "4MiB",
        ..ClusterOptions::default()
    });
    cluster.stop(&Cluster::datanode(1));
    fs::remove_dir_all(volume(&cluster, 1)).expect("its volume");
    let Some(disk) = SmallDisk::mount(&volume(&cluster, 1), 12 << 20) else {
        return;
    };
    cluster.start_datanode(1);
    cluster.wait_alive(3, DEADLINE);
    let mount = cluster.mount("mnt");
    for seed in 0..40 {
        write_synced(&mount.join(format!("f{seed}")), seed)
            .unwrap_or_else(|error| panic!("two other datanodes have room: f{seed}: {error}"));
    }
    for seed in 0..40 {
        check(&mount.join(format!("f{seed}")), seed);
    }
    assert_serves(&mut cluster, &mount, 5);
    // The datanode must release its disk before that is unmounted, and that before its directory is removed.
    cluster.stop(&Cluster::datanode(1));
    drop(disk);
}

fn directory(parent: impl std::os::fd::AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    openat(
        parent,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

#[test]
fn names_and_paths_that_are_too_long_are_refused() {
    let Some((mut cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    }) else {
        return;
    };
    let top = openat(CWD, &mount, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("open");
    let (longest, too_long) = ("n".repeat(255), "n".repeat(256));
    fs::write(mount.join(&longest), "kept").expect("255 bytes are a name");
    for error in [
        fs::write(mount.join(&too_long), "x").expect_err("256 bytes"),
        fs::rename(mount.join(&longest), mount.join(&too_long)).expect_err("256 bytes"),
        fs::create_dir(mount.join(&too_long)).expect_err("256 bytes"),
        std::os::unix::fs::symlink("n".repeat(4096), mount.join("link")).expect_err("a target"),
    ] {
        assert_eq!(
            error.raw_os_error(),
            Some(Errno::NAMETOOLONG.raw_os_error()),
            "{error}"
        );
    }
    let output = cluster.command(&["fs", "mkdir", &format!("/{too_long}")]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("name") && said.contains("long"), "{said}");

    // Step by step, deeper than a path of PATH_MAX can express, until it is refused.
    let mode = Mode::from_raw_mode(0o755);
    let mut parent = directory(&top, ".").expect("the top");
    let mut depth = 0;
    let refused = loop {
        if let Err(error) = mkdirat(&parent, "d", mode) {
            break error;
        }
        parent = directory(&parent, "d").expect("it was made");
        depth += 1;
        assert!(depth <= 5000, "there is no end");
    };
    assert_eq!((refused, depth), (Errno::NAMETOOLONG, 4096));
    // Every level exists, and can be removed from the bottom up.
    for _ in 0..depth {
        let above = directory(&parent, "..").expect("its parent");
        unlinkat(&above, "d", AtFlags::REMOVEDIR).expect("it is empty");
        parent = above;
    }
    assert_eq!(fs::read(mount.join(&longest)).expect("read"), b"kept");
    assert_serves(&mut cluster, &mount, 3);
}
