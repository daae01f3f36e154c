//! Measures how long programs wait when the leading namenode fails, and whether they see errors.
//!
//! - `cluster`: three namenodes, three datanodes and a mount, each in a network of its own;
//! - `probe`: a program on the mount that notices every pause, and what was promised to it;
//! - `report`: the lengths of pauses, and whether the goals were met.

mod cluster;
mod probe;
mod report;

use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::RngExt;
use serde::Serialize;

use self::cluster::Group;
use self::probe::{Probe, STRANGE};
use super::network::Network;
use super::{LiveError, disk};
use crate::random;

pub use probe::{Operation, Wrong};
pub use report::{FaultReport, Quantiles, Report, Round};

/// A fault of the leading namenode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// SIGKILL, and a restart a little later.
    Kill,
    /// SIGSTOP, then SIGCONT.
    Hang,
    /// It is cut off from all other parts for a while.
    Partition,
    /// A sync of its disk fails; it ends, loses what no sync stored, and is restarted.
    Disk,
    /// It is asked to hand over leadership.
    Transfer,
}

impl FaultKind {
    /// All kinds, in the order in which they are measured.
    pub const ALL: [Self; 5] = [
        Self::Kill,
        Self::Hang,
        Self::Partition,
        Self::Disk,
        Self::Transfer,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Hang => "hang",
            Self::Partition => "partition",
            Self::Disk => "disk",
            Self::Transfer => "transfer",
        }
    }
}

impl FromStr for FaultKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kind = Self::ALL.into_iter().find(|it| it.name() == text);
        kind.ok_or_else(|| {
            let names = Self::ALL.map(Self::name);
            format!("it is one of: {}", names.join(", "))
        })
    }
}

/// How long a namenode that was killed is down.
const DOWN: Duration = Duration::from_secs(2);
/// How long a namenode hangs or is cut off.
const AWAY: Duration = Duration::from_secs(5);
/// The pause between two rounds, in which a namenode that was unreachable catches up.
const SETTLE: Duration = Duration::from_secs(2);
/// The most by which a fault is delayed at random, so that it begins at any time between heartbeats, elections and
/// syncs.
const JITTER_MS_MAX: u64 = 300;
/// The names of the mount with the program, and of the one that is used for the comparison.
const PROBED: &str = "mount";
const COMPARED: &str = "mount-after";

/// The options of a measurement.
pub struct FailoverOptions<'a> {
    /// The binary whose parts make the cluster.
    pub binary: &'a Path,
    /// Where the clusters' directories are made; they are not removed.
    pub directory: &'a Path,
    /// The kinds of faults, each measured on a cluster of its own.
    pub kinds: &'a [FaultKind],
    /// How often each fault is inflicted.
    pub rounds: usize,
    /// Decides the exact times, and what is read.
    pub seed: u64,
    /// Set by Ctrl-C.
    pub interrupted: &'a AtomicBool,
}

/// The result of a measurement.
pub struct Measured {
    /// The report on the kinds of faults whose measurement was completed.
    pub report: Report,
    /// Why the measurement of the next kind was not completed.
    pub error: Option<LiveError>,
}

/// Inflicts faults on the leader repeatedly while a program works on a mount, and compares at the end all that was
/// promised to the program. `progress` receives each round. Ends with the first kind of fault whose measurement fails.
///
/// Must be called on a thread that lives until the call returns, and before the process has other threads: the calling
/// thread moves to network and mount namespaces of its own.
///
/// # Errors
/// When this machine cannot run the cluster.
pub fn measure(
    options: &FailoverOptions<'_>,
    progress: &mut dyn FnMut(FaultKind, &Round),
) -> Result<Measured, LiveError> {
    disk::own_mounts()?;
    let network = Network::new(cluster::LINKS, options.seed)?;
    // Child processes are started by this thread, or by those of the network, at whose end the kernel ends them.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(LiveError::io("start the runtime"))?;
    let go_on = || !options.interrupted.load(Ordering::Relaxed);
    let mut faults = Vec::new();
    let mut error = None;
    for &kind in options.kinds {
        let data = options.directory.join(kind.name());
        let measured = Group::start(options.binary, data, &network, &runtime, kind, &go_on)
            .and_then(|mut group| hurt(&mut group, kind, options, &go_on, progress));
        match measured {
            Ok(fault) => faults.push(fault),
            Err(failed) => {
                error = Some(failed);
                break;
            }
        }
    }
    runtime.shutdown_timeout(Duration::from_secs(5));
    let report = Report {
        seed: options.seed,
        faults,
        error: error.as_ref().map(ToString::to_string),
    };
    Ok(Measured { report, error })
}

fn hurt(
    group: &mut Group<'_>,
    kind: FaultKind,
    options: &FailoverOptions<'_>,
    go_on: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(FaultKind, &Round),
) -> Result<FaultReport, LiveError> {
    group.run(&["fs", "mkdir", &format!("/{STRANGE}")])?;
    let mount = group.mount(PROBED)?;
    let probe = Probe::start(&mount, options.seed, go_on)?;
    let mut rng = random::stream(options.seed, kind.name());
    let mut rounds = Vec::new();
    for _ in 0..options.rounds {
        group.rest(SETTLE)?;
        let leader = group.leader()?;
        probe.begin_round();
        group.rest(Duration::from_millis(rng.random_range(0..=JITTER_MS_MAX)))?;
        group.hurt(leader, kind)?;
        group.wait_whole()?;
        let round = Round::new(probe.end_round(go_on)?);
        progress(kind, &round);
        rounds.push(round);
    }
    let mut promised = probe.finish(go_on)?;
    // What is only in the mount's memory does not count.
    group.kill_mount(&mount);
    let after = group.mount(COMPARED)?;
    let (looked_for, missing) = promised.compare(&after, go_on)?;
    // Namenodes that ended in the meantime count, too.
    group.wait_whole()?;
    Ok(FaultReport {
        kind,
        rounds,
        operations: promised.operations.iter().sum(),
        errors: promised.errors,
        looked_for,
        missing,
        ended: std::mem::take(&mut group.ended),
    })
}
