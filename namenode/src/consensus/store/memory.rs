//! What a member knows about how much the others remember. It serves to recognise a member that has forgotten
//! something.

use std::sync::atomic::Ordering;

use harvestfs_protocol::peer::{Known, Memory};
use harvestfs_protocol::planted::{self, Bug};

use super::LogStore;
use crate::consensus::MemberId;
use crate::consensus::member_file::Told;
use crate::journal::JournalError;

impl LogStore {
    /// What is known about another member's memory.
    pub(in crate::consensus) fn known_memory(&self, member: MemberId) -> Option<Known> {
        let known = self.shared.kept.lock().known.get(&member).copied();
        known.map(|(run, writes)| Known {
            run,
            writes,
            acknowledged: None,
        })
    }

    /// Notes what a member reports to remember. Returns false if it has forgotten something that is known here.
    pub(in crate::consensus) fn note_memory(&self, member: MemberId, memory: Memory) -> bool {
        let mut kept = self.shared.kept.lock();
        let known = kept.known.get(&member).copied();
        match known {
            // Messages of one start may arrive out of order.
            Some((run, writes)) if run == memory.run => {
                let most = writes.max(memory.writes);
                kept.known.insert(member, (run, most));
                true
            }
            Some((_, writes))
                if memory.writes_at_start < writes && !planted::is(Bug::TrustsForgetfulMembers) =>
            {
                false
            }
            Some(_) | None => {
                // Written with the next change. A vote is one; `write_memory` is called before an acknowledgement
                // counts.
                kept.known.insert(member, (memory.run, memory.writes));
                true
            }
        }
    }

    /// Whether what is known about another member's memory survives a restart of this one.
    pub(in crate::consensus) fn has_written_memory(&self, member: MemberId) -> bool {
        let known = self.shared.kept.lock().known.get(&member).copied();
        self.shared.written_known.lock().get(&member).copied() == known
    }

    /// Makes what is known about another member's memory durable before it returns, so that a restart of this one
    /// does not forget it.
    pub(in crate::consensus) fn write_memory(&self, member: MemberId) -> Result<(), JournalError> {
        // Another call may have written it while this one waited.
        if self.has_written_memory(member) {
            return Ok(());
        }
        self.keep(|_| ())
    }

    /// Notes that others know more about this member than it does itself: it takes part in nothing any more.
    pub(in crate::consensus) fn forgot(&self) {
        if self.shared.kept.lock().told != Told::Nothing {
            return;
        }
        tracing::error!(
            "this namenode has forgotten what it told others: its directory was put back to an older \
             copy. It leaves the group"
        );
        if let Err(error) = self.keep(|kept| kept.told = Told::Forgot) {
            tracing::error!(%error, "that cannot be written down");
        }
        self.shared.executed.replaced();
    }

    /// Records that this member is no longer in the group. What it promised there no longer binds it, and it starts
    /// over as one that can be added again, under another number.
    pub(in crate::consensus) fn left(&self) {
        if self.shared.kept.lock().told != Told::Nothing {
            return;
        }
        match self.keep(|kept| kept.told = Told::Left) {
            Ok(()) => self.shared.executed.replaced(),
            // To start over would mean to ask again. Meanwhile it does no harm: it gets no votes.
            Err(error) => {
                if !self.shared.is_left_reported.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, "this namenode is in the group no more, and cannot write that down yet");
                }
                let mut kept = self.shared.kept.lock();
                // It is told again, and then tries again. What others have written meanwhile stays.
                if kept.told == Told::Left {
                    kept.told = Told::Nothing;
                }
            }
        }
    }
}
