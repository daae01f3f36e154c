//! A user other than the one that created the cluster.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use harvestfs_tests::{Cluster, copy_directory, copy_harvestfs};
use tempfile::TempDir;

/// A user without privileges that every system has.
pub const NOBODY: u32 = 65_534;

/// A user without privileges that owns the directory `/mine` in the cluster. If the tests do not run as root, it is
/// the user that runs them.
pub struct User(TempDir);

impl User {
    /// Creates the user, with a certificate for a cluster.
    pub fn of(cluster: &Cluster) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let open = || fs::Permissions::from_mode(0o755);
        fs::set_permissions(directory.path(), open()).expect("chmod");
        let user = Self(directory);
        // The user may have no access to the build directory.
        let binary = user.path("harvestfs");
        copy_harvestfs(&binary);
        fs::set_permissions(&binary, open()).expect("chmod");
        copy_directory(&cluster.path("client"), &user.path("client"));
        cluster.output_of(&["fs", "mkdir", "/mine"]);
        if is_root() {
            let owner = format!("{NOBODY}:{NOBODY}");
            cluster.output_of(&["fs", "chown", &owner, "/mine"]);
            let owned = Command::new("chown")
                .args(["-R", &owner])
                .arg(user.path("client"))
                .status();
            assert!(owned.expect("chown runs").success());
        }
        user
    }

    /// A path below a directory that the user may read.
    pub fn path(&self, below: &str) -> PathBuf {
        self.0.path().join(below)
    }

    /// The user's `harvestfs fs` with arguments.
    pub fn fs(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("harvestfs"));
        command
            .arg("fs")
            .args(arguments)
            .arg("--config")
            .arg(self.path("client/client.toml"))
            .current_dir("/");
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    /// Runs it to its end.
    pub fn command(&self, arguments: &[&str]) -> Output {
        self.fs(arguments).output().expect("the binary runs")
    }

    /// The output of a command that must fail, with one error for each of these parts of paths.
    pub fn fails_at(&self, arguments: &[&str], paths: &[&str]) -> String {
        let output = self.command(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        let errors = said.lines().filter(|it| it.starts_with("harvestfs: "));
        assert_eq!(errors.count(), paths.len(), "{arguments:?}: {said}");
        for path in paths {
            assert!(said.contains(path), "{arguments:?}: {said}");
        }
        String::from_utf8(output.stdout).expect("text")
    }

    /// What it prints.
    pub fn output_of(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
