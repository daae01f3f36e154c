//! Output and exit status of `harvestfs fs` commands.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, can_mount, harvestfs, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::user::{User, is_root};
use crate::{DEADLINE, cluster, mode_of};

#[test]
fn waiting_for_replicas_ends_with_enough_of_them_or_after_its_time() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let tree = here.path().join("tree");
    fs::create_dir(&tree).expect("mkdir");
    // They share a block.
    for name in ["a", "b"] {
        fs::write(tree.join(name), name).expect("write");
    }
    cluster.output_of(&["fs", "put", "-r", &tree.to_string_lossy(), "/"]);
    let wait = ["fs", "setrep", "-w", "--timeout"];
    cluster.output_of(&[&wait[..], &["2m", "2", "/tree/a"]].concat());

    // There are three datanodes.
    let start = Instant::now();
    let output = cluster.command(&[&wait[..], &["12s", "4", "tree/b"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(start.elapsed().as_secs() >= 12, "{said}");
    assert!(said.contains("waiting for replicas of tree/b"), "{said}");
    assert!(said.contains("admin placement --file /tree/b"), "{said}");
    assert!(said.contains("the time is over"), "{said}");
}

#[test]
fn what_is_not_shown_of_a_file_is_no_success() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let file = cluster.mount("mount").join("f");
    let file = fs::File::create(file).expect("create");
    // Between holes, so that each is a piece.
    for piece in 0..3_000 {
        file.write_all_at(b"x", piece << 14).expect("write");
    }
    file.sync_all().expect("sync");
    drop(file);
    for (arguments, expected) in [
        (&["locations", "/f"][..], "the rest is not shown"),
        (
            &["setrep", "-w", "--timeout", "1m", "1", "/f"][..],
            "of the rest, which is in more pieces",
        ),
    ] {
        let output = cluster.command(&[&["fs"], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}

/// Sets how long commands wait for a namenode.
fn give_up_after(cluster: &Cluster, seconds: u32) {
    let config = cluster.path("client/client.toml");
    let text = fs::read_to_string(&config).expect("its configuration");
    let set = format!("unreachable_timeout_s = {seconds}");
    let lines = text.lines().map(|line| {
        if line.starts_with("unreachable_timeout_s") {
            set.as_str()
        } else {
            line
        }
    });
    let lines: Vec<&str> = lines.collect();
    assert_ne!(lines.join("\n"), text.trim_end());
    fs::write(&config, lines.join("\n")).expect("write");
}

#[test]
fn a_test_that_has_no_answer_does_not_answer_no() {
    let mut cluster = cluster();
    let status = |cluster: &Cluster, path: &str| {
        let output = cluster.command(&["fs", "test", "-e", path]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    assert_eq!(status(&cluster, "/").0, Some(0));
    assert_eq!(status(&cluster, "/none").0, Some(1));
    cluster.kill("namenode");
    give_up_after(&cluster, 1);
    let (status, said) = status(&cluster, "/none");
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("cannot reach the cluster"), "{said}");
}

#[test]
fn what_may_not_be_listed_is_named_and_the_rest_is_done() {
    let cluster = cluster();
    let user = User::of(&cluster);
    let run = |arguments: &[&str]| cluster.output_of(&[&["fs"], arguments].concat());
    run(&["mkdir", "-p", "/tree/closed/below", "/tree/z"]);
    run(&["touch", "/tree/f", "/tree/z/f"]);
    run(&["chmod", "000", "/tree/closed"]);
    let here = user.path("here");
    fs::create_dir(&here).expect("mkdir");
    fs::set_permissions(&here, fs::Permissions::from_mode(0o777)).expect("chmod");
    let did = |arguments: &[&str]| {
        let output = user.command(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        let is_it = |line: &&str| {
            line.starts_with("harvestfs: cannot list ") && line.contains("/tree/closed: ")
        };
        let named = said.lines().filter(is_it).count();
        assert_eq!(named, 1, "{arguments:?}: {said}");
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(
        did(&["find", "/tree"]),
        "/tree\n/tree/closed\n/tree/f\n/tree/z\n/tree/z/f\n"
    );
    assert_eq!(did(&["ls", "-R", "/tree"]), "closed\nf\nz\nz/f\n");
    let du = did(&["du", "/tree"]);
    let paths = du.lines().map(|line| line.split_whitespace().nth(1));
    let expected = ["/tree/f", "/tree/z", "/tree"].map(Some);
    assert_eq!(paths.collect::<Vec<_>>(), expected);
    did(&["get", "-r", "/tree", &here.to_string_lossy()]);
    assert!(here.join("tree/z/f").is_file());
    did(&["cp", "-r", "/tree", "/mine"]);
    assert_eq!(user.output_of(&["ls", "/mine/tree/z"]), "f\n");
    // Its own attributes can be set.
    run(&["chmod", "300", "/mine/tree/closed"]);
    did(&["setrep", "-R", "-w", "2", "/mine/tree"]);
    // So that users other than root can remove it.
    let closed = here.join("tree/closed");
    fs::set_permissions(closed, fs::Permissions::from_mode(0o700)).expect("chmod");
}

#[test]
fn a_path_that_fails_does_not_keep_the_others_from_being_done() {
    let cluster = cluster();
    let user = User::of(&cluster);
    let did = |arguments: &[&str], expected: &[&str]| user.fails_at(arguments, expected);
    user.output_of(&["mkdir", "/mine/d"]);
    let long = format!("/mine/{}", "x".repeat(256));
    did(&["mkdir", "/mine/d", &long, "/mine/e"], &["/mine/d", &long]);
    let files = ["/mine/d/a", "/mine/d/b", "/mine/d/c"];
    did(&[&["touch", "/none/f"], &files[..]].concat(), &["/none/f"]);
    let content = user.path("content");
    fs::write(&content, "kept").expect("write");
    for file in ["/mine/d/b", "/mine/d/c"] {
        user.output_of(&["put", "-f", &content.to_string_lossy(), file]);
    }
    did(
        &["chmod", "000", "/mine/none", "/mine/d/b"],
        &["/mine/none"],
    );
    assert_eq!(mode_of(&cluster, "/mine/d/b"), "0000");

    let here = user.path("here");
    fs::create_dir(&here).expect("mkdir");
    fs::set_permissions(&here, fs::Permissions::from_mode(0o777)).expect("chmod");
    let to = here.to_string_lossy();
    let get = ["get", "-r", "/mine/none", "/mine/d", "/mine/e", &to];
    did(&get, &["/mine/none", "d/b"]);
    for (copy, is_there) in [("d/a", true), ("d/b", false), ("d/c", true), ("e", true)] {
        assert_eq!(here.join(copy).exists(), is_there, "{copy}");
    }

    did(&["mkdir", "-p", "/mine/d/a", "/mine/p"], &["/mine/d/a"]);
    user.output_of(&["mkdir", "/mine/s"]);
    cluster.output_of(&["fs", "snapshot", "create", "/mine/s", "one"]);
    let rm = ["rm", "-r", "--skip-trash", "/mine/s", "/mine/p"];
    did(&rm, &["nothing in /mine/s was removed"]);
    let left = user.output_of(&["ls", "/mine"]);
    assert_eq!(left, "d\ne\ns\n");

    if is_root() {
        cluster.output_of(&["fs", "touch", "/mine/d/aa"]);
        did(&["chmod", "-R", "700", "/mine/d"], &["/mine/d/aa"]);
        assert_eq!(mode_of(&cluster, "/mine/d/c"), "0700");
        did(&["setrep", "-R", "2", "/mine/d"], &["/mine/d/aa"]);
        wait_until("fewer replicas are wanted", DEADLINE, || {
            let placement = ["admin", "placement", "--file", "/mine/d/c"];
            cluster.output_of(&placement).contains("2 replicas wanted")
        });
    }
    user.output_of(&["chmod", "600", "/mine/d/b"]);
    assert_eq!(did(&["cat", "/none", "/mine/d/b"], &["/none"]), "kept");
    let rm = ["rm", "--skip-trash", "/none", "/mine/e", "/mine/d/b"];
    did(&rm, &["/none", "/mine/e"]);
    let left = user.output_of(&["ls", "/mine/d"]);
    assert!(!left.contains('b'), "{left}");
}

#[test]
fn a_directory_is_removed_only_with_all_that_is_in_it() {
    let cluster = cluster();
    cluster.output_of(&["fs", "mkdir", "/empty"]);
    for how in [&["rm"][..], &["rm", "--skip-trash"][..]] {
        let output = cluster.command(&[&["fs"], how, &["/empty"][..]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{how:?}: {said}");
        assert!(said.contains("without -r: is a directory"), "{said}");
        cluster.output_of(&["fs", "test", "-d", "/empty"]);
    }
    cluster.output_of(&["fs", "rm", "-r", "/empty"]);
    let listed = cluster.output_of(&["fs", "trash", "ls"]);
    assert!(listed.contains("  /empty\n"), "{listed}");
}

#[test]
fn what_may_not_be_looked_into_is_shown_in_the_trash_and_restored() {
    let cluster = cluster();
    let user = User::of(&cluster);
    user.output_of(&["mkdir", "/mine/closed"]);
    user.output_of(&["touch", "/mine/f"]);
    user.output_of(&["chmod", "200", "/mine/closed"]);
    user.output_of(&["rm", "-r", "/mine/closed", "/mine/f"]);
    let listed = user.output_of(&["trash", "ls"]);
    assert!(listed.contains("2 entries, at least "), "{listed}");
    let used_bytes = || {
        let listed = user.output_of(&["trash", "ls", "--json"]);
        let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
        listed.get("used_bytes").expect("it is there").clone()
    };
    assert_eq!(used_bytes(), serde_json::Value::Null);
    let closed = listed.lines().find(|line| line.ends_with("/mine/closed"));
    let name = closed.and_then(|line| line.split_whitespace().next());
    let name = name.unwrap_or_else(|| panic!("{listed}"));
    let restored = user.output_of(&["trash", "restore", name]);
    assert_eq!(restored, "/mine/closed\n");
    assert_eq!(used_bytes(), 0);
}

#[test]
fn what_is_new_is_as_closed_as_the_user_wants() {
    let cluster = cluster();
    let run = |arguments: &[&str]| {
        let output = Command::new("sh")
            .args(["-c", "umask 077 && exec \"$@\"", "sh"])
            .arg(harvestfs())
            .arg("fs")
            .args(arguments)
            .env("HARVESTFS_DATA", cluster.path(""))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    };
    run(&["mkdir", "/d"]);
    run(&["mkdir", "-p", "/p/q"]);
    run(&["touch", "/d/touched"]);
    run(&["put", "-", "/d/piped"]);
    // As with cp(1), copies too.
    cluster.output_of(&["fs", "mkdir", "/open"]);
    cluster.output_of(&["fs", "touch", "/open/f"]);
    let here = cluster.path("here");
    run(&["get", "-r", "/open", &here.to_string_lossy()]);
    for (path, expected) in [(here.clone(), 0o700), (here.join("f"), 0o600)] {
        let mode = fs::metadata(&path).expect("it was copied").permissions();
        assert_eq!(mode.mode() & 0o7777, expected, "{}", path.display());
        let open = fs::Permissions::from_mode(expected | 0o055);
        fs::set_permissions(&path, open).expect("chmod");
    }
    run(&["put", "-r", &here.to_string_lossy(), "/put"]);
    run(&["cp", "-r", "/open", "/copied"]);
    for (path, mode) in [
        ("/put", "0700"),
        ("/put/f", "0600"),
        ("/copied", "0700"),
        ("/copied/f", "0600"),
        ("/d", "0700"),
        ("/p", "0700"),
        ("/p/q", "0700"),
        ("/d/touched", "0600"),
        ("/d/piped", "0600"),
    ] {
        assert_eq!(mode_of(&cluster, path), mode, "{path}");
    }
}

#[test]
fn a_file_that_is_followed_may_be_cut_and_replaced() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("mount");
    fs::create_dir(mount.join("d")).expect("mkdir");
    let log = mount.join("d/log");
    fs::write(&log, "first\nsecond\n").expect("write");
    let mut child = Command::new(harvestfs())
        .args(["fs", "tail", "-f", "/d/log"])
        .env("HARVESTFS_DATA", cluster.path(""))
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let stdout = child.stdout.take().expect("it was asked for");
    let (printed, lines) = mpsc::channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            // The test may have failed in the meantime.
            let _ = printed.send(line.expect("text"));
        }
    });
    let next = || lines.recv_timeout(DEADLINE);
    let before = [next(), next()];
    fs::write(&log, "third\n").expect("write");
    let third = next();
    // For a while, it does not have this name, and then there is no path to it.
    fs::rename(mount.join("d"), mount.join("moved")).expect("rename");
    fs::write(mount.join("d"), "").expect("write");
    thread::sleep(Duration::from_secs(2));
    fs::remove_file(mount.join("d")).expect("rm");
    fs::rename(mount.join("moved"), mount.join("d")).expect("rename");
    // Written right before it is replaced.
    fs::write(mount.join("other"), "fifth, in another file\n").expect("write");
    let mut replaced = fs::File::options().append(true).open(&log).expect("open");
    replaced.write_all(b"fourth\n").expect("write");
    replaced.sync_all().expect("sync");
    fs::rename(mount.join("other"), &log).expect("rename");
    drop(replaced);
    let after = [next(), next()];
    let source = cluster.path("source");
    fs::write(&source, "sixth, put there\n").expect("write");
    cluster.output_of(&["fs", "put", "-f", &source.to_string_lossy(), "/d/log"]);
    let sixth = next();
    child.kill().expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(before, [Ok("first".into()), Ok("second".into())], "{said}");
    assert_eq!(third.as_deref(), Ok("third"), "{said}");
    assert!(said.contains("/log was cut"), "{said}");
    let [fourth, fifth] = after;
    assert_eq!(fourth.as_deref(), Ok("fourth"), "{said}");
    assert_eq!(fifth.as_deref(), Ok("fifth, in another file"), "{said}");
    assert_eq!(sixth.as_deref(), Ok("sixth, put there"), "{said}");
    assert_eq!(said.matches("/log was replaced").count(), 2, "{said}");
    reader.join().expect("it is read");
}

/// Sends a signal, and waits for the end. Returns the signal that ended it.
fn end(child: &mut Child, signal: Signal) -> Option<i32> {
    kill_process(Pid::from_child(child), signal).expect("it runs");
    let mut status = None;
    wait_until("the command ends", DEADLINE, || {
        status = child.try_wait().expect("it is our child");
        status.is_some()
    });
    status.and_then(|status| status.signal())
}

#[test]
fn a_command_that_gets_a_signal_leaves_nothing_half_copied() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let at = |name: &str| here.path().join(name);
    fs::write(at("source"), vec![7; 8 << 20]).expect("write");
    cluster.output_of(&["fs", "put", &at("source").to_string_lossy(), "/f"]);
    fs::create_dir(at("copies")).expect("mkdir");
    fs::write(at("copies/f"), "old").expect("write");
    let names = || {
        let entries = fs::read_dir(at("copies")).expect("a directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.collect::<Vec<_>>()
    };
    // With these paused, it cannot continue.
    for number in 1..=3 {
        cluster.pause(&Cluster::datanode(number));
    }
    let start = |script: &str, arguments: &[&str]| {
        Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(harvestfs())
            .arg("fs")
            .args(arguments)
            .env("HARVESTFS_DATA", cluster.path(""))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .stdin(Stdio::piped())
            .spawn()
            .expect("it runs")
    };
    let copies = at("copies").display().to_string();
    let get = ["get", "-f", "/f", &copies];
    let mut child = start("exec \"$@\"", &get);
    wait_until("it has begun", DEADLINE, || names().len() == 2);
    assert_eq!(end(&mut child, Signal::TERM), Some(15));
    assert_eq!(names(), ["f"]);
    assert_eq!(fs::read(at("copies/f")).expect("read"), b"old");

    // A process that a script starts in the background does not end with Ctrl-C in the terminal.
    let mut child = start("trap '' INT; exec \"$@\"", &get);
    wait_until("it has begun", DEADLINE, || names().len() == 2);
    kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
    thread::sleep(Duration::from_secs(3));
    assert!(child.try_wait().expect("it is our child").is_none());
    assert_eq!(end(&mut child, Signal::TERM), Some(15));
    assert_eq!(names(), ["f"]);

    // Directories get their modes nevertheless.
    fs::create_dir_all(at("tree/closed")).expect("mkdir");
    fs::write(at("tree/closed/f"), "x").expect("write");
    let set_mode = |mode| {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(at("tree/closed"), mode).expect("chmod");
    };
    set_mode(0o555);
    let tree = at("tree").display().to_string();
    let entries = || {
        let output = cluster.command(&["fs", "stat", "--json", "/tree/closed"]);
        let stat: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        stat.and_then(|stat| stat["size_bytes"].as_u64())
    };
    // There are 2 s for that, which may be too short on a busy disk for the removal and then the mode.
    let is_in_time = || {
        cluster.output_of(&["fs", "rm", "-rf", "--skip-trash", "/tree"]);
        let mut child = start("exec \"$@\"", &["put", "-r", &tree, "/"]);
        wait_until("it has begun", DEADLINE, || entries() == Some(1));
        assert_eq!(end(&mut child, Signal::TERM), Some(15));
        entries() == Some(0) && mode_of(&cluster, "/tree/closed") == "0555"
    };
    assert!((0..5).any(|_| is_in_time()));
    // So that users other than root can remove it.
    set_mode(0o755);
    for number in 1..=3 {
        cluster.resume(&Cluster::datanode(number));
    }

    // Nor does it wait for the end of its input. An existing file of its name in the cluster remains, even if another
    // command has created it in the meantime.
    let listed = || cluster.output_of(&["fs", "ls", "/"]);
    let start_put = |arguments: &[&str]| {
        let child = start("exec \"$@\"", arguments);
        wait_until("it has begun", DEADLINE, || {
            listed().contains(".harvestfs-copy.")
        });
        child
    };
    for put in [&["put", "-", "/piped"][..], &["put", "-f", "-", "/f"][..]] {
        let mut child = start_put(put);
        cluster.output_of(&["fs", "touch", "/piped"]);
        assert_eq!(end(&mut child, Signal::TERM), Some(15));
        assert_eq!(listed(), "f\npiped\ntree\n", "{put:?}");
    }
    let kept = cluster.command(&["fs", "cat", "/f"]).stdout;
    assert!(kept == vec![7; 8 << 20]);
    let mut child = start_put(&["put", "-", "/late"]);
    cluster.output_of(&["fs", "touch", "/late"]);
    drop(child.stdin.take());
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(1));
    assert_eq!(listed(), "f\nlate\npiped\ntree\n");
}

#[test]
fn what_cannot_be_removed_of_a_copy_is_named() {
    let mut cluster = cluster();
    give_up_after(&cluster, 5);
    cluster.output_of(&["fs", "mkdir", "/d"]);
    let mut put = Command::new(harvestfs())
        .args(["fs", "put", "-", "/d/f"])
        .env("HARVESTFS_DATA", cluster.path(""))
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut listed = String::new();
    wait_until("it has begun", DEADLINE, || {
        listed = cluster.output_of(&["fs", "ls", "/d"]);
        listed.contains(".harvestfs-copy.")
    });
    cluster.kill("namenode");
    // Ends the data that is copied.
    drop(put.stdin.take());
    let output = put.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let left = format!("/d/{} may be left: remove it", listed.trim_end());
    assert!(said.contains(&left), "{said}");
}
