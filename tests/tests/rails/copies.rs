//! Copies that would destroy what they copy, or would have no end.

use std::fs;
use std::os::unix::fs::symlink;

use harvestfs_tests::can_mount;

use crate::cluster;

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
    // The same file is a file of this machine, too, where it is mounted.
    let (here, directory) = (file.to_string_lossy(), mount.join("d"));
    refused(&["put", "-f", &here, "/d/link"]);
    refused(&["put", "-rf", &directory.to_string_lossy(), "/"]);

    // Another file is replaced.
    fs::write(mount.join("other"), "changed").expect("write");
    let other = mount.join("other");
    cluster.output_of(&["fs", "put", "-f", &other.to_string_lossy(), "/d/a"]);
    assert_eq!(cluster.output_of(&["fs", "cat", "/d/link"]), "changed");
    fs::write(mount.join("third"), "changed again").expect("write");
    cluster.output_of(&["fs", "cp", "-f", "/third", "/d/a"]);
    assert_eq!(
        cluster.output_of(&["fs", "cat", "/d/link"]),
        "changed again"
    );
}

/// Directories, and places in them.
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
    // Beside it, and from it to the directory above, it can be copied.
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
    // Beside it, and from it to the directory above, it can be copied.
    run(&["put", "-r", &here("/a"), "/ab"]);
    run(&["put", "-r", &here("/a/b"), "/a/put"]);
    run(&["get", "-r", "/a/b", &here("/a/got")]);
    let after = run(&["find", "/"]);
    for copy in ["/ab/a/b/c/f", "/a/put/c/f", "/a/got/c/f"] {
        assert!(after.lines().any(|line| line == copy), "{after}");
    }

    // What is copied may only have the cluster mounted in it.
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
