//! What is sent and committed next.

use harvestfs_protocol::limits::{EXTENTS_PER_COMMIT_MAX, PACKET_BYTES_MAX};
use harvestfs_protocol::meta::FileCommit;
use harvestfs_protocol::request_id::RequestId;

use super::{Actions, Commit, DirtyFile, Send};
use crate::engine::write::writeback::Order;

/// A file with more dirty data gets blocks of its own.
const BULK_BYTES: u64 = 8 << 20;
/// A commit is made when this much waits for one, so that memory becomes free.
const COMMIT_BYTES: u64 = 32 << 20;

impl DirtyFile {
    /// Decides what is to be sent and committed now. `tight`: there is so much in memory of all files
    /// that it is committed without waiting for a flush; `request`: what brought the event.
    pub(crate) fn advance(&mut self, tight: bool, request: RequestId) -> Actions {
        let mut actions = Actions::default();
        for order in [Order::File, Order::Append] {
            let lane = self.lane(order);
            if lane.data.is_empty() {
                lane.wanted = None;
                lane.durable = false;
                continue;
            }
            if lane.wanted.is_some_and(|flush| lane.data.is_flushed(flush)) {
                lane.wanted = None;
                lane.durable = false;
            }
            actions.sends.extend(self.send(order, request));
            if !self.holds_commits {
                actions.commits.extend(self.commit(order, tight));
            }
        }
        if self.held_bytes() == 0 {
            assert!(
                actions.sends.is_empty() && actions.commits.is_empty(),
                "{}: nothing is in memory, but {} sends and {} commits are to come of it",
                self.ino,
                actions.sends.len(),
                actions.commits.len()
            );
            actions.holds_owed = std::mem::take(&mut self.holds_owed);
            actions.is_no_longer_early = std::mem::take(&mut self.closed_early);
        }
        actions
    }

    fn send(&mut self, order: Order, request: RequestId) -> Option<Send> {
        let rules = self.rules?;
        self.bulk |= self.lane(order).data.dirty_bytes() >= BULK_BYTES;
        let bulk = self.bulk;
        let by_itself = bulk && !self.paused;
        let ino = self.ino;
        let lane = self.lane(order);
        let wanted = lane.wanted.is_some();
        let mut pieces = Vec::new();
        // Without a flush, only what fills packets.
        while wanted && lane.data.dirty_bytes() > 0
            || by_itself && lane.data.dirty_bytes() >= PACKET_BYTES_MAX as u64
        {
            let dirty_bytes = lane.data.dirty_bytes();
            let mut room = PACKET_BYTES_MAX;
            while room > 0
                && let Some(piece) = lane.data.take(room)
            {
                room -= piece.data.len();
                pieces.push(piece);
            }
            // Or there would be no end to it.
            assert!(
                lane.data.dirty_bytes() < dirty_bytes,
                "{ino}: of {dirty_bytes} dirty bytes none is taken, and {} are left",
                lane.data.dirty_bytes()
            );
        }
        (!pieces.is_empty()).then_some(Send {
            order,
            bulk,
            rules,
            pieces,
            sync: lane.durable,
            request: if wanted { lane.request } else { request },
        })
    }

    fn commit(&mut self, order: Order, tight: bool) -> Option<Commit> {
        let (ino, mtime, by_itself) = (self.ino, self.mtime, !self.paused);
        let lane = self.lane(order);
        let written = lane.data.written_bytes();
        // A flush waits for everything first, so that it needs one commit.
        let flush_is_ready = lane.wanted.is_some() && lane.data.sending_bytes() == 0;
        if written == 0 || !(flush_is_ready || by_itself && (tight || written >= COMMIT_BYTES)) {
            return None;
        }
        let extents = lane.data.begin_commit(EXTENTS_PER_COMMIT_MAX)?;
        let (durable, request) = (lane.durable, lane.request);
        Some(Commit {
            order,
            commit: FileCommit {
                ino,
                extents,
                append: order == Order::Append,
                mtime,
            },
            credentials: self.credentials.clone(),
            durable,
            request,
        })
    }
}
