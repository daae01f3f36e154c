//! Locks on what a cluster needs to itself.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use tokio::time::{Instant, sleep};

/// Longer than an orderly end of a part, which a mount needs when it cannot write back.
const INHERITED_DEADLINE: Duration = Duration::from_secs(90);

/// A lock that parts inherit, so that it is free when the last of them has ended. Those of a killed
/// `up` end by themselves, but until then they hold their directories and addresses.
pub struct Inherited(File);

impl Inherited {
    /// Waits until nobody has it any more.
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

    /// What `spawn` starts inherits the lock.
    pub fn hand_on<T>(&self, spawn: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
        fcntl_setfd(&self.0, FdFlags::empty())?;
        let spawned = spawn();
        fcntl_setfd(&self.0, FdFlags::CLOEXEC)?;
        spawned
    }
}

/// Opens a lock, which need not be free.
pub fn open_lock(path: &Path) -> anyhow::Result<File> {
    File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// Takes it, if it is free.
pub fn try_lock(lock: &File) -> bool {
    flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok()
}
