//! The processes of a job, as seen in `/proc`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Maximum time for killed processes to end.
pub const END_DEADLINE: Duration = Duration::from_secs(60);
const END_TICK: Duration = Duration::from_millis(5);
/// Maximum number of scans for processes that were started before their parents were stopped.
const LOOKS_MAX: usize = 64;
/// Ticks per second of the times in `/proc/PID/stat`: Linux has long reported 100 on every architecture.
const TICKS_PER_S: u64 = 100;

/// Errors with the processes of a job.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is no such process.
    #[error("there is no process {0}")]
    Gone(i32),
    /// The id is that of init, or cannot be that of a process.
    #[error("{0} is not the process of a job")]
    NotAJob(i32),
    /// A cgroup cannot be read.
    #[error("cannot read the cgroup {}: {source}", path.display())]
    Cgroup {
        /// The cgroup's directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The cgroup has no process.
    #[error("the cgroup {} has no process", .0.display())]
    Empty(PathBuf),
    /// The processes in the cgroup do not all descend from one of them.
    #[error(
        "the cgroup {} has {roots} processes that were not started by another of it: a checkpoint \
         is of one process and what it started",
        path.display()
    )]
    Forest {
        /// The cgroup's directory.
        path: PathBuf,
        /// Number of processes whose parent is not in the cgroup.
        roots: usize,
    },
    /// A signal could not be sent.
    #[error("cannot {what} process {pid}: {source}")]
    Signal {
        /// What was attempted.
        what: &'static str,
        /// The process.
        pid: i32,
        /// The cause.
        source: io::Error,
    },
    /// Processes are started faster than they can be stopped.
    #[error("process {0} and what it started go on starting processes")]
    Restless(i32),
    /// A signal has no effect.
    #[error("process {0} does not end")]
    Lingers(i32),
}

/// A process. Once it has ended, its id may be reused, so its start time identifies it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: i32,
    started_ticks: u64,
}

impl Process {
    fn is_there(self) -> bool {
        started_ticks(self.pid) == Some(self.started_ticks)
    }

    /// Whether it has ended, even if its parent has not reaped it yet.
    fn has_ended(self) -> bool {
        match stat(self.pid) {
            Some(stat) if started_in(&stat) == Some(self.started_ticks) => {
                matches!(state_of(&stat), Some("Z" | "X"))
            }
            _ => true,
        }
    }

    /// Sends a signal, but never to another process that has reused the id.
    fn signal(self, signal: Signal) -> Result<(), Errno> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        if !self.is_there() {
            return Err(Errno::SRCH);
        }
        pidfd_send_signal(process, signal)
    }
}

/// A process and all its descendants, with the process itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree(Vec<Process>);

impl Tree {
    /// Reads the current processes of a tree. They may change until they are stopped.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn of(root: i32) -> Result<Self, ProcessError> {
        if root <= 1 {
            return Err(ProcessError::NotAJob(root));
        }
        let all = all();
        let first = all.iter().find(|(process, _)| process.pid == root);
        let (first, _) = first.ok_or(ProcessError::Gone(root))?;
        let mut tree = Self(vec![*first]);
        tree.grow(&all);
        Ok(tree)
    }

    /// Reads the current processes of the same tree again.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when they have ended, even if another process has reused the id since.
    pub fn again(&self) -> Result<Self, ProcessError> {
        let tree = Self::of(self.root())?;
        if tree.0[0] != self.0[0] || tree.has_ended() {
            return Err(ProcessError::Gone(self.root()));
        }
        Ok(tree)
    }

    /// Adds the descendants of its processes. Returns whether there were new ones.
    fn grow(&mut self, all: &[(Process, i32)]) -> bool {
        let before = self.0.len();
        let mut next = 0;
        while let Some(&parent) = self.0.get(next) {
            if all.iter().any(|&(process, _)| process == parent) {
                for &(process, of) in all {
                    if of == parent.pid && !self.0.contains(&process) {
                        self.0.push(process);
                    }
                }
            }
            next += 1;
        }
        self.0.len() > before
    }

    /// The process that started the others.
    #[must_use]
    pub fn root(&self) -> i32 {
        self.0[0].pid
    }

    /// Start time of that process, in ticks since boot.
    pub(crate) fn started_ticks(&self) -> u64 {
        self.0[0].started_ticks
    }

    /// Whether the process with that id is one of them.
    #[must_use]
    pub fn contains(&self, pid: i32) -> bool {
        self.0.iter().any(|process| process.pid == pid)
    }

    /// Whether the two trees have a process in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().any(|process| other.0.contains(process))
    }

    /// Bytes of memory that they use; memory that they share counts once.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let kib: u64 = self.0.iter().filter_map(|it| pss_kib(it.pid)).sum();
        kib << 10
    }

    /// Milliseconds of CPU time that they and their reaped children have used.
    #[must_use]
    pub fn cpu_ms(&self) -> u64 {
        let ticks: u64 = self.0.iter().filter_map(|it| cpu_ticks(it.pid)).sum();
        ticks * 1000 / TICKS_PER_S
    }

    /// Kills them, with everything that they have started since, and waits until their memory is free. This
    /// works also when a checkpoint has stopped them.
    ///
    /// # Errors
    /// When a signal cannot be sent, they start new processes too fast, or they still exist after [`END_DEADLINE`].
    pub fn end(&self) -> Result<(), ProcessError> {
        let mut tree = self.clone();
        // A stopped process starts no others: once a scan finds no new ones, there are none.
        let mut looks = 0;
        loop {
            tree.signal("stop", Signal::STOP)?;
            looks += 1;
            if !tree.grow(&all()) {
                break;
            }
            if looks == LOOKS_MAX {
                tree.signal("end", Signal::KILL)?;
                return Err(ProcessError::Restless(self.root()));
            }
        }
        tree.signal("end", Signal::KILL)?;
        let deadline = Instant::now() + END_DEADLINE;
        while let Some(left) = tree.0.iter().find(|process| !process.has_ended()) {
            if Instant::now() >= deadline {
                return Err(ProcessError::Lingers(left.pid));
            }
            sleep(END_TICK);
        }
        Ok(())
    }

    /// Whether all of them have ended, even if their parents have not reaped them yet.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.0.iter().all(|process| process.has_ended())
    }

    /// Continues them after a checkpoint has stopped them, with everything that they have started since. The first one
    /// may have ended while the others were stopped.
    ///
    /// # Errors
    /// When a signal cannot be sent.
    pub fn go_on(&self) -> Result<(), ProcessError> {
        let mut tree = self.clone();
        tree.grow(&all());
        tree.signal("continue", Signal::CONT)
    }

    fn signal(&self, what: &'static str, signal: Signal) -> Result<(), ProcessError> {
        for process in &self.0 {
            match process.signal(signal) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => {
                    return Err(ProcessError::Signal {
                        what,
                        pid: process.pid,
                        source: error.into(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Finds the one process of a cgroup from which all others in it descend. `path` is the cgroup's
/// directory.
///
/// # Errors
/// When the cgroup cannot be read, has no process, or has more than one without a parent in it.
pub fn root_of_cgroup(path: &Path) -> Result<i32, ProcessError> {
    let list =
        fs::read_to_string(path.join("cgroup.procs")).map_err(|source| ProcessError::Cgroup {
            path: path.to_owned(),
            source,
        })?;
    let members: BTreeSet<i32> = list.lines().filter_map(|line| line.parse().ok()).collect();
    if members.is_empty() {
        return Err(ProcessError::Empty(path.to_owned()));
    }
    let roots = roots(&members, &all());
    match roots[..] {
        [root] => Ok(root),
        _ => Err(ProcessError::Forest {
            path: path.to_owned(),
            roots: roots.len(),
        }),
    }
}

/// Whether CRIU can freeze the processes of this cgroup.
#[must_use]
pub fn can_freeze(path: &Path) -> bool {
    ["freezer.state", "cgroup.freeze"]
        .iter()
        .any(|file| path.join(file).exists())
}

fn roots(members: &BTreeSet<i32>, all: &[(Process, i32)]) -> Vec<i32> {
    all.iter()
        .map(|(process, parent)| (process.pid, parent))
        .filter(|(pid, parent)| members.contains(pid) && !members.contains(parent))
        .map(|(pid, _)| pid)
        .collect()
}

/// All processes, each with the id of its parent.
fn all() -> Vec<(Process, i32)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = stat(pid)?;
            let process = Process {
                pid,
                started_ticks: started_in(&stat)?,
            };
            Some((process, field_of(&stat, 4)?.parse().ok()?))
        })
        .collect()
}

/// Start time of a process, in ticks since boot; `None` when it does not exist.
#[must_use]
pub fn started_ticks(pid: i32) -> Option<u64> {
    started_in(&stat(pid)?)
}

fn started_in(stat: &str) -> Option<u64> {
    field_of(stat, 22)?.parse().ok()
}

/// CPU ticks of a process and of its reaped children: a job may run each step of its work in a process of its own.
fn cpu_ticks(pid: i32) -> Option<u64> {
    let stat = stat(pid)?;
    (14..=17)
        .map(|number| field_of(&stat, number)?.parse::<u64>().ok())
        .sum()
}

fn stat(pid: i32) -> Option<String> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    Some(String::from_utf8_lossy(&stat).into_owned())
}

fn state_of(stat: &str) -> Option<&str> {
    field_of(stat, 3)
}

/// A field of `/proc/PID/stat`, numbered from 1 as in proc(5). The second field is the name in parentheses,
/// which may contain anything.
fn field_of(stat: &str, number: usize) -> Option<&str> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(number.checked_sub(3)?)
}

fn pss_kib(pid: i32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn fields_are_found_after_any_name() {
        let stat = "7 (a) b 9) S 3 7 7 0 -1 0 0 0 0 0 11 12 0 0";
        assert_eq!((state_of(stat), field_of(stat, 4)), (Some("S"), Some("3")));
        assert_eq!(
            (field_of(stat, 14), field_of(stat, 15)),
            (Some("11"), Some("12"))
        );
        assert_eq!(field_of("7 (a", 4), None);
    }

    fn process(pid: i32) -> Process {
        Process {
            pid,
            started_ticks: 7,
        }
    }

    #[test]
    fn a_tree_is_a_process_and_what_it_started() {
        let all = [(2, 1), (5, 2), (6, 5), (7, 1), (8, 5)];
        let all = all.map(|(pid, parent)| (process(pid), parent));
        let mut tree = Tree(vec![process(2)]);
        assert!(tree.grow(&all));
        assert_eq!(tree.0, [2, 5, 6, 8].map(process));
        assert!(!tree.grow(&all));
        assert_eq!(roots(&BTreeSet::from([5, 6, 8]), &all), [5]);
        assert_eq!(roots(&BTreeSet::from([5, 7]), &all), [5, 7]);
        let part = |pid| Tree(vec![process(pid)]);
        assert!(tree.overlaps(&part(6)) && part(6).overlaps(&tree));
        assert!(!tree.overlaps(&part(7)));
        // Another process that has reused an id has children of its own.
        let mut old = Tree(vec![Process {
            pid: 2,
            started_ticks: 3,
        }]);
        assert!(!old.grow(&all));
    }

    /// Polls `look` until it finds something.
    fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + END_DEADLINE;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}");
            std::thread::yield_now();
        }
    }

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        wait_for(what, || is_so().then_some(()));
    }

    /// The current tree, if it has that many processes.
    fn with(tree: &Tree, processes: usize) -> Option<Tree> {
        let tree = tree.again().expect("it runs");
        (tree.0.len() == processes).then_some(tree)
    }

    /// Starts a shell that runs `script`, and waits until they are that many processes.
    fn shell(script: &str, processes: usize) -> (Child, Tree) {
        let shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a shell");
        let root = i32::try_from(shell.id()).expect("a process id");
        let tree = Tree::of(root).expect("it runs");
        let tree = wait_for("it starts the others", || with(&tree, processes));
        (shell, tree)
    }

    #[test]
    fn a_real_tree_is_seen_and_ended() {
        let (mut shell, tree) = shell("sleep 600 & sleep 600 & wait", 3);
        assert_eq!(tree.root(), shell.id() as i32);
        assert!(tree.memory_bytes() > 0);
        assert!(!tree.has_ended());
        assert_eq!(tree.again().expect("it runs"), tree);
        tree.end().expect("they are ours");
        assert!(tree.has_ended());
        assert!(matches!(tree.again(), Err(ProcessError::Gone(_))));
        assert!(!shell.wait().expect("it ended").success());
        assert!(matches!(tree.again(), Err(ProcessError::Gone(_))));
    }

    #[test]
    fn all_go_on_though_the_first_one_has_ended() {
        // Looked at before it starts the other.
        let (mut shell, tree) = shell("read line; sleep 600 & wait", 1);
        drop(shell.stdin.take());
        let grown = wait_for("it starts the other", || with(&tree, 2));
        let other = Tree(vec![grown.0[1]]);
        let is_stopped = || {
            let stat = stat(other.root()).expect("it is there");
            state_of(&stat) == Some("T")
        };
        let stop = || {
            other.signal("stop", Signal::STOP).expect("it is ours");
            wait_until("it is stopped", is_stopped);
        };
        let goes_on = |tree: &Tree| {
            tree.go_on().expect("they are ours");
            wait_until("it goes on", || !is_stopped());
        };
        stop();
        goes_on(&tree);
        stop();
        shell.kill().expect("it is ours");
        shell.wait().expect("it ended");
        goes_on(&grown);
        other.end().expect("it is ours");
    }

    #[test]
    fn what_is_started_meanwhile_is_ended_with_the_others() {
        // Looked at before it starts the others.
        let (mut shell, tree) = shell("read line; for i in 1 2 3 4; do sleep 600 & done; wait", 1);
        drop(shell.stdin.take());
        let grown = wait_for("it starts the others", || with(&tree, 5));
        tree.end().expect("they are ours");
        assert!(grown.has_ended());
        shell.wait().expect("it ended");
    }

    #[test]
    fn another_process_with_the_id_is_not_signalled() {
        let (mut shell, tree) = shell("exec sleep 600", 1);
        let before = Tree(vec![Process {
            started_ticks: tree.started_ticks() - 1,
            ..tree.0[0]
        }]);
        assert!(before.has_ended());
        before.end().expect("it has ended long ago");
        assert!(matches!(before.again(), Err(ProcessError::Gone(_))));
        assert!(!tree.has_ended());
        tree.end().expect("it is ours");
        shell.wait().expect("it ended");
    }

    #[test]
    fn work_of_what_has_ended_counts() {
        const WORK_MS: u64 = 50;
        // Limited, in case the test fails.
        let script = "sh -c 'ulimit -t 60; while :; do :; done'; read line";
        let (mut shell, tree) = shell(script, 2);
        wait_until("it works", || tree.cpu_ms() >= WORK_MS);
        tree.0[1].signal(Signal::KILL).expect("it is ours");
        let alone = wait_for("the other is gone", || with(&tree, 1));
        assert!(alone.cpu_ms() >= WORK_MS, "{}", alone.cpu_ms());
        alone.end().expect("it is ours");
        shell.wait().expect("it ended");
    }

    #[test]
    fn init_is_no_job() {
        assert!(matches!(Tree::of(1), Err(ProcessError::NotAJob(1))));
        assert!(matches!(Tree::of(-3), Err(ProcessError::NotAJob(-3))));
        assert!(matches!(Tree::of(i32::MAX), Err(ProcessError::Gone(_))));
    }
}
