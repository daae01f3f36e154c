//! `harvestfs checkpoint preempt`: applies Algorithm 1 to the jobs of this node.

use std::path::Path;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use harvestfs_checkpoint::adaptive::{Bandwidth, Preemption, Victim, order_victims};
use harvestfs_checkpoint::criu::CriuError;
use harvestfs_checkpoint::manifest::JobName;
use harvestfs_checkpoint::node::Node;
use harvestfs_checkpoint::process::{ProcessError, Tree};
use harvestfs_checkpoint::store::{Job, StoreError};

use super::CheckpointArgs;
use super::dump::{Afterwards, HowArgs, dump, refuse_directories, refuse_own, report, tidy};
use super::locations::has_lost_parts;
use super::resume::bandwidth;
use crate::output;
use crate::units::{self, Size};

/// Arguments of `harvestfs checkpoint preempt`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs checkpoint preempt --free 8GiB train=4711 index=4712 --dry-run")]
pub struct PreemptArgs {
    /// How much memory is needed; as many jobs are preempted as have it.
    #[arg(long)]
    free: Size,
    /// The jobs that may be preempted, each with its process.
    #[arg(required = true, value_name = "JOB=PID")]
    candidates: Vec<Candidate>,
    /// Whether to kill or to checkpoint.
    #[arg(long, value_enum, default_value_t = Policy::Adaptive)]
    policy: Policy,
    /// Only say what would be done.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// Whichever costs less.
    Adaptive,
    /// Always kill.
    Kill,
    /// Always checkpoint.
    Checkpoint,
}

#[derive(Clone, Debug)]
struct Candidate {
    job: JobName,
    pid: i32,
}

impl FromStr for Candidate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (job, pid) = text
            .rsplit_once('=')
            .ok_or_else(|| format!("`{text}` is no candidate; write JOB=PID"))?;
        Ok(Self {
            job: job.parse().map_err(|error| format!("{error}"))?,
            pid: pid
                .parse()
                .map_err(|_| format!("`{pid}` is not the id of a process"))?,
        })
    }
}

/// A candidate and what is known of it.
struct Running {
    job: Job,
    tree: Tree,
    memory_bytes: u64,
    victim: Victim,
}

/// What has become of a candidate since it was looked at.
enum Now {
    /// This is known of it by now.
    Runs(Running),
    /// It has ended by itself, which has freed so many bytes.
    Ended(u64),
    /// Its first process has ended, and others of it go on: nothing leads CRIU to them any more.
    Scattered(Running),
}

/// Runs it.
pub fn run(args: &CheckpointArgs, command: &PreemptArgs) -> anyhow::Result<()> {
    let runner = args.runner()?;
    let store = args.store()?;
    let keep = args.keep()?;
    // A dry run keeps nothing in the store; and the store is checked for trust only if something may be stored in it.
    let stores = command.policy != Policy::Kill && !command.dry_run;
    let work = stores.then(|| store.directory());
    let mut running: Vec<Running> = Vec::new();
    for candidate in &command.candidates {
        let job = store.job(candidate.job.clone());
        if command.policy != Policy::Kill {
            refuse_directories(&job)?;
        }
        match Tree::of(candidate.pid) {
            Ok(tree) => {
                refuse_own(&tree)?;
                // Memory that they have in common would count twice.
                if let Some(other) = running.iter().find(|it| it.tree.overlaps(&tree)) {
                    anyhow::bail!(
                        "{}={} and {}={} have processes in common: name only one of them",
                        other.job.name(),
                        other.tree.root(),
                        job.name(),
                        tree.root()
                    );
                }
                running.push(look_at(&runner.node, work, job, tree)?);
            }
            Err(error @ ProcessError::Gone(_)) => println!("{}: {error}", job.name()),
            Err(error) => return Err(error.into()),
        }
    }
    let bandwidth = bandwidth_for(command, &runner.node, store.directory())?;
    let waiting_s = |of: &Bandwidth| runner.node.queued_bytes() as f64 / of.write_bytes_per_s;
    let queue_s = bandwidth.as_ref().map_or(0.0, waiting_s);
    order_victims(&mut running, |it| match &bandwidth {
        Some(bandwidth) => it.victim.cost_s(bandwidth, queue_s),
        None => it.victim.progress_s,
    });
    let mut freed_bytes = 0;
    // Seconds of checkpoints that a dry run only announces.
    let mut planned_s = 0.0;
    let mut failed: Vec<String> = Vec::new();
    for it in running {
        if freed_bytes >= command.free.0 {
            break;
        }
        let it = match look_again(&runner.node, work, it)? {
            Now::Runs(it) => it,
            Now::Ended(bytes) => {
                freed_bytes += bytes;
                continue;
            }
            Now::Scattered(it) if command.policy == Policy::Kill => it,
            Now::Scattered(it) => {
                let name = it.job.name().to_string();
                output::complain(&anyhow::anyhow!(
                    "cannot preempt job {name}: process {} has ended, and others that it started go on",
                    it.tree.root()
                ));
                failed.push(name);
                continue;
            }
        };
        let costs = bandwidth
            .as_ref()
            .map(|bandwidth| (bandwidth, waiting_s(bandwidth) + planned_s));
        let decision = match costs {
            None => Preemption::Kill,
            Some(_) if command.policy == Policy::Checkpoint => it.victim.checkpoint(),
            Some((bandwidth, queue_s)) => it.victim.preempt(bandwidth, queue_s),
        };
        let alternative = costs.map_or_else(String::new, |(bandwidth, queue_s)| {
            let overhead_s = it.victim.overhead_s(bandwidth, queue_s);
            format!(", {overhead_s:.1} s for a checkpoint")
        });
        println!(
            "{}: {}: {:.1} s of work{alternative}; frees {}",
            it.job.name(),
            match decision {
                Preemption::Kill => "kill",
                Preemption::Checkpoint => "checkpoint",
                Preemption::Incremental => "incremental checkpoint",
            },
            it.victim.progress_s,
            units::human(it.memory_bytes),
        );
        if command.dry_run {
            freed_bytes += it.memory_bytes;
            if decision != Preemption::Kill
                && let Some(bandwidth) = &bandwidth
            {
                planned_s += it.victim.dump_bytes / bandwidth.write_bytes_per_s;
            }
            continue;
        }
        let done = match decision {
            Preemption::Kill => kill(&it.job, &it.tree),
            Preemption::Checkpoint | Preemption::Incremental => {
                let how = &command.how;
                dump(&runner, &it.job, &it.tree, None, how, Afterwards::End).map(|dumped| {
                    report(&dumped);
                    tidy(&it.job, keep);
                })
            }
        };
        match done {
            Ok(()) => {}
            // It has ended by itself, so its memory is free.
            Err(error) if it.tree.has_ended() => println!("{}: {error:#}", it.job.name()),
            Err(error) => {
                let name = it.job.name().to_string();
                let is_of_job = is_of_job(&error);
                let error = error.context(format!("cannot preempt job {name}"));
                // With a full store, for example, the other jobs would be stopped in vain, too.
                if !is_of_job {
                    return Err(error);
                }
                // Other jobs may have the memory that is needed.
                output::complain(&error);
                failed.push(name);
                continue;
            }
        }
        freed_bytes += it.memory_bytes;
    }
    anyhow::ensure!(
        freed_bytes >= command.free.0,
        "the jobs have only {} in all{}",
        units::human(freed_bytes),
        match &failed[..] {
            [] => String::new(),
            names => format!(
                ", without {}, which could not be preempted",
                names.join(", ")
            ),
        }
    );
    Ok(())
}

/// How fast checkpoints are here; `None` when all jobs are killed, which has to free memory even if nothing can be
/// written to the store to measure it.
fn bandwidth_for(
    command: &PreemptArgs,
    node: &Node,
    store: &Path,
) -> anyhow::Result<Option<Bandwidth>> {
    if command.policy == Policy::Kill {
        return Ok(None);
    }
    bandwidth(node, store, command.dry_run).map(Some)
}

/// Ends the processes of a job, unless another command works on it: a dump would be lost half-way.
fn kill(job: &Job, tree: &Tree) -> anyhow::Result<()> {
    // A directory that others can write to is not trusted, and locking a job without a directory would create one. No
    // other fault of the store prevents memory from being freed.
    let _lock = if refuse_directories(job).is_ok() {
        match job.numbers().and_then(|_| job.lock()) {
            Err(error @ StoreError::Locked(_)) => return Err(error.into()),
            lock => lock.ok(),
        }
    } else {
        None
    };
    tree.end()?;
    Ok(())
}

/// Whether one job could not be preempted and others may be: CRIU cannot take every job, another command may be
/// working on this one, no number may be left for its checkpoint, and its first process may have ended without the
/// others.
fn is_of_job(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<CriuError>(),
        Some(CriuError::Refused { .. })
    ) || matches!(
        error.downcast_ref::<StoreError>(),
        Some(StoreError::Locked(_) | StoreError::Overtaken { .. } | StoreError::NoNumber(_))
    ) || matches!(
        error.downcast_ref::<ProcessError>(),
        Some(ProcessError::Gone(_))
    )
}

/// What is known of a candidate by now: checkpoints of those before it may have taken minutes. It is said when its
/// first process has ended.
fn look_again(node: &Node, work: Option<&Path>, before: Running) -> anyhow::Result<Now> {
    match before.tree.again() {
        Ok(tree) => look_at(node, work, before.job, tree).map(Now::Runs),
        Err(error @ ProcessError::Gone(_)) => {
            println!("{}: {error}", before.job.name());
            Ok(if before.tree.has_ended() {
                Now::Ended(before.memory_bytes)
            } else {
                Now::Scattered(before)
            })
        }
        Err(error) => Err(error.into()),
    }
}

/// Files that this takes are made in `work` and are gone when it returns; without one, less is known.
fn look_at(node: &Node, work: Option<&Path>, job: Job, tree: Tree) -> anyhow::Result<Running> {
    let memory_bytes = tree.memory_bytes();
    // With an unusable one, the next checkpoint is a full one; `dump` reports why. Its progress does not count as
    // stored, since a killed job could not be restored from it.
    let last = job.newest().ok().flatten();
    let last = last.filter(|last| matches!(has_lost_parts(last, work), Ok(false)));
    let went_on = node.went_on()?;
    // A process that was restored, or has reused the id of another one, has stored none of its own work.
    let stored_ms = last
        .as_ref()
        .filter(|last| last.manifest.pid == tree.root() && went_on.is_of(last))
        .map_or(0, |last| last.manifest.progress_ms);
    let last = last.map(|last| last.manifest);
    let sent_share = match &last {
        None => 1.0,
        // How much the job changes between two checkpoints is unknown before the second one.
        Some(last) if last.parent.is_none() => 1.0,
        Some(last) => last.sent_bytes() as f64 / last.size_bytes().max(1) as f64,
    };
    let victim = Victim {
        dump_bytes: memory_bytes as f64 * sent_share,
        restore_bytes: memory_bytes as f64,
        progress_s: tree.cpu_ms().saturating_sub(stored_ms) as f64 / 1000.0,
        has_checkpoint: last.is_some(),
    };
    Ok(Running {
        job,
        tree,
        memory_bytes,
        victim,
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use clap::Parser;
    use harvestfs_checkpoint::process::END_DEADLINE;
    use harvestfs_checkpoint::store::Store;

    use super::*;

    #[test]
    fn a_job_that_another_command_works_on_keeps_no_other_one() {
        let name = || -> JobName { "job".parse().expect("a name") };
        let (job, number) = (name(), 1);
        let refused = CriuError::Refused {
            what: "dump",
            reason: String::new(),
        };
        assert!(is_of_job(&refused.into()));
        assert!(is_of_job(&StoreError::Locked(name()).into()));
        assert!(is_of_job(&StoreError::Overtaken { job, number }.into()));
        assert!(is_of_job(&StoreError::NoNumber(name()).into()));
        assert!(is_of_job(&ProcessError::Gone(42).into()));
        assert!(!is_of_job(&ProcessError::Lingers(42).into()));
        assert!(!is_of_job(&StoreError::NoStore("store".into()).into()));
    }

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        command: PreemptArgs,
    }

    #[test]
    fn a_store_that_takes_no_data_keeps_no_job_from_being_killed() {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::open(&directory.path().join("node")).expect("it is made");
        let measure = |policy: &str| {
            let arguments = ["preempt", "--free", "1MiB", "--policy", policy, "job=42"];
            let CommandLine { command } = CommandLine::parse_from(arguments);
            bandwidth_for(&command, &node, &directory.path().join("store"))
        };
        assert_eq!(measure("kill").expect("it is not measured"), None);
        for policy in ["adaptive", "checkpoint"] {
            measure(policy).expect_err("it cannot be measured");
        }
    }

    #[test]
    fn a_candidate_is_looked_at_before_each_decision() {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::open(&directory.path().join("node")).expect("it is made");
        let store = Store::open(directory.path().to_owned()).expect("it is there");
        // Limited, in case the test fails.
        let mut process = Command::new("sh")
            .args(["-c", "ulimit -t 60; while :; do :; done"])
            .spawn()
            .expect("a shell");
        let tree = Tree::of(i32::try_from(process.id()).expect("a process id"));
        let tree = tree.expect("it runs");
        let job = store.job("job".parse().expect("a name"));
        let first = look_at(&node, None, job, tree).expect("it is seen");
        let progress_s = first.victim.progress_s;
        let mut last = first;
        let deadline = Instant::now() + END_DEADLINE;
        while last.victim.progress_s <= progress_s {
            assert!(Instant::now() < deadline, "it does not work");
            let again = look_again(&node, None, last).expect("it is seen");
            let Now::Runs(again) = again else {
                panic!("it has ended");
            };
            last = again;
        }
        process.kill().expect("it is ours");
        process.wait().expect("it is ours");
        let had_bytes = last.memory_bytes;
        assert!(had_bytes > 0);
        let again = look_again(&node, None, last).expect("it is missed");
        assert!(matches!(again, Now::Ended(bytes) if bytes == had_bytes));
    }

    #[test]
    fn a_job_that_another_command_works_on_is_not_killed() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path().to_owned()).expect("it is there");
        let job = store.job("job".parse().expect("a name"));
        let start = || {
            let process = Command::new("sleep").arg("600").spawn().expect("sleep");
            let tree = Tree::of(i32::try_from(process.id()).expect("a process id"));
            (process, tree.expect("it runs"))
        };
        let (mut process, tree) = start();
        kill(&job, &tree).expect("nobody works on it");
        process.wait().expect("it is ours");
        assert!(!job.directory().exists(), "there is nothing to lock");

        let (mut process, tree) = start();
        let lock = job.lock().expect("it is free");
        let error = kill(&job, &tree).expect_err("it is being dumped");
        assert!(is_of_job(&error), "{error:#}");
        assert!(!tree.has_ended());
        drop(lock);
        kill(&job, &tree).expect("nobody works on it any more");
        process.wait().expect("it is ours");
    }

    #[test]
    fn others_that_the_first_process_leaves_behind_are_not_taken_for_ended() {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::open(&directory.path().join("node")).expect("it is made");
        let store = Store::open(directory.path().to_owned()).expect("it is there");
        let job = store.job("job".parse().expect("a name"));
        let mut first = Command::new("sh")
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = String::new();
        let said = first.stdout.take().expect("a pipe");
        BufReader::new(said).read_line(&mut line).expect("it says");
        let other: i32 = line.trim().parse().expect("a process id");
        let tree = Tree::of(i32::try_from(first.id()).expect("a process id"));
        let tree = tree.expect("it runs");
        assert!(tree.contains(other));
        let seen = look_at(&node, None, job, tree).expect("it is seen");
        let had_bytes = seen.memory_bytes;
        first.kill().expect("it is ours");
        first.wait().expect("it is ours");
        let Now::Scattered(left) = look_again(&node, None, seen).expect("it is missed") else {
            panic!("the other one goes on");
        };
        assert_eq!(left.memory_bytes, had_bytes);
        left.tree.end().expect("it is ours");
        let again = look_again(&node, None, left).expect("it is missed");
        assert!(matches!(again, Now::Ended(bytes) if bytes == had_bytes));
    }
}
