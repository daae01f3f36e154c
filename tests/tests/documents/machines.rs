//! Several simulated machines: each is a directory with the contents that the documents have in `/etc`,
//! `/var/lib` and so on, and listens on its own addresses of the loopback network. `systemctl` and `scp`
//! have stand-ins; everything else is real.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use tempfile::TempDir;

use crate::blocks::Block;
use crate::{bash, make_programs};

/// Paths in the documents that exist on each machine.
const PATHS: [&str; 6] = [
    "/var/lib/harvestfs",
    "/etc/",
    "/root/",
    "/srv/",
    "/mnt/",
    "/backup/",
];
/// The network in the documents.
const NETWORK: &str = "192.0.2.";
/// Additional arguments of `init datanode`, since other tests keep this machine busy.
const BESIDE_OTHER_TESTS: &str = "--primary-source none --priority normal --volume";

/// The machines. Their processes end when this is dropped.
pub struct Machines {
    directory: TempDir,
    names: &'static [&'static str],
    network: String,
}

impl Machines {
    pub fn new(names: &'static [&'static str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let programs = make_programs(directory.path());
        for (name, script) in [
            ("systemctl", include_str!("systemctl.sh")),
            ("scp", include_str!("scp.sh")),
        ] {
            let path = programs.join(name);
            fs::write(&path, script).expect("a script");
            let executable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&path, executable).expect("it is ours");
        }
        for name in names {
            for below in [
                "root",
                "etc/systemd/system",
                "var/lib",
                "srv",
                "mnt",
                "backup",
                "run",
            ] {
                fs::create_dir_all(directory.path().join(name).join(below)).expect("a directory");
            }
        }
        // Avoids the addresses of another test that runs at the same time.
        let number = std::process::id();
        let network = format!("127.{}.{}.", 1 + (number >> 8) % 250, number & 0xff);
        Self {
            directory,
            names,
            network,
        }
    }

    /// Runs the commands of a block on each of its machines.
    ///
    /// # Panics
    /// When one fails.
    pub fn run(&self, block: &Block) {
        for machine in block.machines().expect("a block to run") {
            assert!(
                self.names.contains(&machine),
                "{}: which machine is {machine}?",
                block.place
            );
            let output = self.shell(machine, &self.on(machine, &block.script()));
            assert!(
                output.status.success(),
                "{} on {machine}: {}\n--- standard output:\n{}\n--- standard error:\n{}\n{}",
                block.place,
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr),
                self.logs(),
            );
        }
    }

    fn root(&self, machine: &str) -> PathBuf {
        self.directory.path().join(machine)
    }

    /// Rewrites a script with the paths and addresses of a simulated machine.
    fn on(&self, machine: &str, script: &str) -> String {
        let root = self.root(machine);
        let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
        let of_the_machine = PATHS.map(|path| (path, format!("{}{path}", root.display())));
        let replacements = [
            (NETWORK, self.network.clone()),
            ("packaging/systemd", units.display().to_string()),
            ("--volume", BESIDE_OTHER_TESTS.to_owned()),
        ];
        let mut ours = String::new();
        let mut rest = script;
        while let Some(next) = rest.chars().next() {
            let mut all = of_the_machine.iter().chain(&replacements);
            if let Some((text, instead)) = all.find(|(text, _)| rest.starts_with(text)) {
                ours.push_str(instead);
                rest = &rest[text.len()..];
            } else {
                ours.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
        ours
    }

    fn shell(&self, machine: &str, script: &str) -> Output {
        bash(script, self.directory.path(), machine)
            .env("MACHINES", self.directory.path())
            .env("MACHINE", self.root(machine))
            .env("TEST_PID", std::process::id().to_string())
            .env_remove("HARVESTFS_DATA")
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .output()
            .expect("bash runs")
    }

    /// The last lines of what every part has logged.
    fn logs(&self) -> String {
        let script = "tail -n 15 \"$MACHINES\"/*/run/*.log";
        let output = self.shell(self.names[0], script);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        // Mounts end first, or their users would hang.
        for part in ["mount", "datanode", "namenode"] {
            for machine in self.names {
                self.shell(machine, &format!("systemctl stop harvestfs-{part}"));
                self.shell(machine, "umount --lazy mnt/* 2>/dev/null || true");
            }
        }
    }
}
