//! A process to suspend and resume, and the commands that do this.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use harvestfs_tests::{can_mount, criu, harvestfs, wait_until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::{DEADLINE, MEMORY_BYTES};

const STORE: &str = "checkpoints";

/// A process that counts, has memory full of random data, and executes requests.
pub struct Job {
    pub pid: i32,
    /// The child process, until it was suspended for the first time.
    child: Option<Child>,
    directory: tempfile::TempDir,
    asked: u64,
}

impl Job {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let child = Command::new("setsid")
            .arg(harvestfs())
            .args(["checkpoint", "fill", &MEMORY_BYTES.to_string()])
            .arg(directory.path())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("setsid is there");
        let mut job = Self {
            pid: i32::try_from(child.id()).expect("a process id"),
            child: Some(child),
            directory,
            asked: 0,
        };
        job.ask("digest");
        job
    }

    pub fn ask(&mut self, ask: &str) -> String {
        self.asked += 1;
        let expected = format!("{} ", self.asked);
        let path = |name: &str| self.directory.path().join(name);
        fs::write(path("ask.new"), format!("{expected}{ask}")).expect("it is asked");
        fs::rename(path("ask.new"), path("ask")).expect("it is asked");
        let mut answer = None;
        wait_until(ask, DEADLINE, || {
            let done = fs::read_to_string(path("done")).unwrap_or_default();
            answer = done.strip_prefix(&expected).map(str::to_owned);
            answer.is_some()
        });
        answer.expect("it was waited for")
    }

    pub fn count(&self) -> u64 {
        let count = fs::read_to_string(self.directory.path().join("count"));
        count.expect("it counts").parse().expect("a number")
    }

    pub fn goes_on(&self) {
        let before = self.count();
        wait_until("the job counts", DEADLINE, || self.count() > before);
    }

    /// Whether it is stopped, or traced: CRIU has a traced process run code that sends its memory.
    pub fn is_held(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("it is there");
        let value = |name| status.lines().find_map(|line| line.strip_prefix(name));
        let state = value("State:\t").expect("it has a state");
        let tracer = value("TracerPid:\t").expect("it may be traced");
        state.starts_with('T') || tracer != "0"
    }

    pub fn has_ended(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.wait().expect("it is ours");
        }
        let pid = Pid::from_raw(self.pid).expect("a process id");
        wait_until("the job ends", DEADLINE, || test_kill_process(pid).is_err());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.pid) {
            let _ = kill_process(pid, Signal::KILL);
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }
}

/// Creates the directory of the checkpoints as documented.
pub fn make_store(mount: &Path) {
    fs::create_dir(mount.join(STORE)).expect("the file system is mounted");
}

/// `harvestfs checkpoint` with the checkpoints in `mount`.
pub struct Checkpoints {
    pub criu: PathBuf,
    pub node: tempfile::TempDir,
}

impl Checkpoints {
    /// Prepares the commands; skips when there is no CRIU.
    pub fn new() -> Option<Self> {
        if !can_mount() {
            return None;
        }
        Some(Self {
            criu: criu()?.to_owned(),
            node: tempfile::tempdir().expect("a directory"),
        })
    }

    pub fn command(&self, mount: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(harvestfs());
        command
            .arg("checkpoint")
            .args(arguments)
            .arg("--store")
            .arg(mount.join(STORE))
            .arg("--criu")
            .arg(&self.criu)
            .arg("--node-directory")
            .arg(self.node.path())
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, mount: &Path, arguments: &[&str]) -> String {
        let output = self.output(mount, arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// The output of a command that must fail.
    pub fn refusal(&self, mount: &Path, arguments: &[&str]) -> String {
        let output = self.output(mount, arguments);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).expect("text")
    }

    pub fn output(&self, mount: &Path, arguments: &[&str]) -> Output {
        let output = self.command(mount, arguments).output();
        output.expect("the binary runs")
    }

    pub fn list(&self, mount: &Path) -> Vec<Value> {
        serde_json::from_str(&self.run(mount, &["list", "--json"])).expect("JSON")
    }

    pub fn dump(&self, mount: &Path, job: &mut Job) {
        let pid = job.pid.to_string();
        self.run(mount, &["dump", &pid, "--job", "job"]);
        job.has_ended();
    }

    pub fn restore(&self, mount: &Path, job: &Job) {
        let said = self.run(mount, &["restore", "job"]);
        assert!(said.contains(&format!("process {}", job.pid)), "{said}");
        job.goes_on();
    }
}
