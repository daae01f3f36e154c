//! Three namenodes, three datanodes and a mount, each in a network of its own.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::{FaultKind, Wrong};
use crate::live::admin::Admin;
use crate::live::cluster::START_DEADLINE;
use crate::live::disk::FailingDisk;
use crate::live::network::{self, Network};
use crate::live::plan::namenode_name;
use crate::live::process::{self, Process};
use crate::live::{LiveError, mounted};

const NAMENODES: usize = 3;
const DATANODES: usize = 3;
/// The link of the mount, after those of namenodes and datanodes.
const MOUNT: usize = NAMENODES + DATANODES;
/// The number of links.
pub(super) const LINKS: usize = MOUNT + 1;
const NAMENODE_PORT: u16 = 9_310;
const DATANODE_PORT: u16 = 9_311;
const QUOTA: &str = "8GiB";
/// The size of a namenode's disk in memory, for runs in which its syncs fail.
const DISK_BYTES: usize = 1 << 30;
const POLL: Duration = Duration::from_millis(20);
/// How long it may take until a namenode leads while a majority is up.
const LEADER_DEADLINE: Duration = Duration::from_secs(180);
/// How long a namenode may continue after its disk failed: it writes at least some records per second.
const END_DEADLINE: Duration = Duration::from_secs(120);

/// The processes of the cluster. When it is dropped, all of them end and everything is unmounted.
pub(super) struct Group<'a> {
    binary: &'a Path,
    data: PathBuf,
    network: &'a Network,
    runtime: &'a Runtime,
    go_on: &'a dyn Fn() -> bool,
    namenodes: Vec<Option<Process>>,
    datanodes: Vec<Process>,
    mount: Option<Process>,
    admins: Vec<Admin>,
    /// The disks of namenodes, for runs in which their syncs fail.
    disks: Vec<FailingDisk>,
    /// The last log lines of namenodes that ended on their own. They were restarted, as by a supervisor.
    pub ended: Wrong,
}

fn namenode_address(number: usize) -> SocketAddr {
    // Port 0 is that of the harness.
    SocketAddr::from((network::address(number + 1), NAMENODE_PORT))
}

impl<'a> Group<'a> {
    /// Makes a cluster below `data` and starts it, without a mount.
    pub fn start(
        binary: &'a Path,
        data: PathBuf,
        network: &'a Network,
        runtime: &'a Runtime,
        kind: FaultKind,
        go_on: &'a dyn Fn() -> bool,
    ) -> Result<Self, LiveError> {
        let mut group = Self {
            binary,
            data,
            network,
            runtime,
            go_on,
            namenodes: Vec::new(),
            datanodes: Vec::new(),
            mount: None,
            admins: Vec::new(),
            disks: Vec::new(),
            ended: Wrong::default(),
        };
        let addresses: Vec<SocketAddr> = (0..NAMENODES).map(namenode_address).collect();
        let listed: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let listed = listed.join(",");
        group.run(&[
            "init",
            "cluster",
            "--listen",
            &listed,
            "--block-size",
            "16MiB",
        ])?;
        for number in 0..NAMENODES {
            if kind == FaultKind::Disk {
                let at = group.data.join(namenode_name(number)).join("data");
                let disk = FailingDisk::over(&at, DISK_BYTES)
                    .map_err(LiveError::io(format!("mount a disk at {}", at.display())))?;
                group.disks.push(disk);
            }
            group.namenodes.push(None);
            group.start_namenode(number)?;
        }
        for number in 0..DATANODES {
            group.start_datanode(number, &listed)?;
        }
        let _context = runtime.enter();
        for address in addresses {
            group.admins.push(Admin::new(&group.data, &[address])?);
        }
        group.wait("the cluster is ready", START_DEADLINE, Self::is_ready)?;
        group.leader()?;
        Ok(group)
    }

    /// A path below the cluster's directory.
    pub fn path(&self, below: &str) -> PathBuf {
        self.data.join(below)
    }

    /// Runs a command of the binary against this cluster.
    pub fn run(&self, arguments: &[&str]) -> Result<(), LiveError> {
        process::run(self.binary, &self.data, arguments).map(drop)
    }

    fn start_process(
        &self,
        name: &str,
        link: usize,
        arguments: &[OsString],
    ) -> Result<Process, LiveError> {
        let log = self.path(&format!("{name}.log"));
        let home = self.network.home(link);
        Process::start(self.binary, arguments, &log, &home)
            .map_err(LiveError::io(format!("start {name}")))
    }

    fn start_namenode(&mut self, number: usize) -> Result<(), LiveError> {
        let name = namenode_name(number);
        let arguments = [
            "namenode".into(),
            "--policy".into(),
            "stock".into(),
            "--config".into(),
            self.path(&name).join("namenode.toml").into(),
        ];
        self.namenodes[number] = Some(self.start_process(&name, number, &arguments)?);
        Ok(())
    }

    fn start_datanode(&mut self, number: usize, namenodes: &str) -> Result<(), LiveError> {
        let name = format!("datanode-{}", number + 1);
        let link = NAMENODES + number;
        let listen = SocketAddr::from((network::address(link + 1), DATANODE_PORT));
        let directory = self.path(&name);
        self.run(&[
            "init",
            "datanode",
            &name,
            "--out",
            &directory.to_string_lossy(),
            "--namenode",
            namenodes,
            "--listen",
            &listen.to_string(),
            "--rack",
            &format!("rack-{}", number + 1),
            "--environment",
            &format!("environment-{}", number + 1),
            "--machine-function",
            &format!("function-{}", number + 1),
            "--primary-source",
            "none",
            "--priority",
            "normal",
            "--volume",
            &format!("volume={QUOTA}"),
        ])?;
        let config = directory.join("datanode.toml").into();
        let arguments = ["datanode".into(), "--config".into(), config];
        let process = self.start_process(&name, link, &arguments)?;
        self.datanodes.push(process);
        Ok(())
    }

    /// Mounts the file system, and returns the mount point.
    pub fn mount(&mut self, name: &str) -> Result<PathBuf, LiveError> {
        let at = self.path(name);
        fs::create_dir(&at).map_err(LiveError::io(format!("make {}", at.display())))?;
        let config = self.path("client/client.toml").into();
        let arguments = ["mount".into(), at.clone().into(), "--config".into(), config];
        self.mount = Some(self.start_process(name, MOUNT, &arguments)?);
        self.wait("it is mounted", START_DEADLINE, Self::is_ready)?;
        Ok(at)
    }

    /// Kills the mount: what was not synced is lost.
    pub fn kill_mount(&mut self, at: &Path) {
        self.mount = None;
        mounted::unmount(at);
    }

    fn note_ended(&mut self, namenode: usize, status: ExitStatus) {
        let name = namenode_name(namenode);
        let log = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let last = log.lines().next_back().unwrap_or("it logged nothing");
        self.ended
            .note(format!("{name} ended by itself ({status}): {last}"));
    }

    fn is_ready(&mut self) -> Result<bool, LiveError> {
        for number in 0..self.namenodes.len() {
            let process = &mut self.namenodes[number];
            let Some(status) = process.as_mut().and_then(Process::ended) else {
                continue;
            };
            self.note_ended(number, status);
            self.start_namenode(number)?;
        }
        let namenodes = self.namenodes.iter_mut().flatten();
        for process in namenodes.chain(&mut self.datanodes).chain(&mut self.mount) {
            if let Some(status) = process.ended() {
                return Err(LiveError::Cluster(format!(
                    "a part ended by itself ({status})"
                )));
            }
            if !process.is_ready() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(
        &mut self,
        until: &str,
        patience: Duration,
        mut is_so: impl FnMut(&mut Self) -> Result<bool, LiveError>,
    ) -> Result<(), LiveError> {
        let deadline = Instant::now() + patience;
        while !is_so(self)? {
            if Instant::now() > deadline {
                let seconds = patience.as_secs();
                return Err(LiveError::Cluster(format!(
                    "not within {seconds} s: {until}"
                )));
            }
            self.rest(POLL)?;
        }
        Ok(())
    }

    /// Sleeps, until interrupted.
    pub fn rest(&self, how_long: Duration) -> Result<(), LiveError> {
        let deadline = Instant::now() + how_long;
        loop {
            if !(self.go_on)() {
                return Err(LiveError::Interrupted);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(POLL));
        }
    }

    /// Waits for a leader and returns it: the other namenodes do not answer requests for the status.
    pub fn leader(&mut self) -> Result<usize, LiveError> {
        let mut leader = None;
        self.wait("a namenode leads", LEADER_DEADLINE, |group| {
            let runtime = group.runtime;
            for (number, admin) in group.admins.iter_mut().enumerate() {
                if runtime.block_on(admin.status()).is_some() {
                    leader = Some(number);
                    return Ok(true);
                }
            }
            Ok(false)
        })?;
        leader.ok_or(LiveError::Interrupted)
    }

    /// Inflicts a fault on the leader, and begins to heal it.
    pub fn hurt(&mut self, leader: usize, kind: FaultKind) -> Result<(), LiveError> {
        match kind {
            FaultKind::Kill => {
                self.namenodes[leader] = None;
                self.rest(super::DOWN)?;
                self.start_namenode(leader)
            }
            FaultKind::Hang => {
                let process = self.namenodes[leader].as_ref();
                process.inspect(|it| it.pause());
                self.rest(super::AWAY)?;
                let process = self.namenodes[leader].as_ref();
                process.inspect(|it| it.resume());
                Ok(())
            }
            FaultKind::Partition => {
                self.network.set_cut(leader, true);
                let rested = self.rest(super::AWAY);
                self.network.set_cut(leader, false);
                rested
            }
            FaultKind::Disk => {
                self.disks[leader].fail_next_sync(None);
                let mut ended = None;
                self.wait(
                    "the namenode whose disk failed ends",
                    END_DEADLINE,
                    |group| {
                        let process = group.namenodes[leader].as_mut();
                        ended = process.and_then(Process::ended);
                        Ok(ended.is_some())
                    },
                )?;
                self.namenodes[leader] = None;
                // It may have ended for another reason, or in another way than it should.
                if let Some(status) = ended
                    && !(process::has_failed(status) && self.disks[leader].take_failed())
                {
                    self.note_ended(leader, status);
                }
                self.disks[leader].lose_power();
                self.rest(super::DOWN)?;
                self.start_namenode(leader)
            }
            FaultKind::Transfer => self.run(&["admin", "namenode", "transfer"]),
        }
    }

    /// Waits until all parts are ready and a namenode leads.
    pub fn wait_whole(&mut self) -> Result<(), LiveError> {
        self.wait("the cluster is whole again", START_DEADLINE, Self::is_ready)?;
        self.leader().map(drop)
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        // The processes that use a disk end before the disk.
        self.namenodes.clear();
        self.datanodes.clear();
        self.mount = None;
        for name in [super::PROBED, super::COMPARED] {
            mounted::unmount(&self.data.join(name));
        }
        self.disks.clear();
    }
}
