//! Notifications to the kernel that cached attributes, entries and pages are stale.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

use crate::kernel::{Kernel, QUIET_LOOK};
use crate::now;
use crate::pages::Pages;

/// Maximum number of concurrent notices that wait for something that the kernel holds during a request. Each takes a
/// thread.
const WAITING_MAX: usize = 16;

/// Notifies the kernel.
pub struct Notices {
    kernel: Arc<dyn Kernel>,
    runtime: Handle,
    waiting: Arc<Semaphore>,
    /// Signals that pages of some file were dropped.
    pub dropped: Notify,
}

impl Notices {
    /// Notifies `kernel`; `runtime` runs notices that have to wait.
    pub fn new(kernel: Arc<dyn Kernel>, runtime: Handle) -> Self {
        Self {
            kernel,
            runtime,
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
            dropped: Notify::new(),
        }
    }

    /// As [`Kernel::forget_attributes`]. Returns whether the kernel knows the inode.
    pub fn forget_attributes(&self, ino: InodeId) -> bool {
        let notified = self.kernel.forget_attributes(ino);
        let is_unknown = matches!(&notified, Err(error) if error.kind() == io::ErrorKind::NotFound);
        note(ino, "an inode's attributes", notified);
        !is_unknown
    }

    /// Makes the kernel drop its stale pages of a file, in a task, since the kernel waits for pages that are being
    /// read or written back. The caller has marked the pages.
    pub fn drop_pages(self: &Arc<Self>, ino: InodeId, pages: Arc<Pages>) {
        let notices = self.clone();
        self.runtime.spawn(async move {
            loop {
                // The semaphore is never closed.
                let Ok(_permit) = notices.waiting.acquire().await else {
                    return;
                };
                let begun = Arc::new(AtomicBool::new(false));
                let (dropping, begins) = (pages.clone(), begun.clone());
                let begin = Box::new(move || {
                    let from = dropping.begin_drop(now());
                    begins.fetch_or(from.is_some(), Ordering::Relaxed);
                    from
                });
                let dropped = notices.kernel.drop_pages(ino, begin).await;
                if begun.load(Ordering::Relaxed) {
                    note(ino, "a file's pages", dropped);
                    if !pages.end_drop() {
                        break;
                    }
                } else {
                    tracing::warn!(%ino, ?dropped, "pages cannot be dropped; trying again");
                    tokio::time::sleep(QUIET_LOOK).await;
                }
            }
            notices.dropped.notify_waiters();
        });
    }

    /// As [`Kernel::declare_entries_old`].
    ///
    /// # Errors
    /// If the kernel does not support epochs.
    pub fn declare_entries_old(&self) -> io::Result<()> {
        self.kernel.declare_entries_old()
    }

    /// As [`Kernel::expire_entry`], in a task.
    pub fn expire_entry(self: &Arc<Self>, parent: InodeId, name: &Name) {
        let (notices, name) = (self.clone(), name.clone());
        self.runtime.spawn(async move {
            // The semaphore is never closed.
            let Ok(_permit) = notices.waiting.acquire().await else {
                return;
            };
            note(
                parent,
                "an entry",
                notices.kernel.expire_entry(parent, &name).await,
            );
        });
    }

    /// As [`Kernel::submounts_seen_for`].
    pub fn submounts_seen_for(&self) -> Option<Duration> {
        self.kernel.submounts_seen_for()
    }
}

/// Logs that the kernel refused, unless it does not know what it was to forget.
fn note(ino: InodeId, what: &str, notified: io::Result<()>) {
    if let Err(error) = notified
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%ino, %error, "the kernel did not forget {what}");
    }
}
