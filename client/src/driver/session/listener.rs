//! Notifications from the session to the mount.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::request_id::RequestId;

use super::Session;

/// Something granted by the namenode that it has invalidated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// Attributes and content of an inode may have changed.
    Inode(InodeId),
    /// A name in a directory may now exist, no longer exist, or lead elsewhere.
    Entry(InodeId, Name),
    /// Everything may have changed.
    All,
}

/// Completes when everything has been invalidated. Invalidation continues even if this is dropped.
pub type Invalidated = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Receives the invalidations of the namenode: the mount implements this and invalidates the
/// kernel's caches. At the end of a lease it is called even while a notice is still being served.
/// The namenode waits for a notice (at most for the length of a lease).
pub trait CacheListener: Send + Sync + 'static {
    /// Invalidates all of these, in this order.
    fn invalidate(&self, what: Vec<Invalidation>) -> Invalidated;
}

/// The changes of a mutation whose caller has not got the answer yet. If the caller stops waiting, or gets an
/// answer that may have been overtaken, the listener is notified: the kernel may still have the old state.
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

    /// Ends without notice, because the caller is about to get the answer.
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
