//! One process of the cluster.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use harvestfs_protocol::READY;
use rustix::process::{Pid, Signal, kill_process};

use super::LiveError;
use super::network::Home;

/// A running part, which is killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    ready: Arc<AtomicBool>,
}

impl Process {
    /// Starts `binary` with arguments at `home`; returns before it is ready. The kernel ends it with this
    /// process, even if that is killed.
    pub fn start(
        binary: &Path,
        arguments: &[std::ffi::OsString],
        log: &Path,
        home: &Home,
    ) -> io::Result<Self> {
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = command(binary);
        command
            .arg("--supervised-by")
            .arg(std::process::id().to_string())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        // Ctrl-C is for the harness alone. Besides, a process group of its own is orphaned when the harness is
        // killed: the kernel then continues it if it is stopped, so that it can end.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = home.spawn(command)?;
        let ready = Arc::new(AtomicBool::new(false));
        if let Some(stdout) = child.stdout.take() {
            let ready = Arc::clone(&ready);
            // The thread ends with the process, whose pipe it reads.
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if line.starts_with(READY) {
                        ready.store(true, Ordering::Release);
                    }
                }
            });
        }
        Ok(Self { child, ready })
    }

    /// Whether it has reported that it is ready.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends SIGSTOP.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Sends SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It may have ended on its own.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL also ends a stopped process. It may have ended on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a part ended by reporting an error, and not by a signal, as after a panic.
pub(crate) fn has_failed(status: ExitStatus) -> bool {
    status.code() == Some(1)
}

/// A command of the binary, without the environment variables that set flags. They are for commands that are run by
/// hand: here they would apply to all parts, or name another cluster.
fn command(binary: &Path) -> Command {
    let mut command = Command::new(binary);
    for (variable, _) in std::env::vars_os() {
        let name = variable.as_encoded_bytes();
        // Logging stays configurable.
        if name.starts_with(b"HARVESTFS_") && !name.starts_with(b"HARVESTFS_LOG") {
            command.env_remove(variable);
        }
    }
    command
}

/// Runs a command of the binary against the cluster in a directory, and returns its output.
pub(crate) fn run(binary: &Path, data: &Path, arguments: &[&str]) -> Result<String, LiveError> {
    let output = command(binary)
        .args(arguments)
        .env("HARVESTFS_DATA", data)
        .output()
        .map_err(LiveError::io(format!("run {}", binary.display())))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let what = arguments.join(" ");
    Err(LiveError::Cluster(format!("{what}: {}", said.trim())))
}
