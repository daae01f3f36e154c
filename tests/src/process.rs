//! One process of the binary under test.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::{harvestfs, wait_until};

const READY_DEADLINE: Duration = Duration::from_secs(60);
const STOP_DEADLINE: Duration = Duration::from_secs(90);

/// A running part of a cluster. Killed when dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
}

impl Process {
    /// Starts a part, and waits until it reports that it is ready.
    pub fn start(
        name: &str,
        arguments: &[&Path],
        environment: &[(&str, &str)],
        log: &Path,
    ) -> Self {
        Self::start_of(harvestfs(), name, arguments, environment, log)
    }

    /// Same as [`Process::start`], with another binary.
    pub fn start_of(
        binary: &Path,
        name: &str,
        arguments: &[&Path],
        environment: &[(&str, &str)],
        log: &Path,
    ) -> Self {
        let (process, is_ready) = Self::begin_of(binary, name, arguments, environment, log);
        let ready = is_ready.recv_timeout(READY_DEADLINE);
        assert_eq!(
            ready,
            Ok(true),
            "{name} did not become ready; its log:\n{}",
            std::fs::read_to_string(log).unwrap_or_default()
        );
        process
    }

    /// Starts a part, without waiting until it is ready.
    pub fn begin(
        name: &str,
        arguments: &[&Path],
        environment: &[(&str, &str)],
        log: &Path,
    ) -> (Self, mpsc::Receiver<bool>) {
        Self::begin_of(harvestfs(), name, arguments, environment, log)
    }

    /// Same as [`Process::begin`], with another binary.
    pub fn begin_of(
        binary: &Path,
        name: &str,
        arguments: &[&Path],
        environment: &[(&str, &str)],
        log: &Path,
    ) -> (Self, mpsc::Receiver<bool>) {
        let log_file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .expect("the log can be written");
        let mut child = Command::new(binary)
            .args(["--supervised-by", &std::process::id().to_string()])
            .args(arguments)
            .envs(environment.iter().copied())
            // In a process group of its own, as from a shell: Ctrl-C reaches all of that group.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file)
            .spawn()
            .expect("the binary runs");
        let stdout = child.stdout.take().expect("it was asked for");
        let (ready, is_ready) = mpsc::channel();
        thread::spawn(move || {
            let first = BufReader::new(stdout).lines().next();
            let line = first.and_then(Result::ok).unwrap_or_default();
            // The test may have panicked in the meantime.
            let _ = ready.send(line.starts_with("ready"));
        });
        let process = Self {
            name: name.to_owned(),
            child,
        };
        (process, is_ready)
    }

    /// Kills it with SIGKILL.
    pub fn kill(mut self) {
        self.signal(Signal::KILL);
        self.child.wait().expect("it is our child");
    }

    /// Stops it with SIGTERM, and checks that it ends in good order.
    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        let mut status = None;
        wait_until(&format!("{} stops", self.name), STOP_DEADLINE, || {
            status = self.child.try_wait().expect("it is our child");
            status.is_some()
        });
        let status = status.expect("waited for");
        assert!(status.success(), "{} ended with {status}", self.name);
    }

    /// Makes it hang, with all its threads (SIGSTOP).
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        let is_stopped = |task: fs::DirEntry| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            // The state follows the name, which can contain anything. A thread that waits in the
            // kernel stops before it continues, and one of a mount may wait there for another one that
            // has stopped.
            let state = stat
                .rsplit_once(") ")
                .map(|(_, rest)| rest.starts_with(['T', 'D']));
            state.unwrap_or(true)
        };
        wait_until(&format!("{} hangs", self.name), STOP_DEADLINE, || {
            let mut tasks = fs::read_dir(&tasks).expect("it runs");
            tasks.all(|task| task.is_ok_and(is_stopped))
        });
    }

    /// Lets it continue (SIGCONT).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// The files that it has open now.
    ///
    /// # Panics
    /// When it has ended.
    #[must_use]
    pub fn open_files(&self) -> Vec<PathBuf> {
        let descriptors = format!("/proc/{}/fd", self.child.id());
        let descriptors = fs::read_dir(descriptors).expect("it runs");
        descriptors
            // A descriptor that has been closed in the meantime is missing.
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .collect()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_none()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        // It may have ended by itself.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Sends Ctrl-C, also to what it started in its process group.
    pub fn interrupt(&self) {
        // It may have ended by itself.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::INT);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}
