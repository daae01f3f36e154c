//! What the session tells the mount.

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;

/// Is notified when the namenode invalidates what it granted: the mount, which invalidates it in
/// the kernel. Called from blocking threads; at the end of a lease, also while a notice still runs.
/// The namenode waits for a notice (at most the length of a lease).
pub trait CacheListener: Send + Sync + 'static {
    /// Attributes and content of an inode may have changed.
    fn invalidate_inode(&self, ino: InodeId);
    /// A name may lead elsewhere, or exist no more, or exist now.
    fn invalidate_entry(&self, parent: InodeId, name: &Name);
    /// Everything may have changed.
    fn invalidate_all(&self);
}
