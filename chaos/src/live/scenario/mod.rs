//! What a scenario says: the cluster, its clients and what happens to them. Checked completely
//! before anything is started; errors name file and line.

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
    /// Which mistakes of the system it would find.
    pub finds: String,
    /// The seed when none is given.
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
    /// What happens.
    pub faults: Vec<Fault>,
    /// The runs, at least one.
    pub variants: Vec<Variant>,
}

/// The cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// How many namenodes it has.
    pub namenodes: usize,
    /// Its servers.
    pub servers: Vec<Server>,
    /// Replicas of each block.
    pub replication: u8,
    /// Largest block, in MiB.
    pub block_mib: u64,
    /// What a datanode may use, in MiB.
    pub quota_mib: u64,
    /// Repairs per hour and server.
    pub repairs_per_hour: u32,
    /// How long the day of periodic primaries takes, in milliseconds.
    pub day_ms: u64,
    /// How datanodes compete with others for CPU and disks.
    pub priority: Priority,
    /// What primaries do instead of the patterns of their tenants.
    pub trace: Option<Trace>,
}

/// How a datanode competes with others: a value of its `--priority`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// As in production: it takes what nothing else wants.
    #[default]
    Idle,
    /// Less than others.
    Low,
    /// As anybody: for machines that do something else meanwhile.
    Normal,
}

impl Priority {
    /// As it is written.
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
    /// Environment of its primary tenant.
    pub environment: String,
    /// Machine function of its primary tenant.
    pub machine_function: String,
    /// Number of its tenant, from 0.
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
    /// Always the same.
    Constant,
    /// Unforeseen bursts.
    Unpredictable,
}

/// The clients.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientSpec {
    /// How many.
    pub count: u16,
    /// Files of each, at most.
    pub files_max: usize,
    /// Largest file, in KiB.
    pub file_kib_max: u32,
    /// Of 100 operations, how many are reads; the others are mostly writes.
    pub read_percent: u32,
    /// Pause between two operations of a client, in milliseconds.
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
    /// As it is written in a scenario.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Log => "log",
            Self::Sqlite => "sqlite",
            Self::Git => "git",
        }
    }

    /// What has to be installed for it.
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
    /// How many.
    pub count: usize,
    /// What works on them.
    pub programs: Vec<ProgramKind>,
    /// Files of each program, at most.
    pub files_max: usize,
    /// Largest file, in KiB.
    pub file_kib_max: u32,
    /// Pause between two operations of a program, in milliseconds.
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
    /// Which servers replicas go to.
    pub policy: PolicyKind,
    /// Whether datanodes look at their primaries and deny accesses while these are busy.
    pub denial: bool,
    /// Whether losing acknowledged data is no failure of this run.
    pub may_lose: bool,
}

/// What is done to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The disk is emptied without notice and the server comes back.
    Reimage,
    /// The same under a datanode that goes on, and is killed and started again after a while.
    Clear,
    /// SIGKILL, and a new start after a while.
    Kill,
    /// SIGSTOP, and SIGCONT after a while.
    Hang,
    /// The machine sleeps for a while: the same, and what is sent to it meanwhile is lost.
    Suspend,
    /// The primary needs the server for a while.
    Busy,
    /// No space is left on the disk for a while.
    FullDisk,
    /// Bits flip in sealed blocks.
    BitRot,
    /// The server reaches only the others that are cut off with it, for a while.
    Partition,
    /// Some of what the server sends and is sent is lost, for a while.
    Loss,
    /// What the server sends and is sent comes late, for a while.
    Delay,
    /// The disk does one access at a time, and takes its time, for a while.
    SlowDisk,
    /// A sync of the disk fails, and what it was to store is lost, which shows when the power is lost after a while.
    FailedSync,
    /// The namenode's directory is put back to a copy taken when it begins.
    Rollback,
    /// A copy of the namenode is started beside it, and a datanode goes astray to it.
    Double,
}

/// How strong a fault is.
pub(super) struct Amount {
    /// Its key in a scenario.
    pub key: &'static str,
    /// What is accepted.
    pub range: RangeInclusive<u32>,
    /// When nothing is said; none when it has to be.
    pub default: Option<u32>,
}

impl Kind {
    /// All of them.
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

    /// As it is written in a scenario.
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

    /// As simulations call it.
    pub(crate) fn simulated(self) -> &'static str {
        match self {
            Self::Clear => FaultKind::Reimage.name(),
            Self::Kill => FaultKind::Crash.name(),
            Self::FullDisk => FaultKind::DiskFull.name(),
            Self::BitRot => FaultKind::Rot.name(),
            _ => self.name(),
        }
    }

    /// Whether the servers need networks of their own for it.
    pub(crate) fn needs_network(self) -> bool {
        matches!(
            self,
            Self::Suspend | Self::Partition | Self::Loss | Self::Delay
        )
    }

    /// Whether the run needs mounts of its own for it.
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

    /// Whether it can be done to a mount.
    fn hits_mounts(self) -> bool {
        matches!(self, Self::Kill | Self::Hang) || self.needs_network()
    }

    /// Whether it can be done to a namenode of so many. Clients and the harness share the network of an only one.
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

    /// Whether its end is what tests something: a loss of power, the use of a copy, what a copy did. Others are ended by the
    /// healing as well.
    pub(crate) fn tests_at_its_end(self) -> bool {
        matches!(self, Self::FailedSync | Self::Rollback | Self::Double)
    }
}

/// Whom a fault hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// The namenode, or one of several by chance.
    Namenode,
    /// Servers by number, in this order.
    Servers(Vec<usize>),
    /// So many servers, chosen by the seed.
    Random(usize),
    /// A mount, by its number from 0.
    Mount(usize),
    /// So many mounts, chosen by the seed.
    RandomMounts(usize),
}

/// Something that happens, perhaps several times.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// To whom.
    pub targets: Targets,
    /// When first, in milliseconds from the start.
    pub at_ms: u64,
    /// Added to it: up to so many milliseconds, as the seed decides.
    pub jitter_ms: u64,
    /// How long it lasts, in milliseconds.
    pub for_ms: u64,
    /// Time from one server to the next, in milliseconds.
    pub rolling_ms: u64,
    /// How often it happens.
    pub repeat: u32,
    /// Time between repetitions, in milliseconds.
    pub every_ms: u64,
    /// How strong it is: blocks that rot on each server, percent of the frames that are lost, or
    /// milliseconds by which frames are late or that each access to a disk takes. 0 for other kinds.
    pub amount: u32,
}

/// A scenario file is written by people.
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

    /// The cluster that a simulation of it has.
    #[must_use]
    pub fn shape(&self) -> Shape {
        // All are far fewer, as checked.
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
