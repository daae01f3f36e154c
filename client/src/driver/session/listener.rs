//! What the session notifies the mount of.

use std::future::Future;
use std::pin::Pin;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;

/// What the namenode invalidates of that which it granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// Attributes and content of an inode may have changed.
    Inode(InodeId),
    /// A name in a directory may lead elsewhere, or exist no more, or exist now.
    Entry(InodeId, Name),
    /// Everything may have changed.
    All,
}

/// Ends when everything has been invalidated. It is invalidated also if this is dropped.
pub type Invalidated = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Is notified when the namenode invalidates what it granted: the mount, which invalidates it in
/// the kernel. Called at the end of a lease also while a notice is still being served.
/// The namenode waits for a notice (at most the length of a lease).
pub trait CacheListener: Send + Sync + 'static {
    /// Invalidates all of this, in this order.
    fn invalidate(&self, what: Vec<Invalidation>) -> Invalidated;
}
