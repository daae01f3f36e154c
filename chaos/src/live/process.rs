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

/// A running part. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    ready: Arc<AtomicBool>,
}

impl Process {
    /// Starts `binary` with arguments at `home`; returns before it is ready. It ends with this
    /// process, also when that is killed: the kernel sees to it.
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
        // Ctrl-C is for the harness alone. And a group of its own is orphaned when the harness is
        // killed: the kernel then continues it if it is stopped, so that it can end.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = home.spawn(command)?;
        let ready = Arc::new(AtomicBool::new(false));
        if let Some(stdout) = child.stdout.take() {
            let ready = Arc::clone(&ready);
            // Ends with the process, whose pipe it reads.
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

    /// Whether it said that it is ready.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// SIGSTOP.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It may have ended by itself.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL also ends what is stopped. It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a part ended as one does that says what failed: not by a signal, as after a panic.
pub(crate) fn has_failed(status: ExitStatus) -> bool {
    status.code() == Some(1)
}

/// A command of the binary, without variables that stand for flags. They are for what somebody runs by hand: here they
/// would say the same to all parts, or name another cluster.
fn command(binary: &Path) -> Command {
    let mut command = Command::new(binary);
    for (variable, _) in std::env::vars_os() {
        let name = variable.as_encoded_bytes();
        // What is logged is as it was asked for.
        if name.starts_with(b"HARVESTFS_") && !name.starts_with(b"HARVESTFS_LOG") {
            command.env_remove(variable);
        }
    }
    command
}

/// Runs a command of the binary against the cluster in a directory, and gives what it printed.
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
