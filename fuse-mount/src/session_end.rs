//! The end of a session with the kernel, at which nothing must be unmounted by its path.
//!
//! `fuser` 0.18 unmounts whatever is mounted on the directory of a session that has ended, although the session's own
//! mount is gone by then: what was mounted there before, or has been mounted since, is another file system. It takes a
//! device that reports POLLERR for mounted, but that is what the kernel reports for one that is not (fixed in its pull
//! request 703, which is in no release). Its last call before that is `destroy`, and for a session that has begun,
//! that call never returns.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use harvestfs_protocol::watch;

use crate::mount_table::{MountEntry, mounts};
use crate::unmount;

/// How a session has ended; `None` while it continues.
pub(crate) type Ended = watch::Receiver<Option<Result<(), String>>>;

/// Interval and number of checks whether a mount is gone: `umount --force` breaks its connection first.
const POLL: Duration = Duration::from_millis(20);
const POLLS: usize = 50;

/// Handles the end of a session.
pub struct SessionEnd {
    ended: watch::Sender<Option<Result<(), String>>>,
    directory: PathBuf,
    /// `None` before the session has begun.
    mount: OnceLock<MountEntry>,
}

impl SessionEnd {
    /// For a session of a mount on `directory`.
    pub(crate) fn new(directory: PathBuf) -> (Arc<Self>, Ended) {
        let (ended, receiver) = watch::channel(None);
        let end = Self {
            ended,
            directory,
            mount: OnceLock::new(),
        };
        (Arc::new(end), receiver)
    }

    /// Records that the session begins. If something fails before, the session is dropped, and `fuser` unmounts what
    /// it has mounted.
    pub(crate) fn begin(&self, mount: MountEntry) {
        // A session begins once.
        let _ = self.mount.set(mount);
    }

    /// Records that the session was given up before its end.
    pub(crate) fn failed(&self, error: String) {
        self.tell(Err(error));
    }

    /// Records that the session has ended. Does not return if it had begun.
    pub(crate) fn reached(&self) {
        let Some(mount) = self.mount.get() else {
            return;
        };
        let is_there = || mounts().is_ok_and(|all| all.contains(mount));
        let mut polls = POLLS;
        while is_there() && polls > 0 {
            thread::sleep(POLL);
            polls -= 1;
        }
        // The connection was aborted by another process, and the mount answers that it is not connected.
        let removed = if is_there() {
            unmount::remove_dead(&self.directory)
        } else {
            Ok(())
        };
        self.tell(removed.map_err(|error| error.to_string()));
        loop {
            thread::park();
        }
    }

    /// Reports the first result only. Nothing listens any more once the mount is dropped.
    fn tell(&self, result: Result<(), String>) {
        self.ended.send_if_modified(|ended| {
            let is_first = ended.is_none();
            if is_first {
                *ended = Some(result);
            }
            is_first
        });
    }
}
