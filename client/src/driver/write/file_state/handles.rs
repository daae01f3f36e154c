//! Handles of a file, and what their `close` has to wait for.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::time::Instant;

use harvestfs_protocol::limits::PACKET_BYTES_MAX;

use super::FileState;

/// Files whose `close` returned before what was written to them was committed. One more waits.
const CLOSED_EARLY_MAX: usize = 4_096;

impl FileState {
    pub(crate) fn handle_opened(&self) {
        let mut inner = self.inner.lock();
        inner.handles += 1;
        inner.failures_unseen = 0;
    }

    /// A handle is gone.
    pub(crate) fn handle_closed(self: &Arc<Self>) {
        let last = {
            let mut inner = self.inner.lock();
            inner.handles -= 1;
            inner.handles == 0
        };
        if last {
            if !self.is_closed_early() {
                self.start_flush();
            }
            self.close_writer();
            self.core.reap(self);
        }
        self.release_hold();
    }

    /// The namenode need not hold the file for a handle that is gone, once nothing is in memory that
    /// is to go into the file.
    fn release_hold(&self) {
        {
            let mut inner = self.inner.lock();
            if inner.held_bytes() > 0 {
                inner.holds_owed += 1;
                return;
            }
        }
        self.hold_closed();
    }

    pub(super) fn hold_closed(&self) {
        let session = &self.core.session;
        let attr = session.cache.attr(self.ino);
        let has_name = attr.is_none_or(|attr| attr.nlink > 0);
        session.holds.closed(self.ino, Instant::now(), has_name);
    }

    /// The blocks of the file's own are ended once everything is written.
    pub(crate) fn close_writer(&self) {
        if let Some(writer) = self.inner.lock().writer.take() {
            writer.close();
        }
    }

    pub(crate) fn is_unused(&self) -> bool {
        let inner = self.inner.lock();
        inner.handles == 0 && inner.held_bytes() == 0
    }

    /// Whether a `close` need not wait for the commit, which then follows: the session has
    /// the file's delegation, one commit will make everything visible, and there is no reason to fear
    /// that it fails. Data is going into a block with the same rules at this moment, so that a
    /// cluster which takes none is noticed by a `close` that waits.
    pub(crate) fn close_early(self: &Arc<Self>) -> bool {
        let core = &self.core;
        let Some(rules) = self.rules() else {
            return false;
        };
        if !core.session.delegations.has(self.ino)
            || core.session.lease_remaining().is_zero()
            || core.dirty.is_tight()
            || core.closed_early.load(Ordering::Relaxed) >= CLOSED_EARLY_MAX
            || !core.pack(rules).is_flowing()
        {
            return false;
        }
        let (early, first) = {
            let mut inner = self.inner.lock();
            let written = &inner.written.data;
            let early = inner.failure.is_none()
                && inner.appended.data.is_empty()
                && written.is_one_dirty_segment(PACKET_BYTES_MAX as u64);
            let first = early && !std::mem::replace(&mut inner.closed_early, true);
            (early, first)
        };
        if first {
            core.closed_early.fetch_add(1, Ordering::Relaxed);
            core.flush_soon(self.clone());
        }
        early
    }

    /// Whether it was closed with something in memory that is not committed yet.
    pub(crate) fn is_closed_early(&self) -> bool {
        self.inner.lock().closed_early
    }
}
