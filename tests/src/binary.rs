//! The binary under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The `harvestfs` binary of the profile with which the tests were built. It is built first if it is
/// older than its sources, so that a test of one crate never runs against an outdated binary.
///
/// # Panics
/// When it cannot be built.
pub fn harvestfs() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // .../target/<profile>/deps/<test>
        let test = std::env::current_exe().expect("a process knows its executable");
        let profile = test
            .ancestors()
            .nth(2)
            .expect("cargo puts tests two levels below the profile's directory");
        // The same command as for all tests, limited to one test that needs the binary: another
        // command would select other features of shared dependencies, and rebuild all of them.
        let mut build = Command::new(env!("CARGO"));
        build.args([
            "test",
            "--quiet",
            "--workspace",
            "--no-run",
            "--test",
            "command_line",
        ]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        // Build scripts that watch the variables that cargo sets for a test would see a change, and
        // everything that depends on them would be rebuilt.
        for (key, _) in std::env::vars_os() {
            let about_the_test = ["CARGO_MANIFEST_", "CARGO_PKG_"];
            if about_the_test
                .iter()
                .any(|prefix| key.to_string_lossy().starts_with(prefix))
            {
                build.env_remove(key);
            }
        }
        if let Some(target) = profile.parent() {
            build.env("CARGO_TARGET_DIR", target);
        }
        let status = build.status().expect("cargo runs");
        assert!(status.success(), "the harvestfs binary does not build");
        profile.join("harvestfs")
    })
}

/// Copies the binary to a path, with its mode, so that it can be executed there at once.
///
/// # Panics
/// When it cannot be copied.
pub fn copy_harvestfs(to: &Path) {
    // A process that another thread starts while this one writes would have the file open for writing, and it could not
    // be executed. So a child writes it.
    let copied = Command::new("cp")
        .arg("--preserve=mode")
        .args([harvestfs(), to])
        .status();
    assert!(copied.expect("cp runs").success(), "{}", to.display());
}
