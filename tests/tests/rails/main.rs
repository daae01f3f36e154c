//! Guard rails that keep users from harming each other and themselves, on real mounts.

mod commands;
mod copies;
mod servers;
mod trees;
mod user;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use harvestfs_tests::{Cluster, ClusterOptions, can_mount, skip, wait_until};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::umask;

const DEADLINE: Duration = Duration::from_secs(60);

fn cluster() -> Cluster {
    // Set explicitly: the tests expect the modes that result from this umask, for the files that they create themselves
    // and those that commands create.
    umask(Mode::from_raw_mode(0o022));
    Cluster::start(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    })
}

/// Writes a file and syncs it, so that an error shows.
fn put(path: &Path, length_bytes: usize) -> Result<(), Errno> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(&vec![7; length_bytes])?;
        file.sync_all()
    };
    write().map_err(|error: std::io::Error| Errno::from_io_error(&error).expect("an errno"))
}

/// The mode of something in the cluster, as `stat` prints it.
fn mode_of(cluster: &Cluster, path: &str) -> String {
    let stat = cluster.output_of(&["fs", "stat", "--json", path]);
    let stat: serde_json::Value = serde_json::from_str(&stat).expect("JSON");
    stat["mode"].as_str().expect("a mode").to_owned()
}

fn quota(cluster: &Cluster, arguments: &[&str]) -> serde_json::Value {
    let all = [&["fs", "quota", "--json"], arguments].concat();
    serde_json::from_str(&cluster.output_of(&all)).expect("JSON")
}

/// A cluster, a mount, and a directory there that is to get a quota.
fn with_directory_to_limit() -> Option<(Cluster, PathBuf, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        skip("root sets quotas: run it as root");
        return None;
    }
    if !can_mount() {
        return None;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("mount");
    let limited = mount.join("limited");
    fs::create_dir(&limited).expect("mkdir");
    Some((cluster, mount, limited))
}

#[test]
fn a_quota_ends_in_edquot_and_holds_after_a_restart() {
    let Some((mut cluster, mount, limited)) = with_directory_to_limit() else {
        return;
    };
    let set = quota(&cluster, &["/limited", "--bytes", "1MiB", "--files", "3"]);
    assert_eq!(set["quota_bytes"], 1 << 20);
    assert_eq!(set["used_files"], 0);

    put(&limited.join("a"), 600 << 10).expect("below the quota");
    assert_eq!(put(&limited.join("b"), 600 << 10), Err(Errno::DQUOT));
    // The file exists, without the data that exceeded its quota. (On this mount, the kernel assumes the
    // written length until the file is opened again.)
    let stat = cluster.output_of(&["fs", "stat", "--json", "/limited/b"]);
    let stat: serde_json::Value = serde_json::from_str(&stat).expect("JSON");
    assert_eq!(stat["size_bytes"], 0);
    fs::remove_file(limited.join("b")).expect("rm");
    put(&limited.join("b"), 400 << 10).expect("below the quota");
    // The namenode learns a little later that the removed file is no longer open.
    let statfs = || rustix::fs::statvfs(&limited).expect("statfs");
    wait_until("it counts no more", DEADLINE, || statfs().f_favail == 1);
    let room = statfs();
    assert_eq!(room.f_blocks * room.f_frsize, 1 << 20);
    assert_eq!(room.f_bavail * room.f_frsize, 24 << 10);
    assert_eq!((room.f_files, room.f_favail), (3, 1));
    let all = rustix::fs::statvfs(&mount).expect("statfs");
    assert!(all.f_blocks * all.f_frsize > 1 << 30, "the mount's own");

    fs::write(limited.join("c"), "").expect("the last file");
    let refused = fs::create_dir(limited.join("d")).expect_err("a fourth");
    assert_eq!(refused.raw_os_error(), Some(Errno::DQUOT.raw_os_error()));
    fs::write(mount.join("outside"), vec![7; 100 << 10]).expect("write");
    let refused = fs::rename(mount.join("outside"), limited.join("outside"));
    let refused = refused.expect_err("a fourth").raw_os_error();
    assert_eq!(refused, Some(Errno::DQUOT.raw_os_error()));

    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.wait_alive(3, DEADLINE);
    let kept = quota(&cluster, &["/limited"]);
    assert_eq!(kept["quota_files"], 3);
    assert_eq!(kept["used_bytes"], 1000 << 10);
    assert_eq!(put(&limited.join("c"), 100 << 10), Err(Errno::DQUOT));
    fs::remove_file(limited.join("a")).expect("rm");
    fs::rename(mount.join("outside"), limited.join("outside")).expect("there is room now");
    let none = quota(
        &cluster,
        &["/limited", "--bytes", "none", "--files", "none"],
    );
    assert_eq!(none["quota_bytes"], serde_json::Value::Null);
    put(&limited.join("a"), 2 << 20).expect("no quota");
}

#[test]
fn what_was_removed_counts_and_is_private_until_its_space_is_free() {
    let Some((cluster, mount, limited)) = with_directory_to_limit() else {
        return;
    };
    quota(&cluster, &["/limited", "--bytes", "1MiB"]);
    let used = |cluster: &Cluster| quota(cluster, &["/limited"])["used_bytes"].clone();

    // Without a name.
    let mut nameless = File::create(limited.join("nameless")).expect("create");
    fs::remove_file(limited.join("nameless")).expect("rm");
    let written = nameless
        .write_all(&vec![7; 3 << 20])
        .and_then(|()| nameless.sync_all());
    let refused = written.expect_err("3 MiB").raw_os_error();
    assert_eq!(refused, Some(Errno::DQUOT.raw_os_error()));
    drop(nameless);
    wait_until("it counts no more", DEADLINE, || used(&cluster) == 0);

    // In the trash, where only its user has access to it.
    let home = limited.join("home");
    fs::create_dir(&home).expect("mkdir");
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).expect("chmod");
    put(&home.join("secret"), 700 << 10).expect("there is room");
    keep_removed(&home, "3600");
    fs::remove_file(home.join("secret")).expect("rm");
    fs::remove_dir(&home).expect("rmdir");
    assert_eq!(used(&cluster), 700 << 10);
    assert_eq!(put(&limited.join("more"), 700 << 10), Err(Errno::DQUOT));
    fs::remove_file(limited.join("more")).expect("rm");
    let entry = trashed(&cluster).remove(0);
    let entry = entry["entry"].as_str().expect("a name").to_owned();
    let secret = mount.join(".trash").join(&entry);
    assert_eq!(fs::read(&secret).expect("root reads it").len(), 700 << 10);
    fs::set_permissions(cluster.path(""), fs::Permissions::from_mode(0o755)).expect("chmod");
    let mut read = Command::new("cat");
    let read = read.arg(&secret).uid(65_534).gid(65_534).output();
    let said = String::from_utf8(read.expect("cat runs").stderr).expect("UTF-8");
    assert!(said.contains("Permission denied"), "{said}");
    cluster.output_of(&["fs", "trash", "purge", &entry]);
    wait_until("it counts no more", DEADLINE, || used(&cluster) == 0);
    put(&limited.join("more"), 700 << 10).expect("there is room again");

    // A file that replaces a just removed one can use its space.
    quota(&cluster, &["/limited", "--bytes", "1MiB", "--files", "1"]);
    for _ in 0..5 {
        fs::remove_file(limited.join("more")).expect("rm");
        let written = put(&limited.join("more"), 700 << 10);
        assert_eq!(written, Ok(()), "{}", quota(&cluster, &["/limited"]));
    }
}

fn doctor(cluster: &Cluster) -> (Option<i32>, serde_json::Value) {
    let output = cluster.command(&["admin", "doctor", "--json"]);
    let diagnosis = serde_json::from_slice(&output.stdout).expect("JSON");
    (output.status.code(), diagnosis)
}

#[test]
fn the_doctor_finds_what_is_wrong_and_says_what_to_do() {
    let mut cluster = cluster();
    cluster.wait_alive(3, DEADLINE);
    wait_until("all is well", DEADLINE, || {
        let (_, diagnosis) = doctor(&cluster);
        let checked = diagnosis["checked"].as_array().map(Vec::len);
        assert_eq!(checked, Some(11), "every area: {diagnosis}");
        let findings = diagnosis["findings"].as_array().expect("findings");
        // Other tests on this machine may have broken mounts.
        findings.iter().all(|finding| finding["area"] == "mounts")
    });

    let client = cluster.path("client/client.toml");
    let text = fs::read_to_string(&client).expect("a configuration");
    fs::write(&client, format!("{text}colour = \"blue\"\n")).expect("write");
    let key = cluster.path("datanode-1/identity/key.pem");
    fs::remove_file(&key).expect("a key");
    cluster.kill("namenode");
    let (code, diagnosis) = doctor(&cluster);
    assert_eq!(code, Some(1));
    let found = |area: &str, part: &str| {
        let findings = diagnosis["findings"].as_array().expect("findings");
        let fits = |finding: &&serde_json::Value| {
            let what = finding["what"].as_str().expect("what");
            finding["area"] == area && what.contains(part)
        };
        let found = findings.iter().find(fits);
        let found = found.unwrap_or_else(|| panic!("{area}, {part}: {diagnosis:#}"));
        assert!(!found["advice"].as_str().expect("advice").is_empty());
    };
    found("configuration", "colour");
    found("certificates", "key.pem");
    found("namenode", "cannot reach the namenode");
    let said = cluster.command(&["admin", "doctor"]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("ERROR: namenode: "), "{said}");
}

/// Sets how long a directory keeps what is removed from it.
fn keep_removed(directory: &Path, seconds: &str) {
    let (name, flags) = ("user.harvestfs.trash_s", rustix::fs::XattrFlags::empty());
    rustix::fs::setxattr(directory, name, seconds.as_bytes(), flags).expect("xattr");
}

fn trashed(cluster: &Cluster) -> Vec<serde_json::Value> {
    let listed = cluster.output_of(&["fs", "trash", "ls", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    listed["entries"].as_array().expect("entries").clone()
}

#[test]
fn what_is_removed_can_be_restored_until_it_expires() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("mount");
    fs::create_dir_all(mount.join("tree/below")).expect("mkdir");
    fs::write(mount.join("tree/below/f"), "kept").expect("write");
    assert!(trashed(&cluster).is_empty());

    cluster.output_of(&["fs", "rm", "-r", "/tree"]);
    assert!(!mount.join("tree").exists());
    let entry = trashed(&cluster).remove(0);
    assert_eq!(entry["origin"], "/tree");
    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.wait_alive(3, DEADLINE);
    let name = entry["entry"].as_str().expect("a name");
    let to = cluster.output_of(&["fs", "trash", "restore", name]);
    assert_eq!(to.trim(), "/tree");
    let restored = fs::read_to_string(mount.join("tree/below/f"));
    assert_eq!(restored.expect("read"), "kept");
    assert!(trashed(&cluster).is_empty());

    // Through the mount, in a directory with that setting.
    let keep = |seconds| keep_removed(&mount.join("tree"), seconds);
    keep("3600");
    fs::remove_dir_all(mount.join("tree/below")).expect("rm -r");
    let entry = trashed(&cluster).remove(0);
    assert_eq!(entry["origin"], "/tree/below/f");
    let name = entry["entry"].as_str().expect("a name");
    assert_eq!(
        fs::read_to_string(mount.join(".trash").join(name)).expect("it can be read there"),
        "kept"
    );
    cluster.output_of(&["fs", "trash", "restore", name]);
    assert!(mount.join("tree/below/f").exists(), "with its directory");

    // After it has expired, it is removed automatically; an open file stays readable.
    keep("1");
    let open = File::open(mount.join("tree/below/f")).expect("open");
    fs::remove_file(mount.join("tree/below/f")).expect("rm");
    wait_until("it is purged", DEADLINE, || trashed(&cluster).is_empty());
    let mut content = String::new();
    (&open).read_to_string(&mut content).expect("read");
    assert_eq!(content, "kept");
    drop(open);
    keep("3600");
    fs::write(mount.join("tree/g"), "purged").expect("write");
    fs::remove_file(mount.join("tree/g")).expect("rm");
    cluster.output_of(&["fs", "trash", "purge", "--all"]);
    assert!(trashed(&cluster).is_empty());
    cluster.wait_healthy();
}

#[test]
fn a_snapshot_shows_a_directory_as_it_was_until_it_is_removed() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let (mount, other) = (cluster.mount("mount"), cluster.mount("other"));
    let tree = mount.join("tree");
    fs::create_dir_all(tree.join("below")).expect("mkdir");
    put(&tree.join("below/f"), 3 << 20).expect("write");
    put(&tree.join("g"), 100).expect("write");
    // Both mounts have cached that there is none, and all listed entries.
    for mount in [&mount, &other] {
        assert!(!mount.join("tree/.snapshot").exists());
        assert_eq!(fs::read_dir(mount.join("tree")).expect("ls").count(), 2);
    }
    let snapshot = |arguments: &[&str]| {
        let all = [&["fs", "snapshot"], arguments].concat();
        cluster.output_of(&all)
    };
    let blocks = || {
        let status = cluster.output_of(&["admin", "status", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        status["blocks"].as_u64().expect("a number")
    };
    let before = blocks();
    assert_eq!(snapshot(&["create", "/tree", "one"]).trim(), "one");
    assert_eq!(blocks(), before, "metadata only");

    fs::write(tree.join("g"), "changed").expect("write");
    fs::remove_dir_all(tree.join("below")).expect("rm -r");
    fs::write(tree.join("new"), "").expect("write");
    for mount in [&mount, &other] {
        assert_eq!(fs::read_dir(mount.join("tree")).expect("ls").count(), 2);
        let kept = mount.join("tree/.snapshot/one");
        assert_eq!(fs::read(kept.join("g")).expect("read"), [7; 100]);
        let f = fs::read(kept.join("below/f")).expect("read");
        assert!(f == vec![7; 3 << 20]);
    }
    let said = snapshot(&["diff", "/tree", "one"]);
    assert_eq!(said, "- below\n- below/f\nM g\n+ new\n");

    let kept = tree.join(".snapshot/one");
    let refused = |result: std::io::Result<()>| {
        let error = result.expect_err("nothing changes a snapshot");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::ROFS), "{error}");
    };
    refused(fs::write(kept.join("g"), "x"));
    refused(File::options().append(true).open(kept.join("g")).map(drop));
    refused(fs::write(kept.join("x"), "x"));
    refused(fs::remove_file(kept.join("g")));
    refused(fs::remove_dir(tree.join(".snapshot")));
    refused(fs::rename(kept.join("g"), tree.join("x")));
    refused(fs::hard_link(kept.join("g"), tree.join("x")));
    let read_only = fs::Permissions::from_mode(0o400);
    refused(fs::set_permissions(kept.join("g"), read_only));

    // A copy from it is an ordinary file.
    fs::copy(kept.join("below/f"), tree.join("back")).expect("cp");
    put(&tree.join("back"), 10).expect("write");
    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.wait_alive(3, DEADLINE);
    let snapshot = |arguments: &[&str]| {
        let all = [&["fs", "snapshot"], arguments].concat();
        cluster.output_of(&all)
    };
    let listed = snapshot(&["ls", "/tree", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    assert_eq!(listed[0]["name"], "one");
    assert_eq!(listed[0]["used_bytes"], (3 << 20) + 100);
    let f = fs::read(other.join("tree/.snapshot/one/below/f")).expect("read");
    assert!(f == vec![7; 3 << 20]);

    snapshot(&["rm", "/tree", "one"]);
    assert!(!other.join("tree/.snapshot").exists());
    wait_until("what only the snapshot had is gone", DEADLINE, || {
        let fsck = cluster.fsck();
        fsck["lost_blocks"] == 0 && trashed(&cluster).is_empty()
    });
    cluster.output_of(&["fs", "rm", "-r", "--skip-trash", "/tree"]);
    // A block is kept as long as a mount may write to it.
    cluster.stop("mount");
    cluster.stop("other");
    wait_until("all blocks are removed", 2 * DEADLINE, || {
        let fsck = cluster.fsck();
        fsck["blocks"] == 0 && fsck["orphan_blocks"] == 0
    });
}

#[test]
fn what_has_snapshots_is_not_removed_for_good() {
    let cluster = cluster();
    let run = |arguments: &[&str]| cluster.output_of(&[&["fs"], arguments].concat());
    run(&["mkdir", "-p", "/tree/a/my own", "/tree/b"]);
    run(&["touch", "/tree/f", "/tree/a/f", "/tree/a/my own/f"]);
    // The message contains the whole path of the conflicting file, not just its last component.
    let output = cluster.command(&["fs", "cp", "-r", "/tree/a", "/tree/b"]);
    assert!(output.status.success(), "{output:?}");
    let output = cluster.command(&["fs", "cp", "/tree/a/f", "/tree/b/a"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("/tree/b/a/f exists; replace it with -f"),
        "{said}"
    );
    run(&["snapshot", "create", "/tree/a/my own", "one"]);
    run(&["snapshot", "create", "/tree/a/my own", "two"]);
    run(&["snapshot", "create", "/tree", "it's"]);
    let refused = || {
        let output = cluster.command(&["fs", "rm", "-r", "--skip-trash", "/tree/"]);
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    let found = run(&["find", "/tree"]);
    let said = refused();
    for command in [
        r"`harvestfs fs snapshot rm /tree/ 'it'\''s'`",
        "`harvestfs fs snapshot rm '/tree/a/my own' one two`",
    ] {
        assert!(said.contains(command), "{said}");
    }
    assert_eq!(run(&["find", "/tree"]), found, "nothing is removed");

    run(&["snapshot", "rm", "/tree", "it's"]);
    run(&["snapshot", "rm", "/tree/a/my own", "one"]);
    let said = refused();
    assert!(said.contains("rm '/tree/a/my own' two`"), "{said}");
    assert!(!said.contains("rm /tree "), "{said}");
    assert_eq!(run(&["find", "/tree"]), found, "nothing is removed");

    run(&["snapshot", "rm", "/tree/a/my own", "two"]);
    run(&["rm", "-r", "--skip-trash", "/tree"]);
    assert!(!run(&["find", "/"]).contains("tree"));
}

/// Small files are committed after they were closed; a query about one waits for that.
#[test]
fn what_was_closed_is_whole_in_snapshots_and_in_the_trash() {
    const FILES: usize = 100;
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let (writer, reader) = (cluster.mount("writer"), cluster.mount("reader"));
    let content = |round: usize, file: usize| format!("{round} {file}\n").repeat(500);
    let check = |directory: &Path, round: usize| {
        for file in 0..FILES {
            let read = fs::read_to_string(directory.join(file.to_string())).expect("read");
            assert!(
                read == content(round, file),
                "{file} in {}",
                directory.display()
            );
        }
    };
    for round in 0..5 {
        let tree = writer.join("tree");
        fs::create_dir(&tree).expect("mkdir");
        for file in 0..FILES {
            fs::write(tree.join(file.to_string()), content(round, file)).expect("write");
        }
        let name = format!("round-{round}");
        cluster.output_of(&["fs", "snapshot", "create", "/tree", &name]);
        check(&reader.join("tree/.snapshot").join(&name), round);

        for file in 0..FILES {
            fs::write(tree.join(file.to_string()), content(round + 1, file)).expect("write");
        }
        cluster.output_of(&["fs", "rm", "-r", "/tree"]);
        let entry = trashed(&cluster).remove(0);
        let entry = entry["entry"].as_str().expect("a name");
        let removed = reader.join(".trash").join(entry);
        check(&removed, round + 1);
        check(&removed.join(".snapshot").join(&name), round);
        // This includes its snapshot, which is removed in the background.
        cluster.output_of(&["fs", "trash", "purge", "--all"]);
        wait_until("the trash is empty", DEADLINE, || {
            trashed(&cluster).is_empty()
        });
    }
}

/// An entry that is removed while it is listed is omitted, without an error.
#[test]
fn what_is_purged_meanwhile_does_not_break_a_list() {
    const FILES: usize = 400;
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("mount");
    for directory in 0..2 {
        let directory = mount.join(directory.to_string());
        fs::create_dir(&directory).expect("mkdir");
        for file in 0..FILES / 2 {
            fs::write(directory.join(file.to_string()), "x").expect("write");
        }
        keep_removed(&directory, "3600");
        fs::remove_dir_all(&directory).expect("rm -r");
    }
    assert!(trashed(&cluster).len() >= FILES);
    std::thread::scope(|scope| {
        let purge = scope.spawn(|| cluster.output_of(&["fs", "trash", "purge", "--all"]));
        while !purge.is_finished() {
            trashed(&cluster);
            cluster.output_of(&["fs", "ls", "-R", "/.trash"]);
        }
    });
    assert!(trashed(&cluster).is_empty());
}

#[test]
fn a_copy_to_this_machine_has_the_modes_of_the_tree_and_follows_no_symlink_in_its_way() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let at = |name: &str| here.path().join(name);
    let path = |name: &str| at(name).display().to_string();
    let set_mode = |name: &str, mode| {
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).expect("chmod");
    };
    fs::create_dir_all(at("tree/closed")).expect("mkdir");
    fs::write(at("tree/closed/f"), "new").expect("write");
    set_mode("tree/closed/f", 0o640);
    set_mode("tree", 0o750);
    cluster.output_of(&["fs", "put", "-r", &path("tree"), "/"]);
    cluster.output_of(&["fs", "chmod", "500", "/tree/closed"]);
    cluster.output_of(&["fs", "get", "-r", "/tree", &path("copy")]);
    for (name, mode) in [
        ("copy", 0o750),
        ("copy/closed", 0o500),
        ("copy/closed/f", 0o640),
    ] {
        let metadata = fs::metadata(at(name)).expect("it was copied");
        assert_eq!(metadata.permissions().mode() & 0o7777, mode, "{name}");
    }
    // So that it can be removed.
    set_mode("copy/closed", 0o700);

    // Another user may have created these at the destination.
    fs::create_dir_all(at("shared/tree")).expect("mkdir");
    fs::create_dir(at("elsewhere")).expect("mkdir");
    symlink("../../elsewhere", at("shared/tree/closed")).expect("symlink");
    let output = cluster.command(&["fs", "get", "-r", "-f", "/tree", &path("shared")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("is not a directory"), "{said}");
    assert_eq!(fs::read_dir(at("elsewhere")).expect("ls").count(), 0);

    // A symlink that the user names is followed.
    let file = "/tree/closed/f";
    fs::write(at("old"), "old").expect("write");
    symlink("old", at("link")).expect("symlink");
    let refused = cluster.command(&["fs", "get", file, &path("link")]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("replace it with -f"), "{said}");
    cluster.output_of(&["fs", "get", "-f", file, &path("link")]);
    cluster.output_of(&["fs", "get", "-f", file, "/dev/null"]);
    assert_eq!(fs::read(at("old")).expect("read"), b"new");
    let leads_to = fs::read_link(at("link")).expect("a symlink");
    assert_eq!(leads_to, Path::new("old"));
}
