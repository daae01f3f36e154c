//! A cluster of real processes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use tempfile::TempDir;

use crate::ports::{free_address, free_addresses};
use crate::process::Process;
use crate::{can_mount, harvestfs, mounts, wait_until};

/// Maximum time for a cluster to become healthy. An excess replica alone is kept for a minute, in case
/// another one is lost.
pub const HEALTHY_DEADLINE: Duration = Duration::from_secs(180);

/// Options with which a cluster is created.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Number of namenodes.
    pub namenodes: usize,
    /// Number of datanodes.
    pub datanodes: usize,
    /// Replicas of each block.
    pub replication: u8,
    /// Largest block.
    pub block_size: &'static str,
    /// Quota of each datanode.
    pub quota: &'static str,
    /// Placement policy.
    pub policy: &'static str,
    /// Whether namenode and datanodes serve HTTP; see [`Cluster::http`].
    pub http: bool,
    /// Seconds to wait for a datanode that stops in good order. None by default, so that a datanode that a
    /// test stops is missed.
    pub restart_wait_s: u32,
    /// Environment variables with which its parts are started.
    pub environment: &'static [(&'static str, &'static str)],
}

impl Default for ClusterOptions {
    /// Four datanodes, so that three replicas survive the loss of one.
    fn default() -> Self {
        Self {
            namenodes: 1,
            datanodes: 4,
            replication: 3,
            block_size: "16MiB",
            quota: "8GiB",
            // Most tests are about something else, and have too few servers to lose one and still keep
            // replicas as far apart as `harvest` does.
            policy: "stock",
            http: false,
            restart_wait_s: 0,
            environment: &[],
        }
    }
}

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    processes: BTreeMap<String, Process>,
    pub(crate) policy: &'static str,
    environment: &'static [(&'static str, &'static str)],
    mounts: Vec<PathBuf>,
    pub(crate) namenodes: Vec<SocketAddr>,
    http: BTreeMap<String, SocketAddr>,
    directory: TempDir,
}

impl Cluster {
    /// Creates a cluster, and starts namenode and datanodes.
    #[must_use]
    pub fn start(options: &ClusterOptions) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("harvestfs-test-")
            .tempdir()
            .expect("a temporary directory");
        let namenodes = free_addresses(options.namenodes);
        let mut cluster = Self {
            processes: BTreeMap::new(),
            policy: options.policy,
            environment: options.environment,
            mounts: Vec::new(),
            namenodes,
            http: BTreeMap::new(),
            directory,
        };
        if options.http {
            let names = (1..=options.datanodes).map(datanode);
            for name in names.chain(["namenode".to_owned()]) {
                cluster.http.insert(name, free_address());
            }
        }
        let http = |cluster: &Self, name: &str| -> Vec<String> {
            let address = cluster.http.get(name);
            address.map_or_else(Vec::new, |address| vec![format!("--http={address}")])
        };
        let namenodes: Vec<String> = cluster.namenodes.iter().map(ToString::to_string).collect();
        let namenodes = namenodes.join(",");
        let data = cluster.path("");
        let run = |arguments: &[&str], more: &[String]| {
            let output = Command::new(harvestfs())
                .args(arguments)
                .args(more)
                .arg("--data")
                .arg(&data)
                .output()
                .expect("the binary runs");
            assert!(output.status.success(), "{arguments:?}: {output:?}");
        };
        run(
            &[
                "init",
                "cluster",
                "--listen",
                &namenodes,
                "--replication",
                &options.replication.to_string(),
                "--block-size",
                options.block_size,
            ],
            &http(&cluster, "namenode"),
        );
        for number in 1..=options.datanodes {
            let name = datanode(number);
            let init = init_datanode(number, &cluster.path(&name), &namenodes, options.quota);
            let init: Vec<&str> = init.iter().map(String::as_str).collect();
            run(&init, &http(&cluster, &name));
        }
        cluster.set_restart_wait(options.restart_wait_s);
        for number in 1..=options.namenodes {
            cluster.start_namenode_number(number);
        }
        for number in 1..=options.datanodes {
            cluster.start_datanode(number);
        }
        cluster
    }

    fn set_restart_wait(&self, seconds: u32) {
        for number in 1..=self.namenodes.len() {
            self.set_restart_wait_of(&Self::namenode_name(number), seconds);
        }
    }

    pub(crate) fn set_restart_wait_of(&self, namenode: &str, seconds: u32) {
        let path = self.path(namenode).join("namenode.toml");
        let text = fs::read_to_string(&path).expect("its configuration");
        let repair = "[repair]\n";
        assert!(text.contains(repair), "{text}");
        let text = text.replace(repair, &format!("{repair}restart_wait_s = {seconds}\n"));
        fs::write(&path, text).expect("it can be written");
    }

    /// A cluster with one mount, and the path of the mount. Skips the test and returns `None` if FUSE cannot be used.
    #[must_use]
    pub fn mounted(options: &ClusterOptions) -> Option<(Self, PathBuf)> {
        if !can_mount() {
            return None;
        }
        let mut cluster = Self::start(options);
        let mount = cluster.mount("mnt");
        Some((cluster, mount))
    }

    /// A small cluster with two mounts, `one` and `other`. Skips like [`Cluster::mounted`].
    #[must_use]
    pub fn with_two_mounts() -> Option<(Self, PathBuf, PathBuf)> {
        if !can_mount() {
            return None;
        }
        let mut cluster = Self::start(&ClusterOptions {
            datanodes: 3,
            ..ClusterOptions::default()
        });
        let one = cluster.mount("one");
        let other = cluster.mount("other");
        Some((cluster, one, other))
    }

    /// Address of the namenode, or of the first of several.
    #[must_use]
    pub fn namenode(&self) -> SocketAddr {
        self.namenodes[0]
    }

    /// Addresses of all namenodes.
    #[must_use]
    pub fn namenodes(&self) -> &[SocketAddr] {
        &self.namenodes
    }

    /// The name of a namenode among the parts, and of its directory; they are numbered from 1.
    #[must_use]
    pub fn namenode_name(number: usize) -> String {
        match number {
            1 => "namenode".to_owned(),
            _ => format!("namenode-{number}"),
        }
    }

    /// Address at which a part serves HTTP.
    ///
    /// # Panics
    /// When it does not serve HTTP, see [`ClusterOptions::http`].
    #[must_use]
    pub fn http(&self, name: &str) -> SocketAddr {
        self.http[name]
    }

    /// Makes the namenode serve its page on this machine, as with `up`, which restarts it. Returns the
    /// address of the page, with its token.
    ///
    /// # Panics
    /// When the configuration cannot be written.
    pub fn serve_page(&mut self) -> String {
        let page = self.serve_page_of(1);
        // A block that is written before all datanodes are back has fewer replicas.
        let datanodes = self
            .processes
            .keys()
            .filter(|name| name.starts_with("datanode-"));
        self.wait_alive(datanodes.count() as u64, HEALTHY_DEADLINE);
        page
    }

    /// Same as [`Cluster::serve_page`], for one of several namenodes; they are numbered from 1.
    ///
    /// # Panics
    /// When the configuration cannot be written.
    pub fn serve_page_of(&mut self, number: usize) -> String {
        const TOKEN: &str = "a-token-that-nobody-guesses";
        let address = free_address();
        let name = Self::namenode_name(number);
        let path = self.path(&name).join("namenode.toml");
        let config = fs::read_to_string(&path).expect("its configuration");
        let http = format!("{config}\n[http]\nlisten = \"{address}\"\naccess = \"token\"\n");
        fs::write(&path, http).expect("it can be written");
        let token = path.with_file_name("http-token");
        fs::write(&token, TOKEN).expect("it can be written");
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).expect("it is ours");
        self.stop(&name);
        self.start_namenode_number(number);
        format!("http://{address}/?token={TOKEN}")
    }

    /// The output of `harvestfs admin nodes --json` for one datanode.
    ///
    /// # Panics
    /// When it is not registered.
    #[must_use]
    pub fn node_status(&self, number: usize) -> serde_json::Value {
        let nodes = self.output_of(&["admin", "nodes", "--json"]);
        let nodes: Vec<serde_json::Value> = serde_json::from_str(&nodes).expect("JSON");
        let name = datanode(number);
        nodes
            .into_iter()
            .find(|node| node["server"]["name"] == name.as_str())
            .unwrap_or_else(|| panic!("{name} is not registered"))
    }

    /// A path below the cluster's directory.
    #[must_use]
    pub fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join(below)
    }

    /// Starts the namenode, or the first of several.
    pub fn start_namenode(&mut self) {
        self.start_namenode_number(1);
    }

    /// Starts a namenode; they are numbered from 1.
    pub fn start_namenode_number(&mut self, number: usize) {
        self.start_namenode_with(number, &[]);
    }

    /// Starts a namenode from a copy of the namenode's directory, alongside that of the cluster. Its name
    /// is `copy`. Returns its address.
    pub fn start_copied_namenode(&mut self, directory: &Path) -> SocketAddr {
        let address = free_address();
        let config = directory.join("namenode.toml");
        let listen = format!("--listen={address}");
        let policy = format!("--policy={}", self.policy);
        self.start_part(
            "copy",
            &[
                "namenode".as_ref(),
                policy.as_ref(),
                listen.as_ref(),
                "--config".as_ref(),
                &config,
            ],
        );
        address
    }

    /// Starts a datanode; they are numbered from 1.
    pub fn start_datanode(&mut self, number: usize) {
        self.start_datanode_with(number, &[]);
    }

    /// Starts a datanode with additional flags.
    pub fn start_datanode_with(&mut self, number: usize, flags: &[&str]) {
        let name = datanode(number);
        let config = self.path(&name).join("datanode.toml");
        let mut arguments: Vec<&Path> = vec!["datanode".as_ref(), "--config".as_ref(), &config];
        arguments.extend(flags.iter().map(Path::new));
        self.start_part(&name, &arguments);
    }

    /// Starts a datanode that the namenode may refuse, without waiting until it is ready.
    pub fn begin_datanode(&mut self, number: usize) {
        let name = datanode(number);
        let config = self.path(&name).join("datanode.toml");
        self.begin_part(&name, &["datanode".as_ref(), "--config".as_ref(), &config]);
    }

    pub(crate) fn begin_part(&mut self, name: &str, arguments: &[&Path]) {
        let log = self.path(&format!("{name}.log"));
        let (process, _) = Process::begin(name, arguments, self.environment, &log);
        self.processes.insert(name.to_owned(), process);
    }

    /// Restarts a datanode with `config` as the primary tenant in its configuration, instead of none.
    ///
    /// # Panics
    /// When it already had a primary tenant.
    pub fn set_primary(&mut self, number: usize, config: &str, flags: &[&str]) {
        self.stop(&datanode(number));
        let path = self.path(&datanode(number)).join("datanode.toml");
        let before = fs::read_to_string(&path).expect("its configuration");
        let after = before.replace("[primary]\nsource = \"none\"\n", config);
        assert!(after.contains(config), "{after}");
        fs::write(&path, after).expect("it can be written");
        self.start_datanode_with(number, flags);
    }

    /// Mounts the cluster; `name` distinguishes mounts. Returns the path.
    pub fn mount(&mut self, name: &str) -> PathBuf {
        self.mount_with(name, &[])
    }

    /// Mounts the cluster with additional flags.
    pub fn mount_with(&mut self, name: &str, flags: &[&str]) -> PathBuf {
        let mount = self.path(name);
        mounts::remove(&mount);
        fs::create_dir_all(&mount).expect("a mount point");
        if !self.mounts.contains(&mount) {
            self.mounts.push(mount.clone());
        }
        let config = self.path("client/client.toml");
        let mut arguments: Vec<&Path> =
            vec!["mount".as_ref(), &mount, "--config".as_ref(), &config];
        if rustix::process::geteuid().is_root() {
            arguments.push("--allow-other".as_ref());
        }
        arguments.extend(flags.iter().map(Path::new));
        self.start_part(name, &arguments);
        mount
    }

    pub(crate) fn start_part(&mut self, name: &str, arguments: &[&Path]) {
        let log = self.path(&format!("{name}.log"));
        let process = Process::start(name, arguments, self.environment, &log);
        self.processes.insert(name.to_owned(), process);
    }

    /// Kills a part as a crash would (SIGKILL).
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self, name: &str) {
        self.take(name).kill();
    }

    /// Stops a part in an orderly way (SIGTERM).
    ///
    /// # Panics
    /// When it does not run, or ends with an error.
    pub fn stop(&mut self, name: &str) {
        self.take(name).stop();
    }

    /// Sends a part a signal.
    pub fn signal(&self, name: &str, signal: rustix::process::Signal) {
        self.process(name).signal(signal);
    }

    /// Sends a part the signal of Ctrl-C in its terminal.
    pub fn interrupt(&self, name: &str) {
        self.process(name).interrupt();
    }

    /// Makes a part hang (SIGSTOP).
    pub fn pause(&self, name: &str) {
        self.process(name).pause();
    }

    /// Lets a part continue (SIGCONT).
    pub fn resume(&self, name: &str) {
        self.process(name).resume();
    }

    /// The files that a part has open now.
    ///
    /// # Panics
    /// When it does not run.
    #[must_use]
    pub fn open_files(&self, name: &str) -> Vec<PathBuf> {
        self.processes[name].open_files()
    }

    /// The name of a datanode.
    #[must_use]
    pub fn datanode(number: usize) -> String {
        datanode(number)
    }

    /// Empties a datanode's disk, as its owner does without notice.
    ///
    /// # Panics
    /// When the datanode still runs.
    pub fn reimage(&self, number: usize) {
        let name = datanode(number);
        assert!(!self.processes.contains_key(&name), "stop {name} first");
        fs::remove_dir_all(self.path(&name).join("volume")).expect("its volume");
    }

    /// Runs `harvestfs` with arguments, against this cluster.
    ///
    /// # Panics
    /// When the binary does not run.
    pub fn command<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Output {
        Command::new(harvestfs())
            .args(arguments)
            .env("HARVESTFS_DATA", self.path(""))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .output()
            .expect("the binary runs")
    }

    /// The standard output of `harvestfs` with arguments.
    ///
    /// # Panics
    /// When it fails.
    pub fn output_of<A: AsRef<OsStr> + std::fmt::Debug>(&self, arguments: &[A]) -> String {
        let output = self.command(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Runs `harvestfs admin fsck --json`.
    ///
    /// # Panics
    /// When it prints no JSON.
    #[must_use]
    pub fn fsck(&self) -> serde_json::Value {
        let output = self.command(&["admin", "fsck", "--json"]);
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("fsck: {error}: {output:?}"))
    }

    /// Waits until fsck reports no problems.
    ///
    /// # Panics
    /// When that takes longer than three minutes.
    pub fn wait_healthy(&self) {
        let mut last = serde_json::Value::Null;
        let end = std::time::Instant::now() + HEALTHY_DEADLINE;
        while std::time::Instant::now() < end {
            last = self.fsck();
            if last["healthy"] == true {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        panic!("not healthy within {HEALTHY_DEADLINE:?}: {last:#}");
    }

    /// The output of `harvestfs admin status --json`.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        let status = self.output_of(&["admin", "status", "--json"]);
        serde_json::from_str(&status).expect("JSON")
    }

    /// Waits until `count` datanodes are alive.
    ///
    /// # Panics
    /// When that takes longer than `deadline`.
    pub fn wait_alive(&self, count: u64, deadline: Duration) {
        wait_until(&format!("{count} datanodes alive"), deadline, || {
            self.status()["nodes_alive"] == count
        });
    }

    /// The log of a part.
    #[must_use]
    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }

    /// The names of all parts that a test started and did not stop.
    pub fn running(&mut self) -> Vec<String> {
        self.processes
            .iter_mut()
            .filter_map(|(name, process)| process.is_running().then(|| name.clone()))
            .collect()
    }

    fn process(&self, name: &str) -> &Process {
        self.processes
            .get(name)
            .unwrap_or_else(|| panic!("{name} does not run"))
    }

    fn take(&mut self, name: &str) -> Process {
        self.processes
            .remove(name)
            .unwrap_or_else(|| panic!("{name} does not run"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in self.processes.keys() {
                let log = self.log(name);
                let lines: Vec<&str> = log.lines().collect();
                let end = lines[lines.len().saturating_sub(15)..].join("\n");
                eprintln!("--- the end of the log of {name}:\n{end}");
            }
        }
        // Mounts end first, or their users would hang.
        for mount in &self.mounts {
            mounts::remove(mount);
        }
        self.processes.clear();
        for mount in &self.mounts {
            mounts::remove(mount);
        }
    }
}

fn datanode(number: usize) -> String {
    format!("datanode-{number}")
}

/// The arguments that create the directory of a datanode whose owner's use is not measured.
#[must_use]
pub fn init_datanode(number: usize, out: &Path, namenodes: &str, quota: &str) -> Vec<String> {
    [
        "init",
        "datanode",
        &datanode(number),
        "--out",
        &out.to_string_lossy(),
        "--namenode",
        namenodes,
        "--listen",
        "127.0.0.1:0",
        "--rack",
        &format!("rack-{number}"),
        "--environment",
        &format!("environment-{number}"),
        "--machine-function",
        &format!("function-{number}"),
        // Other tests may keep this machine busy.
        "--primary-source",
        "none",
        "--priority",
        "normal",
        "--volume",
        &format!("volume={quota}"),
    ]
    .map(str::to_owned)
    .into()
}
