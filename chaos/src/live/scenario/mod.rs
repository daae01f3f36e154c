//! Scenarios: the cluster, its clients and the faults. A scenario is checked completely before anything is started;
//! errors name file and line.

mod check;
mod faults;
mod raw;
#[cfg(test)]
mod tests;
mod trace;

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use harvestfs_placement::PolicyKind;
use harvestfs_protocol::settings::SettingsError;
use serde::{Deserialize, Serialize};

use check::Checker;
pub use trace::Trace;

use crate::simulate::cluster::FaultKind;
use crate::simulate::cluster::replay::Shape;

/// A checked scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// Which defects of the system it would find.
    pub finds: String,
    /// The default seed.
    pub seed: u64,
    /// How long clients work and faults happen, in milliseconds.
    pub duration_ms: u64,
    /// How long the cluster may take to become whole after that, in milliseconds.
    pub heal_ms: u64,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// The clients.
    pub clients: ClientSpec,
    /// The mounts.
    pub mounts: MountSpec,
    /// The faults.
    pub faults: Vec<Fault>,
    /// The runs, at least one.
    pub variants: Vec<Variant>,
}

/// The cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Number of namenodes.
    pub namenodes: usize,
    /// Its servers.
    pub servers: Vec<Server>,
    /// Replicas of each block.
    pub replication: u8,
    /// The largest block, in MiB.
    pub block_mib: u64,
    /// The quota of a datanode, in MiB.
    pub quota_mib: u64,
    /// Repairs per hour and server.
    pub repairs_per_hour: u32,
    /// The length of a day of periodic primaries, in milliseconds.
    pub day_ms: u64,
    /// How datanodes compete with others for CPU and disks.
    pub priority: Priority,
    /// A recorded load of primaries, in place of the patterns of their tenants.
    pub trace: Option<Trace>,
}

/// How a datanode competes with others: a value of its `--priority`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// As in production: it uses only what nothing else needs.
    #[default]
    Idle,
    /// Below others.
    Low,
    /// Like any other process: for machines that do something else at the same time.
    Normal,
}

impl Priority {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Low => "low",
            Self::Normal => "normal",
        }
    }
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its name, `datanode-N`.
    pub name: String,
    /// Its rack.
    pub rack: String,
    /// The environment of its primary tenant.
    pub environment: String,
    /// The machine function of its primary tenant.
    pub machine_function: String,
    /// The number of its tenant, from 0.
    pub tenant: usize,
    /// How the primary's load changes.
    pub pattern: Pattern,
}

/// How the load of a primary tenant changes over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Nothing runs there.
    #[default]
    Idle,
    /// Days and nights.
    Periodic,
    /// A constant load.
    Constant,
    /// Unpredictable bursts.
    Unpredictable,
}

/// The clients.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientSpec {
    /// Number of clients.
    pub count: u16,
    /// The most files of each client.
    pub files_max: usize,
    /// The largest file, in KiB.
    pub file_kib_max: u32,
    /// Percentage of operations that are reads; the others are mostly writes.
    pub read_percent: u32,
    /// The pause between two operations of a client, in milliseconds.
    pub pause_ms: u64,
    /// How long an access waits for busy servers, in milliseconds.
    pub busy_timeout_ms: u64,
    /// How long an access waits for parts that do not answer, in milliseconds.
    pub unreachable_timeout_ms: u64,
}

impl Default for ClientSpec {
    fn default() -> Self {
        Self {
            count: 2,
            files_max: 60,
            file_kib_max: 2_048,
            read_percent: 50,
            pause_ms: 50,
            busy_timeout_ms: 5_000,
            unreachable_timeout_ms: 20_000,
        }
    }
}

/// Programs on real mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProgramKind {
    /// Random operations on files, one program on each mount.
    Files,
    /// A log that is appended to on the first mount, and followed on the last one.
    Log,
    /// Databases of SQLite on the first mount.
    Sqlite,
    /// A repository of `git` on the last mount.
    Git,
}

impl ProgramKind {
    /// Its name in a scenario.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Log => "log",
            Self::Sqlite => "sqlite",
            Self::Git => "git",
        }
    }

    /// The program that has to be installed for it.
    pub(crate) fn needs(self) -> Option<&'static str> {
        match self {
            Self::Files | Self::Log => None,
            Self::Sqlite => Some("sqlite3"),
            Self::Git => Some("git"),
        }
    }
}

/// Real mounts, and the programs on them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MountSpec {
    /// Number of mounts.
    pub count: usize,
    /// The kinds of programs that work on them.
    pub programs: Vec<ProgramKind>,
    /// The most files of each program.
    pub files_max: usize,
    /// The largest file, in KiB.
    pub file_kib_max: u32,
    /// The pause between two operations of a program, in milliseconds.
    pub pause_ms: u64,
}

impl Default for MountSpec {
    fn default() -> Self {
        Self {
            count: 0,
            programs: vec![ProgramKind::Files],
            files_max: 60,
            file_kib_max: 2_048,
            pause_ms: 20,
        }
    }
}

/// One run of the scenario.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Its name.
    pub name: String,
    /// The placement policy.
    pub policy: PolicyKind,
    /// Whether datanodes watch their primaries and deny accesses while these are busy.
    pub denial: bool,
    /// Whether this run may lose acknowledged data and still pass.
    pub may_lose: bool,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The disk is emptied without notice and the server comes back.
    Reimage,
    /// The disk is emptied under a running datanode, which is killed and started again after a while.
    Clear,
    /// SIGKILL, and a restart after a while.
    Kill,
    /// SIGSTOP, and SIGCONT after a while.
    Hang,
    /// The machine is suspended for a while: as `Hang`, and what is sent to it in the meantime is lost.
    Suspend,
    /// The primary needs the server for a while.
    Busy,
    /// No space is left on the disk for a while.
    FullDisk,
    /// Bits flip in sealed blocks.
    BitRot,
    /// The server reaches only those that are cut off with it, for a while.
    Partition,
    /// Some of the server's traffic, in both directions, is lost for a while.
    Loss,
    /// The server's traffic, in both directions, is delayed for a while.
    Delay,
    /// The disk serves one access at a time, and slowly, for a while.
    SlowDisk,
    /// A sync of the disk fails and what it should have stored is lost, which becomes visible when power is lost after
    /// a while.
    FailedSync,
    /// At its end, the namenode's directory is replaced by a copy that was made at its beginning.
    Rollback,
    /// A copy of the namenode is started beside it, and a datanode follows the copy.
    Double,
}

/// How strong a fault is.
pub(super) struct Amount {
    /// Its key in a scenario.
    pub key: &'static str,
    /// The accepted values.
    pub range: RangeInclusive<u32>,
    /// The default; `None` if it has to be given.
    pub default: Option<u32>,
}

impl Kind {
    /// All kinds of faults.
    pub const ALL: [Self; 15] = [
        Self::Reimage,
        Self::Kill,
        Self::Hang,
        Self::Suspend,
        Self::Busy,
        Self::FullDisk,
        Self::BitRot,
        Self::Partition,
        Self::Loss,
        Self::Delay,
        Self::SlowDisk,
        Self::FailedSync,
        Self::Rollback,
        Self::Double,
        Self::Clear,
    ];

    /// Its name in a scenario.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reimage => "reimage",
            Self::Clear => "clear",
            Self::Kill => "kill",
            Self::Hang => "hang",
            Self::Suspend => "suspend",
            Self::Busy => "busy",
            Self::FullDisk => "full-disk",
            Self::BitRot => "bit-rot",
            Self::Partition => "partition",
            Self::Loss => "loss",
            Self::Delay => "delay",
            Self::SlowDisk => "slow-disk",
            Self::FailedSync => "failed-sync",
            Self::Rollback => "rollback",
            Self::Double => "double",
        }
    }

    /// Its name in simulations.
    pub(crate) fn simulated(self) -> &'static str {
        match self {
            Self::Clear => FaultKind::Reimage.name(),
            Self::Kill => FaultKind::Crash.name(),
            Self::FullDisk => FaultKind::DiskFull.name(),
            Self::BitRot => FaultKind::Rot.name(),
            _ => self.name(),
        }
    }

    /// Whether it needs servers with networks of their own.
    pub(crate) fn needs_network(self) -> bool {
        matches!(
            self,
            Self::Suspend | Self::Partition | Self::Loss | Self::Delay
        )
    }

    /// Whether it needs a run with mounts of its own.
    pub(crate) fn needs_mounts(self) -> bool {
        matches!(self, Self::FullDisk | Self::SlowDisk | Self::FailedSync)
    }

    fn amount(self) -> Option<Amount> {
        let amount = |key, range, default| {
            Some(Amount {
                key,
                range,
                default,
            })
        };
        match self {
            Self::BitRot => amount("blocks", 1..=10_000, Some(1)),
            Self::Loss => amount("loss_percent", 1..=100, None),
            Self::Delay => amount("delay_ms", 1..=10_000, None),
            Self::SlowDisk => amount("delay_ms", 1..=10_000, None),
            _ => None,
        }
    }

    /// Whether it can affect a mount.
    fn hits_mounts(self) -> bool {
        matches!(self, Self::Kill | Self::Hang) || self.needs_network()
    }

    /// Whether it can affect one of `of` namenodes. A single namenode shares its network with clients and the harness.
    fn hits_namenode(self, of: usize) -> bool {
        match self {
            Self::Kill | Self::Hang | Self::FailedSync => true,
            Self::Rollback | Self::Double => of == 1,
            _ => of > 1 && self.needs_network(),
        }
    }

    fn lasts(self) -> bool {
        !matches!(self, Self::BitRot)
    }

    /// Whether its end is what tests something: a loss of power, the use of a copy, what a copy did. Other kinds are
    /// ended by healing as well.
    pub(crate) fn tests_at_its_end(self) -> bool {
        matches!(self, Self::FailedSync | Self::Rollback | Self::Double)
    }
}

/// The parts that a fault affects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// The namenode, or one of several at random.
    Namenode,
    /// Servers by number, in this order.
    Servers(Vec<usize>),
    /// This many servers, chosen by the seed.
    Random(usize),
    /// A mount, by its number from 0.
    Mount(usize),
    /// This many mounts, chosen by the seed.
    RandomMounts(usize),
}

/// A fault, which may be repeated.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The kind of fault.
    pub kind: Kind,
    /// The affected parts.
    pub targets: Targets,
    /// When it first begins, in milliseconds from the start.
    pub at_ms: u64,
    /// The most that the seed adds to each beginning, in milliseconds.
    pub jitter_ms: u64,
    /// How long it lasts, in milliseconds.
    pub for_ms: u64,
    /// Time from one affected part to the next, in milliseconds.
    pub rolling_ms: u64,
    /// How often it happens.
    pub repeat: u32,
    /// Time between repetitions, in milliseconds.
    pub every_ms: u64,
    /// How strong it is: blocks that rot on each server, percentage of frames that are lost, or
    /// milliseconds by which frames are delayed or that each access to a disk takes. 0 for other kinds.
    pub amount: u32,
}

/// The largest scenario file: people write them by hand.
const FILE_BYTES_MAX: u64 = 1 << 20;

impl Scenario {
    /// Reads and checks a scenario.
    ///
    /// # Errors
    /// [`SettingsError`] with file and line.
    pub fn load(path: &Path) -> Result<Self, SettingsError> {
        let fail = |message: String| SettingsError::of_file(path, message);
        let length = fs::metadata(path).map_err(|error| fail(error.to_string()))?;
        if length.len() > FILE_BYTES_MAX {
            return Err(fail("a scenario has at most 1 MiB".into()));
        }
        let text = fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        Self::parse(path, &text)
    }

    /// The shape of the cluster for a replay in a simulation.
    #[must_use]
    pub fn shape(&self) -> Shape {
        // The checked limits are far lower.
        let count = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
        Shape {
            namenodes: count(self.cluster.namenodes),
            datanodes: count(self.cluster.servers.len()),
            clients: self.clients.count,
            mounts: count(self.mounts.count),
            length_ms: self.duration_ms,
        }
    }

    /// Checks the text of a scenario; `path` is for errors.
    ///
    /// # Errors
    /// [`SettingsError`] with file and line.
    pub fn parse(path: &Path, text: &str) -> Result<Self, SettingsError> {
        let checker = Checker { path, text };
        let raw: raw::RawScenario = toml::from_str(text).map_err(|error| {
            let message = error.message().to_owned();
            checker.at(error.span().unwrap_or(0..0), message)
        })?;
        checker.check(raw)
    }
}
