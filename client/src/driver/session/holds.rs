//! Holds of files, which are released in the background.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::housekeeping;
use harvestfs_protocol::request_id::RequestId;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::Session;
use crate::driver::clock;
use crate::engine::session::holds::{self as engine, Keep};

/// How often idle holds are checked.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// The holds of a session.
pub(crate) struct Holds {
    inner: Mutex<engine::Holds>,
    /// Notified when a release was answered.
    released: Notify,
}

impl Holds {
    pub(crate) fn new(idle_max: usize) -> Self {
        Self {
            inner: Mutex::new(engine::Holds::new(idle_max)),
            released: Notify::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, engine::Holds> {
        self.inner.lock()
    }

    /// Closes a file once.
    pub(crate) fn closed(&self, ino: InodeId, keep: Keep) {
        self.lock().closed(ino, clock::now(), keep);
    }

    /// Notes that the namenode is about to be asked to hold a file, as soon as no release is in flight that would
    /// remove the new hold.
    pub(crate) async fn begin_open(&self, ino: InodeId) {
        loop {
            let released = self.released.notified();
            if self.lock().begin_open(ino) {
                return;
            }
            released.await;
        }
    }

    /// Waits until no release is in flight.
    async fn all_answered(&self) {
        loop {
            let released = self.released.notified();
            if !self.lock().is_releasing() {
                return;
            }
            released.await;
        }
    }
}

impl Session {
    /// Makes the namenode release closed files, so that files without a name no longer count
    /// against a quota. Returns whether a release was answered, or failed, since the caller read `answered_before` from
    /// [`engine::Holds::releases_answered`]. It must have read it before it sent what was refused: a
    /// release in the background may overtake the refusal, and then nothing is left to release.
    pub(crate) async fn release_now(self: &Arc<Self>, answered_before: u64) -> bool {
        let has_nameless = self.holds.lock().has_nameless();
        if has_nameless {
            // The kernel reports the last `close` only some time after that has returned.
            tokio::time::sleep(RELEASE_INTERVAL).await;
        }
        let session = self.clone();
        let released = async move { session.release_batch().await };
        // A task of its own, since the caller may stop waiting. It fails only when the runtime ends.
        let _ = self
            .runtime
            .spawn(RequestId::current().scope(released))
            .await;
        self.holds.all_answered().await;
        self.holds.lock().releases_answered() != answered_before
    }

    /// Releases a batch of closed files, if there are any. It must be completed: until it is answered, these files
    /// cannot be opened, and others wait for it.
    async fn release_batch(self: &Arc<Self>) {
        let inodes = self.holds.lock().begin_release(clock::now());
        if inodes.is_empty() {
            return;
        }
        for ino in &inodes {
            self.delegations.returned(*ino);
        }
        let op = housekeeping::Release {
            inodes: inodes.clone(),
        };
        if let Err(error) = self.keep_house(op).await {
            // The end of the session releases them.
            tracing::debug!(%error, "cannot release closed files");
        }
        self.holds.lock().release_answered(&inodes);
        self.holds.released.notify_waiters();
    }
}

/// Releases what is no longer open, in batches.
pub(super) async fn release_closed(session: Arc<Session>) {
    loop {
        tokio::time::sleep(RELEASE_INTERVAL).await;
        if session.is_closed() {
            return;
        }
        session.release_batch().await;
    }
}
