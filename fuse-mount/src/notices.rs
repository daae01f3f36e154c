//! Notifications to the kernel: that attributes, entries and pages that it has cached are old.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{INodeNo, Notifier};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::pages::Pages;

/// Notices at the same time that wait for what the kernel holds during a request. Each takes a thread.
const WAITING_MAX: usize = 16;
/// `FUSE_NOTIFY_INVAL_ENTRY` of `linux/fuse.h`.
const NOTIFY_INVAL_ENTRY: i32 = 3;
/// `FUSE_EXPIRE_ONLY`: the entry is looked up again, and not thrown away.
const EXPIRE_ONLY: u32 = 1;
/// `FUSE_NOTIFY_INC_EPOCH` of `linux/fuse.h` (protocol 7.44, Linux 6.16): all cached directory
/// entries of the mount are from an older epoch now.
const NOTIFY_INC_EPOCH: i32 = 8;
/// How often is looked whether the kernel may be disturbed.
const QUIET_LOOK: Duration = Duration::from_millis(2);

/// Tells the kernel.
#[derive(Debug)]
pub struct Notices {
    notifier: Notifier,
    /// The mount's connection to the kernel, for what the notifier does not know.
    device: Arc<OwnedFd>,
    runtime: Handle,
    threads: Arc<Semaphore>,
    /// Pages of some file were dropped.
    pub dropped: Notify,
}

impl Notices {
    /// `device` is the mount's connection to the kernel; `runtime` runs what has to wait.
    pub fn new(notifier: Notifier, device: OwnedFd, runtime: Handle) -> Self {
        Self {
            notifier,
            device: Arc::new(device),
            runtime,
            threads: Arc::new(Semaphore::new(WAITING_MAX)),
            dropped: Notify::new(),
        }
    }

    /// The attributes that the kernel has of an inode are old. Takes no lock that the kernel holds
    /// during a request.
    pub fn forget_attributes(&self, ino: InodeId) {
        // A negative offset: the attributes only.
        self.tell(ino, -1, "an inode's attributes");
    }

    /// The pages that the kernel has of a file are old: it is made to drop them, in a task, since it
    /// waits for those that are being read or written back. The caller has marked them.
    pub fn drop_pages(self: &Arc<Self>, ino: InodeId, pages: Arc<Pages>) {
        let notices = self.clone();
        self.runtime.spawn(async move {
            loop {
                // Never closed.
                let Ok(permit) = notices.threads.clone().acquire_owned().await else {
                    return;
                };
                let (done, is_done) = oneshot::channel();
                let (kernel, dropping) = (notices.clone(), pages.clone());
                // Not one of the runtime's: its end would wait for the thread, and so for the kernel.
                let spawned =
                    std::thread::Builder::new()
                        .name("fuse-drop".into())
                        .spawn(move || {
                            while !dropping.begin_drop(Instant::now()) {
                                std::thread::sleep(QUIET_LOOK);
                            }
                            kernel.tell(ino, 0, "a file's pages");
                            drop(permit);
                            // Nobody waits when the runtime has ended.
                            let _ = done.send(());
                        });
                if let Err(error) = &spawned {
                    tracing::warn!(%ino, %error, "no thread to drop pages with; trying again");
                    tokio::time::sleep(QUIET_LOOK).await;
                }
                let dropped = is_done.await.is_ok();
                if dropped && !pages.end_drop() {
                    break;
                }
            }
            notices.dropped.notify_waiters();
        });
    }

    /// All entries of the mount that the kernel has cached are old. Takes no lock.
    ///
    /// # Errors
    /// When the kernel knows no epochs.
    pub fn declare_entries_old(&self) -> io::Result<()> {
        notify(&self.device, NOTIFY_INC_EPOCH, &[])
    }

    /// The kernel is to look up an entry again, and to keep what is mounted there; in a task, since it
    /// waits for requests in the directory.
    pub fn expire_entry(&self, parent: InodeId, name: &Name) {
        // struct fuse_notify_inval_entry_out { u64 parent; u32 namelen; u32 flags }, then the name with
        // its end.
        let name = name.as_bytes();
        let mut body = parent.0.to_ne_bytes().to_vec();
        body.extend((name.len() as u32).to_ne_bytes());
        body.extend(EXPIRE_ONLY.to_ne_bytes());
        body.extend(name);
        body.push(0);
        let (device, threads) = (self.device.clone(), self.threads.clone());
        self.runtime.spawn(async move {
            // Never closed.
            let Ok(permit) = threads.acquire_owned().await else {
                return;
            };
            let spawned = std::thread::Builder::new()
                .name("fuse-expire".into())
                .spawn(move || {
                    let _permit = permit;
                    if let Err(error) = notify(&device, NOTIFY_INVAL_ENTRY, &body)
                        && error.kind() != io::ErrorKind::NotFound
                    {
                        tracing::warn!(%error, "the kernel did not expire an entry");
                    }
                });
            if let Err(error) = spawned {
                tracing::warn!(%error, "no thread to expire an entry with");
            }
        });
    }

    fn tell(&self, ino: InodeId, offset: i64, what: &str) {
        if let Err(error) = self.notifier.inval_inode(INodeNo(ino.0), offset, 0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%ino, %error, "the kernel did not forget {what}");
        }
    }
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
