//! What all programs on mounts have in common: they work step by step while their mount may be used.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use harvestfs_client::Client;
use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::runtime::Runtime;

use super::state::{Era, Shared};
use super::work::Reports;
use crate::live::metrics::Operation;
use crate::live::verify::Comparison;

/// What the final comparison uses.
pub(crate) struct Check<'a> {
    /// The runtime of the client.
    pub runtime: &'a Runtime,
    /// A client with empty caches.
    pub client: &'a Client,
}

/// The directory on a mount in which a program works.
pub(crate) struct Place {
    pub mount: usize,
    pub directory: PathBuf,
    pub shared: Arc<Shared>,
    pub reports: Reports,
}

impl Place {
    /// A directory on the mount at `at`.
    pub fn new(
        (mount, at): (usize, &Path),
        directory: &str,
        (shared, reports): (&Arc<Shared>, &Reports),
    ) -> Self {
        Self {
            mount,
            directory: at.join(directory),
            shared: Arc::clone(shared),
            reports: reports.clone(),
        }
    }

    /// Makes the directory, unless it exists.
    pub fn make(&self) -> io::Result<()> {
        match fs::create_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    /// Whether what was done in this era is promised.
    pub fn counts(&self, era: Era) -> bool {
        self.shared.era(self.mount) == Some(era)
    }

    /// Reports an operation that failed.
    pub fn failed(&self, operation: Operation, what: &str, error: &io::Error) {
        self.reports.failed(operation);
        self.reports.error(&format!("{what} on a mount: {error}"));
    }
}

/// A program on a mount.
pub(crate) trait Job: Send {
    /// Notes that its mount was killed, or the namenode rolled back: what this interrupted counts as not acknowledged.
    fn interrupted(&mut self) {}

    /// Begins to use the mount, for the first time or again.
    fn begin(&mut self) -> io::Result<()>;

    /// Does something; promises count only if the era is still the same at the end.
    fn step(&mut self, era: Era);

    /// Compares what was promised to it, once everything is healed and all programs have ended.
    fn compare(&mut self, check: &Check<'_>, to: &mut Comparison);
}

/// The pause between two checks of a mount that cannot be used.
const AWAY: Duration = Duration::from_millis(100);

/// Works until `stop` is set. May block as long as the mount does.
pub(crate) fn run(
    job: &mut dyn Job,
    (shared, mount): (&Shared, usize),
    pause: Duration,
    reports: &Reports,
    stop: &AtomicBool,
) {
    // The era of the last step.
    let mut last: Option<Era> = None;
    while !stop.load(Ordering::Relaxed) {
        let Some(era) = shared.era(mount) else {
            thread::sleep(AWAY);
            continue;
        };
        if last != Some(era) {
            if last.take().is_some() {
                job.interrupted();
            }
            if let Err(error) = job.begin() {
                reports.error(&format!("begin on a mount: {error}"));
                thread::sleep(AWAY);
                continue;
            }
            last = Some(era);
        }
        job.step(era);
        thread::sleep(pause);
    }
    // The mount may have been killed after the last operation.
    if last.is_some() && last != shared.era(mount) {
        job.interrupted();
    }
}

/// Runs another program, and returns its output. It ends with the thread that waits for it, even if this process is
/// killed: otherwise it could continue where the next program works.
pub(crate) fn output(command: &mut Command) -> io::Result<String> {
    let end_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: between fork and exec, the closure makes one system call, allocates nothing and takes no lock.
    unsafe { command.pre_exec(end_with_parent) };
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let status = output.status;
    Err(io::Error::other(format!("{status}: {}", said.trim())))
}
