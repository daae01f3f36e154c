//! Announcing changes to sessions, and the addresses of the group's namenodes to sessions and datanodes.

use std::net::SocketAddr;

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::limits::NAMENODES_TOLD_MAX;
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::node::NodeCommand;

use super::Owner;
use crate::engine::namespace::Effects;
use crate::server::leases::{Announcement, WaitId};

/// No session: a change by it must be announced to every session.
pub(super) const NO_SESSION: SessionId = SessionId(0);

impl Owner {
    /// Sends notices on the connections of their sessions. A session without a connection cannot be notified; either
    /// its lease runs out, or it comes back and is notified then.
    pub(super) fn announce(&self, announcements: Vec<Announcement>) {
        for (id, notice) in announcements {
            let connection = self.sessions.get(id).and_then(|session| session.connection);
            let connected = connection.and_then(|c| self.connections.get(&c));
            if let Some(connected) = connected
                && let Err(error) = connected.notices.send(&notice)
            {
                tracing::debug!(session = %id, %error, "a notice was not sent");
            }
        }
    }

    /// Announces a change that no session made.
    pub(super) fn announce_to_all(&mut self, effects: &Effects) {
        let id = self.gate.next_id();
        let now_ms = self.clock.now_ms();
        let (announcements, _) =
            self.leases
                .changed(now_ms, NO_SESSION, &effects.inodes, &effects.entries, id);
        self.announce(announcements);
    }

    /// Announces the members of the group to clients if they have changed. Datanodes receive them with each
    /// heartbeat.
    pub(super) fn note_namenodes(&mut self) {
        let members = self.log.group().status().members;
        // A member that listens on all addresses does not know how others reach it.
        let addrs = members.iter().map(|it| it.addr);
        let reachable = addrs.filter(|it| !it.ip().is_unspecified());
        let all: Vec<SocketAddr> = reachable.take(NAMENODES_TOLD_MAX).collect();
        if all == self.namenodes {
            return;
        }
        self.namenodes = all;
        if self.leads() {
            let all = self.sessions.ids();
            self.announce(all.map(|id| (id, self.namenodes_notice())).collect());
        }
    }

    fn namenodes_notice(&self) -> Notice {
        Notice::Namenodes {
            all: self.namenodes.clone(),
        }
    }

    /// Sends the members to a session that begins. It knows the only namenode of a cluster, perhaps by another
    /// address.
    pub(super) fn tell_namenodes(&self, session: SessionId) {
        if self.namenodes.len() > 1 {
            self.announce(vec![(session, self.namenodes_notice())]);
        }
    }

    /// Releases replies that no other session's cache holds back any more.
    pub(super) fn release(&mut self, waits: Vec<WaitId>) {
        for wait in waits {
            if let Some(answer) = self.gate.acknowledged(wait) {
                self.send(answer);
            }
        }
    }

    /// The members for datanodes, if others can reach this namenode.
    pub(super) fn namenodes_command(&self) -> Option<NodeCommand> {
        let this = self.options.listen;
        (!this.ip().is_unspecified()).then(|| NodeCommand::Namenodes {
            this,
            all: self.namenodes.clone(),
        })
    }

    /// The session on whose behalf a change is announced. A client does not know what its removal does in the trash,
    /// nor where snapshots are, so for such a change it is notified like every other session.
    pub(super) fn author_of(&self, effects: &Effects, session: SessionId) -> SessionId {
        let is_unknown =
            |ino: InodeId| self.namespace.is_part_of_trash(ino) || self.namespace.is_frozen(ino);
        let mut inodes = effects.inodes.iter();
        let mut changed = effects.entries.iter();
        if inodes.any(|ino| is_unknown(*ino)) || changed.any(|(dir, _)| is_unknown(*dir)) {
            NO_SESSION
        } else {
            session
        }
    }
}
