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
            let mut failures = 0_u64;
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
                    if failures > 0 {
                        tracing::info!(%ino, failures, "pages can be dropped again");
                        failures = 0;
                    }
                    note(ino, "a file's pages", dropped);
                    if !pages.end_drop() {
                        break;
                    }
                } else {
                    // While no thread can be started, there are hundreds of attempts a second.
                    if failures == 0 {
                        tracing::warn!(%ino, ?dropped, "pages cannot be dropped; trying again");
                    }
                    failures += 1;
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::*;
    use crate::kernel::Notified;

    /// A kernel that cannot be asked to drop pages at first, as if no thread could be started.
    struct Refusing {
        refusals_left: AtomicU32,
    }

    impl Kernel for Refusing {
        fn forget_attributes(&self, _: InodeId) -> io::Result<()> {
            Ok(())
        }

        fn declare_entries_old(&self) -> io::Result<()> {
            Ok(())
        }

        fn drop_pages(
            &self,
            _: InodeId,
            mut begin: Box<dyn FnMut() -> Option<u64> + Send>,
        ) -> Notified {
            let left = self.refusals_left.load(Ordering::Relaxed);
            if left > 0 {
                self.refusals_left.store(left - 1, Ordering::Relaxed);
                return Box::pin(async { Err(io::ErrorKind::WouldBlock.into()) });
            }
            assert_eq!(begin(), Some(0), "all pages are dropped");
            Box::pin(async { Ok(()) })
        }

        fn expire_entry(&self, _: InodeId, _: &Name) -> Notified {
            Box::pin(async { Ok(()) })
        }

        fn submounts_seen_for(&self) -> Option<Duration> {
            None
        }
    }

    /// Counts warnings.
    struct Warnings(Arc<AtomicU32>);

    impl Subscriber for Warnings {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let is_warning = *event.metadata().level() == Level::WARN;
            self.0.fetch_add(is_warning.into(), Ordering::Relaxed);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[tokio::test(start_paused = true)]
    async fn pages_that_cannot_be_dropped_are_reported_once() {
        let warnings = Arc::new(AtomicU32::new(0));
        let _logs = tracing::subscriber::set_default(Warnings(warnings.clone()));
        let kernel = Arc::new(Refusing {
            refusals_left: AtomicU32::new(100),
        });
        let notices = Arc::new(Notices::new(kernel, Handle::current()));
        let pages = Arc::new(Pages::new(4_096));
        pages.opened();
        assert!(pages.want_drop());
        let dropped = notices.dropped.notified();
        notices.drop_pages(InodeId(7), pages.clone());
        let dropped = tokio::time::timeout(Duration::from_secs(60), dropped).await;
        dropped.unwrap();
        assert!(!pages.are_old());
        assert_eq!(warnings.load(Ordering::Relaxed), 1);
    }
}
