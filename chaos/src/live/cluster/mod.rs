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
    /// How a part, or the copy of the namenode, ended on its own before it was to be killed.
    ended: Option<String>,
    /// A copy of the namenode beside it, the only server that is configured with its address, and that address.
    double: Option<(Process, usize, SocketAddr)>,
    /// Disks that can be made slow. They may be stacked on the other ones.
    slow: BTreeMap<usize, SlowDisk>,
    /// Disks in memory.
    mounted: Vec<Mounted>,
    /// Disks whose syncs can fail.
    failing: BTreeMap<Part, FailingDisk>,
    /// The condition of each server.
    pub conditions: Vec<Condition>,
    /// For each mount, whether programs were notified that it may be used.
    pub mounts: Vec<bool>,
    /// The programs on mounts, a process for each kind.
    pub programs: Vec<Programs>,
    /// When the primaries began, in milliseconds since 1970; `None` if datanodes do not watch them.
    primaries_began: Option<u64>,
}

/// Long enough for a hundred processes on a machine that is also used otherwise.
pub(crate) const START_DEADLINE: Duration = Duration::from_secs(300);
/// Volumes are small here, so they are scrubbed every few seconds.
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
            // A failing disk can be full, too.
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

    /// Raises the budgets of repair: with the usual ones, no repair would finish in a run of minutes.
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

    /// Has a datanode scrub often, so that rot is found within the run and before later faults hit the other replicas.
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

    /// Writes the trace of the primaries, which datanodes that are started from now on watch.
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

    /// Starts a part, without waiting until it is ready.
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
                    // The directory cannot be inspected if it is a mount whose process was killed.
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
                    // A sync that failed earlier, under a process that continued, does not excuse the end of this one.
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

    /// Starts a copy of the namenode's directory beside the namenode, and a server that is configured with no other
    /// namenode. That server must not be running.
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

    /// Kills the copy and the server that follows it.
    pub fn end_double(&mut self) {
        if let Some((mut copy, server, _)) = self.double.take() {
            // A copy that finds out that it is one continues, in recovery.
            if let Some(status) = copy.ended() {
                let ended = self.how_it_ended(DOUBLE, status);
                self.ended.get_or_insert(ended);
            }
            self.kill(Part::Server(server));
        }
    }

    /// The servers without faults.
    pub fn usable_servers(&self) -> Vec<usize> {
        let usable = |&server: &usize| self.conditions[server] == Condition::default();
        (0..self.conditions.len()).filter(usable).collect()
    }

    /// Starts all namenodes and servers, and waits until they are ready.
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

    /// Starts all mounts, and waits until they are ready.
    pub async fn mount_all(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LiveError> {
        for mount in 0..self.mounts.len() {
            self.start(Part::Mount(mount))?;
        }
        self.wait_ready(go_on).await
    }

    /// Notifies programs of mounts that have become ready.
    pub fn note_mounted(&mut self) {
        for mount in 0..self.mounts.len() {
            let process = self.parts.get(&Part::Mount(mount));
            if !self.mounts[mount] && process.is_some_and(Process::is_ready) {
                self.mounts[mount] = true;
                self.order(Order::Ready { mount });
            }
        }
    }

    /// Sends an order to the programs on mounts, before it is carried out.
    pub fn order(&mut self, order: Order) {
        for programs in &mut self.programs {
            programs.order(order);
        }
    }

    /// The mount point of a mount.
    pub fn mount_point(&self, mount: usize) -> PathBuf {
        self.path(&mounted::name(mount))
    }

    /// Waits until all started parts are ready.
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

    /// Takes a part that ended on its own, and how. Parts that were right to end are restarted instead.
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

    /// Whether a part was right to end, and ended as it should: a sync of its disk has failed.
    fn was_to_end(&self, part: Part, status: ExitStatus, was_ready: bool) -> bool {
        let may_end = match part {
            Part::Namenode(_) => true,
            // A datanode continues after a failed sync, but it cannot start without its only disk.
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

    /// Whether a part is running.
    pub fn runs(&self, part: Part) -> bool {
        self.parts.contains_key(&part)
    }

    /// The names of the running parts that are not ready.
    pub fn not_ready(&self) -> Vec<String> {
        let parts = self.parts.iter();
        let not_ready = parts.filter(|(_, process)| !process.is_ready());
        not_ready.map(|(&part, _)| self.name(part)).collect()
    }

    /// Whether a part is running and ready.
    pub fn is_ready(&self, part: Part) -> bool {
        self.parts.get(&part).is_some_and(Process::is_ready)
    }

    /// Kills a part with SIGKILL.
    pub fn kill(&mut self, part: Part) {
        if let Part::Mount(mount) = part {
            self.mounts[mount] = false;
            // Before the kill, so that nothing that it interrupts counts as acknowledged.
            self.order(Order::Killed { mount });
        }
        if let Some(mut process) = self.parts.remove(&part)
            && let Some(status) = process.ended()
            && !self.was_to_end(part, status, process.is_ready())
        {
            // This was not noticed before, and could not be noticed later.
            let ended = self.how_it_ended(&self.name(part), status);
            self.ended.get_or_insert(ended);
        }
        if let Part::Server(server) = part {
            self.conditions[server].down = true;
            self.conditions[server].hung = false;
        }
    }

    /// Kills each namenode with SIGKILL.
    pub fn kill_namenodes(&mut self) {
        for number in 0..self.namenodes.len() {
            self.kill(Part::Namenode(number));
        }
    }

    /// The blocks on a disk.
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
        // Running processes keep a disk in use, and a slow disk is stacked on another.
        self.parts.clear();
        self.double = None;
        // Programs no longer wait for mounts that have ended.
        self.programs.clear();
        for mount in 0..self.mounts.len() {
            mounted::unmount(&self.mount_point(mount));
        }
        self.slow.clear();
        self.mounted.clear();
        self.failing.clear();
    }
}
