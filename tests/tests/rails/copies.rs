//! Copies that would destroy their source, or would never end.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Stdio;

use harvestfs_tests::{KillOnDrop, can_mount, skip, wait_until};

use crate::user::{User, is_root};
use crate::{DEADLINE, cluster};

#[test]
fn a_copy_onto_itself_does_not_empty_a_file() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("mount");
    fs::create_dir(mount.join("d")).expect("mkdir");
    let file = mount.join("d/a");
    fs::write(&file, "kept").expect("write");
    fs::hard_link(&file, mount.join("d/link")).expect("link");
    let refused = |arguments: &[&str]| {
        let output = cluster.command(&[&["fs"], arguments].concat());
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("is the same file"), "{arguments:?}: {said}");
        let content = cluster.output_of(&["fs", "cat", "/d/a"]);
        assert_eq!(content, "kept", "{arguments:?}");
    };
    for target in ["/d/a", "/d/link", "/d", "/d/../d/a"] {
        refused(&["cp", "-f", "/d/a", target]);
    }
    // Through the mount, the same file is also a file on this machine.
    let (here, directory) = (file.to_string_lossy(), mount.join("d"));
    refused(&["put", "-f", &here, "/d/link"]);
    refused(&["put", "-rf", &directory.to_string_lossy(), "/"]);

    // A different file is replaced, and unchanged under its other names.
    fs::write(mount.join("other"), "changed").expect("write");
    let other = mount.join("other");
    cluster.output_of(&["fs", "put", "-f", &other.to_string_lossy(), "/d/a"]);
    assert_eq!(cluster.output_of(&["fs", "cat", "/d/a"]), "changed");
    assert_eq!(cluster.output_of(&["fs", "cat", "/d/link"]), "kept");
    fs::hard_link(mount.join("d/a"), mount.join("d/third")).expect("link");
    cluster.output_of(&["fs", "cp", "-f", "/d/link", "/d/a"]);
    assert_eq!(cluster.output_of(&["fs", "cat", "/d/a"]), "kept");
    assert_eq!(cluster.output_of(&["fs", "cat", "/d/third"]), "changed");
    assert_eq!(cluster.output_of(&["fs", "ls", "/d"]), "a\nlink\nthird\n");
}

#[test]
fn a_file_that_its_owner_may_not_write_to_is_replaced_and_a_directory_is_not() {
    let cluster = cluster();
    let user = User::of(&cluster);
    let source = user.path("f");
    let here = source.to_string_lossy();
    let put = ["put", "-f", &here, "/mine"];
    // Even the longest name leaves room for a temporary name.
    let long = format!("/mine/{}", "x".repeat(255));
    let cp = ["cp", "-f", "/mine/f", &long];
    for content in ["old", "new"] {
        fs::write(&source, content).expect("write");
        for command in [put, cp] {
            user.output_of(&command);
        }
        for copy in ["/mine/f", &long] {
            assert_eq!(user.output_of(&["cat", copy]), content);
            user.output_of(&["chmod", "400", copy]);
        }
    }

    user.output_of(&["mkdir", "-p", "/mine/d/f"]);
    for command in [
        ["put", "-f", &here, "/mine/d"],
        ["cp", "-f", "/mine/f", "/mine/d"],
    ] {
        let output = user.command(&command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{command:?}: {said}");
        assert!(said.contains("is a directory"), "{command:?}: {said}");
        assert_eq!(user.output_of(&["ls", "/mine/d"]), "f\n");
    }
}

#[test]
fn a_file_of_another_user_in_a_sticky_directory_is_not_replaced_and_not_copied_in_vain() {
    if !is_root() {
        skip("it needs two users: run it as root");
        return;
    }
    let cluster = cluster();
    let user = User::of(&cluster);
    cluster.output_of(&["fs", "mkdir", "/shared"]);
    cluster.output_of(&["fs", "chmod", "1777", "/shared"]);
    cluster.output_of(&["fs", "touch", "/shared/f"]);
    let source = user.path("f");
    fs::write(&source, "new").expect("write");
    let here = source.to_string_lossy();
    user.output_of(&["put", &here, "/mine"]);
    let cp = user.command(&["cp", "-f", "/mine/f", "/shared"]);
    let said = String::from_utf8_lossy(&cp.stderr);
    assert_eq!(cp.status.code(), Some(1), "{said}");
    assert!(said.contains("in a sticky directory"), "{said}");
    // It does not wait for the end of its input.
    let mut put = user.fs(&["put", "-f", "-", "/shared/f"]);
    let mut put = KillOnDrop(put.stdin(Stdio::piped()).spawn().expect("it runs"));
    let mut status = None;
    wait_until("it is refused", DEADLINE, || {
        status = put.0.try_wait().expect("it is our child");
        status.is_some()
    });
    assert_eq!(status.and_then(|status| status.code()), Some(1));
    assert_eq!(cluster.output_of(&["fs", "cat", "/shared/f"]), "");

    // Users can replace their own files there, and the owner of the directory any file.
    for name in ["/shared/own", "/mine/f"] {
        for _ in 0..2 {
            user.output_of(&["put", "-f", &here, name]);
        }
    }
    cluster.output_of(&["fs", "chmod", "1777", "/mine"]);
    cluster.output_of(&["fs", "put", "-f", &here, "/mine/f"]);
    user.output_of(&["put", "-f", &here, "/mine/f"]);
}

/// Directories, and targets in them.
const INTO_ITSELF: [(&str, &str); 5] = [
    ("/a", "/a/new"),
    ("/a", "/a"),
    ("/a", "/a/b/c/new"),
    ("/a/b", "/a/b/c"),
    ("/", "/backup"),
];

#[test]
fn a_directory_is_not_copied_into_itself() {
    let cluster = cluster();
    let run = |arguments: &[&str]| cluster.output_of(&[&["fs"], arguments].concat());
    run(&["mkdir", "-p", "/a/b/c", "/ab"]);
    run(&["touch", "/a/b/c/f"]);
    let before = run(&["find", "/"]);
    for (source, target) in INTO_ITSELF {
        let output = cluster.command(&["fs", "cp", "-r", source, target]);
        assert!(!output.status.success(), "{source} to {target}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("into itself"), "{source} to {target}: {said}");
        assert_eq!(run(&["find", "/"]), before, "{source} to {target}");
    }
    // It can be copied next to itself, and from it to its parent.
    run(&["cp", "-r", "/a", "/ab"]);
    run(&["cp", "-r", "/a/b", "/a/new"]);
    let after = run(&["find", "/"]);
    for copy in ["/ab/a/b/c/f", "/a/new/c/f"] {
        assert!(after.lines().any(|line| line == copy), "{after}");
    }
}

#[test]
fn a_directory_is_not_copied_into_itself_through_a_mount() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("home/mount");
    let here = |path: &str| mount.join(&path[1..]).display().to_string();
    let run = |arguments: &[&str]| cluster.output_of(&[&["fs"], arguments].concat());
    let refused = |arguments: &[&str]| {
        let output = cluster.command(&[&["fs"], arguments].concat());
        assert!(!output.status.success(), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("into itself"), "{arguments:?}: {said}");
    };
    run(&["mkdir", "-p", "/a/b/c", "/ab"]);
    run(&["touch", "/a/b/c/f"]);
    let before = run(&["find", "/"]);
    for (source, target) in INTO_ITSELF {
        for how in ["-r", "-rf"] {
            refused(&["put", how, &here(source), target]);
            refused(&["get", how, source, &here(target)]);
        }
        assert_eq!(run(&["find", "/"]), before, "{source} to {target}");
    }
    // It can be copied next to itself, and from it to its parent.
    run(&["put", "-r", &here("/a"), "/ab"]);
    run(&["put", "-r", &here("/a/b"), "/a/put"]);
    run(&["get", "-r", "/a/b", &here("/a/got")]);
    let after = run(&["find", "/"]);
    for copy in ["/ab/a/b/c/f", "/a/put/c/f", "/a/got/c/f"] {
        assert!(after.lines().any(|line| line == copy), "{after}");
    }

    // The source may merely contain a mount of the cluster.
    let home = cluster.path("home");
    refused(&["put", "-r", &home.to_string_lossy(), "/up"]);
    let after = run(&["find", "/up"]);
    assert!(!after.lines().any(|line| line == "/up/mount"), "{after}");
}

#[test]
fn what_is_no_directory_is_not_taken_for_one() {
    if !can_mount() {
        return;
    }
    let mut cluster = cluster();
    let mount = cluster.mount("mount");
    fs::create_dir(mount.join("d")).expect("mkdir");
    fs::write(mount.join("f"), "kept").expect("write");
    symlink("d", mount.join("to-d")).expect("symlink");
    symlink("f", mount.join("to-f")).expect("symlink");
    let here = cluster.path("here");
    for name in ["d", "f", "to-f"] {
        fs::create_dir_all(here.join(name)).expect("a directory");
    }
    let refused = |arguments: &[&str]| {
        let output = cluster.command(&[&["fs"], arguments].concat());
        assert!(!output.status.success(), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        let expected = "exists and is not a directory";
        assert!(said.contains(expected), "{arguments:?}: {said}");
        assert_eq!(cluster.output_of(&["fs", "cat", "/f"]), "kept");
    };
    for path in ["/f", "/to-f", "f/x"] {
        refused(&["mkdir", "-p", path]);
    }
    for name in ["f", "to-f"] {
        refused(&["put", "-r", &here.join(name).to_string_lossy(), "/"]);
    }
    let put = here.join("d");
    cluster.output_of(&["fs", "put", "-r", &put.to_string_lossy(), "/"]);
    cluster.output_of(&["fs", "mkdir", "-p", "/d", "/to-d", "/to-d/x"]);
    assert!(mount.join("d/x").is_dir());
}
