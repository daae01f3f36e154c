//! Jobs that are suspended on one mount and resumed from another. Needs root and CRIU, for which that of
//! `tests/criu-root.sh` is used.

mod cgroup;
mod job;
mod lost;
mod preempt;
mod trust;
mod turn;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, can_mount, copy_harvestfs, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use self::cgroup::Cgroup;
use self::job::{Checkpoints, Job, make_store};

const DEADLINE: Duration = Duration::from_secs(60);
const MEMORY_BYTES: u64 = 64 << 20;

fn sent_bytes(manifest: &Value) -> u64 {
    let images = manifest["images"].as_array().expect("images");
    let sent = images.iter().map(|image| image["sent_bytes"].as_u64());
    sent.map(|bytes| bytes.expect("a number")).sum()
}

/// Bytes stored by the datanodes.
fn stored_bytes(cluster: &Cluster, datanodes: usize) -> u64 {
    fn below(directory: &Path) -> u64 {
        let entries = fs::read_dir(directory).expect("a volume").flatten();
        let bytes = entries.map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => below(&entry.path()),
            Ok(metadata) => metadata.blocks() * 512,
            // It has been removed in the meantime.
            Err(_) => 0,
        });
        bytes.sum()
    }
    (1..=datanodes)
        .map(|number| below(&cluster.path(&Cluster::datanode(number)).join("volume")))
        .sum()
}

#[test]
fn a_job_goes_on_from_another_mount_and_is_stored_incrementally() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (mut cluster, here, there) = on_two_mounts(2);
    let mut job = Job::start();
    let digest = job.ask("digest");

    let empty_bytes = stored_bytes(&cluster, 3);
    checkpoints.dump(&here, &mut job);
    let first_bytes = stored_bytes(&cluster, 3) - empty_bytes;
    let count = job.count();
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);
    assert!(job.count() > count, "it started again");

    // Changes a tenth, first contiguous and then scattered over the memory.
    for how in ["together", "scattered"] {
        job.ask(&format!("change 10 {how}"));
        let digest = job.ask("digest");
        let before_bytes = stored_bytes(&cluster, 3);
        checkpoints.dump(&there, &mut job);
        let stored_bytes = stored_bytes(&cluster, 3).saturating_sub(before_bytes);
        assert!(
            stored_bytes * 100 <= first_bytes * 15,
            "{how}: {stored_bytes} of {first_bytes} stored"
        );
        let manifests = checkpoints.list(&here);
        let last = manifests.last().expect("two");
        assert!(
            sent_bytes(last) * 100 <= MEMORY_BYTES * 15,
            "{how}: {} sent",
            sent_bytes(last)
        );
        checkpoints.restore(&here, &job);
        assert_eq!(job.ask("digest"), digest, "{how}");
    }

    // The two newest are kept, and are unchanged when stored whole.
    let numbers: Vec<Value> = checkpoints
        .list(&here)
        .iter()
        .map(|manifest| manifest["number"].clone())
        .collect();
    assert_eq!(numbers, [2, 3]);
    let digest = job.ask("digest");
    checkpoints.dump(&here, &mut job);
    let said = checkpoints.run(&here, &["gc", "--keep", "1", "--depth", "0"]);
    assert!(said.contains("stored whole"), "{said}");
    // Some blocks have lost a replica with this datanode.
    cluster.kill("datanode-1");
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);
    assert_eq!(checkpoints.list(&there).len(), 1);
    checkpoints.run(&there, &["rm", "job"]);
    assert!(checkpoints.list(&here).is_empty());
}

/// Where the kernel tracks changes and this is requested, CRIU uses that; elsewhere all memory is
/// compared.
#[test]
fn a_job_that_goes_on_is_stored_incrementally() {
    const BY_KERNEL: &str = "tracked by the kernel";
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let check = Command::new(&checkpoints.criu)
        .args(["check", "--feature", "mem_dirty_track"])
        .output();
    let is_tracked = check.expect("CRIU runs").status.success();
    if !is_tracked {
        eprintln!("this kernel does not track changes of memory: only the comparison is tested");
    }
    let (_cluster, here, there) = on_two_mounts(2);
    let mut job = Job::start();
    let pid = job.pid.to_string();
    let go_on = [
        "dump",
        &pid,
        "--job",
        "job",
        "--leave-running",
        "--track-mem",
    ];
    let said = checkpoints.run(&here, &go_on);
    assert!(!said.contains(BY_KERNEL), "{said}");
    let sends_little = |how: &str| {
        let manifests = checkpoints.list(&here);
        let last = manifests.iter().rfind(|manifest| manifest["job"] == "job");
        let bytes = sent_bytes(last.expect("it was stored"));
        assert!(bytes * 100 <= MEMORY_BYTES * 15, "{how}: {bytes} sent");
    };
    for how in ["together", "scattered"] {
        job.ask(&format!("change 10 {how}"));
        let said = checkpoints.run(&here, &go_on);
        assert_eq!(said.contains(BY_KERNEL), is_tracked, "{how}: {said}");
        sends_little(how);
        job.goes_on();
    }

    // All memory is compared when another dump has made the kernel forget changes.
    job.ask("change 1 together");
    let other = [
        "dump",
        &pid,
        "--job",
        "other",
        "--leave-running",
        "--track-mem",
    ];
    checkpoints.run(&here, &other);
    let said = checkpoints.run(&here, &go_on);
    assert!(!said.contains(BY_KERNEL), "{said}");
    sends_little("compared");

    job.ask("change 10 scattered");
    let digest = job.ask("digest");
    let said = checkpoints.run(&here, &["dump", &pid, "--job", "job"]);
    assert_eq!(said.contains(BY_KERNEL), is_tracked, "{said}");
    sends_little("suspended");
    job.has_ended();
    checkpoints.run(&here, &["gc", "job", "--keep", "1", "--depth", "0"]);
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);

    // A resumed job is a new process to the kernel.
    let said = checkpoints.run(&there, &["dump", &pid, "--job", "job"]);
    assert!(!said.contains(BY_KERNEL), "{said}");
    sends_little("resumed");
    job.has_ended();
}

#[test]
fn criu_alone_works_on_the_mount() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let (here, there) = (cluster.mount("mnt"), cluster.mount("mnt2"));
    let mut job = Job::start();
    let digest = job.ask("digest");
    let criu = |arguments: &[&str], directory: &Path| {
        let output = Command::new(&checkpoints.criu)
            .args(arguments)
            .arg("--images-dir")
            .arg(directory)
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{output:?}");
    };
    fs::create_dir(here.join("images")).expect("a directory");
    criu(
        &["dump", "--tree", &job.pid.to_string()],
        &here.join("images"),
    );
    job.has_ended();
    let pages = there.join("images/pages-1.img");
    let held_bytes = || fs::metadata(&pages).expect("it is there").blocks() * 512;
    assert!(held_bytes() >= MEMORY_BYTES);
    // Punches a hole for each page that has been restored.
    criu(
        &["restore", "--restore-detached", "--auto-dedup"],
        &there.join("images"),
    );
    job.goes_on();
    assert_eq!(job.ask("digest"), digest);
    assert!(held_bytes() < MEMORY_BYTES / 8, "{} held", held_bytes());
}

/// A cluster of three datanodes with two mounts, and a directory for checkpoints.
fn on_two_mounts(replication: u8) -> (Cluster, PathBuf, PathBuf) {
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        replication,
        ..ClusterOptions::default()
    });
    let (here, there) = (cluster.mount("mnt"), cluster.mount("mnt2"));
    make_store(&here);
    (cluster, here, there)
}

#[test]
fn what_fails_leaves_the_job_and_the_last_checkpoint() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (mut cluster, here, there) = on_two_mounts(1);
    let mut job = Job::start();
    let digest = job.ask("digest");
    checkpoints.dump(&here, &mut job);
    checkpoints.restore(&here, &job);
    let pid = job.pid.to_string();

    let said = checkpoints.refusal(&here, &["dump", "1", "--job", "job"]);
    assert!(said.contains("not the process of a job"), "{said}");
    let said = checkpoints.refusal(&here, &["restore", "job"]);
    assert!(said.contains("in use here"), "{said}");
    let said = checkpoints.refusal(&here, &["restore", "nobody"]);
    assert!(said.contains("no checkpoint of a job nobody"), "{said}");
    let said = checkpoints.refusal(&here, &["dump", &pid, "--job", "a/b"]);
    assert!(said.contains("cannot be the name of a job"), "{said}");
    let without = Checkpoints {
        criu: "/nonexistent/criu".into(),
        node: tempfile::tempdir().expect("a directory"),
    };
    let said = without.refusal(&here, &["dump", &pid, "--job", "job"]);
    assert!(said.contains("there is no CRIU at"), "{said}");

    let mount_point = tempfile::tempdir().expect("a directory");
    let said = checkpoints.refusal(mount_point.path(), &["dump", &pid, "--job", "job"]);
    assert!(said.contains("mount the file system"), "{said}");
    let left = fs::read_dir(mount_point.path()).expect("it is there");
    assert_eq!(
        left.count(),
        0,
        "something was stored where nothing is mounted"
    );
    job.goes_on();

    // The mount fails in the middle: the datanodes are paused, so the dump cannot end before.
    for number in 1..=3 {
        cluster.pause(&Cluster::datanode(number));
    }
    let mut dump = checkpoints
        .command(&here, &["dump", &pid, "--job", "job"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    wait_until("the dump has begun", DEADLINE, || {
        // Its pages may not exist yet: for the comparison, it may first have to read from the datanodes.
        let mut entries = fs::read_dir(there.join("checkpoints/job")).expect("it is there");
        let has_draft = entries.any(|entry| {
            let name = entry.expect("a name").file_name();
            name.to_string_lossy().starts_with(".dump-")
        });
        has_draft && job.is_held()
    });
    cluster.kill("mnt");
    for number in 1..=3 {
        cluster.resume(&Cluster::datanode(number));
    }
    assert!(!dump.wait().expect("it ends").success());
    job.goes_on();
    assert_eq!(job.ask("digest"), digest);
    let here = cluster.mount("mnt");
    assert_eq!(checkpoints.list(&here).len(), 1);

    // The next one is good, and then damaged.
    checkpoints.dump(&here, &mut job);
    let second = here.join("checkpoints/job/000002");
    let pages = fs::OpenOptions::new()
        .write(true)
        .open(second.join("pages-1.img"))
        .expect("it is there");
    std::os::unix::fs::FileExt::write_all_at(&pages, b"damage", 1 << 20).expect("written");
    drop(pages);
    let said = checkpoints.refusal(&there, &["restore", "job"]);
    assert!(said.contains("pages-1.img is damaged"), "{said}");
    assert!(said.contains("--number 1"), "{said}");
    fs::write(second.join("manifest.json"), r#"{"version": 99}"#).expect("written");
    let said = checkpoints.refusal(&there, &["restore", "job"]);
    assert!(said.contains("version 99"), "{said}");
    checkpoints.run(&there, &["restore", "job", "--number", "1"]);
    job.goes_on();
    assert_eq!(job.ask("digest"), digest);
}

#[test]
fn a_datanode_that_goes_in_the_middle_of_a_restore_is_passed_over() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let options = ClusterOptions {
        datanodes: 3,
        replication: 2,
        ..ClusterOptions::default()
    };
    let mut cluster = Cluster::start(&options);
    let (here, there) = (cluster.mount("mnt"), cluster.mount("mnt2"));
    make_store(&here);
    let mut job = Job::start();
    let digest = job.ask("digest");
    checkpoints.dump(&here, &mut job);
    cluster.wait_healthy();
    // So that this mount has cached the manifest, which is read before the node's queue is entered.
    checkpoints.run(&there, &["list"]);
    // While they are paused, the restore cannot end before one of them is removed.
    for number in 1..=3 {
        cluster.pause(&Cluster::datanode(number));
    }
    let mut restore = checkpoints
        .command(&there, &["restore", "job"])
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary runs");
    let turn = checkpoints
        .node
        .path()
        .join("queue")
        .join(restore.id().to_string());
    wait_until("the restore has begun", DEADLINE, || turn.exists());
    cluster.kill(&Cluster::datanode(1));
    for number in 2..=3 {
        cluster.resume(&Cluster::datanode(number));
    }
    assert!(restore.wait().expect("it ends").success());
    job.goes_on();
    assert_eq!(job.ask("digest"), digest);
}

#[test]
fn a_dump_that_is_interrupted_or_killed_lets_the_job_go_on() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (cluster, here, _there) = on_two_mounts(1);
    let mut job = Job::start();
    let digest = job.ask("digest");
    let pid = job.pid.to_string();
    for signal in [Signal::INT, Signal::KILL] {
        // So that the dump cannot end before.
        for number in 1..=3 {
            cluster.pause(&Cluster::datanode(number));
        }
        let mut dump = checkpoints
            .command(&here, &["dump", &pid, "--job", "job"])
            .process_group(0)
            .spawn()
            .expect("the binary runs");
        wait_until("CRIU has the job", DEADLINE, || job.is_held());
        // As a terminal does.
        kill_process_group(Pid::from_child(&dump), signal).expect("it is ours");
        for number in 1..=3 {
            cluster.resume(&Cluster::datanode(number));
        }
        assert!(!dump.wait().expect("it ends").success());
        job.goes_on();
        assert_eq!(job.ask("digest"), digest);
    }
    // It leaves nothing in the way, and the next checkpoint is not one of a stopped job.
    checkpoints.dump(&here, &mut job);
    checkpoints.restore(&here, &job);
    assert_eq!(job.ask("digest"), digest);
}

#[test]
fn a_restore_that_is_interrupted_leaves_no_process() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (cluster, here, there) = on_two_mounts(1);
    let mut job = Job::start();
    let digest = job.ask("digest");
    checkpoints.dump(&here, &mut job);
    // So that CRIU reads the state immediately, and waits for the memory.
    for entry in fs::read_dir(there.join("checkpoints/job/000001")).expect("it is there") {
        let path = entry.expect("a name").path();
        if !path.ends_with("pages-1.img") {
            fs::read(&path).expect("it can be read");
        }
    }
    for number in 1..=3 {
        cluster.pause(&Cluster::datanode(number));
    }
    let mut restore = checkpoints
        .command(&there, &["restore", "job"])
        .process_group(0)
        .spawn()
        .expect("the binary runs");
    let process = PathBuf::from(format!("/proc/{}", job.pid));
    wait_until("CRIU restores", DEADLINE, || process.exists());
    // As a terminal does.
    kill_process_group(Pid::from_child(&restore), Signal::INT).expect("it is ours");
    assert!(!restore.wait().expect("it ends").success());
    for number in 1..=3 {
        cluster.resume(&Cluster::datanode(number));
    }
    wait_until("nothing is left of it", DEADLINE, || !process.exists());
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);
}

#[test]
fn the_job_of_a_cgroup_is_suspended_and_resumed() {
    let (Some(checkpoints), Some(cgroup)) = (Checkpoints::new(), Cgroup::new()) else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    make_store(&mount);
    let mut job = Job::start();
    let digest = job.ask("digest");
    let directory = cgroup.0.to_string_lossy().into_owned();
    let dump = ["dump", "--cgroup", &directory, "--job", "job"];
    let said = checkpoints.refusal(&mount, &dump);
    assert!(said.contains("has no process"), "{said}");
    fs::write(cgroup.0.join("cgroup.procs"), job.pid.to_string()).expect("root moves processes");
    checkpoints.run(&mount, &dump);
    job.has_ended();
    checkpoints.restore(&mount, &job);
    assert_eq!(job.ask("digest"), digest);
}

#[test]
fn thousands_of_images_are_made_linked_and_removed() {
    if !can_mount() {
        return;
    }
    const IMAGES: usize = 3_000;
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let (here, there) = (cluster.mount("mnt"), cluster.mount("mnt2"));
    let name = |number: usize| format!("core-{number}.img");
    for directory in ["first", "second"] {
        fs::create_dir(here.join(directory)).expect("mkdir");
    }
    for number in 0..IMAGES {
        let image = here.join("first").join(name(number));
        fs::write(&image, name(number)).expect("written");
        fs::hard_link(&image, here.join("second").join(name(number))).expect("linked");
    }
    fs::remove_dir_all(here.join("first")).expect("removed");
    // CRIU looks here for the pages that a checkpoint shares with its predecessor.
    std::os::unix::fs::symlink("../second", here.join("parent")).expect("a symlink");
    assert_eq!(
        fs::read_link(there.join("parent")).expect("a symlink"),
        Path::new("../second")
    );
    let second = there.join("second");
    assert_eq!(fs::read_dir(&second).expect("ls").count(), IMAGES);
    for number in 0..IMAGES {
        let content = fs::read_to_string(second.join(name(number))).expect("read");
        assert_eq!(content, name(number));
    }
    fs::remove_dir_all(&second).expect("removed");
    assert!(!here.join("second").exists());
}

#[test]
fn without_privilege_it_is_said_what_is_missing() {
    if !rustix::process::geteuid().is_root() {
        return skip("root gives its privilege up: run it as root");
    }
    // In a place where every user can run it.
    let directory = tempfile::tempdir().expect("a directory");
    let everybody = fs::Permissions::from_mode(0o755);
    fs::set_permissions(directory.path(), everybody).expect("chmod");
    let program = directory.path().join("harvestfs");
    copy_harvestfs(&program);
    let output = Command::new(&program)
        .args(["checkpoint", "dump", "1", "--job", "job", "--store"])
        .arg(directory.path())
        .uid(65_534)
        .gid(65_534)
        .output()
        .expect("it runs");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains("checkpoints need root"), "{said}");
}

#[test]
fn the_cheaper_way_of_preempting_is_taken() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    make_store(&mount);
    // Storage so slow that killing costs less, and then so fast that it never does.
    let measured = |bytes_per_s: f64| {
        let path = checkpoints.node.path().join("measured.json");
        let text =
            format!(r#"{{"write_bytes_per_s":{bytes_per_s},"read_bytes_per_s":{bytes_per_s}}}"#);
        fs::write(path, text).expect("written");
    };
    let mut job = Job::start();
    let candidate = format!("job={}", job.pid);
    measured(1.0);
    let said = checkpoints.run(
        &mount,
        &["preempt", "--free", "1MiB", &candidate, "--dry-run"],
    );
    assert!(said.contains("job: kill"), "{said}");
    job.goes_on();
    measured(1e15);
    let said = checkpoints.run(&mount, &["preempt", "--free", "1MiB", &candidate]);
    assert!(said.contains("job: checkpoint"), "{said}");
    job.has_ended();
    let said = checkpoints.run(
        &mount,
        &["resume", "job", "--datanode", "datanode-1", "--dry-run"],
    );
    assert!(said.contains("resume it here"), "{said}");
    checkpoints.run(&mount, &["resume", "job", "--datanode", "datanode-1"]);
    job.goes_on();
    measured(1.0);
    let gone = format!("gone={}", i32::MAX);
    let said = checkpoints.run(&mount, &["preempt", "--free", "1MiB", &gone, &candidate]);
    assert!(said.contains("gone: there is no process"), "{said}");
    job.has_ended();
    assert_eq!(checkpoints.list(&mount).len(), 1);
}
