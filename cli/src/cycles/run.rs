//! `harvestfs cycles run`: runs a job's command with the class that Algorithm 1 chooses for it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::IsTerminal;
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
use harvestfs_cycles::job::{JobType, Thresholds};
use harvestfs_cycles::select::{
    ClassHistory, ClassId, Headrooms, LargerThanCluster, RESERVE_SHARE, Selection, Server, Weights,
};
use harvestfs_protocol::classes::Classes;
use harvestfs_protocol::history::TenantPattern;
use harvestfs_telemetry::profile::Pattern;
use rand::Rng;
use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::follow::owners::{Namenode, Owners};
use super::stored;
use crate::admin::link;
use crate::cluster::ClusterArgs;

/// Replaced in the command by the label.
const PLACEHOLDER: &str = "{label}";
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
    /// Cores of each server [default: those of this machine].
    #[arg(long, value_name = "N")]
    server_cores: Option<NonZeroU32>,
    /// Jobs whose last run was shorter are short.
    #[arg(long, default_value = "173s", value_name = "TIME")]
    short_below: humantime::Duration,
    /// Jobs whose last run was longer are long.
    #[arg(long, default_value = "433s", value_name = "TIME")]
    long_above: humantime::Duration,
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
}

impl History {
    fn load(&self) -> anyhow::Result<BTreeMap<String, LastRun>> {
        stored::load(&self.path)
    }

    /// Others that end at the same moment wait.
    fn remember(&self, job: &str, length_s: f64) -> anyhow::Result<()> {
        let store = || -> anyhow::Result<()> {
            let lock = File::create(self.path.with_extension("lock"))?;
            rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
            let mut runs = self.load()?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let run = LastRun {
                length_s,
                ended_unix_s: now.map_or(0, |now| now.as_secs()),
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

/// The label for a job, if a class has room, and why.
fn choose(
    classes: &Classes,
    server_cores: NonZeroU32,
    job_type: JobType,
    dag: &Dag,
    rng: &mut impl Rng,
) -> Result<(Option<u32>, String), LargerThanCluster> {
    let share = |permille: u16| f64::from(permille.min(1_000)) / 1_000.0;
    let histories = classes.classes.iter().map(|class| ClassHistory {
        pattern: pattern(class.pattern),
        average_cpu_share: share(class.average_cpu_permille),
        peak_cpu_share: share(class.peak_cpu_permille),
    });
    // A server of which nothing is known now has no room.
    let used: Vec<(Server, u32)> = (0..)
        .zip(&classes.classes)
        .flat_map(|(number, class)| {
            let of_class = class.servers.iter().filter_map(|it| it.cpu_permille);
            of_class.map(move |permille| {
                let server = Server {
                    class: ClassId(number),
                    cores: server_cores,
                };
                (server, u32::from(permille) * server_cores.get())
            })
        })
        .collect();
    let servers: Vec<Server> = used.iter().map(|it| it.0).collect();
    let headrooms = Headrooms::new(&histories.collect::<Vec<_>>(), &servers, RESERVE_SHARE);
    // There is no class yet.
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
        // YARN takes one label.
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

/// Waits for the command, and passes on what it would be told.
async fn wait(mut child: Child) -> anyhow::Result<ExitStatus> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    // A terminal tells all of its job.
    let is_told = std::io::stdin().is_terminal();
    loop {
        let signal = tokio::select! {
            biased;
            status = child.wait() => return Ok(status?),
            _ = interrupt.recv() => Signal::INT,
            _ = terminate.recv() => Signal::TERM,
            _ = hangup.recv() => Signal::HUP,
        };
        let pid = child
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid
            && !(is_told && signal == Signal::INT)
        {
            // It may have ended at this moment.
            let _ = kill_process(pid, signal);
        }
    }
}

/// Runs `harvestfs cycles run`.
///
/// # Errors
/// When the job makes no sense or the cluster cannot be reached; [`Ended`] when the command fails.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let (job, dag) = Job::load(&args.job)?;
    let thresholds = Thresholds::new(
        args.short_below.as_secs_f64(),
        args.long_above.as_secs_f64(),
    )?;
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
    let server_cores = args.server_cores.or_else(here).unwrap_or(NonZeroU32::MIN);
    let last_run_s = history.load()?.get(&job.name).map(|run| run.length_s);
    let job_type = thresholds.job_type(last_run_s);
    link::block_on(async {
        let classes = Namenode::new(&args.cluster).ask().await?;
        let (class, why) = choose(&classes, server_cores, job_type, &dag, &mut rand::rng())
            .with_context(|| format!("job {}", job.name))?;
        let label = class.map(label_of).unwrap_or_default();
        eprintln!(
            "{}: {} job of {} cores at a time: {} ({why})",
            job.name,
            job_type.name(),
            dag.max_concurrent_cores(),
            if label.is_empty() {
                "any server"
            } else {
                &label
            },
        );
        let mut words = args.command.iter().map(|word| with_label(word, &label));
        let program = words.next().context("there is no command")?;
        let began = Instant::now();
        let child = Command::new(&program)
            .args(words)
            .env(LABEL_VARIABLE, &label)
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let status = wait(child).await?;
        if let Some(ended) = Ended::of(status) {
            return Err(ended.into());
        }
        history.remember(&job.name, began.elapsed().as_secs_f64())
    })
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::classes::{CLASSES_VERSION, ClassedServer, UtilisationClass};
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;

    fn class(class: u32, pattern: TenantPattern, permille: &[u16]) -> UtilisationClass {
        let server = |(number, permille): (usize, &u16)| ClassedServer {
            name: format!("s{class}-{number}"),
            cpu_permille: Some(*permille),
        };
        UtilisationClass {
            class,
            pattern,
            average_cpu_permille: 100,
            peak_cpu_permille: 500,
            tenants: Vec::new(),
            servers: permille.iter().enumerate().map(server).collect(),
            cpu_permille: None,
            headroom: None,
        }
    }

    fn classes(classes: Vec<UtilisationClass>) -> Classes {
        Classes {
            version: CLASSES_VERSION,
            analysed_unix_s: None,
            classes,
            without_class: Vec::new(),
        }
    }

    fn dag(tasks: u32) -> Dag {
        Dag::new(&[Stage {
            name: "all".to_owned(),
            tasks: NonZeroU32::new(tasks).unwrap(),
            cores_per_task: NonZeroU32::MIN,
            inputs: Vec::new(),
        }])
        .unwrap()
    }

    fn chosen(of: &Classes, job_type: JobType, tasks: u32) -> Option<u32> {
        let cores = NonZeroU32::new(12).unwrap();
        let mut rng = SmallRng::seed_from_u64(1);
        choose(of, cores, job_type, &dag(tasks), &mut rng)
            .unwrap()
            .0
    }

    #[test]
    fn the_class_has_room_for_the_job() {
        use TenantPattern::{Constant, Periodic};
        let two = classes(vec![
            class(4, Constant, &[900]),
            class(7, Periodic, &[100, 200]),
        ]);
        assert_eq!(chosen(&two, JobType::Medium, 5), Some(7));
        // Peaks of owners leave 2 cores of a server.
        assert_eq!(chosen(&two, JobType::Long, 5), None);
        assert_eq!(chosen(&two, JobType::Long, 4), Some(7));
        // Both together.
        let both = classes(vec![
            class(0, Constant, &[100]),
            class(1, Constant, &[0, 0]),
        ]);
        assert_eq!(chosen(&both, JobType::Short, 20), Some(1));
        assert_eq!(chosen(&classes(Vec::new()), JobType::Short, 1), None);
        let cores = NonZeroU32::new(12).unwrap();
        let mut rng = SmallRng::seed_from_u64(1);
        let error = choose(&two, cores, JobType::Short, &dag(25), &mut rng).unwrap_err();
        assert_eq!((error.need_cores.get(), error.cluster_cores), (25, 24));
    }

    #[test]
    fn labels_are_put_into_commands() {
        let word = |word: &str| with_label(OsStr::new(word), "harvestfs-3");
        assert_eq!(word("-Dx={label}"), "-Dx=harvestfs-3");
        assert_eq!(word("{label}{label}x"), "harvestfs-3harvestfs-3x");
        assert_eq!(word("{labe"), "{labe");
    }

    #[test]
    fn jobs_that_make_no_sense_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("job.toml");
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            format!("{:#}", Job::load(&path).unwrap_err())
        };
        let stage = |name: &str, input: &str| {
            format!("[[stages]]\nname = \"{name}\"\ntasks = 1\ninputs = [\"{input}\"]\n")
        };
        let cycle = format!("name = \"j\"\n{}{}", stage("a", "b"), stage("b", "a"));
        assert!(error(&cycle).contains("stages wait for each other: "));
        let unknown = format!("name = \"j\"\n{}", stage("a", "c"));
        assert!(error(&unknown).contains("`c`, which is no stage"));
        assert!(error("name = \"j\"\nstages = []").contains("has no stage"));
        assert!(error("name = \"j\"\nstages = 3").contains("is not understood"));
    }

    #[test]
    fn the_last_length_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let history = History {
            path: directory.path().join("lengths.json"),
        };
        assert!(history.load().unwrap().is_empty());
        history.remember("a", 1.0).unwrap();
        history.remember("b", 500.0).unwrap();
        history.remember("a", 2.5).unwrap();
        let runs = history.load().unwrap();
        assert_eq!((runs["a"].length_s, runs["b"].length_s), (2.5, 500.0));
        std::fs::write(&history.path, "{").unwrap();
        assert!(format!("{:#}", history.load().unwrap_err()).contains("is damaged"));
    }
}
