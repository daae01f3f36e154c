//! A rolling upgrade from one build to another, and one that is rolled back, while programs write and
//! read through mounts. `just upgrade` builds the second build, which has a later version, and runs the
//! tests one after the other.

mod load;
mod parts;

use std::path::PathBuf;
use std::time::Duration;

use harvestfs_tests::{can_mount, wait_until};

use self::load::Load;
use self::parts::{Build, Parts};

/// Environment variable with the path of the second build.
const NEXT: &str = "HARVESTFS_TESTS_NEXT";
/// The version of this build, and of the next one.
const OLD: u64 = 12;
const NEW: u64 = 13;
/// Time for which the programs run before the first part is replaced, and after the last one was.
const QUIET: Duration = Duration::from_secs(5);

fn step(what: &str) {
    println!("--- {what}");
}

fn next_build() -> PathBuf {
    let next = std::env::var_os(NEXT).map(PathBuf::from);
    next.unwrap_or_else(|| panic!("{NEXT} says where the next build is"))
}

#[test]
fn an_upgrade_that_is_not_finished_is_taken_back_while_programs_use_the_cluster() {
    assert!(can_mount(), "mounts are what is tested");
    let mut parts = Parts::start(next_build());
    let old_mount = parts.mount("mount-old", Build::Old);
    let new_mount = parts.mount("mount-new", Build::New);
    let load = Load::start(&[old_mount, new_mount]);
    for (to, why) in [
        (Build::New, "becomes the next build"),
        (Build::Old, "goes back"),
    ] {
        for number in 1..=parts::DATANODES {
            step(&format!("datanode {number} {why}"));
            parts.replace_datanode(number, to);
            load.check();
        }
        for number in 1..=parts.namenodes() {
            step(&format!("namenode {number} {why}"));
            parts.replace_namenode(number, to);
            load.check();
            // The other build has to read it.
            parts.succeeds(to, &["admin", "snapshot"]);
        }
    }
    let status = parts.status();
    assert_eq!((status.cluster, status.newest), (OLD, OLD), "{status:?}");
    assert!(status.missing.is_empty(), "{status:?}");
    assert_eq!(status.clients, [OLD, NEW].into());

    std::thread::sleep(QUIET);
    let done = load.stop();
    println!("{done}");
    done.verify();
    step("the mount of the next build goes, too");
    parts.stop("mount-new");
    parts.mount("mount-new", Build::Old);
    done.verify();
    wait_until("the file system is healthy", parts::HEALTHY_WITHIN, || {
        parts.run(Build::Old, &["admin", "fsck"]).status.success()
    });
}

#[test]
fn a_cluster_is_upgraded_part_by_part_while_programs_use_it() {
    assert!(can_mount(), "mounts are what is tested");
    let mut parts = Parts::start(next_build());
    let old_mount = parts.mount("mount-old", Build::Old);
    let new_mount = parts.mount("mount-new", Build::New);
    let status = parts.status();
    assert_eq!((status.cluster, status.newest), (OLD, OLD), "{status:?}");
    assert_eq!(status.clients, [OLD, NEW].into());
    // The next build has a message that the other parts do not understand yet.
    let refused = parts.fails(Build::New, &["admin", "upgrade", "probe"]);
    assert!(refused.contains("exists since version 13"), "{refused}");
    let load = Load::start(&[old_mount.clone(), new_mount.clone()]);
    std::thread::sleep(QUIET);

    for number in 1..=parts::DATANODES {
        step(&format!("datanode {number} becomes the next build"));
        parts.replace_datanode(number, Build::New);
        load.check();
    }
    let status = parts.status();
    assert_eq!((status.cluster, status.newest), (OLD, NEW), "{status:?}");
    assert_eq!(status.missing.len(), parts.namenodes(), "{status:?}");
    let refused = parts.fails(Build::Old, &["admin", "upgrade", "finish"]);
    assert!(refused.contains("the namenode 127.0.0.1:"), "{refused}");

    step("datanode 1 goes back to the build of before, and forth again");
    parts.replace_datanode(1, Build::Old);
    parts.replace_datanode(1, Build::New);
    load.check();

    for number in 1..=parts.namenodes() {
        step(&format!("namenode {number} becomes the next build"));
        parts.replace_namenode(number, Build::New);
        load.check();
    }
    step("a namenode goes back to the build of before");
    let last = parts.namenodes();
    parts.replace_namenode(last, Build::Old);
    let status = parts.status();
    assert_eq!((status.cluster, status.newest), (OLD, NEW));
    assert_eq!(status.missing.len(), 1, "{status:?}");
    let refused = parts.fails(Build::New, &["admin", "upgrade", "finish"]);
    assert!(refused.contains("it runs 0.2.0"), "{refused}");
    parts.replace_namenode(last, Build::New);
    load.check();
    // All parts understand the message now, but must not write the record yet.
    let refused = parts.fails(Build::New, &["admin", "upgrade", "probe"]);
    assert!(refused.contains("the cluster has version 12"), "{refused}");

    step("the upgrade is finished");
    assert!(parts.status().missing.is_empty());
    let finished = parts.succeeds(Build::New, &["admin", "upgrade", "finish"]);
    print!("{finished}");
    assert!(finished.contains("version 13 now"), "{finished}");
    let status = parts.status();
    assert_eq!((status.cluster, status.newest), (NEW, NEW));
    let probe = ["admin", "upgrade", "probe"];
    assert_eq!(parts.succeeds(Build::New, &probe), "1 probe\n");

    step("what is new is in journal and snapshots");
    parts.succeeds(Build::New, &["admin", "snapshot"]);
    assert_eq!(parts.succeeds(Build::New, &probe), "2 probes\n");
    for number in 1..=parts.namenodes() {
        parts.replace_namenode(number, Build::New);
    }
    assert_eq!(parts.succeeds(Build::New, &probe), "3 probes\n");
    load.check();

    step("parts of the build of before are refused");
    let said = parts.namenode_ends(last, Build::Old);
    assert!(
        said.contains("the cluster has version 13, the program has 12"),
        "{said}"
    );
    parts.replace_namenode(last, Build::New);
    parts.datanode_is_refused(
        1,
        Build::Old,
        "the cluster has version 13, the program has 12",
    );
    parts.replace_datanode(1, Build::New);
    load.check();

    std::thread::sleep(QUIET);
    step("everything is compared");
    let done = load.stop();
    println!("{done}");
    done.verify();
    step("the mounts change places");
    parts.stop("mount-old");
    parts.stop("mount-new");
    parts.mount("mount-old", Build::New);
    parts.mount("mount-new", Build::New);
    done.verify();
    wait_until("the file system is healthy", parts::HEALTHY_WITHIN, || {
        parts.run(Build::New, &["admin", "fsck"]).status.success()
    });
}
