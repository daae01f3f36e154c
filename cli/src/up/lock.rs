//! Locks on resources that a cluster needs exclusively.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock, fstat, stat};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Pid;
use tokio::time::{Instant, sleep};

/// Maximum wait for an inherited lock: longer than the orderly end of a part, such as of a mount that cannot write
/// back.
const INHERITED_DEADLINE: Duration = Duration::from_secs(90);

/// A lock that parts inherit, so that it is released when the last of them has ended. The parts of a killed
/// `up` end by themselves, but occupy their directories and addresses until then.
pub struct Inherited(File);

impl Inherited {
    /// Waits until no process holds the lock, and takes it.
    pub async fn wait(path: &Path) -> anyhow::Result<Self> {
        let lock = open_lock(path)?;
        if try_lock(&lock) {
            return Ok(Self(lock));
        }
        eprintln!("Waiting until what is left of a cluster that was killed has ended ...");
        let deadline = Instant::now() + INHERITED_DEADLINE;
        while !try_lock(&lock) {
            if Instant::now() > deadline {
                bail!(
                    "processes of a cluster that was killed still run: `fuser {}` finds them",
                    path.display()
                );
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(Self(lock))
    }

    /// Runs `spawn`, whose child process inherits the lock.
    pub fn hand_on<T>(&self, spawn: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
        fcntl_setfd(&self.0, FdFlags::empty())?;
        let spawned = spawn();
        fcntl_setfd(&self.0, FdFlags::CLOEXEC)?;
        spawned
    }
}

/// Opens a lock's file, which may be locked. As opening the file is enough to lock it, only its owner may open it.
pub fn open_lock(path: &Path) -> anyhow::Result<File> {
    File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// The lock at a path, if the process that took it passed it to this process as standard input.
pub fn handed_on(path: &Path) -> anyhow::Result<Option<File>> {
    let input = std::io::stdin();
    let (Ok(ours), Ok(there)) = (fstat(&input), stat(path)) else {
        return Ok(None);
    };
    if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) {
        return Ok(None);
    }
    Ok(Some(input.as_fd().try_clone_to_owned()?.into()))
}

/// Takes the lock if it is free. Returns whether it did.
pub fn try_lock(lock: &File) -> bool {
    flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Whether a process has a lock's file open.
///
/// # Errors
/// When the open files of another user's process cannot be read.
pub fn is_open_in(lock: &File, pid: Pid) -> anyhow::Result<bool> {
    let ours = fstat(lock)?;
    let directory = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries.with_context(|| format!("cannot read {directory}"))?,
    };
    // A file that it closes in the meantime is not one that it keeps locked.
    let mut open = entries.filter_map(|entry| stat(entry.ok()?.path()).ok());
    Ok(open.any(|it| (it.st_dev, it.st_ino) == (ours.st_dev, ours.st_ino)))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_told_from_one_that_has_no_part_in_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let lock = open_lock(&dir.path().join("lock")).unwrap();
        assert!(try_lock(&lock));
        assert!(is_open_in(&lock, rustix::process::getpid()).unwrap());
        let mut other = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        assert!(!is_open_in(&lock, Pid::from_child(&other)).unwrap());
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!is_open_in(&lock, Pid::from_child(&other)).unwrap());
    }
}
