//! What the kernel is told when another session changed what it has cached.
//!
//! Nothing here may wait for a lock that the kernel holds during a request of ours, or two mounts
//! that change one directory would wait for each other's acknowledgement. That rules out the
//! notification that removes one directory entry (it takes the directory's lock). Instead all
//! entries of the mount are declared old at once, which takes no lock, and the kernel looks each up
//! again when it is next used; the client's cache answers those lookups without a trip.

use std::{io, os::fd::OwnedFd, sync::Arc};

use fuser::{INodeNo, Notifier};
use harvestfs_client::CacheListener;
use harvestfs_protocol::{ids::InodeId, name::Name};

use crate::shared::Shared;

/// `FUSE_NOTIFY_INC_EPOCH` of `linux/fuse.h` (protocol 7.44, Linux 6.16): all cached directory
/// entries of the mount are from an older epoch now.
const NOTIFY_INC_EPOCH: i32 = 8;

/// Passes invalidations on to the kernel.
#[derive(Debug)]
pub struct KernelCache {
    shared: Arc<Shared>,
    notifier: Notifier,
    device: OwnedFd,
}

impl KernelCache {
    /// `device` is the mount's connection to the kernel.
    pub fn new(shared: Arc<Shared>, notifier: Notifier, device: OwnedFd) -> Self {
        Self {
            shared,
            notifier,
            device,
        }
    }

    /// Whether this kernel can declare all entries old. If it cannot, it must not cache entries.
    pub fn entries_can_be_declared_old(&self) -> bool {
        self.declare_entries_old().is_ok()
    }

    fn declare_entries_old(&self) -> io::Result<()> {
        // struct fuse_out_header { u32 len; s32 error; u64 unique }; a notification has its code
        // in `error` and 0 in `unique`.
        let mut header = [0; 16];
        header[..4].copy_from_slice(&16_u32.to_ne_bytes());
        header[4..8].copy_from_slice(&NOTIFY_INC_EPOCH.to_ne_bytes());
        rustix::io::write(&self.device, &header)?;
        Ok(())
    }

    fn forget_attributes(&self, node_id: u64) {
        // A negative offset: the attributes only. Dropping pages would wait for those that are
        // being written back, which wait for us.
        if let Err(error) = self.notifier.inval_inode(INodeNo(node_id), -1, 0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(node_id, %error, "the kernel did not forget an inode's attributes");
        }
    }

    fn forget_entries(&self) {
        if let Err(error) = self.declare_entries_old() {
            // Such a kernel was given no entries to cache.
            tracing::trace!(%error, "the kernel knows no epochs");
        }
    }
}

impl CacheListener for KernelCache {
    fn invalidate_inode(&self, ino: InodeId) {
        self.shared.invalidations.add(ino);
        if let Some(node_id) = self.shared.nodes.changed_elsewhere(ino) {
            self.forget_attributes(node_id);
            self.forget_entries();
        }
    }

    fn invalidate_entry(&self, _parent: InodeId, _name: &Name) {
        self.forget_entries();
    }

    fn invalidate_all(&self) {
        self.shared.invalidations.add_all();
        for ino in self.shared.nodes.all() {
            if let Some(node_id) = self.shared.nodes.changed_elsewhere(ino) {
                self.forget_attributes(node_id);
            }
        }
        self.forget_entries();
    }
}
