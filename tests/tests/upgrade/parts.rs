//! Three namenodes, three datanodes and mounts, each of one of two builds.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use harvestfs_tests::{Cluster, Process, harvestfs, init_datanode, unmount, wait_until};
use serde_json::Value;
use tempfile::TempDir;

/// Environment variable with the number of namenodes, if not three.
const NAMENODES: &str = "HARVESTFS_TESTS_NAMENODES";
pub const DATANODES: usize = 3;
pub const HEALTHY_WITHIN: Duration = Duration::from_secs(180);
/// Maximum time until a replaced part is as expected.
const REPLACED_WITHIN: Duration = Duration::from_secs(120);

/// One of the two builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    Old,
    New,
}

/// All parts of a cluster.
pub struct Parts {
    next: PathBuf,
    processes: BTreeMap<String, Process>,
    namenodes: Vec<SocketAddr>,
    mounts: Vec<PathBuf>,
    directory: TempDir,
}

/// The output of `admin upgrade status --json`.
#[derive(Debug)]
pub struct Status {
    pub cluster: u64,
    pub newest: u64,
    /// The newest versions of clients.
    pub clients: BTreeSet<u64>,
    pub missing: Vec<Value>,
    all: Value,
}

impl Parts {
    pub fn start(next: PathBuf) -> Self {
        let namenodes = std::env::var(NAMENODES);
        let namenodes = namenodes.map_or(3, |it| it.parse().expect("a number of namenodes"));
        // All are held until the last one is bound, so that they differ, and are freed when dropped.
        let sockets: Vec<UdpSocket> = (0..namenodes)
            .map(|_| UdpSocket::bind("127.0.0.1:0").expect("a port"))
            .collect();
        let addresses = sockets
            .iter()
            .map(|it| it.local_addr().expect("an address"));
        let mut parts = Self {
            next,
            processes: BTreeMap::new(),
            namenodes: addresses.collect(),
            mounts: Vec::new(),
            directory: tempfile::Builder::new()
                .prefix("harvestfs-upgrade-")
                .tempdir()
                .expect("a temporary directory"),
        };
        drop(sockets);
        let listed: Vec<String> = parts.namenodes.iter().map(ToString::to_string).collect();
        let listed = listed.join(",");
        let block_size = ["--block-size", "16MiB"];
        let init = ["init", "cluster", "--listen", &listed];
        parts.succeeds(Build::Old, &[&init[..], &block_size].concat());
        for number in 1..=namenodes {
            parts.start_namenode(number, Build::Old);
        }
        for number in 1..=DATANODES {
            let init = init_datanode(
                number,
                &parts.path(&Cluster::datanode(number)),
                &listed,
                "4GiB",
            );
            let init: Vec<&str> = init.iter().map(String::as_str).collect();
            parts.succeeds(Build::Old, &init);
            parts.start_datanode(number, Build::Old);
        }
        parts.wait_healthy();
        parts
    }

    /// How many namenodes there are.
    pub fn namenodes(&self) -> usize {
        self.namenodes.len()
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join(below)
    }

    fn binary(&self, build: Build) -> &Path {
        match build {
            Build::Old => harvestfs(),
            Build::New => &self.next,
        }
    }

    /// Runs a command of one of the builds against the cluster.
    pub fn run(&self, build: Build, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.binary(build));
        command.args(arguments).arg("--data").arg(self.path(""));
        command.output().expect("the binary runs")
    }

    pub fn succeeds(&self, build: Build, arguments: &[&str]) -> String {
        let output = self.run(build, arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Runs a command that must fail, and returns its output.
    pub fn fails(&self, build: Build, arguments: &[&str]) -> String {
        let output = self.run(build, arguments);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).expect("text")
    }

    fn json(&self, arguments: &[&str]) -> Option<Value> {
        let output = self.run(Build::Old, arguments);
        let text = output.status.success().then_some(output.stdout)?;
        Some(serde_json::from_slice(&text).expect("JSON"))
    }

    pub fn status(&self) -> Status {
        let mut status = None;
        wait_until("somebody says what runs", REPLACED_WITHIN, || {
            status = self.json(&["admin", "upgrade", "status", "--json"]);
            status.is_some()
        });
        let all = status.expect("waited for");
        let newest = |part: &Value| part["versions"]["newest"].as_u64();
        let clients = all["clients"].as_array().expect("clients");
        Status {
            cluster: all["cluster"].as_u64().expect("a version"),
            newest: all["newest"].as_u64().expect("a version"),
            clients: clients.iter().filter_map(newest).collect(),
            missing: all["missing"].as_array().expect("what is missing").clone(),
            all,
        }
    }

    /// Waits until a part is known to be of a build.
    fn wait_known(&self, kind: &str, name: &str, build: Build) {
        let newest = match build {
            Build::Old => super::OLD,
            Build::New => super::NEW,
        };
        wait_until(&format!("{name} is known"), REPLACED_WITHIN, || {
            let status = self.status();
            let parts = status.all[kind].as_array().expect("parts");
            let part = parts.iter().find(|part| part["name"] == name);
            part.is_some_and(|part| part["versions"]["newest"] == newest && part["is_live"] == true)
        });
    }

    fn wait_healthy(&self) {
        wait_until("all blocks have their replicas", HEALTHY_WITHIN, || {
            let status = self.json(&["admin", "status", "--json"]);
            status.is_some_and(|it| {
                it["ready"] == true
                    && it["nodes_alive"] == DATANODES as u64
                    && it["under_replicated_blocks"] == 0
                    && it["curtailed_blocks"] == 0
            })
        });
    }

    fn start_part(&mut self, name: &str, build: Build, arguments: &[&OsStr]) {
        let log = self.path(&format!("{name}.log"));
        let arguments: Vec<&Path> = arguments.iter().map(Path::new).collect();
        let process = Process::start_of(self.binary(build), name, &arguments, &[], &log);
        self.processes.insert(name.to_owned(), process);
    }

    fn start_namenode(&mut self, number: usize, build: Build) {
        let name = namenode(number);
        let config = self.path(&name).join("namenode.toml");
        let policy = ["namenode", "--policy", "stock", "--config"].map(OsStr::new);
        self.start_part(&name, build, &[&policy[..], &[config.as_os_str()]].concat());
    }

    fn start_datanode(&mut self, number: usize, build: Build) {
        let name = Cluster::datanode(number);
        let config = self.path(&name).join("datanode.toml");
        let arguments = ["datanode".as_ref(), "--config".as_ref(), config.as_os_str()];
        self.start_part(&name, build, &arguments);
    }

    /// Stops a part in an orderly way.
    pub fn stop(&mut self, name: &str) {
        self.processes.remove(name).expect("it runs").stop();
    }

    pub fn mount(&mut self, name: &str, build: Build) -> PathBuf {
        let mount = self.path(name);
        fs::create_dir_all(&mount).expect("a mount point");
        if !self.mounts.contains(&mount) {
            self.mounts.push(mount.clone());
        }
        let config = self.path("client/client.toml");
        let arguments = ["mount".as_ref(), mount.as_os_str()];
        let config = ["--config".as_ref(), config.as_os_str()];
        self.start_part(name, build, &[arguments, config].concat());
        mount
    }

    /// Stops a datanode, and restarts it with a build. Waits until it has the replicas that it lacks by then.
    pub fn replace_datanode(&mut self, number: usize, build: Build) {
        let name = Cluster::datanode(number);
        if self.processes.contains_key(&name) {
            self.stop(&name);
        }
        self.start_datanode(number, build);
        self.wait_known("datanodes", &name, build);
        self.wait_healthy();
    }

    /// Stops a namenode, and restarts it with a build, after another one has become the leader.
    pub fn replace_namenode(&mut self, number: usize, build: Build) {
        let address = self.namenodes[number - 1].to_string();
        if self.processes.contains_key(&namenode(number)) {
            self.hand_over(&address);
            self.stop(&namenode(number));
        }
        self.start_namenode(number, build);
        self.wait_known("namenodes", &address, build);
    }

    /// Transfers leadership to another namenode, if the one at `address` leads.
    fn hand_over(&self, address: &str) {
        if self.namenodes() == 1 {
            return;
        }
        wait_until("another namenode leads", REPLACED_WITHIN, || {
            let Some(group) = self.json(&["admin", "namenode", "list", "--json"]) else {
                return false;
            };
            let members = group["members"].as_array().expect("members");
            let leader = members.iter().find(|it| it["id"] == group["leader"]);
            match leader {
                Some(leader) if leader["addr"] == address => {
                    println!("    {address} leads, and hands over");
                    let transfer = ["admin", "namenode", "transfer"];
                    self.run(Build::Old, &transfer).status.success()
                }
                Some(_) => true,
                None => false,
            }
        });
    }

    /// Starts a namenode that must end by itself, and returns its output.
    pub fn namenode_ends(&mut self, number: usize, build: Build) -> String {
        self.hand_over(&self.namenodes[number - 1].to_string());
        self.stop(&namenode(number));
        let config = self.path(&namenode(number)).join("namenode.toml");
        let mut command = Command::new(self.binary(build));
        command.args(["--supervised-by", &std::process::id().to_string()]);
        command.args(["namenode", "--config"]).arg(config);
        let output = command.output().expect("the binary runs");
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Checks that a datanode of a build is not registered, and that its log contains the reason.
    pub fn datanode_is_refused(&mut self, number: usize, build: Build, why: &str) {
        let name = Cluster::datanode(number);
        self.stop(&name);
        let log = self.path(&format!("{name}-refused.log"));
        let config = self.path(&name).join("datanode.toml");
        let arguments = ["datanode".as_ref(), "--config".as_ref(), config.as_path()];
        let (process, _) = Process::begin_of(self.binary(build), &name, &arguments, &[], &log);
        wait_until("it says why it is refused", REPLACED_WITHIN, || {
            fs::read_to_string(&log).is_ok_and(|said| said.contains(why))
        });
        process.kill();
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in self.processes.keys() {
                let log = self.path(&format!("{name}.log"));
                let log = fs::read_to_string(log).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(30).collect();
                let last: Vec<&str> = last.into_iter().rev().collect();
                eprintln!("=== {name}\n{}", last.join("\n"));
            }
        }
        for mount in &self.mounts {
            unmount(mount);
        }
    }
}

fn namenode(number: usize) -> String {
    match number {
        1 => "namenode".to_owned(),
        _ => format!("namenode-{number}"),
    }
}
