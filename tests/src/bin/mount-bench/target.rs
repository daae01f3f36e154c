//! File systems to measure: the interface of every target, and the plain directory.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::cpu::Marker;
use crate::interrupt;

/// Polling interval.
pub const POLL: Duration = Duration::from_millis(50);

/// A file system under measurement.
pub trait Target {
    /// The name in the table.
    fn label(&self) -> &str;

    /// Makes it ready; returns an existing, empty directory in which to work.
    fn start(&mut self) -> Result<PathBuf>;

    /// Ensures that nothing written so far is in any cache, neither the kernel's nor its own.
    /// The directory that `start` returned stays valid.
    fn make_cold(&mut self) -> Result<()>;

    /// The marker of its processes, if it has any.
    fn marker(&self) -> Option<&Marker>;

    /// Number of bytes that must be free, by its own report, to write one byte.
    fn free_bytes_per_byte(&self) -> u64;

    /// A directory on the disk that finally stores the data.
    fn disk(&self) -> &Path;

    /// Ends it and removes everything. Does nothing when it was not started.
    fn stop(&mut self) -> Result<()>;
}

/// An existing directory.
#[derive(Debug)]
pub struct Directory {
    label: String,
    parent: PathBuf,
    remount: Option<String>,
    work: Option<TempDir>,
}

impl Directory {
    /// The directory `dir`; `remount` is a shell command that empties caches of its own.
    pub fn new(dir: &str, label: &str, remount: Option<String>) -> Result<Self> {
        let parent = fs::canonicalize(dir).with_context(|| format!("--dir {dir}"))?;
        ensure!(parent.is_dir(), "--dir {dir}: not a directory");
        Ok(Self {
            label: label.to_owned(),
            parent,
            remount,
            work: None,
        })
    }
}

impl Target for Directory {
    fn label(&self) -> &str {
        &self.label
    }

    fn start(&mut self) -> Result<PathBuf> {
        let work = scratch_directory(&self.parent, "mount-bench-")?;
        let path = work.path().to_owned();
        self.work = Some(work);
        Ok(path)
    }

    fn make_cold(&mut self) -> Result<()> {
        drop_kernel_caches()?;
        if let Some(command) = &self.remount {
            let status = Command::new("sh").arg("-c").arg(command).status()?;
            ensure!(status.success(), "--remount {command}: {status}");
        }
        Ok(())
    }

    fn marker(&self) -> Option<&Marker> {
        None
    }

    fn free_bytes_per_byte(&self) -> u64 {
        1
    }

    fn disk(&self) -> &Path {
        &self.parent
    }

    fn stop(&mut self) -> Result<()> {
        if let Some(work) = self.work.take() {
            work.close()?;
        }
        Ok(())
    }
}

/// Creates a directory that is removed when the returned value is dropped.
pub fn scratch_directory(parent: &Path, prefix: &str) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(prefix)
        .tempdir_in(parent)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))
}

/// Writes all dirty data back and drops the kernel's caches of pages, entries and inodes.
pub fn drop_kernel_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3")
        .context("rows with cold caches need root (write to /proc/sys/vm/drop_caches)")
}

/// Starts a program of a target, with its output at the end of a log.
pub fn spawn(command: &mut Command, marker: &Marker, log: &Path) -> Result<Child> {
    let output = File::options().create(true).append(true).open(log)?;
    let (name, value) = marker.variable();
    command
        .env(name, value)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        // Out of reach of a Ctrl-C that is meant for this program, which then stops it.
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))
}

/// Checks every [`POLL`] until `ready` holds; fails after `limit`, with `what` in the message.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut ready: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    while !ready()? {
        interrupt::check()?;
        if started.elapsed() > limit {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Whether another file system is mounted at `path`.
pub fn is_mounted(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
    match (device(path), path.parent().map(device)) {
        (Ok(here), Some(Ok(above))) => here != above,
        // A mount whose process has ended does not answer stat.
        (Err(_), Some(Ok(_))) => path.symlink_metadata().is_err_and(|error| {
            error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error())
        }),
        _ => false,
    }
}

/// Detaches the file system at `path`, even if its process has ended or is busy.
pub fn force_unmount(path: &Path) {
    for program in [&["umount", "-l"][..], &["fusermount3", "-u", "-z"]] {
        if !is_mounted(path) {
            return;
        }
        // If this program fails, the next one is tried.
        let _ = Command::new(program[0])
            .args(&program[1..])
            .arg(path)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status();
    }
}

/// Ends processes that still carry the marker: with SIGTERM first, and forcibly after `grace`.
pub fn end_processes(marker: &Marker, grace: Duration) {
    use rustix::process::{Pid, Signal, kill_process};
    let signal_all = |signal: Signal| {
        let processes = marker.processes();
        for pid in processes.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            // It may have ended by itself in the meantime.
            let _ = kill_process(pid, signal);
        }
        processes.is_empty()
    };
    if signal_all(Signal::TERM) {
        return;
    }
    let started = Instant::now();
    while started.elapsed() < grace {
        if marker.processes().is_empty() {
            return;
        }
        thread::sleep(POLL);
    }
    signal_all(Signal::KILL);
}

/// The last lines of a log, for an error message.
pub fn log_tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
