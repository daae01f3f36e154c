//! Which sessions changes are announced to.

use harvestfs_protocol::ids::SessionId;

use super::Owner;
use crate::engine::namespace::Effects;

/// No session: a change by it must be announced to every session.
pub(super) const NO_SESSION: SessionId = SessionId(0);

impl Owner {
    /// Announces a change that no session made.
    pub(super) fn announce_to_all(&mut self, effects: &Effects) {
        let id = self.gate.next_id();
        let now_ms = self.clock.now_ms();
        let (announcements, _) =
            self.leases
                .changed(now_ms, NO_SESSION, &effects.inodes, &effects.entries, id);
        self.announce(announcements);
    }

    /// On whose behalf a change is announced. A client does not know what its removal does in the
    /// trash, nor where snapshots are, so that it is notified like every other.
    pub(super) fn author_of(&self, effects: &Effects, session: SessionId) -> SessionId {
        let mut inodes = effects.inodes.iter();
        let in_trash = inodes.any(|ino| self.namespace.is_part_of_trash(*ino));
        let mut changed = effects.entries.iter();
        let in_snapshots = changed.any(|(directory, _)| self.namespace.is_frozen(*directory));
        if in_trash || in_snapshots {
            NO_SESSION
        } else {
            session
        }
    }
}
