//! What `harvestfs down` reports when not everything stopped in good order, and what does not prevent `up` from
//! starting.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use harvestfs_tests::{
    DownOnDrop, Process, can_mount, copy_harvestfs, harvestfs, run_on, skip, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

const DEADLINE: Duration = Duration::from_secs(30);

/// The `up` of a cluster.
fn supervisor(data: &Path) -> Pid {
    let text = fs::read_to_string(data.join("up.pid")).expect("the supervisor's id");
    Pid::from_raw(text.trim().parse().expect("a number")).expect("not 0")
}

fn datanodes_of(supervisor: Pid) -> Vec<Pid> {
    let pid = supervisor.as_raw_nonzero();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.expect("the kernel lists children");
    let is_datanode = |child: &&str| {
        let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0)
            .any(|word| word == b"datanode")
    };
    let datanodes = children.split_whitespace().filter(is_datanode);
    datanodes
        .map(|child| Pid::from_raw(child.parse().expect("a number")).expect("not 0"))
        .collect()
}

/// Begins `down`, and returns when it has signalled an `up` that hangs.
fn begin_down(data: &Path, supervisor: Pid) -> Child {
    let child = Command::new(harvestfs())
        .args(["down", "--data"])
        .arg(data)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let status = format!("/proc/{}/status", supervisor.as_raw_nonzero());
    wait_until("it is told to stop", DEADLINE, || {
        let status = fs::read_to_string(&status).expect("it hangs");
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        let pending = u64::from_str_radix(pending.expect("a mask").trim(), 16);
        // Signals are numbered from 1.
        let terminate = 1_u64 << (Signal::TERM.as_raw() - 1);
        pending.expect("hexadecimal") & terminate != 0
    });
    child
}

fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn down_names_what_did_not_stop_in_good_order() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let up = run_on(
        &data,
        &["up", "--detach", "--datanodes", "3", "--quota", "1GiB"],
    );
    assert!(up.status.success(), "{up:?}");

    // The part is not restarted before everything stops.
    let pid = supervisor(&data);
    kill_process(pid, Signal::STOP).expect("it runs");
    kill_process(datanodes_of(pid)[0], Signal::KILL).expect("it runs");
    let down = begin_down(&data, pid);
    kill_process(pid, Signal::CONT).expect("it hangs");
    let output = down.wait_with_output().expect("it ends");
    let said = complaint(&output);
    assert!(said.contains("not all of it in good order"), "{said}");
    let named = said.lines().filter(|line| line.contains("signal: 9"));
    let named: Vec<&str> = named.collect();
    assert_eq!(named.len(), 1, "{said}");
    assert!(named[0].contains("datanode-"), "{said}");

    // The report about that one is not repeated for the next one, which cannot report anything.
    let up = run_on(&data, &["up", "--detach"]);
    assert!(up.status.success(), "{up:?}");
    let pid = supervisor(&data);
    kill_process(pid, Signal::STOP).expect("it runs");
    let down = begin_down(&data, pid);
    kill_process(pid, Signal::KILL).expect("it hangs");
    let output = down.wait_with_output().expect("it ends");
    let said = complaint(&output);
    assert!(said.contains("was killed"), "{said}");

    let up = run_on(&data, &["up", "--detach"]);
    assert!(up.status.success(), "{up:?}");
    let down = run_on(&data, &["down"]);
    assert!(down.status.success(), "{down:?}");
    let said = String::from_utf8_lossy(&down.stdout).into_owned();
    assert!(said.contains("Everything is kept"), "{said}");
}

#[test]
fn variables_for_a_part_are_not_for_those_of_a_whole_cluster() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let up = Command::new(harvestfs())
        .args(["up", "--detach", "--datanodes", "3", "--quota", "1GiB"])
        .arg("--data")
        .arg(&data)
        .env("HARVESTFS_LISTEN", "nonsense")
        .env("HARVESTFS_NAMENODES", "127.0.0.1:1")
        .env("HARVESTFS_PRIORITY", "nonsense")
        .env("HARVESTFS_PRIMARY_CGROUP", "/nonsense")
        .output()
        .expect("the binary runs");
    assert!(up.status.success(), "{up:?}");
}

#[test]
fn the_mount_of_another_cluster_is_left_alone() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    let (_down, _down_other) = (DownOnDrop(&one), DownOnDrop(&other));
    let flags = ["up", "--detach", "--datanodes", "3", "--quota", "1GiB"];
    let up = run_on(&one, &flags);
    assert!(up.status.success(), "{up:?}");
    let mount = one.join("mnt");
    fs::write(mount.join("f"), "of one").expect("write");

    // Under another name, too, which the kernel's table does not have.
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&one, &link).expect("symlink");
    let by_link = link.join("mnt");
    for there in [&mount, &by_link] {
        let there = there.to_str().expect("text");
        let said = complaint(&run_on(&other, &[&flags[..], &["--mount", there]].concat()));
        assert!(said.contains("another cluster is mounted on"), "{said}");
    }
    let up = run_on(&other, &flags);
    assert!(up.status.success(), "{up:?}");

    if rustix::process::geteuid().is_root() {
        let config = other.join("client/client.toml");
        let arguments: [&Path; 4] = ["mount".as_ref(), &mount, "--config".as_ref(), &config];
        let over = Process::start("over", &arguments, &[], &directory.path().join("over.log"));
        assert!(!mount.join("f").exists(), "it is hidden");
        let said = complaint(&run_on(&one, &["down"]));
        assert!(
            said.contains(&format!("umount {}", mount.display())),
            "{said}"
        );
        over.stop();
    } else {
        skip("only root can mount over a mount: run it as root");
    }
    assert_eq!(fs::read(mount.join("f")).expect("read"), b"of one");
    for data in [&one, &other] {
        let down = run_on(data, &["down"]);
        assert!(down.status.success(), "{down:?}");
    }
}

#[test]
fn who_stops_waiting_for_a_start_stops_that() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let flags = ["up", "--detach", "--datanodes", "3", "--quota", "1GiB"];
    let up = run_on(&data, &flags);
    assert!(up.status.success(), "{up:?}");
    let down = run_on(&data, &["down"]);
    assert!(down.status.success(), "{down:?}");

    // As if servers of a killed cluster still ran, for which a start waits.
    let lock = fs::File::open(data.join("servers.lock")).expect("it was started");
    lock.lock().expect("nobody has it");
    let up = Command::new(harvestfs())
        .args(flags)
        .arg("--data")
        .arg(&data)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    wait_until("it waits", DEADLINE, || {
        let log = fs::read_to_string(data.join("log/up.log")).unwrap_or_default();
        log.contains("Waiting until what is left")
    });
    kill_process(Pid::from_child(&up), Signal::TERM).expect("it waits");
    let ended = up.wait_with_output().expect("it ends");
    assert_eq!(
        ended.status.signal(),
        Some(Signal::TERM.as_raw()),
        "{ended:?}"
    );
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("Stopping what has started"), "{said}");
    drop(lock);
    let up = run_on(&data, &flags);
    assert!(up.status.success(), "nothing runs: {up:?}");
    let down = run_on(&data, &["down"]);
    assert!(down.status.success(), "{down:?}");
}

/// As in an upgrade: running processes keep their binary, and so do parts that they restart.
#[test]
fn a_part_comes_back_though_the_binary_is_gone() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let binary = directory.path().join("harvestfs");
    copy_harvestfs(&binary);
    let up = Command::new(&binary)
        .args(["up", "--detach", "--datanodes", "3", "--quota", "1GiB"])
        .arg("--data")
        .arg(&data)
        .output()
        .expect("the binary runs");
    assert!(up.status.success(), "{up:?}");
    fs::remove_file(&binary).expect("it is there");
    let pid = supervisor(&data);
    let before = datanodes_of(pid);
    kill_process(before[0], Signal::KILL).expect("it runs");
    let is_called_by_its_name = |datanode: &Pid| {
        let name = format!("/proc/{}/comm", datanode.as_raw_nonzero());
        fs::read_to_string(name).is_ok_and(|name| name == "harvestfs\n")
    };
    wait_until("it is started again", DEADLINE, || {
        let now = datanodes_of(pid);
        now.len() == 3 && !now.contains(&before[0]) && now.iter().all(is_called_by_its_name)
    });
    let down = run_on(&data, &["down"]);
    assert!(down.status.success(), "{down:?}");
}

#[test]
fn a_stop_can_be_hurried() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let up = run_on(
        &data,
        &["up", "--detach", "--datanodes", "3", "--quota", "1GiB"],
    );
    assert!(up.status.success(), "{up:?}");
    let pid = supervisor(&data);
    for datanode in datanodes_of(pid) {
        kill_process(datanode, Signal::STOP).expect("it runs");
    }
    let down = Command::new(harvestfs())
        .args(["down", "--data"])
        .arg(&data)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let ready = data.join("up.ready");
    wait_until("it stops", DEADLINE, || !ready.exists());
    let began = Instant::now();
    kill_process(pid, Signal::INT).expect("it waits");
    let said = complaint(&down.wait_with_output().expect("it ends"));
    assert!(began.elapsed() < DEADLINE, "it was hurried");
    let killed = said.lines().filter(|line| line.contains("was killed"));
    assert!(killed.count() >= 3, "{said}");
}
