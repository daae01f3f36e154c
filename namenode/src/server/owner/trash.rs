//! Emptying the trash in the background.

use harvestfs_protocol::ids::SessionId;
use harvestfs_protocol::limits::TRASH_INODES_PER_COMMAND_MAX;

use super::Owner;
use crate::engine::namespace::{Command, Effects};
use crate::server::clock;

/// No session: what it changes, every session has to be told.
pub(super) const NOBODY: SessionId = SessionId(0);

impl Owner {
    /// Removes some of what has been in the trash for long enough.
    pub(super) fn purge_expired_trash(&mut self) {
        let now = clock::wall_now();
        let expired = self.namespace.expired_trash(now);
        let inodes: Vec<_> = expired.take(TRASH_INODES_PER_COMMAND_MAX).collect();
        if inodes.is_empty() {
            return;
        }
        // Nobody waits for it: after a crash it is done again.
        match self.execute(&Command::PurgeTrash { inodes, now }, false) {
            Ok((applied, _)) => {
                let effects = applied.effects;
                self.tell_everybody(&effects);
                self.release_orphans(effects.inodes);
            }
            Err(error) => tracing::error!(%error, "the trash cannot be emptied"),
        }
    }

    pub(super) fn tell_everybody(&mut self, effects: &Effects) {
        let id = self.gate.next_id();
        let now_ms = self.clock.now_ms();
        let (announcements, _) =
            self.leases
                .changed(now_ms, NOBODY, &effects.inodes, &effects.entries, id);
        self.announce(announcements);
    }

    /// On whose behalf a change is announced. A client does not know what its removal does in the
    /// trash, nor where snapshots are, so that it is told like everybody else.
    pub(super) fn author_of(&self, effects: &Effects, session: SessionId) -> SessionId {
        let trash = self.namespace.trash_directory();
        let in_trash = trash.is_some_and(|trash| effects.inodes.contains(&trash));
        let mut changed = effects.entries.iter();
        let in_snapshots = changed.any(|(directory, _)| self.namespace.is_frozen(*directory));
        if in_trash || in_snapshots {
            NOBODY
        } else {
            session
        }
    }
}
