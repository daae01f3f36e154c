//! Records for which processes of this node the kernel tracks changes, and since which checkpoint.
//!
//! A dump makes the kernel forget which pages were changed before it, even if the dump fails. So the
//! record of a process is removed before a dump begins, and written when its checkpoint is durable.
//!
//! In the same way a node records, for each process, the last checkpoint after which it continued.

use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::process::{Tree, started_ticks};
use crate::store::{Checkpoint, StoreError, io_error};

/// A process, and the checkpoint since which its changes are tracked. When any field differs, nothing is
/// known about the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracked {
    /// The boot of the machine: after the next boot, other processes have these ids.
    boot_id: String,
    /// Start time of the process, as in `/proc/PID/stat`.
    started_ticks: u64,
    checkpoint: PathBuf,
    /// When the checkpoint was made, since another one may reuse its name.
    created_unix_ms: u64,
}

impl Tracked {
    /// The record of a checkpoint's process since that checkpoint; `None` when there is no such process.
    #[must_use]
    pub fn since(checkpoint: &Checkpoint) -> Option<Self> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(Self {
            boot_id: boot_id.trim().to_owned(),
            started_ticks: started_ticks(checkpoint.manifest.pid)?,
            checkpoint: checkpoint.directory.clone(),
            created_unix_ms: checkpoint.manifest.created_unix_ms,
        })
    }
}

/// The records of this node, one file for each process.
#[derive(Clone, Debug)]
pub struct Tracking {
    directory: PathBuf,
}

impl Tracking {
    pub(crate) fn open(directory: PathBuf) -> Result<Self, StoreError> {
        fs::create_dir_all(&directory).map_err(io_error("make", &directory))?;
        Ok(Self { directory })
    }

    /// Takes the record of the first process of a tree that is about to be dumped. This removes it, and also
    /// those of trees that have a process in common with it, as the kernel restarts tracking for all processes
    /// of the tree. `None` when there is no record, or it is damaged.
    ///
    /// # Errors
    /// When a record cannot be removed: the dump would make it wrong.
    pub fn take(&self, tree: &Tree) -> Result<Option<Tracked>, StoreError> {
        let known = fs::read(self.path(tree.root())).ok();
        self.forget(|pid| {
            tree.contains(pid) || Tree::of(pid).is_ok_and(|other| other.contains(tree.root()))
        })?;
        Ok(known.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// Whether the process of a checkpoint is still the one of which it was made, and this checkpoint is the last
    /// one recorded for it.
    #[must_use]
    pub fn is_of(&self, checkpoint: &Checkpoint) -> bool {
        let known = fs::read(self.path(checkpoint.manifest.pid)).ok();
        let known: Option<Tracked> = known.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        known.is_some() && known == Tracked::since(checkpoint)
    }

    /// Records a process, and removes the records of those that have ended.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn remember(&self, pid: i32, tracked: &Tracked) -> Result<(), StoreError> {
        self.forget(|pid| started_ticks(pid).is_none())?;
        let path = self.path(pid);
        let bytes = serde_json::to_vec(tracked).map_err(io::Error::from);
        bytes
            .and_then(|bytes| fs::write(&path, bytes))
            .map_err(io_error("write", &path))
    }

    /// Removes the records of the given processes, and any file that is not a record.
    fn forget(&self, mut is_wrong: impl FnMut(i32) -> bool) -> Result<(), StoreError> {
        for entry in fs::read_dir(&self.directory).map_err(io_error("list", &self.directory))? {
            let entry = entry.map_err(io_error("list", &self.directory))?;
            let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
            if pid.is_none_or(&mut is_wrong) {
                let path = entry.path();
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(())
    }

    fn path(&self, pid: i32) -> PathBuf {
        self.directory.join(pid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Manifest;

    fn checkpoint(pid: i32, created_unix_ms: u64) -> Checkpoint {
        Checkpoint {
            manifest: Manifest {
                pid,
                created_unix_ms,
                ..Manifest::sample(Vec::new())
            },
            directory: "/store/job/000001".into(),
        }
    }

    #[test]
    fn what_is_known_is_known_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let tracking = Tracking::open(directory.path().join("tracked")).expect("it is made");
        let pid = i32::try_from(std::process::id()).expect("a process id");
        let tree = Tree::of(pid).expect("we run");
        assert_eq!(tracking.take(&tree).expect("nothing is no error"), None);
        let tracked = Tracked::since(&checkpoint(pid, 5)).expect("we run");
        tracking.remember(pid, &tracked).expect("it is written");
        assert_eq!(tracking.take(&tree).expect("it is read"), Some(tracked));
        assert_eq!(tracking.take(&tree).expect("it was taken"), None);
    }

    /// A dump of part of a tree, or of a larger one, makes its record wrong.
    #[test]
    fn trees_with_a_process_in_common_are_forgotten() {
        let directory = tempfile::tempdir().expect("a directory");
        let tracking = Tracking::open(directory.path().to_owned()).expect("it is made");
        let ours = i32::try_from(std::process::id()).expect("a process id");
        let mut sleeps = std::process::Command::new("sleep");
        let [mut child, mut other] = [(); 2].map(|()| sleeps.arg("600").spawn().expect("it runs"));
        let [child_pid, other_pid] = [&child, &other].map(|it| it.id() as i32);
        for (dumped, known, stays) in [
            (child_pid, ours, false),
            (ours, child_pid, false),
            (child_pid, other_pid, true),
        ] {
            let tracked = Tracked::since(&checkpoint(known, 5)).expect("it runs");
            tracking.remember(known, &tracked).expect("it is written");
            let tree = Tree::of(dumped).expect("it runs");
            assert_eq!(tracking.take(&tree).expect("it is forgotten"), None);
            assert_eq!(tracking.path(known).exists(), stays, "{dumped} {known}");
        }
        for sleep in [&mut child, &mut other] {
            sleep.kill().expect("it is ours");
            sleep.wait().expect("it is ours");
        }
    }

    #[test]
    fn another_checkpoint_or_process_is_not_the_same() {
        let pid = i32::try_from(std::process::id()).expect("a process id");
        let tracked = Tracked::since(&checkpoint(pid, 5));
        assert_eq!(tracked, Tracked::since(&checkpoint(pid, 5)));
        assert_ne!(tracked, Tracked::since(&checkpoint(pid, 6)));
        assert_ne!(tracked, Tracked::since(&checkpoint(1, 5)));
        assert_eq!(Tracked::since(&checkpoint(i32::MAX, 5)), None);
    }

    /// The CPU time in a checkpoint is that of one process: another one with its id starts at 0 again.
    #[test]
    fn a_process_that_got_the_id_of_another_is_not_that_of_its_checkpoint() {
        let directory = tempfile::tempdir().expect("a directory");
        let went_on = Tracking::open(directory.path().to_owned()).expect("it is made");
        let pid = i32::try_from(std::process::id()).expect("a process id");
        let stored = checkpoint(pid, 5);
        assert!(!went_on.is_of(&stored), "nothing is known");
        let here = Tracked::since(&stored).expect("we run");
        went_on.remember(pid, &here).expect("it is written");
        assert!(went_on.is_of(&stored) && went_on.is_of(&stored));
        assert!(!went_on.is_of(&checkpoint(pid, 6)));
        let started_before = Tracked {
            started_ticks: here.started_ticks - 1,
            ..here.clone()
        };
        let before_a_boot = Tracked {
            boot_id: "other".into(),
            ..here
        };
        for other in [started_before, before_a_boot] {
            went_on.remember(pid, &other).expect("it is written");
            assert!(!went_on.is_of(&stored), "{other:?}");
        }
    }

    #[test]
    fn damage_and_what_has_ended_are_forgotten() {
        let directory = tempfile::tempdir().expect("a directory");
        let tracking = Tracking::open(directory.path().to_owned()).expect("it is made");
        let pid = i32::try_from(std::process::id()).expect("a process id");
        fs::write(tracking.path(pid), "{").expect("it is written");
        let tree = Tree::of(pid).expect("we run");
        assert_eq!(tracking.take(&tree).expect("damage is no error"), None);
        fs::write(tracking.path(i32::MAX), "{}").expect("it is written");
        let tracked = Tracked::since(&checkpoint(pid, 5)).expect("we run");
        tracking.remember(pid, &tracked).expect("it is written");
        assert!(!tracking.path(i32::MAX).exists());
    }
}
