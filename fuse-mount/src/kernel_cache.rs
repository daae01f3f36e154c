//! Invalidates the kernel's caches when another session has changed an inode or entry.
//!
//! Nothing here may wait for a lock that the kernel holds during a request of ours, or two mounts that change one
//! directory would wait for each other's acknowledgement. That rules out the notification that removes one directory
//! entry (it takes the directory's lock). Instead, all entries of the mount are declared stale in a single step, which
//! takes no lock, and the kernel looks up each one again when it is next used; the client's cache answers those
//! lookups without a round trip.

use std::sync::Arc;

use harvestfs_client::{CacheListener, Invalidated, Invalidation};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;

use crate::blocking;
use crate::kernel_options::TTL_MAX;
use crate::notices::Notices;
use crate::shared::Shared;

/// Passes invalidations on to the kernel.
#[derive(Clone)]
pub struct KernelCache {
    shared: Arc<Shared>,
    notices: Arc<Notices>,
    knows_epochs: bool,
}

impl KernelCache {
    /// The kernel caches nothing yet.
    pub fn new(shared: Arc<Shared>, notices: Arc<Notices>) -> Self {
        let knows_epochs = notices.declare_entries_old().is_ok();
        // A kernel that cannot declare all entries stale must not cache them.
        shared.let_kernel_cache_entries(knows_epochs);
        Self {
            shared,
            notices,
            knows_epochs,
        }
    }

    /// `entry` is the one that changed; with `None`, any may have.
    fn forget_entries(&self, entry: Option<(InodeId, &Name)>) {
        if !self.knows_epochs {
            return;
        }
        let submounts = self.notices.submounts_seen_for();
        self.shared.let_kernel_cache_entries(submounts.is_none());
        match submounts {
            None => {
                if let Err(error) = self.notices.declare_entries_old() {
                    tracing::warn!(%error, "the kernel did not forget directory entries");
                }
            }
            // The kernel may have cached some entries before something was mounted.
            Some(seen_for) if seen_for <= TTL_MAX => {
                if let Some((parent, name)) = entry {
                    self.notices.expire_entry(parent, name);
                }
            }
            Some(_) => {}
        }
    }
    async fn invalidate_one(&self, what: Invalidation) {
        match what {
            Invalidation::Inode(ino) => {
                if self.shared.changed_elsewhere(ino).await {
                    self.forget_entries(None);
                }
            }
            Invalidation::Entry(parent, name) => self.forget_entries(Some((parent, &name))),
            Invalidation::All => {
                self.shared.all_changed_elsewhere().await;
                self.forget_entries(None);
            }
        }
    }
}

impl CacheListener for KernelCache {
    fn invalidate(&self, what: Vec<Invalidation>) -> Invalidated {
        let kernel = self.clone();
        Box::pin(async move {
            let notify = async move {
                for one in what {
                    kernel.invalidate_one(one).await;
                }
            };
            // `None` means that the runtime ends, and the mount with it.
            let _ = blocking::run(notify).await;
        })
    }
}
