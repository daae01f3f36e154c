//! Copies of trees, unchanged and while they are modified.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harvestfs_tests::{Cluster, KillOnDrop, harvestfs};
use rustix::fs::{FileType, Mode, RenameFlags, mknodat, renameat_with};

use crate::user::User;
use crate::{cluster, mode_of};

const COPIES: usize = 8;

/// Maximum time for a copy of a few bytes, which never blocks.
const COPY_DEADLINE: Duration = Duration::from_secs(120);

/// Copies a directory in which two names are constantly exchanged.
fn copy_exchanged(cluster: &Cluster, tree: &Path, target: &str) {
    let directory = File::open(tree).expect("a directory");
    let put = Command::new(harvestfs())
        .args(["fs", "put", "-r"])
        .arg(tree)
        .arg(target)
        .env("HARVESTFS_DATA", cluster.path(""))
        .env_remove("HARVESTFS_CLIENT_CONFIG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut put = KillOnDrop(put.expect("the binary runs"));
    let end = Instant::now() + COPY_DEADLINE;
    // It may fail if an entry has changed its type since it was examined.
    while put.0.try_wait().expect("it is our child").is_none() {
        assert!(Instant::now() < end, "{target} is waited for");
        renameat_with(&directory, "a", &directory, "b", RenameFlags::EXCHANGE).expect("exchange");
    }
}

#[test]
fn what_takes_the_place_of_a_file_while_a_tree_is_copied_is_neither_followed_nor_waited_for() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let at = |name: &str| here.path().join(name);
    let path = |name: &str| at(name).display().to_string();
    for tree in ["linked", "waiting"] {
        fs::create_dir(at(tree)).expect("mkdir");
        fs::write(at(tree).join("a"), "open").expect("write");
    }
    fs::write(at("secret"), "secret").expect("write");
    symlink(at("secret"), at("linked/b")).expect("symlink");
    let waiting = File::open(at("waiting")).expect("a directory");
    mknodat(&waiting, "b", FileType::Fifo, Mode::RWXU, 0).expect("mkfifo");
    cluster.output_of(&["fs", "mkdir", "/copies"]);
    for tree in ["linked", "waiting"] {
        for number in 0..COPIES {
            copy_exchanged(&cluster, &at(tree), &format!("/copies/{tree}-{number}"));
        }
    }
    cluster.output_of(&["fs", "get", "-r", "/copies", &path("back")]);
    let mut files = 0;
    for copy in fs::read_dir(at("back")).expect("a directory") {
        for entry in fs::read_dir(copy.expect("an entry").path()).expect("a directory") {
            let entry = entry.expect("an entry");
            if entry.file_type().expect("its kind").is_file() {
                let content = fs::read_to_string(entry.path()).expect("a file");
                assert_eq!(content, "open", "{}", entry.path().display());
                files += 1;
            }
        }
    }
    assert!(files > 0);
}

/// A copy made by root belongs to root.
#[test]
fn a_copy_has_no_bits_that_let_others_run_it_as_its_owner() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let at = |name: &str| here.path().join(name);
    fs::create_dir_all(at("tree/shared")).expect("mkdir");
    fs::write(at("tree/f"), "x").expect("write");
    for (name, mode) in [("tree/f", 0o6755), ("tree/shared", 0o3777)] {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(at(name), mode).expect("chmod");
    }
    cluster.output_of(&["fs", "put", "-r", &at("tree").to_string_lossy(), "/"]);
    assert_eq!(mode_of(&cluster, "/tree/f"), "0755");
    // Nor more bits than the umask leaves.
    assert_eq!(mode_of(&cluster, "/tree/shared"), "1755");
    cluster.output_of(&["fs", "chmod", "6755", "/tree/f"]);
    cluster.output_of(&["fs", "chmod", "3777", "/tree/shared"]);
    cluster.output_of(&["fs", "cp", "-r", "/tree", "/copy"]);
    assert_eq!(mode_of(&cluster, "/copy/f"), "0755");
    assert_eq!(mode_of(&cluster, "/copy/shared"), "1755");
}

#[test]
fn directories_are_copied_under_their_names() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let at = |name: &str| here.path().join(name).display().to_string();
    for name in ["photos", "music"] {
        fs::create_dir(at(name)).expect("mkdir");
        fs::write(here.path().join(name).join("f"), name).expect("write");
    }
    let run = |arguments: &[&str]| cluster.output_of(&[&["fs"], arguments].concat());
    run(&["mkdir", "/photos", "/d"]);
    // One of several sources has the same name as the target directory.
    run(&["put", "-r", &at("music"), &at("photos"), "/photos"]);
    assert_eq!(run(&["ls", "/photos"]), "music\nphotos\n");
    run(&["touch", "/f"]);
    let (music, photos) = (at("music"), at("photos"));
    for file in ["/f", "/new"] {
        let output = cluster.command(&["fs", "put", "-r", &music, &photos, file]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("is not a directory"), "{file}: {said}");
    }
    // For a path without a name of its own, the name of the directory itself is used.
    run(&["put", "-r", &at("photos/../music/."), "/d"]);
    run(&["put", "-r", &at("music/../photos/../music/.."), "/d"]);
    let name = here.path().file_name().expect("a name").to_string_lossy();
    let listed = run(&["ls", "/d"]);
    let names: Vec<&str> = listed.lines().collect();
    assert!(
        names.contains(&"music") && names.contains(&&*name),
        "{names:?}"
    );
    assert_eq!(names.len(), 2, "{names:?}");
}

/// A tree whose directories are not writable.
#[test]
fn a_user_copies_directories_that_nobody_may_write_to() {
    let cluster = cluster();
    let user = User::of(&cluster);
    let tree = user.path("tree");
    fs::create_dir_all(tree.join("closed/below")).expect("mkdir");
    fs::write(tree.join("closed/below/f"), "kept").expect("write");
    for (name, mode) in [("closed/below", 0o505), ("closed", 0o555)] {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(tree.join(name), mode).expect("chmod");
    }
    let tree = tree.to_string_lossy();
    user.output_of(&["put", "-r", &tree, "/mine"]);
    user.output_of(&["cp", "-r", "/mine/tree", "/mine/copy"]);
    for copy in ["/mine/tree", "/mine/copy"] {
        assert_eq!(mode_of(&cluster, &format!("{copy}/closed")), "0555");
        assert_eq!(mode_of(&cluster, &format!("{copy}/closed/below")), "0505");
        let content = user.output_of(&["cat", &format!("{copy}/closed/below/f")]);
        assert_eq!(content, "kept");
    }
    // The same if something cannot be copied.
    let part = user.path("part");
    fs::create_dir_all(part.join("closed")).expect("mkdir");
    fs::write(part.join("closed/secret"), "").expect("write");
    for (name, mode) in [("closed/secret", 0), ("closed", 0o555)] {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(part.join(name), mode).expect("chmod");
    }
    let output = user.command(&["put", "-r", &part.to_string_lossy(), "/mine"]);
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(mode_of(&cluster, "/mine/part/closed"), "0555");
    // So that users other than root can remove it.
    for name in ["tree/closed", "tree/closed/below", "part/closed"] {
        let mode = fs::Permissions::from_mode(0o700);
        fs::set_permissions(user.path(name), mode).expect("chmod");
    }
}

#[test]
fn a_tree_is_copied_again_over_itself_with_force() {
    let cluster = cluster();
    let here = tempfile::tempdir().expect("a directory");
    let at = |name: &str| here.path().join(name);
    let path = |name: &str| at(name).display().to_string();
    fs::create_dir_all(at("tree/d")).expect("mkdir");
    fs::write(at("tree/d/f"), "old").expect("write");
    symlink("old", at("tree/link")).expect("symlink");
    let tree = File::open(at("tree")).expect("a directory");
    mknodat(&tree, "fifo", FileType::Fifo, Mode::RWXU, 0).expect("mkfifo");
    let run = |arguments: &[&str]| cluster.output_of(&[&["fs"], arguments].concat());
    // Special files are left out, and the rest is copied.
    run(&["put", "-r", &path("tree"), "/"]);
    assert_eq!(
        run(&["find", "/tree"]),
        "/tree\n/tree/d\n/tree/d/f\n/tree/link\n"
    );
    let parent = here.path().to_string_lossy();
    for arguments in [
        ["put", "-r", &path("tree"), "/"],
        ["get", "-r", "/tree", &parent],
    ] {
        let output = cluster.command(&[&["fs"], &arguments[..]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("replace it with -f"), "{arguments:?}: {said}");
    }

    fs::write(at("tree/d/f"), "new").expect("write");
    fs::remove_file(at("tree/link")).expect("rm");
    symlink("new", at("tree/link")).expect("symlink");
    run(&["put", "-rf", &path("tree"), "/"]);
    run(&["mkdir", "/all"]);
    fs::create_dir(at("back")).expect("mkdir");
    for _ in 0..2 {
        run(&["cp", "-rf", "/tree", "/all"]);
        run(&["get", "-rf", "/all/tree", &path("back")]);
    }
    assert_eq!(fs::read(at("back/tree/d/f")).expect("read"), b"new");
    let leads_to = fs::read_link(at("back/tree/link")).expect("a symlink");
    assert_eq!(leads_to, Path::new("new"));

    // A file replaces a symlink, not its target.
    run(&["touch", "/tree/new", "/all/tree/new"]);
    fs::remove_file(at("tree/link")).expect("rm");
    fs::write(at("tree/link"), "a file").expect("write");
    run(&["put", "-rf", &path("tree"), "/"]);
    run(&["cp", "-rf", "/tree", "/all"]);
    for tree in ["/tree", "/all/tree"] {
        assert_eq!(run(&["cat", &format!("{tree}/link")]), "a file");
        assert_eq!(run(&["cat", &format!("{tree}/new")]), "");
    }
    assert_eq!(
        run(&["find", "/all"]),
        "/all\n/all/tree\n/all/tree/d\n/all/tree/d/f\n/all/tree/link\n/all/tree/new\n"
    );

    // A directory is not copied onto itself.
    let output = cluster.command(&["fs", "cp", "-rf", "/all/tree", "/all/"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("is the same directory"), "{said}");
}

#[test]
fn what_has_no_place_on_this_machine_is_left_out_with_all_below_and_the_rest_is_copied() {
    let cluster = cluster();
    let user = User::of(&cluster);
    user.output_of(&["mkdir", "-p", "/mine/t/m/below", "/mine/t/n"]);
    for file in ["f", "m/below/f", "m/f", "n/f", "z"] {
        user.output_of(&["touch", &format!("/mine/t/{file}")]);
    }
    // On this machine, a directory's name is taken by a file, and a file's by a directory.
    let here = user.path("here");
    fs::create_dir_all(here.join("t/f")).expect("mkdir");
    fs::write(here.join("t/m"), "kept").expect("write");
    for directory in [here.clone(), here.join("t")] {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).expect("chmod");
    }
    let to = here.to_string_lossy();
    // The root has no name of its own.
    let get = ["get", "-rf", "/", "/mine/t", &to];
    user.fails_at(&get, &["cannot copy /: ", "t/f", "t/m"]);
    assert_eq!(fs::read(here.join("t/m")).expect("read"), b"kept");
    let mut names = Vec::new();
    for directory in [here.join("t"), here.join("t/n")] {
        let entries = fs::read_dir(directory).expect("a directory");
        names.extend(entries.map(|entry| entry.expect("an entry").file_name()));
    }
    names.sort();
    assert_eq!(names, ["f", "f", "m", "n", "z"]);

    // Existing files are not replaced without -f, and directories are not copied without -r.
    user.fails_at(&["get", "-r", "/mine/t", &to], &["t/f", "t/m", "n/f", "z"]);
    let get = ["get", "/mine/t/n", "/mine/t/z", &to];
    user.fails_at(&get, &["/mine/t/n is a directory"]);
    assert!(here.join("z").is_file());
}
