//! Whether leases have run out.

use harvestfs_protocol::ids::SessionId;

use super::{Followed, Leases};

impl Leases {
    /// A session whose lease had run out before this namenode began to lead, and that has not come back since: it has
    /// nothing cached.
    pub(crate) fn restored_lapsed(&mut self, now_ms: u64, session: SessionId) {
        self.insert(now_ms, session);
        if let Some(lease) = self.sessions.get_mut(&session) {
            lease.ends_ms = now_ms;
        }
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
