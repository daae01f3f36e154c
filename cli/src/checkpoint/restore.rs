//! `harvestfs checkpoint restore`

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use harvestfs_checkpoint::manifest::JobName;
use harvestfs_checkpoint::process::Tree;
use harvestfs_checkpoint::store::{Checkpoint, Job, StoreError};
use harvestfs_checkpoint::verdict::Verdict;
use harvestfs_checkpoint::{criu, image, trust};

use super::{CheckpointArgs, Runner};

/// Most time that a job's process may take to be gone after it has ended.
const ID_DEADLINE: Duration = Duration::from_secs(10);
const ID_TICK: Duration = Duration::from_millis(20);

/// Arguments of `harvestfs checkpoint restore`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs checkpoint restore train\n  \
    harvestfs checkpoint restore train --number 3")]
pub struct RestoreArgs {
    /// Name of the job.
    job: JobName,
    /// Which checkpoint [default: the newest].
    #[arg(long)]
    number: Option<u32>,
}

/// Runs it.
pub fn run(args: &CheckpointArgs, command: &RestoreArgs) -> anyhow::Result<()> {
    let runner = args.runner()?;
    let job = args.job(&command.job)?;
    let (number, pid) = restore(&runner, &job, command.number)?;
    println!("{} {number}: runs as process {pid}", job.name());
    Ok(())
}

/// A checkpoint of a job: the newest unless a number is given.
pub fn find(job: &Job, number: Option<u32>) -> anyhow::Result<Checkpoint> {
    let found = match number {
        Some(number) => job.checkpoint(number),
        None => job
            .newest()
            .and_then(|newest| newest.ok_or_else(|| StoreError::NoJob(job.name().clone()))),
    };
    found.map_err(|error| match error {
        StoreError::Manifest { number, .. } => {
            anyhow::Error::new(error).context(before(job, number))
        }
        error => error.into(),
    })
}

/// Resumes a job from a checkpoint, which stays as it is: the newest unless a number is given. Returns its number and
/// the process.
pub fn restore(runner: &Runner, job: &Job, number: Option<u32>) -> anyhow::Result<(u32, i32)> {
    let size_bytes = find(job, number)?.manifest.size_bytes();
    let user = rustix::process::geteuid().as_raw();
    // Before anything is created in them.
    trust::refuse_directories(job, user)
        .with_context(|| format!("no checkpoint of job {} is restored", job.name()))?;
    let _lock = job.lock()?;
    let _turn = runner.node.enter(size_bytes)?;
    // Read again: it may have waited long for its turn, and another node may have stored a newer one in the meantime.
    let checkpoint = &find(job, number)?;
    let manifest = &checkpoint.manifest;
    let started = Instant::now();
    let refused = || {
        format!(
            "checkpoint {} of job {} cannot be restored; {}",
            manifest.number,
            manifest.job,
            before(job, manifest.number)
        )
    };
    trust::refuse_what_others_could_write(job, &checkpoint.directory, user)
        .with_context(refused)?;
    image::verify_state(checkpoint).with_context(refused)?;
    // The id of a process that has ended stays in use until its parent has reaped it. CRIU reports an
    // error if that takes too long.
    wait_while(|| Tree::of(manifest.pid).is_ok_and(|tree| tree.has_ended()));
    let work = Runner::work_directory()?;
    let pid_file = work.path().join("pid");
    // Memory is verified while CRIU loads it; whichever comes second reads from the page cache.
    let verdict = Verdict::pending(work.path()).context("cannot hold the job back")?;
    let mut child = runner.criu.restore(
        &checkpoint.directory,
        work.path(),
        &manifest.allow,
        &pid_file,
        Some(&verdict),
    )?;
    let verified = image::verify_memory(checkpoint)
        .with_context(refused)
        .and_then(|()| verdict.whole().context("cannot let the job go"));
    let status = child.wait().context("cannot wait for CRIU")?;
    if verified.is_err() {
        // CRIU has killed what it restored; the process id is needed to restore an earlier checkpoint.
        wait_while(|| Tree::of(manifest.pid).is_ok());
    }
    verified?;
    criu::outcome("restore", status, work.path())?;
    let mut measured = runner.node.measured();
    measured.read(manifest.size_bytes(), started.elapsed());
    if let Err(error) = runner.node.remember(&measured) {
        eprintln!("harvestfs: the bandwidth that was measured is not remembered: {error}");
    }
    let pid = fs::read_to_string(&pid_file).context("CRIU did not say which process it made")?;
    let pid = pid
        .trim()
        .parse::<i32>()
        .context("CRIU did not say which process it made")?;
    Ok((manifest.number, pid))
}

fn wait_while(is_in_use: impl Fn() -> bool) {
    let deadline = Instant::now() + ID_DEADLINE;
    while is_in_use() && Instant::now() < deadline {
        sleep(ID_TICK);
    }
}

/// Which checkpoint is left when one cannot be used.
fn before(job: &Job, number: u32) -> String {
    let numbers = match job.numbers() {
        Ok(numbers) => numbers,
        Err(error) => return format!("which others there are cannot be seen: {error}"),
    };
    match numbers.iter().rev().find(|&&other| other < number) {
        Some(other) => format!(
            "the one before it is there: `harvestfs checkpoint restore {} --number {other}`",
            job.name()
        ),
        None => "there is none before it".to_owned(),
    }
}
