//! The end of a session with the kernel, at which nothing is unmounted by its path.
//!
//! `fuser` 0.18 unmounts what is mounted on the directory of a session that has ended, although that is not mounted any
//! more then: what was mounted there before, or is mounted there by now, is another file system. It takes a device that
//! answers POLLERR for mounted, and the kernel says so of one that is not (mended in its pull request 703, which no
//! release has). Its last call before is `destroy`, and a session that has begun never returns from that.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use harvestfs_protocol::watch;

use crate::mount_table::{MountEntry, mounts};
use crate::unmount;

/// How a session has ended; none while it goes on.
pub(crate) type Ended = watch::Receiver<Option<Result<(), String>>>;

/// How often, and how many times, it is looked whether a mount is gone: `umount --force` breaks its connection before.
const POLL: Duration = Duration::from_millis(20);
const POLLS: usize = 50;

/// What a session does at its end.
pub struct SessionEnd {
    ended: watch::Sender<Option<Result<(), String>>>,
    directory: PathBuf,
    /// None before the session has begun.
    mount: OnceLock<MountEntry>,
}

impl SessionEnd {
    /// Of a session of a mount on `directory`.
    pub(crate) fn new(directory: PathBuf) -> (Arc<Self>, Ended) {
        let (ended, receiver) = watch::channel(None);
        let end = Self {
            ended,
            directory,
            mount: OnceLock::new(),
        };
        (Arc::new(end), receiver)
    }

    /// The session begins. Until then it is dropped where something fails, and `fuser` unmounts what it has mounted.
    pub(crate) fn begin(&self, mount: MountEntry) {
        // A session begins once.
        let _ = self.mount.set(mount);
    }

    /// The session was given up before its end.
    pub(crate) fn failed(&self, error: String) {
        self.tell(Err(error));
    }

    /// The session has ended. Does not return if it had begun.
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
        // Somebody aborted its connection, and it answers that it is not connected.
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

    /// The first one says it. Nobody listens any more once the mount is dropped.
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
