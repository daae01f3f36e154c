//! Edge cases: the start and end of a mount, an unavailable namenode, and output without a reader.

mod away;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{
    Cluster, ClusterOptions, DownOnDrop, KillOnDrop, can_mount, harvestfs, skip, unmount,
    wait_until,
};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn small() -> ClusterOptions {
    ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    }
}

/// The options, type and source of what is mounted on a directory.
fn mounted_on(directory: &Path) -> Option<(String, String, String)> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the kernel's table");
    table.lines().rev().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let before: Vec<&str> = before.split(' ').collect();
        let after: Vec<&str> = after.split(' ').collect();
        (Path::new(before[4]) == directory)
            .then(|| (before[5].into(), after[0].into(), after[1].into()))
    })
}

fn signal(process: &Child, signal: Signal) {
    let pid = Pid::from_raw(process.id().try_into().expect("a pid")).expect("not 0");
    kill_process(pid, signal).expect("it runs");
}

/// Unmounts a directory when this is dropped.
struct UnmountOnDrop<'a>(&'a Path);

impl Drop for UnmountOnDrop<'_> {
    fn drop(&mut self) {
        unmount(self.0);
    }
}

/// A process that has a file of the mount open, and its working directory there.
fn user_of(directory: &Path) -> KillOnDrop {
    let mut child = Command::new("/bin/sh")
        .args([
            "-c",
            "exec 3> held; echo data >&3; echo here; exec sleep 1000",
        ])
        .current_dir(directory)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut said = [0; 5];
    let stdout = child.stdout.as_mut().expect("piped");
    stdout.read_exact(&mut said).expect("it says so");
    KillOnDrop(child)
}

#[test]
fn a_mount_says_whose_it_is_and_gives_nobody_rights() {
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    let (options, kind, source) = mounted_on(&mount).expect("it is mounted");
    for option in ["nosuid", "nodev"] {
        assert!(options.split(',').any(|it| it == option), "{options}");
    }
    assert_eq!(kind, "fuse.harvestfs");
    assert_eq!(
        source.strip_prefix("harvestfs:").map(str::len),
        Some(16),
        "{source}"
    );
    let doctor = cluster.output_of(&["admin", "doctor", "--json"]);
    let doctor: Value = serde_json::from_str(&doctor).expect("JSON");
    let list = |name: &str| doctor[name].as_array().expect("a list");
    assert!(list("checked").contains(&"mounts".into()), "{doctor:#}");
    let shown = mount.to_string_lossy();
    let complains = list("findings").iter().any(|finding| {
        let what = finding["what"].as_str().expect("a text");
        finding["area"] == "mounts" && what.contains(&*shown)
    });
    assert!(!complains, "{doctor:#}");
    if !is_root() {
        return skip("only root's mount can give rights");
    }
    // Another mount, with the flags that allow this.
    let other = cluster.mount_with("with-rights", &["--suid", "--dev"]);
    let (options, ..) = mounted_on(&other).expect("it is mounted");
    assert!(
        !options.contains("nosuid") && !options.contains("nodev"),
        "{options}"
    );
    cluster.stop("with-rights");
}

/// Starts a mount that the cluster does not manage, and that may not be ready.
fn mounts_on(directory: &Path, cluster: &Cluster) -> KillOnDrop {
    let process = Command::new(harvestfs())
        .args(["mount".as_ref(), directory.as_os_str(), "--config".as_ref()])
        .arg(cluster.path("client/client.toml"))
        .stdout(Stdio::null())
        .spawn();
    KillOnDrop(process.expect("the binary runs"))
}

#[test]
fn a_mount_that_is_stopped_while_it_starts_leaves_nothing() {
    let Some((cluster, _mount)) = Cluster::mounted(&small()) else {
        return;
    };
    let directory = cluster.path("short");
    fs::create_dir(&directory).expect("a mount point");
    let _unmount = UnmountOnDrop(&directory);
    for _ in 0..20 {
        let mut process = mounts_on(&directory, &cluster);
        let began = Instant::now();
        while mounted_on(&directory).is_none() {
            assert!(began.elapsed() < DEADLINE, "it is not mounted");
        }
        signal(&process.0, Signal::TERM);
        assert!(process.0.wait().expect("it ends").success());
        assert_eq!(mounted_on(&directory), None);
    }
}

#[test]
fn a_killed_mount_is_cleaned_up_by_the_next() {
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    fs::write(mount.join("f"), "kept").expect("write");
    File::open(mount.join("f"))
        .and_then(|f| f.sync_all())
        .expect("sync");
    let user = user_of(&mount);
    cluster.kill("mnt");
    let error = fs::read_dir(&mount).expect_err("nobody serves it");
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::NOTCONN.raw_os_error())
    );
    let mut process = mounts_on(&mount, &cluster);
    wait_until("it is there again", DEADLINE, || {
        fs::read(mount.join("f")).is_ok_and(|content| content == b"kept")
    });
    drop(user);
    signal(&process.0, Signal::TERM);
    assert!(process.0.wait().expect("it ends").success());
    assert!(mounted_on(&mount).is_none(), "nothing is left");
}

#[test]
fn a_mount_in_use_ends_when_it_is_told_and_writes_back_what_it_has() {
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    let _user = user_of(&mount);
    // This panics unless the mount ends in good order.
    cluster.stop("mnt");
    assert!(mounted_on(&mount).is_none(), "nothing is left");
    let mount = cluster.mount("again");
    assert_eq!(fs::read(mount.join("held")).expect("read"), b"data\n");
}

#[test]
fn a_mount_that_cannot_write_back_can_be_killed_and_leaves_nobody_waiting() {
    // After the longer time, the mount has to ask the namenode, and unmounting waits for its answer until the mount is
    // killed.
    for away in [Duration::ZERO, Duration::from_secs(12)] {
        let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
            return;
        };
        let mut user = user_of(&mount);
        // From here on, dirty data cannot be written back, and the mount cannot end in good order.
        cluster.pause("namenode");
        thread::sleep(away);
        cluster.signal("mnt", Signal::TERM);
        thread::sleep(Duration::from_secs(1));
        // The kernel also sends this when the parent of a part ends.
        cluster.signal("mnt", Signal::TERM);
        thread::sleep(Duration::from_secs(1));
        assert!(
            cluster.running().contains(&"mnt".to_owned()),
            "it still tries"
        );
        cluster.interrupt("mnt");
        wait_until("Ctrl-C ends it", DEADLINE, || {
            !cluster.running().contains(&"mnt".to_owned())
        });
        user.0.kill().expect("it runs");
        wait_until("its user ends", DEADLINE, || {
            user.0.try_wait().expect("it is our child").is_some()
        });
        wait_until("nothing is left", DEADLINE, || mounted_on(&mount).is_none());
        cluster.resume("namenode");
    }
}

/// Another mount has changed a file that is being read here: the kernel drops pages, and waits for the read.
#[test]
fn a_mount_that_is_killed_while_the_kernel_waits_for_it_leaves_nobody_waiting() {
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    if !is_root() {
        return skip("only root's guard can break a connection");
    }
    let other = cluster.mount("other");
    fs::write(other.join("file"), vec![b'x'; 4 << 20]).expect("write");
    fs::read(other.join("file")).expect("read");
    for number in 1..=3 {
        cluster.pause(&Cluster::datanode(number));
    }
    let reader = Command::new("cat")
        .arg(mount.join("file"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut reader = KillOnDrop(reader.expect("cat runs"));
    thread::sleep(Duration::from_secs(1));
    fs::set_permissions(other.join("file"), fs::Permissions::from_mode(0o600)).expect("chmod");
    thread::sleep(Duration::from_secs(1));
    assert_eq!(
        reader.0.try_wait().expect("it is our child"),
        None,
        "it reads"
    );
    cluster.signal("mnt", Signal::KILL);
    wait_until("the reader ends", Duration::from_secs(20), || {
        reader.0.try_wait().expect("it is our child").is_some()
    });
    cluster.kill("mnt");
    for number in 1..=3 {
        cluster.resume(&Cluster::datanode(number));
    }
    let mount = cluster.mount("mnt");
    assert_eq!(fs::read(mount.join("file")).expect("read").len(), 4 << 20);
}

/// Device numbers are reused immediately.
#[test]
fn a_guard_that_comes_late_leaves_the_next_mount_alone() {
    if !is_root() {
        return skip("only root's guard can break a connection");
    }
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    let device = fs::metadata(&mount).expect("stat").dev();
    let device = format!(
        "{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    );
    let variable = format!("HARVESTFS_GUARD_DEVICE={device}");
    let is_guard = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|it| it == variable.as_bytes())
    };
    let guard = || {
        let processes = fs::read_dir("/proc").expect("the kernel's list of processes");
        processes
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .find(is_guard)
    };
    wait_until("the guard watches", DEADLINE, || guard().is_some());
    thread::sleep(Duration::from_secs(1));
    let number: u32 = guard().expect("it watches");
    let pid = Pid::from_raw(number.try_into().expect("a pid")).expect("not 0");
    kill_process(pid, Signal::STOP).expect("it runs");
    cluster.kill("mnt");
    let mount = cluster.mount("mnt");
    kill_process(pid, Signal::CONT).expect("it waits");
    wait_until("the guard ends", DEADLINE, || !is_guard(&number));
    fs::write(mount.join("file"), "x").expect("write");
    assert!(mounted_on(&mount).is_some());
}

#[test]
fn down_refuses_while_something_is_mounted_below() {
    if !is_root() {
        return skip("only root can mount a tmpfs");
    }
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let run = |arguments: &[&str]| {
        let output = Command::new(harvestfs())
            .args(arguments)
            .arg("--data")
            .arg(&data)
            .output()
            .expect("the binary runs");
        let said = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8(said).expect("text"),
        )
    };
    let up = run(&["up", "--detach", "--datanodes", "3", "--quota", "1GiB"]);
    assert!(up.0, "{}", up.1);
    let mount = data.join("mnt");
    let below = mount.join("a/b");
    let _unmount = UnmountOnDrop(&below);
    fs::create_dir_all(&below).expect("mkdir");
    rustix::mount::mount("none", &below, "tmpfs", MountFlags::empty(), None).expect("a tmpfs");
    fs::write(below.join("precious"), "x").expect("write");
    let (stopped, said) = run(&["down"]);
    let is_there = below.join("precious").exists();
    rustix::mount::unmount(&below, UnmountFlags::empty()).expect("it is mounted");
    let (stopped_then, said_then) = run(&["down"]);
    assert!(
        !stopped && said.contains(&format!("umount {}", below.display())),
        "{said}"
    );
    assert!(is_there, "nothing was touched");
    assert!(stopped_then, "{said_then}");
    assert!(mounted_on(&mount).is_none());
}

#[test]
fn a_mount_that_is_told_to_end_unmounts_what_is_below_first() {
    if !is_root() {
        return skip("only root can mount a tmpfs");
    }
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    let below = mount.join("a");
    fs::create_dir(&below).expect("mkdir");
    let device = fs::metadata(&mount).expect("it is there").dev();
    rustix::mount::mount("none", &below, "tmpfs", MountFlags::empty(), None).expect("a tmpfs");
    assert_ne!(fs::metadata(&below).expect("it is there").dev(), device);
    cluster.stop("mnt");
    assert!(mounted_on(&below).is_none() && mounted_on(&mount).is_none());
    // There is no dead mount either.
    assert_eq!(fs::read_dir(&mount).expect("an empty directory").count(), 0);
}

/// As with `mount --bind`: the mount table contains the device a second time, after the mount itself.
#[test]
fn a_mount_that_is_bound_elsewhere_too_loses_nothing_and_leaves_nothing() {
    if !is_root() {
        return skip("only root can bind a mount");
    }
    let Some((mut cluster, mut mount)) = Cluster::mounted(&small()) else {
        return;
    };
    let mut name = "mnt";
    for (is_used, next) in [(false, "second"), (true, "third")] {
        let bound = cluster.path(&format!("{name}-bound"));
        fs::create_dir(&bound).expect("mkdir");
        let _unmount = UnmountOnDrop(&bound);
        rustix::mount::mount_bind(&mount, &bound).expect("a bind mount");
        let below = mount.join("below");
        fs::create_dir_all(&below).expect("mkdir");
        rustix::mount::mount("none", &below, "tmpfs", MountFlags::empty(), None).expect("a tmpfs");
        let _user = is_used.then(|| user_of(&bound));
        fs::write(bound.join("last"), name).expect("write");
        // This panics unless the mount ends in good order.
        cluster.stop(name);
        for left in [&below, &bound, &mount] {
            assert_eq!(mounted_on(left), None, "{}", left.display());
        }
        mount = cluster.mount(next);
        let last = fs::read_to_string(mount.join("last")).expect("read");
        assert_eq!(last, name);
        name = next;
    }
}

/// As where `/` is shared, and part of it was bound elsewhere before: unmounting one of the two unmounts the other.
#[test]
fn a_mount_that_propagates_loses_nothing_and_leaves_nothing() {
    if !is_root() {
        return skip("only root can bind a mount");
    }
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&small());
    let (one, other) = (cluster.path("one"), cluster.path("other"));
    for directory in [&one, &other] {
        fs::create_dir(directory).expect("mkdir");
    }
    let _unmount = UnmountOnDrop(&one);
    rustix::mount::mount("none", &one, "tmpfs", MountFlags::empty(), None).expect("a tmpfs");
    rustix::mount::mount_change(&one, MountPropagationFlags::SHARED).expect("it is mounted");
    let _unmount_other = UnmountOnDrop(&other);
    rustix::mount::mount_bind(&one, &other).expect("a bind mount");
    let mount = cluster.mount("one/mnt");
    let propagated = other.join("mnt");
    assert!(mounted_on(&propagated).is_some(), "it propagates");
    let _user = user_of(&mount);
    // This panics unless the mount ends in good order.
    cluster.stop("one/mnt");
    let are_left = || [&mount, &propagated].map(|it| mounted_on(it).is_some());
    assert_eq!(are_left(), [false; 2]);
    // Now it is unused.
    cluster.mount("one/mnt");
    assert_eq!(fs::read(mount.join("held")).expect("read"), b"data\n");
    cluster.stop("one/mnt");
    assert_eq!(are_left(), [false; 2]);
}

#[test]
fn a_reader_that_has_seen_enough_ends_a_command_quietly() {
    let cluster = Cluster::start(&small());
    for arguments in [
        &["admin", "nodes"][..],
        &["admin", "status"],
        &["fs", "ls", "-l", "/"],
        &["completions", "bash"],
        &["admin", "doctor"],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = Command::new(harvestfs())
            .args(arguments)
            .env("HARVESTFS_DATA", cluster.path(""))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .expect("the binary runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(error, "", "{arguments:?}");
        // Status 0 if it had nothing to print.
        assert!(
            matches!(output.status.code(), Some(0 | 141)),
            "{arguments:?}: {}",
            output.status
        );
    }
}
