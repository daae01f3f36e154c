//! The interface for notifying the kernel: its device, or a substitute.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use fuser::{INodeNo, Notifier};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use tokio::sync::oneshot;

use crate::submounts::Submounts;

/// `FUSE_NOTIFY_INVAL_ENTRY` of `linux/fuse.h`.
const NOTIFY_INVAL_ENTRY: i32 = 3;
/// `FUSE_EXPIRE_ONLY`: the entry is looked up again, and not discarded.
const EXPIRE_ONLY: u32 = 1;
/// `FUSE_NOTIFY_INC_EPOCH` of `linux/fuse.h` (protocol 7.44, Linux 6.16): all directory entries of the mount cached so
/// far belong to an older epoch.
const NOTIFY_INC_EPOCH: i32 = 8;
/// Time between checks whether the kernel may be disturbed.
pub const QUIET_LOOK: Duration = Duration::from_millis(2);

/// A notification for which the kernel may wait for requests of ours. It continues if this is dropped.
pub type Notified = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// The notifications to the kernel for one mount.
pub trait Kernel: Send + Sync + 'static {
    /// Invalidates the kernel's attributes of an inode. Takes no lock that the kernel holds during a request.
    ///
    /// # Errors
    /// The kernel refuses; `NotFound` if it does not know the inode.
    fn forget_attributes(&self, ino: InodeId) -> io::Result<()>;

    /// Declares all cached entries of the mount stale. Takes no lock.
    ///
    /// # Errors
    /// The kernel does not support epochs.
    fn declare_entries_old(&self) -> io::Result<()>;

    /// Makes the kernel drop the pages of a file from the offset that `begin` returns. `begin` is called every
    /// [`QUIET_LOOK`] until it returns one, which takes effect immediately. Waits for pages that are being read or
    /// written back.
    fn drop_pages(&self, ino: InodeId, begin: Box<dyn FnMut() -> Option<u64> + Send>) -> Notified;

    /// Makes the kernel look up an entry again, and keep what is mounted there. Waits for requests in the directory.
    fn expire_entry(&self, parent: InodeId, name: &Name) -> Notified;

    /// How long something has been seen mounted in the mount; `None` if nothing is.
    fn submounts_seen_for(&self) -> Option<Duration>;
}

/// The kernel of this machine.
pub(crate) struct FuseKernel {
    notifier: Notifier,
    /// The mount's connection to the kernel, for messages that the notifier does not support.
    device: Arc<OwnedFd>,
    submounts: Submounts,
}

impl FuseKernel {
    /// `device` is the mount's connection to the kernel.
    pub(crate) fn new(notifier: Notifier, device: OwnedFd, submounts: Submounts) -> Self {
        Self {
            notifier,
            device: Arc::new(device),
            submounts,
        }
    }
}

impl Kernel for FuseKernel {
    fn forget_attributes(&self, ino: InodeId) -> io::Result<()> {
        // A negative offset means the attributes only.
        self.notifier.inval_inode(INodeNo(ino.0), -1, 0)
    }

    fn declare_entries_old(&self) -> io::Result<()> {
        notify(&self.device, NOTIFY_INC_EPOCH, &[])
    }

    fn drop_pages(
        &self,
        ino: InodeId,
        mut begin: Box<dyn FnMut() -> Option<u64> + Send>,
    ) -> Notified {
        let notifier = self.notifier.clone();
        in_thread("fuse-drop", move || {
            let from = loop {
                match begin() {
                    Some(from) => break from,
                    None => std::thread::sleep(QUIET_LOOK),
                }
            };
            // No file is longer; a negative offset would mean the attributes only.
            let from = i64::try_from(from).unwrap_or(i64::MAX);
            notifier.inval_inode(INodeNo(ino.0), from, 0)
        })
    }

    fn expire_entry(&self, parent: InodeId, name: &Name) -> Notified {
        // struct fuse_notify_inval_entry_out { u64 parent; u32 namelen; u32 flags }, then the name with its
        // terminator.
        let name = name.as_bytes();
        let mut body = parent.0.to_ne_bytes().to_vec();
        body.extend((name.len() as u32).to_ne_bytes());
        body.extend(EXPIRE_ONLY.to_ne_bytes());
        body.extend(name);
        body.push(0);
        let device = self.device.clone();
        in_thread("fuse-expire", move || {
            notify(&device, NOTIFY_INVAL_ENTRY, &body)
        })
    }

    fn submounts_seen_for(&self) -> Option<Duration> {
        self.submounts.seen_for()
    }
}

/// Runs `work` in a dedicated thread, not one of the runtime's: shutting down the runtime would wait for the thread,
/// and so for the kernel.
fn in_thread(name: &str, work: impl FnOnce() -> io::Result<()> + Send + 'static) -> Notified {
    let (done, is_done) = oneshot::channel();
    let spawned = std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Nothing waits any more when the runtime has ended.
            let _ = done.send(work());
        });
    Box::pin(async move {
        spawned?;
        is_done
            .await
            .unwrap_or_else(|ended| Err(io::Error::other(ended)))
    })
}

fn notify(device: &OwnedFd, code: i32, body: &[u8]) -> io::Result<()> {
    // struct fuse_out_header { u32 len; s32 error; u64 unique }; a notification has its code in `error`
    // and 0 in `unique`.
    let length = 16 + body.len() as u32;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(code.to_ne_bytes());
    message.extend(0_u64.to_ne_bytes());
    message.extend(body);
    rustix::io::write(device, &message)?;
    Ok(())
}
