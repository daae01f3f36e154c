//! Requirements of tests on the machine. A test whose requirements are missing prints prominently that
//! it is skipped, and how to provide them; with `HARVESTFS_TESTS_NO_SKIP`, as in `.ci/run`, it fails instead.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Reports that a test is skipped, and why.
///
/// # Panics
/// When skipping is forbidden.
pub fn skip(reason: &str) {
    assert!(
        std::env::var_os("HARVESTFS_TESTS_NO_SKIP").is_none(),
        "skipping is forbidden, but: {reason}"
    );
    // `eprintln` would be captured, and shown only for tests that fail. A write error means that nobody reads it.
    let _ = writeln!(io::stderr().lock(), "\nSKIPPED: {reason}\n");
}

/// Whether FUSE can be used; skips if not.
#[must_use]
pub fn can_mount() -> bool {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    if let Err(error) = device {
        skip(&format!("/dev/fuse: {error} (`modprobe fuse`)"));
        return false;
    }
    rustix::process::geteuid().is_root()
        || have_program("fusermount3", "apt install fuse3").is_some()
}

/// Path of a program; skips if it is not installed. `how` explains how to install it.
#[must_use]
pub fn have_program(name: &str, how: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file());
    if found.is_none() {
        skip(&format!("{name} is not installed: {how}"));
    }
    found
}

/// Free space, in bytes, on the file system of a directory.
///
/// # Errors
/// When it cannot be determined.
pub fn free_bytes(directory: &Path) -> io::Result<u64> {
    let space = rustix::fs::statvfs(directory)?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

/// Whether there are that many bytes of space where tests create their clusters; skips if not.
///
/// # Panics
/// When this cannot be determined.
#[must_use]
pub fn have_space(bytes: u64) -> bool {
    let directory = std::env::temp_dir();
    let free = free_bytes(&directory).expect("the temporary directory");
    if free < bytes {
        skip(&format!(
            "{} has {} MiB free, {} are needed: free some, or set TMPDIR",
            directory.display(),
            free >> 20,
            bytes >> 20
        ));
    }
    free >= bytes
}

/// A CRIU that supports this kernel, unpacked on first use and kept in `.ci/cache`; skips if that
/// is not possible.
#[must_use]
pub fn criu() -> Option<&'static Path> {
    static CRIU: OnceLock<Option<PathBuf>> = OnceLock::new();
    CRIU.get_or_init(|| {
        if !rustix::process::geteuid().is_root() {
            skip("checkpoints need root");
            return None;
        }
        have_program("debootstrap", "apt install debootstrap")?;
        let project = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let output = Command::new(project.join("tests/criu-root.sh"))
            .arg(project.join(".ci/cache"))
            .output()
            .expect("the script is there");
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            skip(&format!("no CRIU could be unpacked: {said}"));
            return None;
        }
        let path = String::from_utf8_lossy(&output.stdout);
        Some(PathBuf::from(path.trim_end()))
    })
    .as_deref()
}

/// Directory of the programs of the newest installed PostgreSQL release; skips if there is none.
#[must_use]
pub fn postgresql() -> Option<PathBuf> {
    let releases = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten();
    let programs = releases
        .filter_map(|release| Some(release.ok()?.path().join("bin")))
        .filter(|programs| programs.join("pg_amcheck").is_file());
    let newest = programs.max();
    if newest.is_none() {
        skip("PostgreSQL is not installed: apt install postgresql");
    }
    newest
}

/// Directory of the jars listed in `tests/yarn/pom.xml`, with all their dependencies; skips if it is missing.
#[must_use]
pub fn hadoop() -> Option<PathBuf> {
    let project = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let here = std::env::var_os("HARVESTFS_TESTS_HADOOP").map(PathBuf::from);
    let jars = here.unwrap_or_else(|| project.join(".ci/cache/hadoop-3.4.2"));
    // The directory is created only once all of them have been fetched.
    if jars.is_dir() {
        return Some(jars);
    }
    skip(&format!(
        "Hadoop is not in {}: mvn -f tests/yarn/pom.xml dependency:copy-dependencies -DoutputDirectory=$PWD/.ci/cache/hadoop-3.4.2",
        jars.display()
    ));
    None
}
