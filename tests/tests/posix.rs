//! Third-party suites on a mount, pjdfstest and fsx, and expectations of other suites that are not run here.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use harvestfs_tests::{Cluster, ClusterOptions, have_program, skip};
use rustix::fs::{IFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

/// Cases of pjdfstest that cannot pass on this file system; `docs/SEMANTICS.md` gives the reasons.
const PJDFSTEST_EXCEPTIONS: [&str; 0] = [];

#[test]
fn every_case_of_pjdfstest_passes() {
    let how = "cargo install --locked --version 0.2.2 pjdfstest";
    let Some(pjdfstest) = have_program("pjdfstest", how) else {
        return;
    };
    if !rustix::process::geteuid().is_root() {
        return skip("pjdfstest changes users: run it as root");
    }
    let Some((cluster, mount)) = Cluster::mounted(&ClusterOptions::default()) else {
        return;
    };
    let config = cluster.path("pjdfstest.toml");
    fs::write(
        &config,
        format!(
            "[features]\nposix_fallocate = {{}}\nrename_ctime = {{}}\nutime_now = {{}}\n\
             utimensat = {{}}\n[settings]\nnaptime = 0.03\nexpected_failures = \
             {PJDFSTEST_EXCEPTIONS:?}\n[dummy_auth]\n\
             entries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"], [\"bin\", \"bin\"]]\n"
        ),
    )
    .expect("the configuration");
    // Other users have to reach the mount.
    open_to_others(&cluster.path(""));
    let output = Command::new(pjdfstest)
        .arg("-c")
        .arg(&config)
        .arg("-p")
        .arg(&mount)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let failures: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("FAILED"))
        .collect();
    assert!(
        output.status.success() && failures.is_empty(),
        "{failures:#?}\n{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let last: Vec<&str> = said.lines().rev().take(3).collect();
    eprintln!("{last:?}");
}

fn open_to_others(directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).expect("a mode");
}

/// Configuration of fsx with mapped reads and writes, truncation, holes, allocation and copies within the file.
const FSX_CONFIG: &str = "\
flen = 1048576

[weights]
close_open = 1
invalidate = 1
mapread = 10
mapwrite = 10
read = 10
write = 10
truncate = 5
fsync = 1
fdatasync = 1
posix_fallocate = 2
punch_hole = 3
sendfile = 2
posix_fadvise = 1
copy_file_range = 3
";

/// Number of operations of fsx for each seed. (100,000 take some minutes.)
const FSX_OPERATIONS_VARIABLE: &str = "HARVESTFS_TESTS_FSX_OPERATIONS";
const FSX_OPERATIONS: u32 = 30_000;

fn fsx(seed: u32) {
    let operations: u32 = std::env::var(FSX_OPERATIONS_VARIABLE).map_or(FSX_OPERATIONS, |text| {
        text.parse().expect(FSX_OPERATIONS_VARIABLE)
    });
    let how = "cargo install --locked --version 0.3.2 fsx";
    let Some(fsx) = have_program("fsx", how) else {
        return;
    };
    let Some((cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    }) else {
        return;
    };
    let config = cluster.path("fsx.toml");
    fs::write(&config, FSX_CONFIG).expect("the configuration");
    let output = Command::new(fsx)
        .arg("-f")
        .arg(&config)
        .args(["-S", &seed.to_string(), "-N", &operations.to_string()])
        .arg("-P")
        .arg(cluster.path(""))
        .arg(mount.join("file"))
        .output()
        .expect("it runs");
    let log = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = log.lines().collect();
    assert!(
        output.status.success(),
        "replay with: fsx -f CONFIG -S {seed} -N {operations} FILE\n{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        lines[lines.len().saturating_sub(40)..].join("\n")
    );
    let left: Vec<PathBuf> = fs::read_dir(&mount)
        .expect("the root")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    assert_eq!(left, [mount.join("file")]);
}

#[test]
fn fsx_finds_nothing_with_seed_1() {
    fsx(1);
}

#[test]
fn fsx_finds_nothing_with_seed_2() {
    fsx(2);
}

#[test]
fn fsx_finds_nothing_with_seed_3() {
    fsx(3);
}

#[test]
fn what_differs_from_local_file_systems_says_so() {
    let Some((_cluster, mount)) = Cluster::mounted(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    }) else {
        return;
    };
    let nameless = rustix::fs::open(&mount, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR);
    assert_eq!(nameless.err(), Some(Errno::OPNOTSUPP));
    let file = File::create_new(mount.join("file")).expect("create");
    assert_eq!(rustix::fs::ioctl_getflags(&file), Err(Errno::NOTTY));
    let set = rustix::fs::ioctl_setflags(&file, IFlags::NODUMP);
    assert_eq!(set, Err(Errno::NOTTY));
    // A hole ends at any byte, before the data is committed and afterwards.
    file.write_all_at(b"x", 1_025).expect("write");
    for _ in 0..2 {
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(0)), Ok(1_025));
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(1_025)), Ok(1_026));
        file.sync_all().expect("fsync");
    }
    // The kernel asks once, and learns that there is nothing to do.
    let directory = File::open(&mount).expect("a directory");
    for _ in 0..2 {
        directory.sync_all().expect("fsync");
    }
}
