//! Changes from before this namenode began to lead, whose replies are requested again.

use harvestfs_protocol::ids::SessionId;

use super::{Announcement, Leases, NoticeId, WaitId};

impl Leases {
    /// Handles `author` asking again for the reply to a change that this namenode found already made. The previous
    /// leader may have been waiting until other sessions had forgotten the earlier state, and which sessions these
    /// are is no longer known: all that may still show anything from that time have to forget everything. Returns
    /// what [`Leases::changed`] does.
    pub(crate) fn found_changed(
        &mut self,
        now_ms: u64,
        author: SessionId,
        wait: WaitId,
    ) -> (Vec<Announcement>, bool) {
        let holders: Vec<SessionId> = self
            .hold_everything
            .iter()
            .copied()
            .filter(|it| *it != author && self.is_alive(now_ms, *it))
            .collect();
        let announce = |session| (session, self.announce_everything(now_ms, session).1);
        let announcements: Vec<Announcement> = holders.into_iter().map(announce).collect();
        let awaited = self.unacked_everything.iter().copied();
        let awaited: Vec<NoticeId> = awaited
            .filter(|id| self.unacked.get(id).is_some_and(|it| it.session != author))
            .collect();
        let waits = self.wait_for(wait, awaited);
        (announcements, waits)
    }
}
