//! A cluster of processes in one directory.

mod conditions;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use harvestfs_protocol::unix_now_ms;

use super::LiveError;
use super::disk::{self, FailingDisk, Mounted, SlowDisk};
use super::double::DOUBLE;
use super::ledger::{self, Contents};
use super::mounted::{self, Order, Programs};
use super::network::{self, Home, Network};
use super::plan::{Part, Plan, namenode_name};
use super::primary::Loads;
use super::process::{self, Process};
use super::scenario::{Kind, Scenario, Variant};
pub(crate) use conditions::Condition;

/// The processes and their directory.
pub(crate) struct Cluster<'a> {
    scenario: &'a Scenario,
    variant: &'a Variant,
    binary: &'a Path,
    data: PathBuf,
    /// Where the namenodes listen.
    pub namenodes: Vec<SocketAddr>,
    network: Option<&'a Network>,
    parts: BTreeMap<Part, Process>,
    /// How a part, or the copy of the namenode, had ended that was to be killed.
    ended: Option<String>,
    /// A copy of the namenode beside it, and the server that is told its address alone.
    double: Option<(Process, usize, SocketAddr)>,
    /// Disks that can be made slow. They lie on others.
    slow: BTreeMap<usize, SlowDisk>,
    /// Disks of memory.
    mounted: Vec<Mounted>,
    /// Disks whose syncs can fail.
    failing: BTreeMap<Part, FailingDisk>,
    /// Of each server.
    pub conditions: Vec<Condition>,
    /// Whether programs know that each mount may be used.
    pub mounts: Vec<bool>,
    /// What works on mounts, a process for each kind.
    pub programs: Vec<Programs>,
    /// When the primaries began, in milliseconds since 1970; none when they are not looked at.
    primaries_began: Option<u64>,
}

/// For a hundred processes on a machine that does something else, too.
pub(crate) const START_DEADLINE: Duration = Duration::from_secs(300);
/// Volumes are small here: each is read in some seconds, again and again.
const SCRUB_RATE: &str = "64MiB";
const SCRUB_EVERY_S: i64 = 5;
const POLL: Duration = Duration::from_millis(20);

impl<'a> Cluster<'a> {
    /// Makes certificates, configuration and disks below `data`. Starts nothing.
    pub fn make(
        scenario: &'a Scenario,
        variant: &'a Variant,
        binary: &'a Path,
        data: &Path,
        network: Option<&'a Network>,
        plan: &Plan,
    ) -> Result<Self, LiveError> {
        let count = scenario.cluster.namenodes;
        let first_port = Self::first_namenode_port(scenario);
        let address = |number: usize| match network {
            Some(_) if count == 1 => Ok(SocketAddr::from((network::address(0), 9_310))),
            Some(_) => {
                let address = network::address(first_port + number + 1);
                Ok(SocketAddr::from((address, 9_310)))
            }
            None => free_address(),
        };
        let namenodes = (0..count).map(address).collect::<Result<Vec<_>, _>>()?;
        let mut cluster = Self {
            scenario,
            variant,
            binary,
            data: data.to_owned(),
            namenodes,
            network,
            parts: BTreeMap::new(),
            ended: None,
            double: None,
            slow: BTreeMap::new(),
            mounted: Vec::new(),
            failing: BTreeMap::new(),
            conditions: vec![Condition::default(); scenario.cluster.servers.len()],
            mounts: vec![false; scenario.mounts.count],
            programs: Vec::new(),
            primaries_began: None,
        };
        let spec = &scenario.cluster;
        let addresses = cluster.namenodes.iter().map(ToString::to_string);
        let listen = addresses.collect::<Vec<_>>().join(",");
        let replication = spec.replication.to_string();
        let block_size = format!("{}MiB", spec.block_mib);
        cluster.run(&[
            "init",
            "cluster",
            "--listen",
            &listen,
            "--replication",
            &replication,
            "--block-size",
            &block_size,
        ])?;
        cluster.allow_repairs(spec.repairs_per_hour)?;
        for part in (0..count).map(Part::Namenode) {
            if plan.hits(part, Kind::FailedSync) {
                cluster.add_failing_disk(part)?;
            }
        }
        let has_rot = plan.has(|kind| kind == Kind::BitRot);
        for (number, server) in spec.servers.iter().enumerate() {
            let address = match network {
                Some(_) => SocketAddr::from((network::address(number + 1), 9_311)),
                None => SocketAddr::from(([127, 0, 0, 1], 0)),
            };
            cluster.run(&[
                "init",
                "datanode",
                &server.name,
                "--out",
                &data.join(&server.name).to_string_lossy(),
                "--namenode",
                &listen,
                "--listen",
                &address.to_string(),
                "--rack",
                &server.rack,
                "--environment",
                &server.environment,
                "--machine-function",
                &server.machine_function,
                "--primary-source",
                "none",
                "--priority",
                spec.priority.name(),
                "--volume",
                &format!("volume={}MiB", spec.quota_mib),
            ])?;
            if has_rot {
                cluster.scrub_often(&server.name)?;
            }
            let volume = cluster.volume(number);
            let hits = |kind| plan.hits(Part::Server(number), kind);
            if hits(Kind::FullDisk) || hits(Kind::SlowDisk) || hits(Kind::FailedSync) {
                fs::create_dir_all(&volume)
                    .map_err(LiveError::io(format!("make {}", volume.display())))?;
            }
            // It can be full, too.
            if hits(Kind::FailedSync) {
                cluster.add_failing_disk(Part::Server(number))?;
            } else if hits(Kind::FullDisk) {
                let mounted = disk::mount_disk(&volume, spec.quota_mib)?;
                cluster.mounted.push(mounted);
            }
            if hits(Kind::SlowDisk) {
                cluster.slow.insert(number, SlowDisk::new(&volume)?);
            }
        }
        Ok(cluster)
    }

    /// Runs a command of the binary against this cluster.
    pub fn run(&self, arguments: &[&str]) -> Result<String, LiveError> {
        process::run(self.binary, &self.data, arguments)
    }

    /// A path below the cluster's directory.
    pub fn path(&self, below: &str) -> PathBuf {
        self.data.join(below)
    }

    /// The directory of a server's disk.
    pub fn volume(&self, server: usize) -> PathBuf {
        self.data
            .join(&self.scenario.cluster.servers[server].name)
            .join("volume")
    }

    /// With the usual budgets a run of minutes would see no repair end.
    fn allow_repairs(&self, per_hour: u32) -> Result<(), LiveError> {
        let mut repair = toml::Table::new();
        for key in [
            "per_hour",
            "urgent_per_hour",
            "moves_per_hour",
            "per_volume_per_hour",
        ] {
            repair.insert(key.into(), toml::Value::Integer(per_hour.into()));
        }
        repair.insert("at_once".into(), toml::Value::Integer(4));
        for number in 0..self.namenodes.len() {
            let file = format!("{}/namenode.toml", namenode_name(number));
            self.configure(&file, [("repair", repair.clone().into())])?;
        }
        Ok(())
    }

    /// So that rot is found within the run, and before later faults hit the other replicas.
    fn scrub_often(&self, server: &str) -> Result<(), LiveError> {
        let scrubber = [
            ("scrub_bytes_per_s", SCRUB_RATE.into()),
            ("scrub_every_s", SCRUB_EVERY_S.into()),
        ];
        self.configure(&format!("{server}/datanode.toml"), scrubber)
    }

    /// Changes a configuration file.
    fn configure<const N: usize>(
        &self,
        file: &str,
        changes: [(&str, toml::Value); N],
    ) -> Result<(), LiveError> {
        let path = self.path(file);
        let wrong = |error: &dyn std::fmt::Display| {
            LiveError::Cluster(format!("{}: {error}", path.display()))
        };
        let text = fs::read_to_string(&path).map_err(|error| wrong(&error))?;
        let mut config: toml::Table = text.parse().map_err(|error| wrong(&error))?;
        for (key, value) in changes {
            config.insert(key.into(), value);
        }
        fs::write(&path, config.to_string()).map_err(|error| wrong(&error))
    }

    /// Lays out what the primaries do; datanodes that are started from now on watch them.
    pub fn begin_primaries(&mut self, loads: &Loads, plan: &Plan) -> Result<(), LiveError> {
        if !self.variant.denial || !(loads.any() || plan.has(|kind| kind == Kind::Busy)) {
            return Ok(());
        }
        let path = self.path("primaries.csv");
        fs::write(&path, loads.trace(self.scenario, plan))
            .map_err(LiveError::io(format!("write {}", path.display())))?;
        self.primaries_began = Some(unix_now_ms().unwrap_or(0));
        Ok(())
    }

    /// Starts a part; it is not ready yet.
    pub fn start(&mut self, part: Part) -> Result<(), LiveError> {
        let (name, arguments) = match part {
            Part::Namenode(number) => {
                let name = namenode_name(number);
                let arguments: Vec<OsString> = vec![
                    "namenode".into(),
                    "--policy".into(),
                    self.variant.policy.to_string().into(),
                    "--config".into(),
                    self.path(&name).join("namenode.toml").into(),
                ];
                (name, arguments)
            }
            Part::Mount(mount) => {
                let at = self.mount_point(mount);
                let made = match fs::create_dir(&at) {
                    // Looking at a mount whose process was killed fails.
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
                    made => made,
                };
                made.map_err(LiveError::io(format!("make {}", at.display())))?;
                let arguments: Vec<OsString> = vec![
                    "mount".into(),
                    at.into(),
                    "--config".into(),
                    self.path("client/client.toml").into(),
                ];
                (mounted::name(mount), arguments)
            }
            Part::Server(number) => {
                let name = self.scenario.cluster.servers[number].name.clone();
                let mut arguments: Vec<OsString> = vec![
                    "datanode".into(),
                    "--config".into(),
                    self.path(&name).join("datanode.toml").into(),
                ];
                if let Some(began) = self.primaries_began {
                    arguments.extend([
                        "--primary-trace".into(),
                        self.path("primaries.csv").into(),
                        "--primary-series".into(),
                        name.clone().into(),
                        "--trace-speed".into(),
                        "1".into(),
                        "--trace-began".into(),
                        began.to_string().into(),
                    ]);
                }
                if let Some((_, server, address)) = &self.double
                    && *server == number
                {
                    arguments.push(format!("--namenodes={address}").into());
                }
                self.conditions[number].down = false;
                self.conditions[number].hung = false;
                if let Some(disk) = self.failing.get(&part) {
                    // A sync that failed before, of one that went on, does not excuse the end of this one.
                    disk.take_failed();
                }
                (name, arguments)
            }
        };
        let home = match (self.network, self.port(part)) {
            (Some(network), Some(port)) => network.home(port),
            _ => Home::Here,
        };
        let log = self.path(&format!("{name}.log"));
        let process = Process::start(self.binary, &arguments, &log, &home)
            .map_err(LiveError::io(format!("start {name}")))?;
        self.parts.insert(part, process);
        Ok(())
    }

    /// Starts a copy of the namenode's directory beside the namenode, and a server that reaches no other
    /// namenode. That server must not run.
    pub fn start_double(&mut self, copied: &Path, server: usize) -> Result<SocketAddr, LiveError> {
        let address = match self.network {
            Some(_) => SocketAddr::from((network::address(0), 9_312)),
            None => free_address()?,
        };
        let arguments: Vec<OsString> = vec![
            "namenode".into(),
            "--policy".into(),
            self.variant.policy.to_string().into(),
            "--listen".into(),
            address.to_string().into(),
            "--config".into(),
            copied.join("namenode.toml").into(),
        ];
        let log = self.path(&format!("{DOUBLE}.log"));
        let process = Process::start(self.binary, &arguments, &log, &Home::Here)
            .map_err(LiveError::io("start a copy of the namenode"))?;
        self.double = Some((process, server, address));
        self.start(Part::Server(server))?;
        Ok(address)
    }

    /// Kills the copy and the server that reaches it alone.
    pub fn end_double(&mut self) {
        if let Some((mut copy, server, _)) = self.double.take() {
            // One that finds out what it is goes on, in recovery.
            if let Some(status) = copy.ended() {
                let ended = self.how_it_ended(DOUBLE, status);
                self.ended.get_or_insert(ended);
            }
            self.kill(Part::Server(server));
        }
    }

    /// The servers that nothing is wrong with.
    pub fn usable_servers(&self) -> Vec<usize> {
        let usable = |&server: &usize| self.conditions[server] == Condition::default();
        (0..self.conditions.len()).filter(usable).collect()
    }

    /// Starts everything and waits until it is ready.
    pub async fn start_all(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LiveError> {
        for number in 0..self.namenodes.len() {
            self.start(Part::Namenode(number))?;
        }
        self.wait_ready(go_on).await?;
        for server in 0..self.scenario.cluster.servers.len() {
            self.start(Part::Server(server))?;
        }
        self.wait_ready(go_on).await
    }

    /// Mounts everywhere, and waits until it is ready.
    pub async fn mount_all(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LiveError> {
        for mount in 0..self.mounts.len() {
            self.start(Part::Mount(mount))?;
        }
        self.wait_ready(go_on).await
    }

    /// Lets programs use what is mounted by now.
    pub fn note_mounted(&mut self) {
        for mount in 0..self.mounts.len() {
            let process = self.parts.get(&Part::Mount(mount));
            if !self.mounts[mount] && process.is_some_and(Process::is_ready) {
                self.mounts[mount] = true;
                self.order(Order::Ready { mount });
            }
        }
    }

    /// Programs on mounts are to know something before it is done.
    pub fn order(&mut self, order: Order) {
        for programs in &mut self.programs {
            programs.order(order);
        }
    }

    /// Where a mount is.
    pub fn mount_point(&self, mount: usize) -> PathBuf {
        self.path(&mounted::name(mount))
    }

    /// Waits until all that was started is ready.
    pub async fn wait_ready(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LiveError> {
        let end = tokio::time::Instant::now() + START_DEADLINE;
        loop {
            if !go_on() {
                return Err(LiveError::Interrupted);
            }
            if let Some(ended) = self.ended_by_itself() {
                return Err(LiveError::Cluster(ended));
            }
            let not_ready = self.not_ready();
            if not_ready.is_empty() {
                return Ok(());
            }
            if tokio::time::Instant::now() > end {
                let seconds = START_DEADLINE.as_secs();
                let names = not_ready.join(", ");
                let message = format!("not ready within {seconds} s: {names}");
                return Err(LiveError::Cluster(message));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// A part that ended by itself, and how. It is forgotten then.
    pub fn ended_by_itself(&mut self) -> Option<String> {
        if self.ended.is_some() {
            return self.ended.take();
        }
        loop {
            let parts = self.parts.iter_mut();
            let (part, status, was_ready) = parts
                .filter_map(|(part, process)| Some((*part, process.ended()?, process.is_ready())))
                .next()?;
            self.parts.remove(&part);
            if let Part::Server(server) = part {
                self.conditions[server].down = true;
            }
            if !self.was_to_end(part, status, was_ready) {
                return Some(self.how_it_ended(&self.name(part), status));
            }
            // A supervisor starts it again.
            if let Err(error) = self.start(part) {
                return Some(error.to_string());
            }
        }
    }

    /// Whether a part was right to end, and did as it is to: a sync of its disk has failed.
    fn was_to_end(&self, part: Part, status: ExitStatus, was_ready: bool) -> bool {
        let may_end = match part {
            Part::Namenode(_) => true,
            // It goes on, but cannot begin without its only disk.
            Part::Server(_) => !was_ready,
            Part::Mount(_) => false,
        };
        let disk = self.failing.get(&part);
        may_end && process::has_failed(status) && disk.is_some_and(FailingDisk::take_failed)
    }

    fn how_it_ended(&self, name: &str, status: ExitStatus) -> String {
        let log = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let last = log.lines().next_back().unwrap_or("it logged nothing");
        format!("{name} ended by itself ({status}): {last}")
    }

    /// The name of a part.
    pub fn name(&self, part: Part) -> String {
        match part {
            Part::Namenode(number) => namenode_name(number),
            Part::Server(server) => self.scenario.cluster.servers[server].name.clone(),
            Part::Mount(mount) => mounted::name(mount),
        }
    }

    /// Whether it runs.
    pub fn runs(&self, part: Part) -> bool {
        self.parts.contains_key(&part)
    }

    /// The names of the parts that run and are not ready.
    pub fn not_ready(&self) -> Vec<String> {
        let parts = self.parts.iter();
        let not_ready = parts.filter(|(_, process)| !process.is_ready());
        not_ready.map(|(&part, _)| self.name(part)).collect()
    }

    /// Whether it runs and is ready.
    pub fn is_ready(&self, part: Part) -> bool {
        self.parts.get(&part).is_some_and(Process::is_ready)
    }

    /// SIGKILL.
    pub fn kill(&mut self, part: Part) {
        if let Part::Mount(mount) = part {
            self.mounts[mount] = false;
            // First: nothing that the kill interrupts counts as acknowledged.
            self.order(Order::Killed { mount });
        }
        if let Some(mut process) = self.parts.remove(&part)
            && let Some(status) = process.ended()
            && !self.was_to_end(part, status, process.is_ready())
        {
            // Nobody has looked since then, and nobody will find it any more.
            let ended = self.how_it_ended(&self.name(part), status);
            self.ended.get_or_insert(ended);
        }
        if let Part::Server(server) = part {
            self.conditions[server].down = true;
            self.conditions[server].hung = false;
        }
    }

    /// SIGKILL of each namenode.
    pub fn kill_namenodes(&mut self) {
        for number in 0..self.namenodes.len() {
            self.kill(Part::Namenode(number));
        }
    }

    /// What is on a disk.
    pub fn contents(&self, server: usize) -> Result<Contents, LiveError> {
        let volume = self.volume(server);
        ledger::scan(&volume).map_err(LiveError::io(format!("look at {}", volume.display())))
    }
}

fn free_address() -> Result<SocketAddr, LiveError> {
    UdpSocket::bind("127.0.0.1:0")
        .and_then(|socket| socket.local_addr())
        .map_err(LiveError::io("find a free port"))
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        // What runs there keeps a disk in use, and a slow disk lies on another.
        self.parts.clear();
        self.double = None;
        // When mounts have ended, nothing waits for them.
        self.programs.clear();
        for mount in 0..self.mounts.len() {
            mounted::unmount(&self.mount_point(mount));
        }
        self.slow.clear();
        self.mounted.clear();
        self.failing.clear();
    }
}
