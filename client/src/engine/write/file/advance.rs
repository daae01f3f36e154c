//! The decision about what is sent and committed next.

use harvestfs_protocol::limits::{EXTENTS_PER_COMMIT_MAX, PACKET_BYTES_MAX};
use harvestfs_protocol::meta::FileCommit;
use harvestfs_protocol::request_id::RequestId;

use super::{Actions, Commit, DirtyFile, Lane, Send};
use crate::engine::write::writeback::{Epoch, Order};

/// A file with at least this much dirty data gets blocks of its own.
const BULK_BYTES: u64 = 8 << 20;
/// A commit is made when this much data waits for one, to free memory.
const COMMIT_BYTES: u64 = 32 << 20;

impl Lane {
    /// Whether so much data waits for a commit that it should not wait for a flush.
    fn is_due(&self, tight: bool) -> bool {
        let written = self.data.written_bytes();
        written > 0 && (tight || written >= COMMIT_BYTES)
    }
}

impl DirtyFile {
    /// Decides what is to be sent and committed now. `tight`: all files together hold so much in memory
    /// that it is committed without waiting for a flush; `request`: the request that caused the event.
    pub(crate) fn advance(&mut self, tight: bool, request: RequestId) -> Actions {
        let mut actions = Actions::default();
        let by_itself = !self.paused;
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
            if order == Order::Append && by_itself && lane.wanted.is_none() && lane.is_due(tight) {
                // Data that fills packets may end within an append, but a commit ends at the end of one.
                lane.want(false, request);
            }
            actions.sends.extend(self.send(order, request));
            if !self.holds_commits {
                actions.commits.extend(self.commit(order, tight));
            }
        }
        actions.needs_rules = self.needed_rules();
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

    /// Whether something that a flush waits for is still to be sent.
    pub(super) fn has_wanted(&self) -> bool {
        let mut lanes = [&self.written, &self.appended].into_iter();
        lanes.any(|lane| lane.wanted.is_some_and(|it| lane.data.has_dirty(it)))
    }

    fn send(&mut self, order: Order, request: RequestId) -> Option<Send> {
        let rules = self.rules()?;
        self.bulk |= self.lane(order).data.dirty_bytes() >= BULK_BYTES;
        let bulk = self.bulk;
        let by_itself = bulk && !self.paused;
        let ino = self.ino;
        let lane = self.lane(order);
        let mut pieces = Vec::new();
        // Data that is written after the flush began does not belong to it: otherwise it might
        // never end while a program writes.
        if let Some(flush) = lane.wanted {
            let (mut from, mut room) = (0, PACKET_BYTES_MAX);
            while let Some(piece) = lane.data.take(flush, from, room) {
                from = piece.end();
                room -= piece.data.len();
                if room == 0 {
                    room = PACKET_BYTES_MAX;
                }
                pieces.push(piece);
            }
        }
        // The rest is sent only in full packets.
        while by_itself && lane.data.dirty_bytes() >= PACKET_BYTES_MAX as u64 {
            let dirty_bytes = lane.data.dirty_bytes();
            let mut room = PACKET_BYTES_MAX;
            while room > 0
                && let Some(piece) = lane.data.take(Epoch::MAX, 0, room)
            {
                room -= piece.data.len();
                pieces.push(piece);
            }
            // Otherwise this loop would not end.
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
            request: match lane.wanted {
                Some(_) => lane.request,
                None => request,
            },
        })
    }

    fn commit(&mut self, order: Order, tight: bool) -> Option<Commit> {
        let (ino, mtime, by_itself) = (self.ino, self.mtime, !self.paused);
        let lane = self.lane(order);
        if lane.data.written_bytes() == 0 {
            return None;
        }
        // A flush waits for an entire epoch, so that it needs only one commit, but not for epochs
        // whose flushes began after it.
        let flushed = lane.wanted.and_then(|it| lane.data.written_through(it));
        let through = match flushed {
            Some(through) => through,
            None if order == Order::File && by_itself && lane.is_due(tight) => Epoch::MAX,
            None => return None,
        };
        let extents = lane.data.begin_commit(EXTENTS_PER_COMMIT_MAX, through)?;
        let first = lane.data.committing()?;
        let (durable, request) = (lane.durable, lane.request);
        if order == Order::Append {
            // This commit may contain pieces of an earlier one that was refused in the end.
            self.unanswered = None;
        }
        Some(Commit {
            order,
            first,
            commit: FileCommit {
                ino,
                extents,
                append: order == Order::Append,
                mtime,
            },
            credentials: self.commits_as(),
            durable,
            request,
        })
    }
}
