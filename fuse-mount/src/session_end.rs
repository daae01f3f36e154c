//! The end of a session with the kernel, at which nothing is unmounted by its path.
//!
//! `fuser` 0.18 unmounts what is mounted on the directory of a session that has ended, although that is not mounted any
//! more then: what was mounted there before, or is mounted there by now, is another file system. It takes a device that
//! answers POLLERR for mounted, and the kernel says so of one that is not (mended in its pull request 703, which no
//! release has). Its last call before is `destroy`, and a session that has begun never returns from that.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;

use harvestfs_protocol::watch;

use crate::mount_table::mounts;
use crate::unmount;

/// How a session has ended; none while it goes on.
pub(crate) type Ended = watch::Receiver<Option<Result<(), String>>>;

/// What a session does at its end.
pub struct SessionEnd {
    ended: watch::Sender<Option<Result<(), String>>>,
    directory: PathBuf,
    /// Of the mount; none before it has begun.
    device: OnceLock<String>,
}

impl SessionEnd {
    /// Of a session of a mount on `directory`.
    pub(crate) fn new(directory: PathBuf) -> (Arc<Self>, Ended) {
        let (ended, receiver) = watch::channel(None);
        let end = Self {
            ended,
            directory,
            device: OnceLock::new(),
        };
        (Arc::new(end), receiver)
    }

    /// The session begins. Until then it is dropped where something fails, and `fuser` unmounts what it has mounted.
    pub(crate) fn begin(&self, device: String) {
        // A session begins once.
        let _ = self.device.set(device);
    }

    /// The session has ended. Does not return if it had begun.
    pub(crate) fn reached(&self) {
        let Some(device) = self.device.get() else {
            return;
        };
        let is_mounted = mounts().is_ok_and(|all| all.iter().any(|it| it.device == *device));
        let result = if is_mounted {
            // Only if it answers that it is not connected.
            let removed = unmount::remove_dead(&self.directory);
            Err(match removed {
                Ok(()) => "it was aborted".to_owned(),
                Err(error) => format!("it was aborted, and what is mounted stays: {error}"),
            })
        } else {
            Ok(())
        };
        // Nobody listens any more once the mount is dropped.
        self.ended.send_replace(Some(result));
        loop {
            thread::park();
        }
    }
}
