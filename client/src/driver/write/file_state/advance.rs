//! What is sent and committed next.

use std::sync::Arc;

use harvestfs_protocol::limits::{EXTENTS_PER_COMMIT_MAX, PACKET_BYTES_MAX};
use harvestfs_protocol::meta::FileCommit;
use harvestfs_protocol::request_id::RequestId;

use super::{Actions, FileState, Inner};
use crate::driver::write::committer::Entry;
use crate::driver::write::pipeline::Topology;
use crate::driver::write::writer::{DataWriter, Job};
use crate::engine::write::writeback::Order;

/// A file with more dirty data gets blocks of its own.
const BULK_BYTES: u64 = 8 << 20;
/// A commit is made when this much waits for one, so that memory becomes free.
const COMMIT_BYTES: u64 = 32 << 20;

impl FileState {
    /// Decides what is to be sent and committed now.
    pub(super) fn advance(self: &Arc<Self>, inner: &mut Inner) -> Actions {
        let mut actions = Actions::default();
        let tight = self.core.dirty.is_tight();
        for order in [Order::File, Order::Append] {
            let lane = inner.lane(order);
            if lane.data.is_empty() {
                lane.wanted = None;
                lane.durable = false;
                continue;
            }
            if lane.wanted.is_some_and(|flush| lane.data.is_flushed(flush)) {
                lane.wanted = None;
                lane.durable = false;
            }
            self.send(inner, order, &mut actions);
            self.commit(inner, order, tight, &mut actions);
        }
        actions
    }

    fn send(self: &Arc<Self>, inner: &mut Inner, order: Order, actions: &mut Actions) {
        let Some(rules) = inner.rules else { return };
        if inner.writer.is_none() && inner.lane(order).data.dirty_bytes() >= BULK_BYTES {
            inner.writer = Some(DataWriter::start(&self.core, Topology::Chain, rules));
        }
        let writer = inner.writer.clone();
        let by_itself = writer.is_some() && !inner.paused;
        let lane = inner.lane(order);
        let wanted = lane.wanted.is_some();
        let request = if wanted {
            lane.request
        } else {
            RequestId::current()
        };
        let mut jobs = Vec::new();
        // Without a flush, only what fills packets.
        while wanted && lane.data.dirty_bytes() > 0
            || by_itself && lane.data.dirty_bytes() >= PACKET_BYTES_MAX as u64
        {
            let mut room = PACKET_BYTES_MAX;
            while room > 0
                && let Some(piece) = lane.data.take(room)
            {
                room -= piece.data.len();
                jobs.push(Job {
                    file: self.clone(),
                    order,
                    piece,
                    sync: false,
                    request,
                });
            }
        }
        if lane.durable
            && let Some(last) = jobs.last_mut()
        {
            last.sync = true;
        }
        if !jobs.is_empty() {
            let writer = writer.unwrap_or_else(|| self.core.pack(rules));
            actions.jobs.push((writer, jobs));
        }
    }

    fn commit(
        self: &Arc<Self>,
        inner: &mut Inner,
        order: Order,
        tight: bool,
        actions: &mut Actions,
    ) {
        let (mtime, credentials) = (inner.mtime, inner.credentials.clone());
        let by_itself = !inner.paused;
        let lane = inner.lane(order);
        let written = lane.data.written_bytes();
        // A flush waits for everything first, so that it needs one commit.
        let flush_is_ready = lane.wanted.is_some() && lane.data.sending_bytes() == 0;
        if written == 0 || !(flush_is_ready || by_itself && (tight || written >= COMMIT_BYTES)) {
            return;
        }
        if let Some(extents) = lane.data.begin_commit(EXTENTS_PER_COMMIT_MAX) {
            // It ends with the first commit.
            self.core.session.delegations.returned(self.ino);
            actions.commits.push(Entry {
                file: self.clone(),
                order,
                commit: FileCommit {
                    ino: self.ino,
                    extents,
                    append: order == Order::Append,
                    mtime,
                },
                credentials,
                durable: lane.durable,
                request: lane.request,
            });
        }
    }
}
