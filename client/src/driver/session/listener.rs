//! What the session notifies the mount of.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::request_id::RequestId;

use super::Session;

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

/// What a mutation has changed, as long as its caller is not told. If that has stopped waiting, or is told what may have been
/// overtaken, the listener is notified: the kernel may have what was there before.
pub(crate) struct Untold {
    session: Arc<Session>,
    what: Vec<Invalidation>,
}

impl Untold {
    pub(crate) fn new(session: &Arc<Session>, what: Vec<Invalidation>) -> Self {
        Self {
            session: session.clone(),
            what,
        }
    }

    /// The caller is told next.
    pub(crate) fn told(mut self) {
        self.what.clear();
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        let what = std::mem::take(&mut self.what);
        if !what.is_empty() {
            let session = self.session.clone();
            let runtime = session.runtime.clone();
            runtime.spawn(RequestId::current().scope(async move {
                session.notify_listener(what).await;
            }));
        }
    }
}
