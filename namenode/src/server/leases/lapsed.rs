//! Whether leases have run out.

use harvestfs_protocol::ids::{InodeId, SessionId};

use super::{Announcement, Followed, Forget, Leases};

impl Leases {
    /// Adds a session whose lease had run out before this namenode began to lead, and that has not come back since:
    /// it has nothing cached.
    pub(crate) fn restored_lapsed(&mut self, now_ms: u64, session: SessionId) {
        self.insert(now_ms, session);
        if let Some(lease) = self.sessions.get_mut(&session) {
            lease.ends_ms = now_ms;
        }
    }

    /// The notice that makes a session forget inodes before it receives the reply about them. It must not cache them,
    /// since another leader would not wait for it.
    pub(crate) fn forget(
        &mut self,
        now_ms: u64,
        session: SessionId,
        inodes: &[InodeId],
    ) -> Announcement {
        let forget = Forget {
            inodes: inodes.to_vec(),
            entries: Vec::new(),
        };
        let (_, notice) = self.announce(now_ms, session, forget, (session, &[]));
        (session, notice)
    }

    /// Whether the session's lease has not run out.
    pub(crate) fn is_alive(&self, now_ms: u64, session: SessionId) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|lease| lease.ends_ms > now_ms)
    }

    /// Whether the lease of a session has run out, and nothing waits for it any more.
    pub(crate) fn has_lapsed(&self, now_ms: u64, session: SessionId) -> bool {
        let lease = self.sessions.get(&session);
        lease
            .is_some_and(|it| it.ends_ms <= now_ms && matches!(it.followed, Followed::HoldsNothing))
    }
}
