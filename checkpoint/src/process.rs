//! The processes of a job, as `/proc` shows them.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

/// Ticks per second of the times in `/proc/PID/stat`: Linux has shown 100 on every architecture
/// since long.
const TICKS_PER_S: u64 = 100;

/// What is wrong with the processes of a job.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is no such process.
    #[error("there is no process {0}")]
    Gone(i32),
    /// Init, or what is no process.
    #[error("{0} is not the process of a job")]
    NotAJob(i32),
    /// The cgroup cannot be read.
    #[error("cannot read the cgroup {}: {source}", path.display())]
    Cgroup {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It has no process.
    #[error("the cgroup {} has no process", .0.display())]
    Empty(PathBuf),
    /// It has processes that do not descend from one of them.
    #[error(
        "the cgroup {} has {roots} processes that were not started by another of it: a checkpoint \
         is of one process and what it started",
        path.display()
    )]
    Forest {
        /// Which.
        path: PathBuf,
        /// How many.
        roots: usize,
    },
    /// A signal could not be sent.
    #[error("cannot {what} process {pid}: {source}")]
    Signal {
        /// What was tried.
        what: &'static str,
        /// With which.
        pid: i32,
        /// Why not.
        source: io::Error,
    },
}

/// A process and all that it started, itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree(Vec<i32>);

impl Tree {
    /// The processes as they are now. They may change until they are stopped.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn of(root: i32) -> Result<Self, ProcessError> {
        if root <= 1 {
            return Err(ProcessError::NotAJob(root));
        }
        let parents = parents();
        if !parents.iter().any(|&(pid, _)| pid == root) {
            return Err(ProcessError::Gone(root));
        }
        Ok(Self(descendants(root, &parents)))
    }

    /// The process that started the others.
    #[must_use]
    pub fn root(&self) -> i32 {
        self.0[0]
    }

    /// Whether this process is one of them.
    #[must_use]
    pub fn contains(&self, pid: i32) -> bool {
        self.0.contains(&pid)
    }

    /// Bytes of memory that they use; what they share counts once.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let kib: u64 = self.0.iter().filter_map(|&pid| pss_kib(pid)).sum();
        kib << 10
    }

    /// Milliseconds of CPU time that they have used.
    #[must_use]
    pub fn cpu_ms(&self) -> u64 {
        let ticks: u64 = self.0.iter().filter_map(|&pid| cpu_ticks(pid)).sum();
        ticks * 1000 / TICKS_PER_S
    }

    /// Ends them. What a checkpoint has stopped does not notice.
    ///
    /// # Errors
    /// When a signal cannot be sent.
    pub fn kill(&self) -> Result<(), ProcessError> {
        self.signal("end", Signal::KILL)
    }

    /// Whether all of them have ended; their parents may not have taken note of it yet.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.0.iter().all(|&pid| match stat(pid) {
            Some(stat) => matches!(state_of(&stat), Some("Z" | "X")),
            None => true,
        })
    }

    /// Lets them go on that a checkpoint has stopped.
    ///
    /// # Errors
    /// When a signal cannot be sent.
    pub fn go_on(&self) -> Result<(), ProcessError> {
        self.signal("continue", Signal::CONT)
    }

    fn signal(&self, what: &'static str, signal: Signal) -> Result<(), ProcessError> {
        for &pid in &self.0 {
            let Some(target) = Pid::from_raw(pid) else {
                continue;
            };
            match kill_process(target, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => {
                    return Err(ProcessError::Signal {
                        what,
                        pid,
                        source: error.into(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The one process of a cgroup from which all others in it descend. `path` is the cgroup's
/// directory.
///
/// # Errors
/// When the cgroup has none, or more than one.
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
    let parents = parents();
    let roots = roots(&members, &parents);
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

fn roots(members: &BTreeSet<i32>, parents: &[(i32, i32)]) -> Vec<i32> {
    parents
        .iter()
        .filter(|(pid, parent)| members.contains(pid) && !members.contains(parent))
        .map(|&(pid, _)| pid)
        .collect()
}

fn descendants(root: i32, parents: &[(i32, i32)]) -> Vec<i32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        let children = parents.iter().filter(|&&(_, of)| of == parent);
        found.extend(children.map(|&(pid, _)| pid));
        next += 1;
    }
    found
}

/// All processes with their parents.
fn parents() -> Vec<(i32, i32)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, stat_field(pid, 4)?.try_into().ok()?)))
        .collect()
}

/// When a process was started, in ticks since the machine was; none: it is not there.
#[must_use]
pub fn started_ticks(pid: i32) -> Option<u64> {
    stat_field(pid, 22)
}

fn cpu_ticks(pid: i32) -> Option<u64> {
    Some(stat_field(pid, 14)? + stat_field(pid, 15)?)
}

/// A field of `/proc/PID/stat`, counted from 1 as its documentation does.
fn stat_field(pid: i32, number: usize) -> Option<u64> {
    field_of(&stat(pid)?, number)?.parse().ok()
}

fn stat(pid: i32) -> Option<String> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    Some(String::from_utf8_lossy(&stat).into_owned())
}

fn state_of(stat: &str) -> Option<&str> {
    field_of(stat, 3)
}

/// The second field is the name in parentheses, and may contain anything.
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
    use std::process::{Command, Stdio};

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

    #[test]
    fn a_tree_is_a_process_and_what_it_started() {
        let parents = [(2, 1), (5, 2), (6, 5), (7, 1), (8, 5)];
        assert_eq!(descendants(2, &parents), [2, 5, 6, 8]);
        assert_eq!(roots(&BTreeSet::from([5, 6, 8]), &parents), [5]);
        assert_eq!(roots(&BTreeSet::from([5, 7]), &parents), [5, 7]);
    }

    #[test]
    fn a_real_tree_is_seen_and_ended() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 600 & sleep 600 & wait"])
            .stdout(Stdio::null())
            .spawn()
            .expect("a shell");
        let root = i32::try_from(shell.id()).expect("a process id");
        let tree = loop {
            let tree = Tree::of(root).expect("it runs");
            if tree.0.len() == 3 {
                break tree;
            }
            std::thread::yield_now();
        };
        assert_eq!(tree.root(), root);
        assert!(tree.memory_bytes() > 0);
        assert!(!tree.has_ended());
        tree.kill().expect("they are ours");
        while !tree.has_ended() {
            std::thread::yield_now();
        }
        assert!(!shell.wait().expect("it ended").success());
    }

    #[test]
    fn init_is_no_job() {
        assert!(matches!(Tree::of(1), Err(ProcessError::NotAJob(1))));
        assert!(matches!(Tree::of(-3), Err(ProcessError::NotAJob(-3))));
        assert!(matches!(Tree::of(i32::MAX), Err(ProcessError::Gone(_))));
    }
}
