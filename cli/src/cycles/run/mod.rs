//! `harvestfs cycles run`: runs a job's command with the class that Algorithm 1 selects.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::num::NonZeroU32;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use harvestfs_cycles::controller::label_of;
use harvestfs_cycles::dag::{Dag, Stage};
use harvestfs_cycles::job::{Capacities, JobType, PastRun, Thresholds};
use harvestfs_cycles::select::{
    ClassHistory, ClassId, Headrooms, LargerThanCluster, RESERVE_SHARE, Selection, Server, Weights,
};
use harvestfs_protocol::classes::{ClassedServer, Classes};
use harvestfs_protocol::history::TenantPattern;
use harvestfs_telemetry::profile::Pattern;
use rand::Rng;
use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::follow::owners::{Namenode, Owners};
use super::stored;
use crate::admin::link;
use crate::cluster::ClusterArgs;
use crate::signals::Ending;

/// Replaced in the command by the label.
const PLACEHOLDER: &str = "{label}";
/// Jobs whose lengths are remembered before they decide what is short and long: fewer say little of those to come.
const RUNS_MIN: usize = 10;
/// The same in the command's environment.
const LABEL_VARIABLE: &str = "HARVESTFS_LABEL";

/// Arguments of `harvestfs cycles run`.
#[derive(Debug, Args)]
#[command(
    after_help = "The file describes the job, so that its need is known:\n\n  \
                  name = \"word-count\"       # its length is remembered under this name\n  \
                  [[stages]]\n  \
                  name = \"map\"\n  \
                  tasks = 20                # each in a container\n  \
                  cores = 1                 # of each container [default: 1]\n  \
                  [[stages]]\n  \
                  name = \"reduce\"\n  \
                  tasks = 2\n  \
                  inputs = [\"map\"]          # begins when these have ended\n\n\
                  In the command, {label} becomes the label of the chosen class, and nothing when no class has room: then the job\n\
                  runs anywhere. HARVESTFS_LABEL has the label too.\n\n\
                  Examples:\n  \
                  harvestfs cycles run job.toml -- yarn jar examples.jar wordcount \
                  -Dmapreduce.job.node-label-expression={label} /in /out\n  \
                  harvestfs cycles run job.toml -- yarn jar shell.jar -shell_command date -node_label_expression {label}"
)]
pub struct RunArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Description of the job.
    job: PathBuf,
    /// Cores of each server [default: those that the server says it has, or those of this machine].
    #[arg(long, value_name = "N")]
    server_cores: Option<NonZeroU32>,
    /// Jobs whose last run was shorter are short [default: by the lengths of ten jobs or more, or 173s].
    #[arg(long, value_name = "TIME", requires = "long_above")]
    short_below: Option<humantime::Duration>,
    /// Jobs whose last run was longer are long [default: by the lengths of ten jobs or more, or 433s].
    #[arg(long, value_name = "TIME", requires = "short_below")]
    long_above: Option<humantime::Duration>,
    /// Where the lengths of jobs are kept [default: job-lengths.json beside the client's configuration].
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Job {
    name: String,
    stages: Vec<JobStage>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JobStage {
    name: String,
    tasks: NonZeroU32,
    #[serde(default = "one")]
    cores: NonZeroU32,
    #[serde(default)]
    inputs: Vec<String>,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

impl Job {
    fn load(path: &Path) -> anyhow::Result<(Self, Dag)> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        let job: Self =
            toml::from_str(&text).with_context(|| format!("{shown} is not understood"))?;
        let stages = job.stages.iter().map(|stage| Stage {
            name: stage.name.clone(),
            tasks: stage.tasks,
            cores_per_task: stage.cores,
            inputs: stage.inputs.clone(),
        });
        let dag = Dag::new(&stages.collect::<Vec<_>>()).with_context(|| shown.to_string())?;
        Ok((job, dag))
    }
}

/// The command ended with an error of its own.
#[derive(Debug)]
pub struct Ended {
    /// As the shell has it: 128 and the signal, if it was killed.
    pub status: u8,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the command ended with status {}", self.status)
    }
}

impl std::error::Error for Ended {}

impl Ended {
    fn of(status: ExitStatus) -> Option<Self> {
        let signal = status.signal().map(|signal| signal + 128);
        let code = status.code().or(signal).unwrap_or(1);
        let status = u8::try_from(code).unwrap_or(u8::MAX);
        (status != 0).then_some(Self { status })
    }
}

/// How long jobs took.
#[derive(Debug)]
struct History {
    path: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct LastRun {
    length_s: f64,
    /// In seconds since 1970.
    ended_unix_s: u64,
    /// The most cores that it used at the same time; not known of runs before this was kept.
    #[serde(default)]
    cores: Option<u64>,
}

impl History {
    fn load(&self) -> anyhow::Result<BTreeMap<String, LastRun>> {
        stored::load(&self.path)
    }

    /// A name that the history cannot have.
    fn lock_path(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".lock");
        path.into()
    }

    /// Others that end at the same moment wait.
    fn remember(&self, job: &str, length_s: f64, cores: u64) -> anyhow::Result<()> {
        let store = || -> anyhow::Result<()> {
            let lock = File::create(self.lock_path())?;
            rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
            let mut runs = self.load()?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let run = LastRun {
                length_s,
                ended_unix_s: now.map_or(0, |now| now.as_secs()),
                cores: Some(cores),
            };
            runs.insert(job.to_owned(), run);
            stored::store(&self.path, &runs)
        };
        store().with_context(|| format!("cannot remember in {}", self.path.display()))
    }
}

fn pattern(pattern: TenantPattern) -> Pattern {
    match pattern {
        TenantPattern::Periodic => Pattern::Periodic,
        TenantPattern::Constant => Pattern::Constant,
        TenantPattern::Unpredictable => Pattern::Unpredictable,
    }
}

/// Cores of a server.
#[derive(Clone, Copy, Debug)]
struct ServerCores {
    /// Of all of them, whatever they say.
    given: Option<NonZeroU32>,
    /// Of those that do not say.
    here: NonZeroU32,
}

impl ServerCores {
    fn of(self, server: &ClassedServer) -> NonZeroU32 {
        let said = || server.cores.and_then(NonZeroU32::new);
        self.given.or_else(said).unwrap_or(self.here)
    }
}

fn share(permille: u16) -> f64 {
    f64::from(permille.min(1_000)) / 1_000.0
}

/// What the classes of each pattern can compute beside what their owners use on average.
fn capacities(classes: &Classes, server_cores: ServerCores) -> Capacities {
    let of = |pattern: TenantPattern| {
        let classes = classes.classes.iter().filter(|it| it.pattern == pattern);
        let cores = classes.map(|class| {
            let cores = class.servers.iter().map(|it| server_cores.of(it).get());
            let all: f64 = cores.map(f64::from).sum();
            all * (1.0 - share(class.average_cpu_permille))
        });
        cores.sum()
    };
    Capacities {
        unpredictable: of(TenantPattern::Unpredictable),
        periodic: of(TenantPattern::Periodic),
        constant: of(TenantPattern::Constant),
    }
}

/// By the last runs of jobs, if there are enough: each counts with all the cores that it could use, for as long as it took.
fn thresholds(runs: &BTreeMap<String, LastRun>, capacities: Capacities) -> Thresholds {
    let past = runs.values().filter_map(|run| {
        let work_core_s = run.length_s * run.cores? as f64;
        let is_positive = run.length_s > 0.0 && work_core_s > 0.0 && work_core_s.is_finite();
        is_positive.then_some(PastRun {
            length_s: run.length_s,
            work_core_s,
        })
    });
    let past: Vec<PastRun> = past.collect();
    if past.len() < RUNS_MIN {
        return Thresholds::PAPER;
    }
    // This fails when there are no classes, and so nothing to choose from.
    Thresholds::from_history(&past, capacities).unwrap_or(Thresholds::PAPER)
}

/// The label for a job, if a class has room, and why.
fn choose(
    classes: &Classes,
    server_cores: ServerCores,
    job_type: JobType,
    dag: &Dag,
    rng: &mut impl Rng,
) -> Result<(Option<u32>, String), LargerThanCluster> {
    let histories = classes.classes.iter().map(|class| ClassHistory {
        pattern: pattern(class.pattern),
        average_cpu_share: share(class.average_cpu_permille),
        peak_cpu_share: share(class.peak_cpu_permille),
    });
    // A server without current data counts as having no room.
    let used: Vec<(Server, u32)> = (0..)
        .zip(&classes.classes)
        .flat_map(|(number, class)| {
            let of_class = class.servers.iter();
            of_class.filter_map(move |it| {
                let cores = server_cores.of(it);
                let server = Server {
                    class: ClassId(number),
                    cores,
                };
                let used = u32::from(it.cpu_permille?).saturating_mul(cores.get());
                Some((server, used))
            })
        })
        .collect();
    let servers: Vec<Server> = used.iter().map(|it| it.0).collect();
    let headrooms = Headrooms::new(&histories.collect::<Vec<_>>(), &servers, RESERVE_SHARE);
    // This fails when there are no classes yet.
    let Ok(mut headrooms) = headrooms else {
        return Ok((None, "there are no classes yet".to_owned()));
    };
    for (place, (_, millicores)) in used.iter().enumerate() {
        headrooms.uses(place, *millicores);
    }
    let need = dag.max_concurrent_cores();
    let selection = headrooms.select(job_type, need, &Weights::default(), rng)?;
    let number = |id: ClassId| classes.classes[id.0 as usize].class;
    Ok(match selection {
        Selection::One(class) => (Some(number(class)), "it fits".to_owned()),
        // YARN accepts only one label.
        Selection::Several(of) => {
            let room = |id: &ClassId| headrooms.room_cores(job_type, *id);
            let roomiest = of
                .iter()
                .copied()
                .max_by(|a, b| room(a).total_cmp(&room(b)));
            let why = format!("{} classes together have room, this one the most", of.len());
            (roomiest.map(number), why)
        }
        Selection::None => (None, "no class has room now".to_owned()),
    })
}

/// With the label in place of each placeholder.
fn with_label(word: &OsStr, label: &str) -> OsString {
    let (word, from) = (word.as_bytes(), PLACEHOLDER.as_bytes());
    let mut replaced = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some(first) = rest.first() {
        match rest.strip_prefix(from) {
            Some(after) => {
                replaced.extend(label.as_bytes());
                rest = after;
            }
            None => {
                replaced.push(*first);
                rest = &rest[1..];
            }
        }
    }
    OsString::from_vec(replaced)
}

/// Runs a command to its end, and passes on the signals that it would be told. They are listened to before it begins: one that comes
/// while it is started would end only this process, and the command would go on. What is ignored the command ignores too: a signal
/// that is listened to would be one by which it ends.
async fn run_to_end(command: &mut Command, signals: &mut Ending) -> std::io::Result<ExitStatus> {
    let mut child = command.spawn()?;
    loop {
        let number = tokio::select! {
            biased;
            status = child.wait() => return status,
            number = signals.received() => number,
        };
        let pid = child
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(number))
            && !(signal == Signal::INT && is_in_foreground())
        {
            // It may just have ended.
            let _ = kill_process(pid, signal);
        }
    }
}

/// Whether Ctrl-C on the terminal reaches this process, and with it the command, which is of the same process group. Where
/// standard input comes from does not matter for that.
fn is_in_foreground() -> bool {
    File::open("/dev/tty")
        .and_then(|terminal| Ok(rustix::termios::tcgetpgrp(&terminal)?))
        .is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Runs `harvestfs cycles run`.
///
/// # Errors
/// When the job makes no sense or the cluster cannot be reached; [`Ended`] when the command fails.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let (job, dag) = Job::load(&args.job)?;
    let given = match (args.short_below, args.long_above) {
        (Some(short), Some(long)) => {
            Some(Thresholds::new(short.as_secs_f64(), long.as_secs_f64())?)
        }
        _ => None,
    };
    let history = History {
        path: match &args.history {
            Some(path) => path.clone(),
            None => args
                .cluster
                .client_file("admin")?
                .with_file_name("job-lengths.json"),
        },
    };
    let here = || std::thread::available_parallelism().ok()?.try_into().ok();
    let server_cores = ServerCores {
        given: args.server_cores,
        here: here().unwrap_or(NonZeroU32::MIN),
    };
    let runs = history.load()?;
    let last_run_s = runs.get(&job.name).map(|run| run.length_s);
    link::block_on(async {
        let classes = Namenode::new(&args.cluster).ask().await?;
        let of_history = || thresholds(&runs, capacities(&classes, server_cores));
        let thresholds = given.unwrap_or_else(of_history);
        let job_type = thresholds.job_type(last_run_s);
        let (class, why) = choose(&classes, server_cores, job_type, &dag, &mut rand::rng())
            .with_context(|| format!("job {}", job.name))?;
        let label = class.map(label_of).unwrap_or_default();
        eprintln!(
            "{}: {} job ({:.0} s and {:.0} s are the limits) of {} cores at a time: {} ({why})",
            job.name,
            job_type.name(),
            thresholds.short_below_s(),
            thresholds.long_above_s(),
            dag.max_concurrent_cores(),
            if label.is_empty() {
                "any server"
            } else {
                &label
            },
        );
        let mut words = args.command.iter().map(|word| with_label(word, &label));
        let program = words.next().context("there is no command")?;
        let mut signals = Ending::listen()?;
        let began = Instant::now();
        let mut command = Command::new(&program);
        command.args(words).env(LABEL_VARIABLE, &label);
        let status = run_to_end(&mut command, &mut signals).await;
        let status = status.with_context(|| format!("cannot run {}", program.display()))?;
        if let Some(ended) = Ended::of(status) {
            return Err(ended.into());
        }
        let cores = dag.max_concurrent_cores().get();
        let remembered = history.remember(&job.name, began.elapsed().as_secs_f64(), cores);
        // The job itself succeeded, and the caller relies on the exit status.
        if let Err(error) = remembered {
            eprintln!("harvestfs: {error:#}");
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests;
