//! Calls that wait until a file's creator has committed what it closed.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::meta::mutation::Awaits;
use harvestfs_protocol::meta::{MetaCall, MetaReply, Notice};
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

use super::Owner;
use crate::server::delegations::Standing;
use crate::server::metrics::Responder;
use crate::server::sessions::ConnectionId;

/// Maximum number of waiting calls. One more is answered with `Busy`, as is a call whose session loses its lease
/// meanwhile.
const DEFERRED_MAX: usize = 4_096;
const BUSY: FsError = FsError::Busy {
    retry_after_ms: 100,
};

/// A call that waits.
pub(super) struct Deferred {
    connection: ConnectionId,
    call: MetaCall,
    responder: Responder,
}

impl Owner {
    /// Whether closed content of any of the files is not committed yet; if so, it is recalled from the session that
    /// has to commit it. `shown` is not evaluated while nothing is delegated.
    pub(super) fn is_ahead_of_commits(
        &mut self,
        asker: SessionId,
        shown: impl FnOnce() -> Vec<Shown>,
    ) -> bool {
        if self.is_nothing_delegated() {
            return false;
        }
        let now_ms = self.clock.now_ms();
        let mut waits = false;
        let mut recalls: Vec<(SessionId, Vec<InodeId>)> = Vec::new();
        let is_alive = |session| self.leases.is_alive(now_ms, session);
        // Before the restart, a file may have been delegated to a session that is missing.
        let missing = self
            .sessions
            .missing()
            .any(|other| other != asker && is_alive(other));
        for file in shown() {
            waits |= missing && file.may_be_owed;
            for standing in self.delegations.standings(now_ms, asker, file.ino) {
                let (Standing::Recall(holder) | Standing::Recalled(holder)) = standing;
                if !is_alive(holder) {
                    continue;
                }
                waits = true;
                if standing == Standing::Recalled(holder) {
                    continue;
                }
                self.delegations.recalled(now_ms, holder, file.ino);
                match recalls.iter_mut().find(|(session, _)| *session == holder) {
                    Some((_, inodes)) => inodes.push(file.ino),
                    None => recalls.push((holder, vec![file.ino])),
                }
            }
        }
        let notices = recalls
            .into_iter()
            .map(|(holder, inodes)| (holder, Notice::Recall { inodes }));
        self.announce(notices.collect());
        waits
    }

    /// Whether a mutation has to wait for files that it would show or keep.
    pub(super) fn is_mutation_ahead_of_commits(
        &mut self,
        asker: SessionId,
        awaits: Awaits<'_>,
    ) -> bool {
        if self.is_nothing_delegated() {
            return false;
        }
        let files = match awaits {
            Awaits::Nothing => return false,
            Awaits::Entry((parent, name)) => {
                let found = self.namespace.lookup(&Credentials::root(), parent, name);
                found
                    .ok()
                    .as_ref()
                    .and_then(Shown::of)
                    .into_iter()
                    .collect()
            }
            // It is not worth finding out which of them are below the directory. There may be others, of sessions
            // from before a restart, for which the directory itself is listed.
            Awaits::Below(dir) => {
                let delegated = self.delegations.inodes();
                let file = |ino| Shown {
                    ino,
                    may_be_owed: true,
                };
                delegated.chain([dir]).map(file).collect()
            }
            // Sessions from before a restart may have changed any of them, and declare them when they come back.
            Awaits::Files(inodes) => {
                let file = |ino| Shown {
                    ino,
                    may_be_owed: true,
                };
                inodes.iter().map(file).collect()
            }
        };
        self.is_ahead_of_commits(asker, || files)
    }

    pub(super) fn is_nothing_delegated(&self) -> bool {
        self.delegations.is_empty() && !self.sessions.any_missing()
    }

    /// Keeps a call until it can be answered.
    pub(super) fn defer(&mut self, connection: ConnectionId, call: MetaCall, responder: Responder) {
        if self.deferred.len() >= DEFERRED_MAX {
            return responder.send(&Err(BUSY));
        }
        self.deferred.push(Deferred {
            connection,
            call,
            responder,
        });
    }

    /// Retries the deferred calls after a commit, a returned delegation or a tick. This renews no lease, since the
    /// callers sent nothing; without a lease, what an answer grants would not be noted.
    pub(super) fn ask_deferred(&mut self) {
        if !self.may_answer() {
            return;
        }
        let now_ms = self.clock.now_ms();
        for deferred in std::mem::take(&mut self.deferred) {
            let session = self.session_on(deferred.connection);
            if session.is_ok_and(|session| !self.leases.is_alive(now_ms, session)) {
                deferred.responder.send(&Err(BUSY));
            } else {
                self.meta_now(deferred.connection, deferred.call, deferred.responder);
            }
        }
    }

    /// Notes that the session has committed a file of its delegation, or has given the delegation up.
    pub(super) fn delegation_returned(&mut self, session: SessionId, ino: InodeId) {
        if self.delegations.returned(session, ino) {
            // All of it was replayed.
            if let Some(session) = self.sessions.get_mut(session) {
                session.overtaken.retain(|(other, _)| *other != ino);
            }
            self.deferred_due |= !self.deferred.is_empty();
        }
    }
}

/// A file whose size or content a reply shows.
pub(super) struct Shown {
    ino: InodeId,
    /// A session from before a restart may have committed it, or closed it to commit it later.
    may_be_owed: bool,
}

impl Shown {
    fn of(attr: &Attr) -> Option<Self> {
        (attr.kind == FileKind::Regular).then_some(Self {
            ino: attr.ino,
            may_be_owed: attr.size_bytes == 0,
        })
    }
}

/// The files whose size or content the reply to a query shows. `content` is the file of the extents in it.
pub(super) fn files_shown(content: Option<InodeId>, reply: &MetaReply) -> Vec<Shown> {
    let without_content = matches!(reply, MetaReply::Extents { extents, .. } if extents.is_empty());
    let content = content.map(|ino| Shown {
        ino,
        may_be_owed: without_content,
    });
    let attrs = reply.attrs().filter_map(Shown::of);
    attrs.chain(content).collect()
}
