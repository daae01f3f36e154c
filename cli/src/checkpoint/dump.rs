//! `harvestfs checkpoint dump`

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use harvestfs_checkpoint::criu::{self, Criu, Dump};
use harvestfs_checkpoint::guard::Guard;
use harvestfs_checkpoint::image::{self, CHAIN_DEPTH_MAX};
use harvestfs_checkpoint::intake::{Intake, IntakeError};
use harvestfs_checkpoint::manifest::{Allow, Image, JobName, MANIFEST_VERSION, Manifest};
use harvestfs_checkpoint::node::draft_maker;
use harvestfs_checkpoint::process::{ProcessError, Tree, can_freeze, root_of_cgroup};
use harvestfs_checkpoint::store::{Checkpoint, Draft, Job};
use harvestfs_checkpoint::tracking::Tracked;
use harvestfs_checkpoint::{page_server, trust};
use harvestfs_protocol::unix_now_ms;

use super::{CheckpointArgs, Runner, locations};
use crate::units;

/// Arguments of `harvestfs checkpoint dump`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs checkpoint dump 4711 --job train --store /mnt/harvestfs/checkpoints\n  \
    harvestfs checkpoint dump --cgroup /sys/fs/cgroup/freezer/train --job train --leave-running")]
pub struct DumpArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Name of the job.
    #[arg(long)]
    job: JobName,
    /// Let the job go on afterwards.
    #[arg(long)]
    leave_running: bool,
    /// Have the kernel track what the job changes from then on, where it can: the next checkpoint need not
    /// read all memory. Only for jobs that do not move memory (`mremap`), which kernels do not notice.
    #[arg(long, requires = "leave_running")]
    track_mem: bool,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct TargetArgs {
    /// The process; what it started goes with it.
    pid: Option<i32>,
    /// The processes of this cgroup: its directory, for example /sys/fs/cgroup/freezer/job.
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
}

/// How a checkpoint is made.
#[derive(Clone, Debug, Default, Args)]
pub struct HowArgs {
    /// Store everything, also what the last checkpoint has.
    #[arg(long)]
    full: bool,
    /// What CRIU refuses unless it is allowed: `shell-job`, `tcp-established`, `ext-unix-sk`,
    /// `file-locks`. Remembered for the restore.
    #[arg(long, value_name = "WHAT")]
    allow: Vec<Allow>,
}

/// What becomes of a job when its checkpoint is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Afterwards {
    /// It is ended.
    End,
    /// It goes on.
    GoOn {
        /// Whether the kernel is to track what it changes from then on.
        track_mem: bool,
    },
}

/// Runs it.
pub fn run(args: &CheckpointArgs, command: &DumpArgs) -> anyhow::Result<()> {
    // First, as it reports that root is needed.
    let runner = args.runner()?;
    let job = args.job(&command.job)?;
    let keep = args.keep()?;
    let (pid, freezer) = match (&command.target.pid, &command.target.cgroup) {
        (Some(pid), _) => (*pid, None),
        (None, Some(cgroup)) => (
            root_of_cgroup(cgroup)?,
            can_freeze(cgroup).then_some(cgroup.as_path()),
        ),
        (None, None) => anyhow::bail!("say which process, or which --cgroup"),
    };
    let afterwards = if command.leave_running {
        Afterwards::GoOn {
            track_mem: command.track_mem,
        }
    } else {
        Afterwards::End
    };
    let tree = Tree::of(pid)?;
    let dumped = dump(&runner, &job, &tree, freezer, &command.how, afterwards)?;
    report(&dumped);
    tidy(&job, keep);
    Ok(())
}

/// A checkpoint that was made.
#[derive(Debug)]
pub struct Dumped {
    /// It.
    pub checkpoint: Checkpoint,
    /// Whether the kernel tracked what was changed since its parent; else all memory was compared.
    pub tracked_by_kernel: bool,
}

/// Prints what was stored.
pub fn report(dumped: &Dumped) {
    let manifest = &dumped.checkpoint.manifest;
    println!(
        "{} {}: {} of memory and state, {} sent{}{}; the job was stopped for {:.2} s",
        manifest.job,
        manifest.number,
        units::human(manifest.size_bytes()),
        units::human(manifest.sent_bytes()),
        match manifest.parent {
            Some(parent) => format!(", the rest shared with checkpoint {parent}"),
            None => String::new(),
        },
        if dumped.tracked_by_kernel {
            " (changes were tracked by the kernel)"
        } else {
            ""
        },
        manifest.stopped_ms as f64 / 1000.0,
    );
}

/// Work that can wait until the job goes on. The checkpoint is safe without it, so a failure is only
/// a warning.
pub fn tidy(job: &Job, keep: usize) {
    let warn = |what: &str, error: &dyn std::fmt::Display| {
        eprintln!("harvestfs: the checkpoint is stored, but {what}: {error}");
    };
    let lock = match job.lock() {
        Ok(lock) => lock,
        Err(error) => return warn("old ones are not removed", &error),
    };
    if let Err(error) = job.collect(&lock, &draft_maker(), keep) {
        warn("old ones are not removed", &error);
    }
    if let Err(error) = image::compact_newest(job, &lock, CHAIN_DEPTH_MAX) {
        warn("its chain is not shortened", &error);
    }
}

/// Refuses to store where others could exchange what is stored: nothing of it could be restored, and root would follow
/// the links of others.
pub fn refuse_directories(job: &Job) -> anyhow::Result<()> {
    trust::refuse_directories(job, rustix::process::geteuid().as_raw())
        .with_context(|| format!("no checkpoint of job {} is stored", job.name()))
}

/// Refuses to stop this process with the others: nobody would be left to let them go on.
pub fn refuse_own(tree: &Tree) -> anyhow::Result<()> {
    let own = i32::try_from(std::process::id())?;
    anyhow::ensure!(
        !tree.contains(own),
        "process {} has started this command: run it from outside of the job",
        tree.root()
    );
    Ok(())
}

/// Makes a checkpoint of a process and what it started. They go on when anything fails, or when this process
/// is killed.
pub fn dump(
    runner: &Runner,
    job: &Job,
    tree: &Tree,
    freezer: Option<&Path>,
    how: &HowArgs,
    afterwards: Afterwards,
) -> anyhow::Result<Dumped> {
    let pid = tree.root();
    refuse_own(tree)?;
    refuse_directories(job)?;
    let lock = job.lock()?;
    let _turn = runner.node.enter(tree.memory_bytes())?;
    // Read again: it may have waited long for its turn.
    let tree = tree.again()?;
    let tracking = runner.node.tracking()?;
    // Removes the record before anything can fail.
    let tracked = tracking.take(&tree)?;
    let mut draft = job.begin(&lock, &draft_maker())?;
    let parent = parent(job, how.full, &draft);
    let work = Runner::work_directory()?;
    let tracked_since = parent
        .as_ref()
        .is_some_and(|parent| tracked.is_some() && tracked == Tracked::since(parent));
    let track_mem = afterwards == Afterwards::GoOn { track_mem: true };
    let track = (track_mem || tracked_since) && runner.criu.tracks_memory();
    if track_mem && !track {
        eprintln!("harvestfs: this kernel does not track changes: all memory is compared");
    }
    // Read once more: removing an old draft may have taken long, too.
    let tree = tree.again()?;
    let guard = match Guard::start(&tree) {
        Ok(guard) => guard,
        Err(error) => {
            // If the job has ended, that is the reason.
            tree.again()?;
            return Err(error).context("cannot start what watches over the job");
        }
    };
    let dump = Dump {
        pid,
        work: work.path(),
        allow: &how.allow,
        freezer,
        track,
        guard: &guard,
    };

    let cpu_ms = tree.cpu_ms();
    let started = Instant::now();
    // CRIU leaves the processes stopped when it succeeds. They continue if a later step fails.
    let mut stopped = Stopped(Some(tree));
    let mut changes = None;
    if let Some(parent) = parent.as_ref().filter(|_| track && tracked_since) {
        match dump_changes(&runner.criu, &dump, &draft, parent) {
            Ok(images) => changes = Some(images),
            Err(error) => {
                eprintln!(
                    "harvestfs: all memory is compared, as its changes are not known: {error:#}"
                );
                // CRIU itself may have succeeded and left them stopped; the next dump would store them as stopped.
                stopped.let_go_on()?;
                draft = job.begin(&lock, &draft_maker())?;
            }
        }
    }
    let tracked_by_kernel = changes.is_some();
    let images = match changes {
        Some(images) => images,
        None => dump_all(&runner.criu, &dump, &draft, parent.as_ref())?,
    };
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        job: job.name().clone(),
        number: draft.number(),
        depth: parent
            .as_ref()
            .map_or(0, |parent| parent.manifest.depth + 1),
        parent: parent.map(|parent| parent.manifest.number),
        node: runner.node_name.clone(),
        pid,
        created_unix_ms: unix_now_ms().unwrap_or(0),
        stopped_ms: millis(started.elapsed()),
        progress_ms: cpu_ms,
        left_running: afterwards != Afterwards::End,
        criu: runner.criu.version().to_owned(),
        allow: how.allow.clone(),
        images,
    };
    let checkpoint = draft.commit(manifest)?;
    if afterwards == Afterwards::End {
        stopped.end()?;
    } else {
        if let Some(since) = Tracked::since(&checkpoint) {
            let went_on = runner.node.went_on();
            if let Err(error) = went_on.and_then(|went_on| went_on.remember(pid, &since)) {
                eprintln!("harvestfs: what the job did before counts as not stored: {error}");
            }
            if track
                && track_mem
                && let Err(error) = tracking.remember(pid, &since)
            {
                eprintln!("harvestfs: the next checkpoint is going to read all memory: {error}");
            }
        }
        stopped.go_on()?;
    }
    let mut measured = runner.node.measured();
    measured.wrote(checkpoint.manifest.sent_bytes(), started.elapsed());
    if let Err(error) = runner.node.remember(&measured) {
        eprintln!("harvestfs: the bandwidth that was measured is not remembered: {error}");
    }
    Ok(Dumped {
        checkpoint,
        tracked_by_kernel,
    })
}

/// The checkpoint to compare with. If it cannot be used, a warning says so, and the new one is stored
/// whole.
fn parent(job: &Job, is_full: bool, draft: &Draft) -> Option<Checkpoint> {
    if is_full {
        return None;
    }
    let newest = match job.newest() {
        Ok(newest) => newest?,
        Err(error) => {
            eprintln!(
                "harvestfs: everything is stored, as there is nothing to compare with: {error}"
            );
            return None;
        }
    };
    let number = newest.manifest.number;
    // It is cloned without reading its bytes: what it has lost would be missing in the new one, too.
    match locations::has_lost_memory(&newest, draft.directory()) {
        Ok(false) => Some(newest),
        Ok(true) => {
            eprintln!(
                "harvestfs: everything is stored: parts of checkpoint {number} are on no datanode that runs"
            );
            None
        }
        Err(error) => {
            eprintln!(
                "harvestfs: everything is stored, as it is not known where checkpoint {number} is: {error:#}"
            );
            None
        }
    }
}

/// Stores everything, of which what the parent has too is not sent.
fn dump_all(
    criu: &Criu,
    dump: &Dump<'_>,
    draft: &Draft,
    parent: Option<&Checkpoint>,
) -> anyhow::Result<Vec<Image>> {
    let intake = Intake::bind(dump.work).context("cannot listen for CRIU's images")?;
    let mut child = criu.dump(dump)?;
    let received = intake.receive(draft.directory(), parent, || is_alive(&mut child));
    ended(child, received, dump.work)
}

/// Stores what the kernel says was changed since the parent.
fn dump_changes(
    criu: &Criu,
    dump: &Dump<'_>,
    draft: &Draft,
    parent: &Checkpoint,
) -> anyhow::Result<Vec<Image>> {
    let (ours, theirs) = UnixStream::pair().context("cannot make a socket for CRIU's pages")?;
    let name = parent.directory.file_name();
    let name = name.expect("the directory of a checkpoint is named after its number");
    let mut child = criu.dump_changes(dump, draft.directory(), name, theirs.into())?;
    let received = page_server::receive(ours, draft.directory(), parent, || is_alive(&mut child));
    let received = ended(child, received, dump.work)?;
    Ok(page_server::adopt(draft.directory(), received)?)
}

fn is_alive(child: &mut Child) -> bool {
    matches!(child.try_wait(), Ok(None))
}

/// Waits until CRIU has ended. The reason of a failure is CRIU's, unless storing failed first.
fn ended(
    mut child: Child,
    received: Result<Vec<Image>, IntakeError>,
    work: &Path,
) -> anyhow::Result<Vec<Image>> {
    let status = child.wait().context("cannot wait for CRIU")?;
    let outcome = criu::outcome("dump", status, work);
    match received {
        Ok(images) => outcome.map(|()| images).map_err(Into::into),
        Err(error) => match (error, outcome) {
            (IntakeError::NotConnected | IntakeError::Connection(_), Err(refused)) => {
                Err(refused.into())
            }
            (error, _) => Err(error).context("the images could not be stored; the job goes on"),
        },
    }
}

/// The processes that CRIU has left stopped; they go on when this is dropped.
struct Stopped(Option<Tree>);

impl Stopped {
    /// They may be stopped again.
    fn let_go_on(&self) -> Result<(), ProcessError> {
        self.0.as_ref().map_or(Ok(()), Tree::go_on)
    }

    fn go_on(&mut self) -> Result<(), ProcessError> {
        self.let_go_on()?;
        self.0 = None;
        Ok(())
    }

    /// Ends them, and waits until their memory is free.
    fn end(&mut self) -> anyhow::Result<()> {
        match self.0.take() {
            Some(tree) => tree
                .end()
                .context("the checkpoint is stored, but the job did not end"),
            None => Ok(()),
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Err(error) = self.let_go_on() {
            eprintln!("harvestfs: the job is still stopped: {error}");
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn no_command_stops_itself() {
        let tree = |id: u32| Tree::of(i32::try_from(id).expect("a process id")).expect("it runs");
        let error = refuse_own(&tree(std::process::id())).expect_err("it is this process");
        assert!(error.to_string().contains("outside of the job"), "{error}");
        let mut other = Command::new("sleep").arg("600").spawn().expect("sleep");
        refuse_own(&tree(other.id())).expect("it is another one");
        other.kill().expect("it is ours");
        other.wait().expect("it is ours");
    }
}
