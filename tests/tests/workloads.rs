//! Real programs on a real mount.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use harvestfs_tests::{
    Cluster, ClusterOptions, Pattern, assert_same_tree, can_mount, count_files, have_program,
    have_space, library_sources, make_source_tree, wait_until,
};
use rustix::fs::{Advice, fadvise};

/// Runs a program to its end.
fn run(directory: &Path, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_source_tree_of_5000_files_is_unpacked_and_removed() {
    if !can_mount() {
        return;
    }
    let local = tempfile::tempdir().expect("a directory");
    let tree = local.path().join("tree");
    fs::create_dir(&tree).expect("a directory");
    let mut files = 0;
    for library in library_sources() {
        if files < 5_000 {
            files += count_files(&library);
            run(&tree, "cp", &["-a", &library.to_string_lossy(), "."]);
        }
    }
    assert!(files >= 5_000, "only {files} files");
    run(local.path(), "tar", &["-cf", "tree.tar", "tree"]);
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    let archive = local.path().join("tree.tar");
    run(&mount, "tar", &["-xf", &archive.to_string_lossy()]);
    assert_same_tree(&local.path().join("tree"), &mount.join("tree"));

    // The same holds on another mount, and after a restart of everything.
    let other = cluster.mount("mnt2");
    assert_same_tree(&local.path().join("tree"), &other.join("tree"));
    cluster.stop("mnt");
    cluster.stop("mnt2");
    cluster.stop("namenode");
    cluster.start_namenode();
    let mount = cluster.mount("mnt");
    assert_same_tree(&local.path().join("tree"), &mount.join("tree"));

    run(&mount, "cp", &["-a", "tree", "copy"]);
    assert_same_tree(&local.path().join("tree"), &mount.join("copy"));
    run(&mount, "rm", &["-rf", "tree", "copy"]);
    assert_eq!(fs::read_dir(&mount).expect("the root").count(), 0);
    cluster.wait_healthy();
}

/// Real crates without dependencies.
const CRATES: [&str; 5] = ["equivalent", "fnv", "heck", "strsim", "utf8parse"];

#[test]
fn cargo_builds_crates() {
    let Some((_cluster, mount)) = Cluster::mounted(&ClusterOptions::default()) else {
        return;
    };
    run(
        &mount,
        env!("CARGO"),
        &["new", "--quiet", "--vcs", "none", "sample"],
    );
    let sample = mount.join("sample");
    let mut manifest = File::options()
        .append(true)
        .open(sample.join("Cargo.toml"))
        .expect("the manifest");
    let libraries = library_sources();
    for name in CRATES {
        let source = libraries.iter().find(|path| {
            let directory = path.file_name().and_then(|name| name.to_str());
            directory
                .and_then(|directory| directory.strip_prefix(name))
                .is_some_and(|version| version.starts_with('-'))
        });
        let source = source.unwrap_or_else(|| panic!("{name} is not among the libraries"));
        run(&sample, "cp", &["-a", &source.to_string_lossy(), name]);
        writeln!(manifest, "{name} = {{ path = \"{name}\" }}").expect("append");
    }
    writeln!(manifest, "[workspace]\nexclude = {CRATES:?}").expect("append");
    drop(manifest);
    let program = |word: &str| {
        format!(
            "use heck::ToSnakeCase;\n\
             fn main() {{ println!(\"{{}} {{}}\", \"{word}\".to_snake_case(), \
             strsim::levenshtein(\"harvest\", \"{word}\")); }}\n"
        )
    };
    fs::write(sample.join("src/main.rs"), program("HarvestTime")).expect("a program");
    let build = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO"))
            .args(arguments)
            .current_dir(&sample)
            .env("CARGO_TARGET_DIR", sample.join("target"))
            .env("CARGO_NET_OFFLINE", "true")
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    build(&["build", "--release"]);
    assert_eq!(
        build(&["run", "--quiet", "--release"]).trim(),
        "harvest_time 5"
    );
    fs::write(sample.join("src/main.rs"), program("Harvests")).expect("a change");
    assert_eq!(build(&["run", "--quiet", "--release"]).trim(), "harvests 2");
}

#[test]
fn git_clones_commits_and_finds_nothing_wrong() {
    if !can_mount() || have_program("git", "apt install git").is_none() {
        return;
    }
    let local = tempfile::tempdir().expect("a directory");
    let origin = local.path().join("origin");
    make_source_tree(&origin, 300);
    let git = |directory: &Path, arguments: &[&str]| {
        let mut all = vec![
            "-c",
            "user.name=Test",
            "-c",
            "user.email=test@example.org",
            "-c",
            "safe.directory=*",
        ];
        all.extend(arguments);
        run(directory, "git", &all)
    };
    git(&origin, &["init", "--quiet"]);
    git(&origin, &["add", "."]);
    git(&origin, &["commit", "--quiet", "-m", "first"]);

    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    git(
        &mount,
        &["clone", "--quiet", &origin.to_string_lossy(), "clone"],
    );
    let clone = mount.join("clone");
    for number in 0..20 {
        fs::write(clone.join(format!("new-{number}")), format!("{number}\n")).expect("a file");
        git(&clone, &["add", "."]);
        git(
            &clone,
            &["commit", "--quiet", "-m", &format!("commit {number}")],
        );
    }
    git(&clone, &["gc", "--quiet"]);
    git(&clone, &["fsck", "--strict"]);
    assert_eq!(git(&clone, &["status", "--porcelain"]), "");
    assert_eq!(git(&clone, &["rev-list", "--count", "HEAD"]).trim(), "21");
}

#[test]
fn a_database_of_sqlite_keeps_10000_transactions() {
    if !can_mount() || have_program("sqlite3", "apt install sqlite3").is_none() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    for mode in ["wal", "delete"] {
        let database = mount.join(format!("{mode}.db"));
        let mut script = format!(
            "PRAGMA journal_mode={mode};\nPRAGMA synchronous=NORMAL;\n\
             CREATE TABLE t(id INTEGER PRIMARY KEY, word TEXT);\n"
        );
        for number in 0..10_000 {
            script.push_str(&format!(
                "BEGIN; INSERT INTO t(word) VALUES('word-{number}'); COMMIT;\n"
            ));
        }
        script.push_str("PRAGMA integrity_check;\nSELECT count(*), sum(id) FROM t;\n");
        let script_path = cluster.path(&format!("{mode}.sql"));
        fs::write(&script_path, script).expect("the script");
        let output = Command::new("sqlite3")
            .arg("-bail")
            .arg(&database)
            .stdin(File::open(&script_path).expect("the script"))
            .output()
            .expect("sqlite3 runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(said.ends_with("ok\n10000|50005000\n"), "{mode}: {said}");
    }
    cluster.kill("mnt");
    let mount = cluster.mount("mnt");
    for mode in ["wal", "delete"] {
        let database = mount.join(format!("{mode}.db"));
        let check = run(
            &mount,
            "sqlite3",
            &[
                &database.to_string_lossy(),
                "PRAGMA integrity_check; SELECT count(*) FROM t;",
            ],
        );
        assert_eq!(check, "ok\n10000\n", "{mode}");
    }
}

/// A mounted cluster with a file whose blocks are all sealed, since only sealed blocks are lent.
fn with_sealed_file(
    block_size: &'static str,
    pattern: Pattern,
    length: usize,
) -> Option<(Cluster, PathBuf)> {
    let (mut cluster, mount) = Cluster::mounted(&ClusterOptions {
        block_size,
        ..ClusterOptions::default()
    })?;
    let path = mount.join("large");
    fs::write(&path, pattern.bytes(length)).expect("write");
    // Unmounting ends the writing of the last blocks.
    cluster.stop("mnt");
    cluster.mount("mnt");
    Some((cluster, path))
}

/// Reads and checks data without the kernel's cache, which would answer without reading from a datanode.
fn check_uncached(path: &Path, pattern: Pattern, offset: u64, length: usize) {
    let file = File::open(path).expect("open");
    fadvise(&file, 0, None, Advice::DontNeed).expect("a hint");
    pattern.check(&file, offset, length);
}

#[test]
fn a_mount_reads_the_files_of_datanodes_on_its_host() {
    let pattern = Pattern { seed: 7 };
    let length = 20 << 20;
    let Some((cluster, path)) = with_sealed_file("4MiB", pattern, length) else {
        return;
    };
    let sealed: Vec<_> = (1..=4)
        .map(|number| cluster.path(&Cluster::datanode(number)))
        .map(|directory| directory.join("volume/sealed"))
        .collect();
    let is_replica = |file: &Path| sealed.iter().any(|directory| file.starts_with(directory));
    wait_until("files to be lent", Duration::from_secs(60), || {
        check_uncached(&path, pattern, 0, length);
        let open = cluster.open_files("mnt");
        open.iter().any(|file| is_replica(file))
    });
}

/// A late answer of a datanode, after a pause, is not mistaken for the answer to another request.
#[test]
fn files_of_a_datanode_that_stood_still_are_not_mixed_up() {
    const BLOCK: usize = 1 << 20;
    // Longer than a client waits for a file to be lent.
    const IN_VAIN: Duration = Duration::from_secs(2);
    // After a failed request, a client asks that datanode last for 15 s.
    const AVOIDED: Duration = Duration::from_secs(18);
    let pattern = Pattern { seed: 8 };
    let Some((cluster, path)) = with_sealed_file("1MiB", pattern, 64 * BLOCK) else {
        return;
    };
    let read = |blocks: Range<usize>| {
        let offset = (blocks.start * BLOCK) as u64;
        check_uncached(&path, pattern, offset, blocks.len() * BLOCK);
    };
    // Now each datanode lends files.
    read(0..16);
    // While one is paused, other replicas are read instead; there is no wait before the first failed
    // request to it.
    let still = Cluster::datanode(1);
    cluster.pause(&still);
    read(16..32);
    sleep(IN_VAIN);
    cluster.resume(&still);
    sleep(AVOIDED);
    read(32..64);
}

/// Length of the large file in MiB, unless the variable sets it: 64 blocks.
const LARGE_MIB: u64 = 512;
const LARGE_VARIABLE: &str = "HARVESTFS_TESTS_LARGE_MIB";

/// Longer: `HARVESTFS_TESTS_LARGE_MIB=4096 cargo test --workspace --test workloads large`
#[test]
fn a_large_file_survives_a_datanode_dying_while_it_is_written_and_another_while_it_is_read() {
    let length_mib =
        std::env::var(LARGE_VARIABLE).map_or(LARGE_MIB, |mib| mib.parse().expect(LARGE_VARIABLE));
    let length = length_mib << 20;
    // Three replicas, and a reserve. The space of dead datanodes is freed.
    if !can_mount() || !have_space(3 * length + (1 << 30)) {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 6,
        block_size: "8MiB",
        quota: "16GiB",
        ..ClusterOptions::default()
    });
    let lose = |cluster: &mut Cluster, number: usize| {
        let name = Cluster::datanode(number);
        // The kernel may cache written data for a while.
        let what = format!("{name} has replicas to lose");
        wait_until(&what, Duration::from_secs(120), || {
            !cluster.sealed_replicas(number).is_empty()
        });
        cluster.kill(&name);
        cluster.reimage(number);
    };
    let mount = cluster.mount("mnt");
    let path = mount.join("large");
    let pattern = Pattern { seed: 42 };
    let mut file = File::create(&path).expect("create");
    let mut buffer = vec![0; 1 << 20];
    for offset in (0..length).step_by(1 << 20) {
        if offset == length / 2 {
            lose(&mut cluster, 2);
        }
        pattern.fill(offset, &mut buffer);
        file.write_all(&buffer).expect("write");
    }
    file.sync_all().expect("fsync");
    drop(file);
    cluster.stop("mnt");
    let mount = cluster.mount("mnt");
    let mut file = File::open(mount.join("large")).expect("open");
    let mut expected = vec![0; 1 << 20];
    for offset in (0..length).step_by(1 << 20) {
        if offset == length / 2 {
            lose(&mut cluster, 4);
        }
        file.read_exact(&mut buffer).expect("read");
        pattern.fill(offset, &mut expected);
        assert!(buffer == expected, "wrong bytes at {offset}");
    }
    assert_eq!(file.read(&mut buffer).expect("the end"), 0);
}
