//! Invalidates the kernel's caches when another session changed an inode or entry.
//!
//! Nothing here may wait for a lock that the kernel holds during a request of ours, or two mounts
//! that change one directory would wait for each other's acknowledgement. That rules out the
//! notification that removes one directory entry (it takes the directory's lock). Instead all
//! entries of the mount are declared old at once, which takes no lock, and the kernel looks each up
//! again when it is next used; the client's cache answers those lookups without a trip.

use std::sync::Arc;

use harvestfs_client::CacheListener;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;

use crate::kernel_options::TTL_MAX;
use crate::notices::Notices;
use crate::shared::Shared;
use crate::submounts::Submounts;

/// Passes invalidations on to the kernel.
#[derive(Debug)]
pub struct KernelCache {
    shared: Arc<Shared>,
    notices: Arc<Notices>,
    submounts: Submounts,
    knows_epochs: bool,
}

impl KernelCache {
    /// Nothing is mounted in the mount yet, and the kernel caches nothing.
    pub fn new(shared: Arc<Shared>, notices: Arc<Notices>, submounts: Submounts) -> Self {
        let knows_epochs = notices.declare_entries_old().is_ok();
        // A kernel that cannot declare all entries old must not cache them.
        shared.let_kernel_cache_entries(knows_epochs);
        Self {
            shared,
            notices,
            submounts,
            knows_epochs,
        }
    }

    /// `entry`: the one that changed; none: any may have.
    fn forget_entries(&self, entry: Option<(InodeId, &Name)>) {
        if !self.knows_epochs {
            return;
        }
        let submounts = self.submounts.seen_for();
        self.shared.let_kernel_cache_entries(submounts.is_none());
        match submounts {
            None => {
                if let Err(error) = self.notices.declare_entries_old() {
                    tracing::warn!(%error, "the kernel did not forget directory entries");
                }
            }
            // It may have cached some before something was mounted.
            Some(seen_for) if seen_for <= TTL_MAX => {
                if let Some((parent, name)) = entry {
                    self.notices.expire_entry(parent, name);
                }
            }
            Some(_) => {}
        }
    }
}

impl CacheListener for KernelCache {
    fn invalidate_inode(&self, ino: InodeId) {
        if self.shared.changed_elsewhere(ino) {
            self.forget_entries(None);
        }
    }

    fn invalidate_entry(&self, parent: InodeId, name: &Name) {
        self.forget_entries(Some((parent, name)));
    }

    fn invalidate_all(&self) {
        self.shared.all_changed_elsewhere();
        self.forget_entries(None);
    }
}
