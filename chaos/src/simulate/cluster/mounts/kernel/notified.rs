//! Notifications from the mount to the kernel, and its questions about the programs that use it.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use harvestfs_fuse_mount::Processes;
use harvestfs_fuse_mount::kernel::{self, QUIET_LOOK};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use rand::RngExt;

use super::{Kernel, PAGE_BYTES};

/// The time from the decision to have pages dropped until that affects the kernel. The mount relies on less than
/// 20 ms (adr/0016).
const DROP_BEGINS_MS: std::ops::Range<u64> = 0..15;

/// The kernel that a mount notifies; it is gone once its machine has crashed.
pub struct Notified(pub Weak<Kernel>);

impl Notified {
    fn kernel(&self) -> io::Result<Arc<Kernel>> {
        self.0
            .upgrade()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))
    }
}

impl kernel::Kernel for Notified {
    /// `fuse_reverse_inval_inode` with a negative offset.
    fn forget_attributes(&self, ino: InodeId) -> io::Result<()> {
        self.kernel()?.reverse_inval_attr(ino)
    }

    /// `fuse_notify_inc_epoch`.
    fn declare_entries_old(&self) -> io::Result<()> {
        self.kernel()?.state.lock().epoch += 1;
        Ok(())
    }

    /// `fuse_reverse_inval_inode`.
    fn drop_pages(
        &self,
        ino: InodeId,
        mut begin: Box<dyn FnMut() -> Option<u64> + Send>,
    ) -> kernel::Notified {
        let kernel = self.kernel();
        Box::pin(async move {
            let kernel = kernel?;
            let from = loop {
                match begin() {
                    Some(from) => break from,
                    None => tokio::time::sleep(QUIET_LOOK).await,
                }
            };
            let late_ms = kernel.state.lock().rng.random_range(DROP_BEGINS_MS);
            tokio::time::sleep(Duration::from_millis(late_ms)).await;
            kernel.reverse_inval_attr(ino)?;
            kernel
                .invalidate_range(ino, from / PAGE_BYTES..u64::MAX)
                .await;
            Ok(())
        })
    }

    /// `fuse_reverse_inval_entry` with `FUSE_EXPIRE_ONLY`.
    fn expire_entry(&self, parent: InodeId, name: &Name) -> kernel::Notified {
        let kernel = self.kernel();
        let name = String::from_utf8_lossy(name.as_bytes()).into_owned();
        Box::pin(async move {
            let kernel = kernel?;
            let lock = kernel.inode_lock(parent)?;
            let _locked = lock.write().await;
            let mut state = kernel.state.lock();
            let dentry = state.dentries.get_mut(&(parent, name));
            let dentry = dentry.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            dentry.valid_until = tokio::time::Instant::now();
            Ok(())
        })
    }

    fn submounts_seen_for(&self) -> Option<Duration> {
        None
    }
}

impl Processes for Notified {
    fn groups(&self, _: u32) -> Vec<u32> {
        Vec::new()
    }

    fn is_dying(&self, pid: u32) -> bool {
        let kernel = self.0.upgrade();
        kernel.is_none_or(|kernel| kernel.state.lock().dying.contains(&pid))
    }
}

impl Kernel {
    fn reverse_inval_attr(&self, ino: InodeId) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.inodes.contains_key(&ino) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.bump(ino);
        state.invalidate_attr(ino);
        Ok(())
    }
}
