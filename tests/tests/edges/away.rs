//! Behavior of programs on a mount while datanodes or the namenode do not answer.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, KillOnDrop, can_mount, wait_until};
use rustix::process::Signal;

use crate::{is_root, signal, small};

/// Maximum time for a killed program to end.
const KILLED_MAX: Duration = Duration::from_secs(2);

/// A shell command that waits for the cluster.
fn waiting(command: &str, mount: &Path) -> KillOnDrop {
    let shell = Command::new("/bin/sh")
        .args(["-c", command])
        .current_dir(mount)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    KillOnDrop(shell.expect("a shell"))
}

/// Kills waiting programs, and waits for their end.
fn end_at_once(programs: &mut [(&str, KillOnDrop)], by: Signal) {
    thread::sleep(Duration::from_millis(500));
    for (command, program) in &mut *programs {
        let ended = program.0.try_wait().expect("it is our child");
        assert_eq!(ended, None, "`{command}` waits");
    }
    for (_, program) in &*programs {
        signal(&program.0, by);
    }
    for (command, program) in programs {
        wait_until(&format!("`{command}` ends"), KILLED_MAX, || {
            program.0.try_wait().expect("it is our child").is_some()
        });
    }
}

#[test]
fn a_killed_program_ends_at_once_whoever_does_not_answer() {
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    fs::write(mount.join("file"), vec![b'x'; 4 << 20]).expect("write");
    for round in ["1", "2"] {
        fs::create_dir(mount.join(round)).expect("mkdir");
        fs::write(mount.join(round).join("small"), "x").expect("write");
    }
    let other = cluster.mount("other");
    fs::read_dir(&other).expect("it is mounted");
    // Pauses the datanodes: programs wait for data that only these have.
    for number in 1..=3 {
        cluster.pause(&Cluster::datanode(number));
    }
    let command = "exec cat file";
    end_at_once(&mut [(command, waiting(command, &other))], Signal::KILL);
    for number in 1..=3 {
        cluster.resume(&Cluster::datanode(number));
    }
    // Pauses the namenode, first before and then after the mount has noticed. The mount knows the contents of
    // the directory that it created: only changes need a request.
    let of_namenode = [
        "exec cat ../not-known",
        "exec ls -l ../not-known/below",
        "exec cp small copy",
        "exec mv small moved",
        "exec mkdir directory",
        // Ends without storing what it wrote.
        "echo more >> small; exec sleep 100",
    ];
    for (round, by) in [("1", Signal::KILL), ("2", Signal::TERM)] {
        if round == "2" {
            cluster.resume("namenode");
            cluster.kill("namenode");
        } else {
            cluster.pause("namenode");
        }
        let directory = mount.join(round);
        let mut programs = of_namenode.map(|command| (command, waiting(command, &directory)));
        end_at_once(&mut programs, by);
    }
    cluster.start_namenode();
    for round in ["1", "2"] {
        let directory = mount.join(round);
        // The interrupted operation has either happened or not.
        let names = ["small", "moved"].map(|name| directory.join(name).exists());
        assert!(names[0] != names[1], "{names:?}");
        fs::write(directory.join("new"), "again").expect("write");
        assert_eq!(fs::read(directory.join("new")).expect("read"), b"again");
    }
    assert_eq!(fs::read(other.join("file")).expect("read").len(), 4 << 20);
}

#[test]
fn a_mount_waits_for_the_namenode_as_long_as_it_was_told() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&small());
    let patient = cluster.mount_with("patient", &["--unreachable-timeout=forever"]);
    let impatient = cluster.mount_with("impatient", &["--unreachable-timeout=2"]);
    fs::write(patient.join("before"), "x").expect("write");
    let held = File::create(impatient.join("held")).expect("create");
    for gone in [false, true] {
        if gone {
            cluster.kill("namenode");
        } else {
            cluster.pause("namenode");
        }
        let began = Instant::now();
        let error = fs::create_dir(impatient.join("d")).expect_err("nobody answers");
        let waited = began.elapsed();
        assert_eq!(
            error.raw_os_error(),
            Some(rustix::io::Errno::TIMEDOUT.raw_os_error()),
            "{error}"
        );
        assert!(
            (Duration::from_millis(1_500)..Duration::from_secs(6)).contains(&waited),
            "{waited:?}"
        );
        if !gone {
            cluster.resume("namenode");
        }
    }
    let said = "no namenode answered within 2 s";
    assert!(cluster.log("impatient").contains(said));
    let mut held = held;
    held.write_all(b"data").expect("it is in memory");
    let error = held.sync_all().expect_err("it cannot be stored");
    assert_ne!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");

    // The first operations after its return find it, and datanodes to write to.
    let waits = thread::spawn(move || {
        fs::create_dir(patient.join("e"))?;
        let mut file = File::create(patient.join("e/file"))?;
        file.write_all(b"data")?;
        file.sync_all()?;
        fs::read(patient.join("e/file"))
    });
    thread::sleep(Duration::from_secs(3));
    assert!(!waits.is_finished(), "it waits");
    cluster.start_namenode();
    let read = waits.join().expect("no panic").expect("all of it works");
    assert_eq!(read, b"data");
    held.sync_all().expect("it is stored now");
}

/// With each write by a user other than root, the kernel requests to clear the file's set-id bits.
#[test]
fn what_others_than_root_append_while_the_namenode_is_away_is_taken_in_once() {
    const LONGER_THAN_THE_LEASE: Duration = Duration::from_secs(12);
    const OTHER: u32 = 65_534;
    const LINES: usize = 10;
    if !is_root() {
        harvestfs_tests::skip("only root can become somebody else");
        return;
    }
    let Some((mut cluster, mount)) = Cluster::mounted(&small()) else {
        return;
    };
    // The temporary directory may be accessible only to root.
    fs::set_permissions(cluster.path(""), Permissions::from_mode(0o755)).expect("chmod");
    let path = mount.join("log");
    fs::write(&path, "first\n").expect("write");
    let set_id = || fs::set_permissions(&path, Permissions::from_mode(0o6777)).expect("chmod");
    set_id();
    let inherited = OpenOptions::new().append(true).open(&path).expect("open");
    let fifo = cluster.path("written");
    let made = Command::new("mkfifo").arg("--mode=666").arg(&fifo).status();
    assert!(made.expect("mkfifo runs").success());
    // Another process, which does not close any file: closing one waits for the namenode.
    let mut writer = Command::new("tee")
        .arg("-a")
        .args([&path, &fifo])
        .uid(OTHER)
        .gid(OTHER)
        .stdin(Stdio::piped())
        .stdout(inherited)
        .spawn()
        .expect("tee runs");
    let mut lines = writer.stdin.take().expect("it was asked for");
    let (written, is_written) = mpsc::channel();
    thread::spawn(move || {
        let lines = BufReader::new(File::open(&fifo).expect("tee opens it too")).lines();
        let mut lines = lines.map_while(Result::ok);
        lines.try_for_each(|line| written.send(line))
    });
    let mut write = |line: &str| {
        // In a single write, since `tee` writes what it has read at a time.
        lines
            .write_all(format!("{line}\n").as_bytes())
            .expect("it reads");
        is_written.recv_timeout(Duration::from_secs(10))
    };
    assert_eq!(write("before").as_deref(), Ok("before"));
    let mode = || fs::metadata(&path).expect("stat").mode() & 0o7777;
    assert_eq!(mode(), 0o777);
    set_id();
    cluster.kill("namenode");
    thread::sleep(LONGER_THAN_THE_LEASE);
    let while_away: Vec<_> = (0..LINES)
        .map(|number| write(&number.to_string()))
        .collect();
    cluster.start_namenode();
    drop(lines);
    assert!(writer.wait().expect("it ends").success());
    let mut expected = String::from("first\nbefore\nbefore\n");
    for (number, written) in while_away.into_iter().enumerate() {
        let line = number.to_string();
        assert_eq!(
            written.as_deref(),
            Ok(&*line),
            "nothing waits for the namenode"
        );
        expected += &format!("{line}\n{line}\n");
    }
    assert_eq!(fs::read_to_string(&path).expect("read"), expected);
    assert_eq!(mode(), 0o777, "the commit cleared them");
}
