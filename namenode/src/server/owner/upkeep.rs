//! What the namenode does to files when it is due: raising replication, ending lifetimes, emptying the trash.

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{TRASH_INODES_PER_COMMAND_MAX, UPKEEP_INODES_PER_TICK_MAX};
use harvestfs_protocol::types::Timestamp;

use super::Owner;
use crate::engine::namespace::{Command, EntryCursor};

/// Ticks further apart than this show that the namenode did not run in between.
const PAUSE_MIN_MS: u64 = 2_000;

/// How far the rounds through the namespace are.
#[derive(Debug)]
pub(super) struct Upkeep {
    raises_from: InodeId,
    lifetimes_from: EntryCursor,
}

impl Default for Upkeep {
    fn default() -> Self {
        Self {
            raises_from: InodeId(0),
            lifetimes_from: (InodeId(0), None),
        }
    }
}

impl Owner {
    /// Takes time that must not count out of the clock, before anything is found to be late. A peer that gets no
    /// answer is not silent, and a leader that reaches no majority hears nobody for as long as that lasts.
    pub(super) fn take_out_pause(&mut self) {
        let since_last_ms = self.clock.now_ms().saturating_sub(self.last_tick_ms);
        let has_paused = since_last_ms > PAUSE_MIN_MS;
        if has_paused {
            tracing::warn!(
                paused_ms = since_last_ms,
                "the namenode did not run for a while"
            );
        }
        if has_paused || !self.may_answer() {
            self.clock.take_out(since_last_ms);
        }
    }

    /// Finds some of the files and names for which upkeep is due, and does it.
    pub(super) fn keep_up(&mut self) {
        let now = Timestamp::now();
        let limit = UPKEEP_INODES_PER_TICK_MAX;
        let from = self.upkeep.raises_from;
        let (inodes, next) = self.namespace.due_raises(now, from, limit);
        self.upkeep.raises_from = next.unwrap_or(InodeId(0));
        if !inodes.is_empty() {
            self.do_upkeep(&Command::RaiseReplication { inodes, now });
        }
        let from = &self.upkeep.lifetimes_from;
        let (entries, next) = self.namespace.expired_entries(now, from, limit);
        self.upkeep.lifetimes_from = next.unwrap_or((InodeId(0), None));
        if !entries.is_empty() {
            self.do_upkeep(&Command::RemoveExpired { entries, now });
        }
        let expired = self.namespace.expired_trash(now);
        let inodes: Vec<_> = expired.take(TRASH_INODES_PER_COMMAND_MAX).collect();
        if !inodes.is_empty() {
            self.do_upkeep(&Command::PurgeTrash { inodes, now });
        }
    }

    fn do_upkeep(&mut self, command: &Command) {
        // No reply waits for this: after a crash it is done again.
        match self.execute(command, false) {
            Ok((applied, _)) => {
                self.announce_to_all(&applied.effects);
                self.release_orphans(applied.effects.inodes);
            }
            Err(error) => tracing::error!(%error, "what was due could not be done"),
        }
    }
}
