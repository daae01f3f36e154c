//! Tests `harvestfs up` and `down` as a new user runs them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_tests::{
    DownOnDrop, can_mount, copy_directory, copy_harvestfs, harvestfs, have_program,
    is_closed_to_others, run_on, skip, supervisor_of, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

/// A user without privileges that every system has.
const NOBODY: u32 = 65_534;

fn ok(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// Requests a path at an address, and returns the answer with its head.
fn get(address: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).expect("it is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    answer
}

/// Checks that the page is at the address that `up` prints, and needs the token in it. Returns the token.
fn check_page(said: &str) -> String {
    let address = said.split_whitespace().find(|it| it.starts_with("http://"));
    let address = address.unwrap_or_else(|| panic!("no page: {said}"));
    let (host, token) = address
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once("/?token="))
        .unwrap_or_else(|| panic!("no token: {address}"));
    assert!(host.starts_with("127.0.0.1:"), "{address}");
    for path in [
        "/",
        "/metrics",
        "/api/cluster",
        "/api/directory?path=/",
        "/api/file?path=/d/f&token=guessed",
        "/?token=",
    ] {
        let refused = get(host, path, "");
        assert!(refused.starts_with("HTTP/1.1 401 "), "{path}: {refused}");
        assert!(!refused.contains("set-cookie"), "{path}: {refused}");
    }
    let page = get(host, &format!("/?token={token}"), "");
    assert!(page.contains("<title>HarvestFS</title>"), "{page}");
    let cookie = page
        .lines()
        .find_map(|line| line.strip_prefix("set-cookie: "))
        .unwrap_or_else(|| panic!("no cookie: {page}"));
    assert!(cookie.contains("; HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().expect("a value");
    for shown in [
        format!("Cookie: {cookie}\r\n"),
        format!("Authorization: Bearer {token}\r\n"),
    ] {
        let answer = get(host, "/api/directory?path=/", &shown);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    token.to_owned()
}

/// Checks what another user of this machine can access of a cluster whose directories are open to everybody.
fn check_strangers(data: &Path, token: &str) {
    let find = |tests: &str| {
        let output = Command::new("/usr/bin/find")
            .arg(data)
            .args(tests.split(' '))
            .output()
            .expect("find runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let blocks = find("-path */volume/*/* -type f");
    assert!(!blocks.is_empty(), "there are replicas");
    let readable = find("-type f -perm /077 ( -path */volume/*/* -o -name *token* )");
    assert_eq!(readable, "");
    let log = data.join("log");
    for entry in fs::read_dir(&log).expect("the logs") {
        let path = entry.expect("an entry").path();
        let text = fs::read_to_string(&path).expect("a log");
        assert!(!text.contains(token), "{} has the token", path.display());
    }
    if !rustix::process::geteuid().is_root() {
        return skip("only root can be another user: run it as root");
    }
    // As an administrator may have created them.
    let mut above = data.join("datanode-1/volume");
    while above.starts_with(data.parent().expect("a directory")) {
        fs::set_permissions(&above, fs::Permissions::from_mode(0o755)).expect("chmod");
        assert!(above.pop());
    }
    fs::set_permissions(data.join("namenode"), fs::Permissions::from_mode(0o755)).expect("chmod");
    for (program, path) in [
        ("/bin/ls", "datanode-1/volume/sealed"),
        ("/bin/ls", "datanode-1/volume/open"),
        ("/bin/cat", "namenode/http-token"),
    ] {
        let output = Command::new(program)
            .arg(data.join(path))
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .expect("it runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("Permission denied"), "{path}: {error}");
    }
}

#[test]
fn up_again_finds_every_file() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);

    let said = ok(run_on(&data, &["up", "--detach", "--quota", "1GiB"]));
    let mount = data.join("mnt");
    assert!(
        said.contains(&format!("mounted at {}", mount.display())),
        "{said}"
    );
    assert!(said.contains("harvestfs down"), "{said}");
    let token = check_page(&said);
    let status: serde_json::Value =
        serde_json::from_str(&ok(run_on(&data, &["admin", "status", "--json"]))).expect("JSON");
    assert_eq!(status["nodes_alive"], 9);
    fs::create_dir(mount.join("d")).expect("mkdir");
    fs::write(mount.join("d/f"), "harvest").expect("write");

    let again = run_on(&data, &["up", "--detach"]);
    assert!(!again.status.success());
    let error = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(error.contains("running"), "{error}");
    assert!(!error.contains(&token), "it may be a log: {error}");
    assert!(error.contains("namenode/http-token"), "{error}");
    assert!(is_closed_to_others(&data));
    check_strangers(&data, &token);

    ok(run_on(&data, &["down"]));
    assert!(!mount.join("d").exists(), "it is unmounted");
    let error = run_on(&data, &["down"]);
    assert_eq!(error.status.code(), Some(1));

    ok(run_on(&data, &["up", "--detach"]));
    assert!(is_closed_to_others(&data), "it was opened to strangers");
    assert_eq!(fs::read(mount.join("d/f")).expect("read"), b"harvest");
    let other_size = run_on(&data, &["up", "--detach", "--datanodes", "5"]);
    assert!(!other_size.status.success());
    ok(run_on(&data, &["down"]));
}

#[test]
fn ctrl_c_unmounts_and_stops_everything() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let mut up = Command::new(harvestfs())
        .args(["up", "--datanodes", "3", "--quota", "1GiB", "--data"])
        .arg(&data)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("the binary runs");
    let mut lines = BufReader::new(up.stdout.take().expect("piped")).lines();
    loop {
        let line = lines.next().expect("it gets ready").expect("text");
        if line.contains("Ctrl-C") {
            break;
        }
    }
    fs::write(data.join("mnt/f"), "x").expect("write");
    let children = children_of(&up);
    assert_eq!(children.len(), 5, "namenode, three datanodes, mount");

    let pid = Pid::from_raw(up.id().try_into().expect("a pid")).expect("not 0");
    kill_process(pid, Signal::INT).expect("it runs");
    let started = Instant::now();
    let status = up.wait().expect("it ends");
    assert!(status.success(), "{status}");
    assert!(started.elapsed() < Duration::from_secs(60), "it was quick");
    assert!(!data.join("mnt/f").exists(), "it is unmounted");
    for child in children {
        assert!(
            !Path::new(&format!("/proc/{child}")).exists(),
            "{child} is gone"
        );
    }
}

#[test]
fn nothing_outlives_a_killed_up() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    ok(run_on(
        &data,
        &["up", "--detach", "--datanodes", "3", "--quota", "1GiB"],
    ));
    let supervisor = supervisor_of(&data);
    let children = children_of_pid(supervisor);
    assert_eq!(children.len(), 5);
    fs::write(data.join("mnt/f"), "kept").expect("write");
    // One of them takes long to end, and keeps its volume locked until then.
    let of = |child: u32| Pid::from_raw(i32::try_from(child).expect("a pid")).expect("not 0");
    let datanode = children
        .iter()
        .copied()
        .find(|child| {
            let command_line = fs::read(format!("/proc/{child}/cmdline")).expect("it runs");
            command_line
                .split(|it| *it == 0)
                .any(|it| it == b"datanode")
        })
        .expect("a datanode");
    // Repeatedly, since the kernel continues a stopped process that loses its parent.
    let stopping = thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end && kill_process(of(datanode), Signal::STOP).is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
        // It may have ended between two stops.
        let _ = kill_process(of(datanode), Signal::CONT);
    });
    kill_process(of(supervisor), Signal::KILL).expect("it runs");
    // Its lock is free, though it may not be reaped yet.
    let lock = fs::File::open(data.join("up.pid")).expect("the supervisor's lock");
    lock.lock().expect("the supervisor ends");
    drop(lock);
    // The next `up` waits for the remaining processes.
    ok(run_on(&data, &["up", "--detach"]));
    stopping.join().expect("the thread ends");
    wait_until("all parts are reaped", Duration::from_secs(30), || {
        children
            .iter()
            .all(|child| !Path::new(&format!("/proc/{child}")).exists())
    });
    assert_eq!(fs::read(data.join("mnt/f")).expect("read"), b"kept");
    ok(run_on(&data, &["down"]));

    // Data that is written then is not hidden by the next mount.
    fs::write(data.join("mnt/stray"), "of nobody").expect("write");
    let refused = run_on(&data, &["up", "--detach"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("mnt is not empty"), "{error}");
    assert_eq!(refused.status.code(), Some(1));
    fs::remove_file(data.join("mnt/stray")).expect("remove");
    ok(run_on(&data, &["up", "--detach"]));
    ok(run_on(&data, &["down"]));
}

#[test]
fn a_part_that_is_killed_comes_back() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    ok(run_on(
        &data,
        &["up", "--detach", "--datanodes", "3", "--quota", "1GiB"],
    ));
    let file = data.join("mnt/f");
    fs::write(&file, "kept").expect("write");
    fs::File::open(&file)
        .and_then(|f| f.sync_all())
        .expect("sync");
    let supervisor = supervisor_of(&data);
    let kill = |part: &str| {
        let victim = children_of_pid(supervisor)
            .into_iter()
            .find(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.split(|&b| b == 0).any(|word| word == part.as_bytes())
            })
            .unwrap_or_else(|| panic!("no {part}"));
        let pid = Pid::from_raw(victim.try_into().expect("a pid")).expect("not 0");
        kill_process(pid, Signal::KILL).expect("it runs");
        victim
    };
    for part in ["namenode", "datanode", "mount"] {
        let killed = kill(part);
        let what = format!("another {part} is started, and the file is read");
        wait_until(&what, Duration::from_secs(90), || {
            let children = children_of_pid(supervisor);
            let is_started = children.len() == 5 && !children.contains(&killed);
            is_started && fs::read(&file).is_ok_and(|content| content == b"kept")
        });
    }
    wait_until("all servers are alive", Duration::from_secs(60), || {
        let status = run_on(&data, &["admin", "status", "--json"]).stdout;
        let status: serde_json::Value = serde_json::from_slice(&status).unwrap_or_default();
        status["nodes_alive"] == 3
    });
    // A mount that was just killed is also unmounted, whether or not it has been restarted.
    kill("mount");
    run_on(&data, &["down"]);
    let left = fs::read_dir(data.join("mnt")).expect("a directory, and no dead mount");
    assert_eq!(left.count(), 0);
}

/// What each namenode answers at a path of its page.
fn answers_of_each(said: &str, path: &str) -> Vec<String> {
    let pages = said.split_whitespace().filter_map(|word| {
        word.strip_prefix("http://")
            .and_then(|rest| rest.split_once("/?token="))
    });
    let shown = |token| format!("Authorization: Bearer {token}\r\n");
    pages
        .map(|(host, token)| get(host, path, &shown(token)))
        .collect()
}

/// What each namenode measures.
fn metric_of_each(said: &str, metric: &str) -> Vec<u64> {
    let all = answers_of_each(said, "/metrics");
    let values = all.iter().map(|metrics| {
        let line = metrics.lines().find_map(|it| it.strip_prefix(metric));
        let value = line.unwrap_or_else(|| panic!("no {metric}: {metrics}"));
        value.trim().parse().expect("a whole number")
    });
    values.collect()
}

/// Waits until one of three namenodes leads and the pages of all say so, since an election may be under way on a busy
/// machine. Returns its number, from 0, and its term.
fn wait_agreed(said: &str) -> (usize, u64) {
    let mut agreed = None;
    wait_until("all agree on who leads", Duration::from_secs(60), || {
        let leads = metric_of_each(said, "harvestfs_namenode_leads");
        assert_eq!(leads.len(), 3, "{said}");
        let terms = metric_of_each(said, "harvestfs_namenode_term");
        let pages = answers_of_each(said, "/api/cluster");
        let all_say_so = pages.iter().zip(&leads).all(|(page, leads)| {
            let part = if *leads == 1 { "leader" } else { "standby" };
            page.contains(&format!("\"group\":{{\"part\":\"{part}\""))
                && page.matches("\"is_this\":true").count() == 1
                && page.matches("\"leads\":true").count() == 1
        });
        let is_one = leads.iter().sum::<u64>() == 1;
        let is_one_term = terms[0] > 0 && terms.iter().all(|it| *it == terms[0]);
        let leader = leads.iter().position(|it| *it == 1);
        let leader = leader.filter(|_| is_one && is_one_term && all_say_so);
        agreed = leader.map(|it| (it, terms[0]));
        agreed.is_some()
    });
    agreed.expect("waited for")
}

#[test]
fn three_namenodes_go_on_when_one_is_killed_and_after_a_restart() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    let _down = DownOnDrop(&data);
    let up = ["up", "--detach", "--namenodes", "3", "--datanodes", "3"];
    let said = ok(run_on(&data, &[&up[..], &["--quota", "1GiB"]].concat()));
    for name in ["(namenode,", "(namenode-2,", "(namenode-3,"] {
        assert!(said.contains(name), "{said}");
    }
    let file = data.join("mnt/f");
    fs::write(&file, "kept").expect("write");
    let children = children_of_pid(supervisor_of(&data));
    assert_eq!(children.len(), 7, "namenodes, datanodes, mount");
    let (leader, term) = wait_agreed(&said);
    let config = match leader {
        0 => "/namenode/namenode.toml".to_owned(),
        _ => format!("/namenode-{}/namenode.toml", leader + 1),
    };
    let victim = children.into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&config)
    });
    let pid = victim.unwrap_or_else(|| panic!("no process has {config}"));
    let pid = Pid::from_raw(pid.try_into().expect("a pid")).expect("not 0");
    kill_process(pid, Signal::KILL).expect("it runs");
    fs::write(data.join("mnt/after"), "another one leads").expect("write");
    wait_until("the killed one follows", Duration::from_secs(60), || {
        let up_again = run_on(&data, &["admin", "status", "--json"])
            .status
            .success();
        let port = said.split("http://").nth(leader + 1).expect("its page");
        let host = port.split('/').next().expect("an address");
        up_again && TcpStream::connect(host).is_ok()
    });
    let now = metric_of_each(&said, "harvestfs_namenode_term");
    assert!(now.iter().max() > Some(&term), "{now:?} after {term}");

    ok(run_on(&data, &["down"]));
    let older = directory.path().join("older");
    fs::create_dir(&older).expect("a directory");
    let copy = |from: &Path, to: &Path| {
        for name in ["namenode", "namenode-2", "namenode-3"] {
            copy_directory(&from.join(name), &to.join(name));
        }
    };
    copy(&data, &older);
    let more = run_on(&data, &["up", "--detach", "--namenodes", "5"]);
    assert_eq!(more.status.code(), Some(1));
    let error = String::from_utf8_lossy(&more.stderr);
    assert!(
        error.contains("--namenodes 3, and cannot be given 5"),
        "{error}"
    );
    assert!(error.contains("another cluster with --data"), "{error}");
    ok(run_on(&data, &up));
    assert_eq!(fs::read(&file).expect("read"), b"kept");
    let after = fs::read(data.join("mnt/after")).expect("read");
    assert_eq!(after, b"another one leads");
    ok(run_on(&data, &["down"]));

    // All namenodes are restored from copies: none will lead, which is reported immediately, and for all of them.
    copy(&older, &data);
    let began = Instant::now();
    let copies = run_on(&data, &up);
    assert_eq!(copies.status.code(), Some(1));
    let error = String::from_utf8_lossy(&copies.stderr);
    for told in [
        "whose directories are copies",
        "harvestfs admin namenode recover",
    ] {
        assert!(error.contains(told), "{told}: {error}");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{error}");
}

#[test]
fn a_user_who_is_not_root_can_run_it() {
    if !can_mount() || have_program("fusermount3", "apt install fuse3").is_none() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        // Without root, every other test here has already shown this.
        return;
    }
    let mode = fs::metadata("/dev/fuse")
        .expect("it is there")
        .permissions();
    if mode.mode() & 0o006 != 0o006 {
        skip("/dev/fuse is not open to others, as udev makes it: `chmod 666 /dev/fuse`");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let binary = binary_for_others(directory.path());
    chown(directory.path(), Some(NOBODY), Some(NOBODY)).expect("chown");
    let data = directory.path().join("cluster");
    let as_nobody = |program: &Path, arguments: &[&str]| run_as_nobody(program, arguments, &data);
    struct Down<F: Fn() -> Output>(F);
    impl<F: Fn() -> Output> Drop for Down<F> {
        fn drop(&mut self) {
            (self.0)();
        }
    }
    let down = || as_nobody(&binary, &["down"]);
    let _down = Down(down);
    let flags = ["up", "--detach", "--datanodes", "3", "--quota", "1GiB"];
    ok(as_nobody(&binary, &flags));
    let mount = data.join("mnt");
    let script = format!(
        "cd {} && echo harvest > f && mkdir d && mv f d/ && cat d/f && stat -c %u d/f",
        mount.display()
    );
    let said = ok(as_nobody("/bin/sh".as_ref(), &["-c", &script]));
    assert_eq!(said, format!("harvest\n{NOBODY}\n"));
    ok(down());
    ok(as_nobody(&binary, &["up", "--detach"]));
    let path = mount.join("d/f");
    let said = ok(as_nobody("/bin/cat".as_ref(), &[&path.to_string_lossy()]));
    assert_eq!(said, "harvest\n");
    ok(down());
}

#[test]
fn the_mount_of_root_is_for_all_users_where_they_can_reach_it() {
    if !can_mount() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return skip("other users are admitted to root's mount: run it as root");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(directory.path(), open).expect("chmod");
    let binary = binary_for_others(directory.path());
    let data = directory.path().join("cluster");
    let mount = directory.path().join("mount");
    let _down = DownOnDrop(&data);
    let shown = mount.to_string_lossy();
    let flags = ["up", "--detach", "--datanodes", "3", "--quota", "1GiB"];
    ok(run_on(&data, &[&flags[..], &["--mount", &shown]].concat()));
    fs::write(mount.join("f"), "harvest").expect("write");
    let as_nobody = |program: &Path, arguments: &[&str]| run_as_nobody(program, arguments, &data);
    let path = mount.join("f");
    let said = ok(as_nobody("/bin/cat".as_ref(), &[&path.to_string_lossy()]));
    assert_eq!(said, "harvest");

    // The certificates belong to root, and that is the reported reason.
    let output = as_nobody(&binary, &["fs", "ls", "/"]);
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("client.toml"), "{error}");
    assert!(error.contains("Permission denied"), "{error}");
    assert!(error.contains("harvestfs init client"), "{error}");
    assert!(!error.contains("no cluster was made"), "{error}");
}

fn run_as_nobody(program: &Path, arguments: &[&str], data: &Path) -> Output {
    Command::new(program)
        .args(arguments)
        .current_dir("/")
        .env("HARVESTFS_DATA", data)
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("it runs")
}

/// A copy of the binary, since other users may have no access to the build directory.
fn binary_for_others(directory: &Path) -> PathBuf {
    let binary = directory.join("harvestfs");
    copy_harvestfs(&binary);
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).expect("chmod");
    binary
}

#[test]
fn wrong_use_is_explained() {
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("cluster");
    for (arguments, code, word) in [
        (&["up", "--datanodes", "0"][..], 2, "datanodes"),
        (&["up", "--replication", "11"], 2, "replication"),
        (&["up", "--block-size", "1"], 2, "1MiB"),
        (&["up", "--colour"], 2, "--colour"),
        (
            &["up", "--datanodes", "2", "--replication", "3"],
            1,
            "replicas",
        ),
        (&["down"], 1, "no cluster"),
        (&["fs", "ls"], 1, "harvestfs up"),
    ] {
        let output = run_on(&data, arguments);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}: {output:?}"
        );
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(word), "{arguments:?}: {error}");
        assert!(!data.exists(), "{arguments:?} left something behind");
    }
}

fn children_of(process: &Child) -> Vec<u32> {
    children_of_pid(process.id())
}

fn children_of_pid(pid: u32) -> Vec<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .expect("the kernel lists children")
        .split_whitespace()
        .map(|child| child.parse().expect("a number"))
        .collect()
}
