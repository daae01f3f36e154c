//! Sessions: opening, resuming, ending.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, SessionId};
use harvestfs_protocol::limits::SESSIONS_MAX;
use harvestfs_protocol::meta::{OpenSession, SessionOpened};
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::timeline::Position;
use harvestfs_protocol::types::Timestamp;

use super::{Answer, Owner};
use crate::engine::namespace::{Command, Outcome};
use crate::journal::Lsn;
use crate::server::metrics::Responder;
use crate::server::sessions::{ConnectionId, OpenTo, Returning};

/// When a client that was refused for too many sessions may try again.
const SESSIONS_RETRY_AFTER_MS: u32 = 1_000;

/// Maximum number of expired leases that are recorded in one tick.
const LAPSED_PER_TICK_MAX: usize = 64;
/// Blocks with one replica left whose silent writers are ended in one tick.
const EXPOSED_PER_TICK_MAX: usize = 1_000;

/// Orphans released with one command.
const ORPHANS_PER_COMMAND_MAX: usize = 1_024;

/// The error for a peer that has reached its limit of something.
pub(super) fn peer_limit(what: &str, max: usize) -> FsError {
    FsError::PeerLimit {
        what: what.to_owned(),
        max: u32::try_from(max).unwrap_or(u32::MAX),
    }
}

impl Owner {
    pub(super) fn open_session(
        &mut self,
        connection: ConnectionId,
        open: OpenSession,
        responder: Responder,
    ) {
        let now_ms = self.clock.now_ms();
        let was_alive = |id| self.leases.is_alive(now_ms, id);
        let has_lapsed = !open.resume.is_some_and(was_alive);
        let opened = match open.resume {
            None => self.new_session(connection),
            Some(id) => self.resume_session(connection, id, open.seen),
        };
        let (id, record) = match opened {
            Ok(opened) => opened,
            Err(error) => return responder.send(&Err(error)),
        };
        if let Some(connected) = self.connections.get_mut(&connection) {
            connected.session = Some(id);
        }
        self.set_holds(id, open.holds);
        self.note_overtaken(id, open.delegations.as_deref().unwrap_or_default());
        if has_lapsed {
            // Others no longer waited for it, and now do again: it gets the full time to answer a recall.
            self.delegations.ended(id);
        }
        match &open.delegations {
            Some(inodes) => self.delegations.declared(id, inodes),
            None => self.delegations.ended(id),
        }
        self.sessions.returned(id);
        self.deferred_due = true;
        self.release_orphans_unless_missing();
        self.tell_namenodes(id);
        let reply = Reply::SessionOpened(SessionOpened {
            session: id,
            cluster: self.formatted.cluster,
            block_bytes: self.formatted.block_bytes,
            default_rules: self.formatted.default_rules,
            position: self.authority().position,
            cluster_version: self.settled_version(),
        });
        self.answer(responder, Ok(reply), record.max(Some(self.epoch_record)));
    }

    fn new_session(
        &mut self,
        connection: ConnectionId,
    ) -> Result<(SessionId, Option<Lsn>), FsError> {
        if self.session_of(connection).is_ok() {
            return Err(FsError::Protocol(
                "this connection has a session; close it first".into(),
            ));
        }
        // Without an ID left, the namenode is about to begin another epoch.
        if self.sessions.len() >= SESSIONS_MAX || self.namespace.sessions_left() == 0 {
            return Err(FsError::Busy {
                retry_after_ms: SESSIONS_RETRY_AFTER_MS,
            });
        }
        let connected = self.connections.get(&connection);
        let connected = connected.ok_or(FsError::SessionExpired)?;
        let client = connected.peer.to_string();
        let max = self.options.sessions_per_client_max;
        if self.sessions.of_client(&client) >= max {
            tracing::warn!(client, max, "a client has too many sessions");
            return Err(peer_limit("sessions", max));
        }
        let command = Command::OpenSession {
            client: client.clone(),
            now: Timestamp::now(),
        };
        let (applied, lsn) = self.execute(&command, true)?;
        let Outcome::Session(id) = applied.reply else {
            unexpected_outcome(&applied.reply);
        };
        let now_ms = self.clock.now_ms();
        self.sessions.opened(now_ms, id, client, connection);
        self.leases.opened(now_ms, id);
        // Only the client waits for this record: the namespace shows no trace of it.
        Ok((id, Some(lsn)))
    }

    fn resume_session(
        &mut self,
        connection: ConnectionId,
        id: SessionId,
        seen: Option<Position>,
    ) -> Result<(SessionId, Option<Lsn>), FsError> {
        let last = self.log.last_lsn();
        if seen.is_some_and(|position| !self.namespace.has_been_at(position, last)) {
            tracing::warn!(
                session = %id,
                "a session is not resumed: it saw more than this namenode knows"
            );
            return Err(FsError::SessionExpired);
        }
        if self.session_of(connection).is_ok_and(|own| own != id) {
            return Err(FsError::Protocol(
                "this connection has another session; close it first".into(),
            ));
        }
        let connected = self.connections.get(&connection);
        let connected = connected.ok_or(FsError::SessionExpired)?;
        let is_missing = self.sessions.is_missing(id);
        let session = self.sessions.get_mut(id);
        let session = session.filter(|it| !it.is_expelled);
        let session = session.ok_or(FsError::SessionExpired)?;
        if session.client != connected.peer.to_string() {
            tracing::warn!(
                session = %id, owner = session.client, peer = %connected.peer,
                "a peer tried to resume the session of another"
            );
            return Err(FsError::SessionExpired);
        }
        // Its old connection may still be alive; from now on it has no session.
        session.connection = Some(connection);
        if is_missing || self.namespace.has_lapsed(id) {
            session.returning = Returning::Replays;
        }
        self.heard(id);
        let now_ms = self.clock.now_ms();
        if let Some(notice) = self.leases.repeat(now_ms, id) {
            self.announce(vec![(id, notice)]);
        }
        Ok((id, self.undurable.last()))
    }

    /// Notes that a session is back. If its lease had run out, another leader would not wait for it: that has to
    /// change before the session receives anything that it may cache.
    pub(super) fn returned(&mut self, session: SessionId) -> Result<Option<Lsn>, FsError> {
        if !self.namespace.has_lapsed(session) {
            return Ok(None);
        }
        let command = Command::NoteLease {
            session,
            has_lapsed: false,
        };
        let (_, lsn) = self.execute(&command, true)?;
        Ok(Some(lsn))
    }

    /// Returns the session of a connection and renews its lease.
    pub(super) fn session_of(&mut self, connection: ConnectionId) -> Result<SessionId, FsError> {
        let id = self.session_on(connection)?;
        self.heard(id);
        Ok(id)
    }

    /// Returns the session of a connection without renewing its lease.
    pub(super) fn session_on(&self, connection: ConnectionId) -> Result<SessionId, FsError> {
        let id = self.connections.get(&connection).and_then(|c| c.session);
        let id = id.ok_or(FsError::SessionExpired)?;
        let session = self.sessions.get(id).ok_or(FsError::SessionExpired)?;
        if session.connection != Some(connection) {
            return Err(FsError::SessionExpired);
        }
        Ok(id)
    }

    fn heard(&mut self, id: SessionId) {
        let now_ms = self.clock.now_ms();
        self.sessions.heard(now_ms, id);
        let released = self.leases.heard(now_ms, id);
        self.release(released);
    }

    pub(super) fn acknowledged(
        &mut self,
        connection: ConnectionId,
        notice: u64,
        responder: Responder,
    ) {
        let session = match self.session_of(connection) {
            Ok(session) => session,
            Err(error) => return responder.send(&Err(error)),
        };
        responder.send(&Ok(Reply::Done));
        let released = self.leases.acked(session, notice);
        self.release(released);
    }

    pub(super) fn close_session(&mut self, connection: ConnectionId, responder: Responder) {
        let ended = self.session_of(connection).and_then(|id| {
            let lsn = self.end_session(id, true)?;
            let released = self.leases.closed(id);
            self.release(released);
            Ok(lsn)
        });
        match ended {
            Ok(lsn) => self.answer(responder, Ok(Reply::Done), Some(lsn)),
            Err(error) => responder.send(&Err(error)),
        }
    }

    /// Checks which leases and sessions have expired.
    pub(super) fn end_silent_sessions(&mut self, now_ms: u64) {
        let expired = self.leases.expire(now_ms);
        self.release(expired.released);
        for id in expired.unresponsive {
            tracing::warn!(session = %id, "a session that does not acknowledge notices is ended");
            self.expel_when_lapsed(id);
        }
        let expelled = self.sessions.expelled();
        let mut lapsed: Vec<SessionId> = expelled
            .filter(|id| !self.leases.is_alive(now_ms, *id))
            .collect();
        lapsed.sort_unstable();
        for id in lapsed {
            self.expel(id);
        }
        let timeout_ms = u64::try_from(self.options.session_timeout.as_millis());
        let timeout_ms = timeout_ms.unwrap_or(u64::MAX);
        for id in self.sessions.timed_out(now_ms, timeout_ms) {
            tracing::info!(session = %id, "a session was silent for too long and is ended");
            self.expel(id);
        }
        self.note_lapsed(now_ms);
        self.end_silent_writers(now_ms);
    }

    /// Records which leases have run out. Otherwise a leader that takes over would have to wait for these sessions
    /// with each change, since it does not know when they were last heard.
    fn note_lapsed(&mut self, now_ms: u64) {
        let lapsed = self
            .sessions
            .unconnected()
            .filter(|id| self.leases.has_lapsed(now_ms, *id) && !self.namespace.has_lapsed(*id));
        let mut lapsed: Vec<SessionId> = lapsed.collect();
        lapsed.sort_unstable();
        lapsed.truncate(LAPSED_PER_TICK_MAX);
        self.note_leases_lapsed(&lapsed);
    }

    pub(super) fn note_leases_lapsed(&mut self, lapsed: &[SessionId]) {
        for &session in lapsed {
            let command = Command::NoteLease {
                session,
                has_lapsed: true,
            };
            match self.execute(&command, false) {
                Ok((_, lsn)) => {
                    if let Some(session) = self.sessions.get_mut(session) {
                        session.lapse_noted = lsn;
                    }
                }
                Err(error) => {
                    tracing::error!(%session, %error, "that a lease has run out cannot be written down");
                }
            }
        }
    }

    /// Ends silent writers of blocks with a single replica left. A block is repaired once it is sealed, either by its
    /// writer or by the end of the writer's session. For these blocks, a writer that has lost its lease is not waited
    /// for any longer: it may be gone, and each restart of the namenode restarts its session timeout.
    fn end_silent_writers(&mut self, now_ms: u64) {
        let lease_ms = u64::try_from(self.options.lease.as_millis());
        let lease_ms = lease_ms.unwrap_or(u64::MAX);
        let writers = self.cluster.exposed().filter_map(|block| {
            let writer = self.namespace.block(block)?.writer?;
            let is_silent = self.sessions.is_silent(now_ms, writer, lease_ms);
            is_silent.then_some((writer, block))
        });
        let writers: BTreeMap<SessionId, BlockId> = writers.take(EXPOSED_PER_TICK_MAX).collect();
        for (id, block) in writers {
            tracing::warn!(
                session = %id, %block,
                "a session is silent, and one replica is left of a block that it writes: it is ended"
            );
            self.expel(id);
        }
    }

    /// Ends a session that may have been heard a moment ago. It may use what it has cached until its lease runs out,
    /// and another leader waits only for sessions that it finds open, so the end is recorded only then.
    pub(super) fn expel_when_lapsed(&mut self, id: SessionId) {
        self.leases.revoke(id);
        if let Some(session) = self.sessions.get_mut(id) {
            session.is_expelled = true;
        }
        self.disconnect(id);
    }

    /// Detaches the session from its connection.
    fn disconnect(&mut self, id: SessionId) {
        let session = self.sessions.get_mut(id);
        let connection = session.and_then(|session| session.connection.take());
        if let Some(connected) = connection.and_then(|it| self.connections.get_mut(&it)) {
            connected.session = None;
        }
    }

    /// Ends a session that did not ask for it.
    pub(super) fn expel(&mut self, id: SessionId) {
        match self.end_session(id, false) {
            Ok(_) => self.leases.revoke(id),
            Err(error) => tracing::error!(session = %id, %error, "the session cannot be ended"),
        }
    }

    fn end_session(&mut self, id: SessionId, awaited: bool) -> Result<Lsn, FsError> {
        let command = Command::CloseSession {
            session: id,
            now: Timestamp::now(),
        };
        let (_, lsn) = self.execute(&command, awaited)?;
        self.disconnect(id);
        if self.compactor.is_some_and(|(session, _)| session == id) {
            self.compactor = None;
        }
        self.delegations.ended(id);
        self.deferred_due = true;
        let unheld = self.sessions.removed(id);
        self.release_orphans(unheld);
        self.release_orphans_unless_missing();
        Ok(lsn)
    }

    /// Replaces the session's holds with those that it declared when it was opened or resumed. That it was permitted
    /// to open them is trusted, as credentials are.
    fn set_holds(&mut self, id: SessionId, holds: Vec<InodeId>) {
        let declared: BTreeSet<InodeId> = holds.into_iter().collect();
        let dropped = self.sessions.held_beside(id, &declared);
        let mut unheld = Vec::new();
        for ino in dropped {
            if self.sessions.release(id, ino) {
                unheld.push(ino);
            }
        }
        for ino in declared {
            let known = self.namespace.exists(ino);
            if known
                && !self
                    .sessions
                    .hold(id, ino, OpenTo::Read, self.options.holds_per_session_max)
            {
                tracing::warn!(session = %id, "the session holds more files than it may");
                break;
            }
        }
        self.release_orphans(unheld);
    }

    /// Removes the inodes that have no name left and that no session holds.
    pub(super) fn release_orphans(&mut self, candidates: Vec<InodeId>) {
        if self.timeline.is_recovering() {
            // They are swept again when recovery is over.
            self.sweep_due = true;
            return;
        }
        let orphans: Vec<InodeId> = candidates
            .into_iter()
            .filter(|&ino| !self.sessions.may_be_held(ino) && self.is_orphan(ino))
            .collect();
        for chunk in orphans.chunks(ORPHANS_PER_COMMAND_MAX) {
            let command = Command::ReleaseOrphans {
                inodes: chunk.to_vec(),
                now: Timestamp::now(),
            };
            // No reply waits for this: after a crash it is done again.
            if let Err(error) = self.execute(&command, false) {
                tracing::error!(%error, "orphans cannot be released");
            }
        }
    }

    /// Whether the inode has no name left and is kept only because a session held it.
    fn is_orphan(&self, ino: InodeId) -> bool {
        self.namespace.attr(ino).is_ok_and(|attr| attr.nlink == 0)
    }

    /// After a restart, orphans stay until every session from before it has come back and declared
    /// what it holds, or has timed out.
    pub(super) fn release_orphans_unless_missing(&mut self) {
        if self.timeline.is_recovering() {
            return;
        }
        if self.sweep_due && !self.sessions.any_missing() {
            self.sweep_due = false;
            let orphans = self.namespace.orphans().collect();
            self.release_orphans(orphans);
        }
    }

    /// Sends a mutation's response, or holds it back.
    pub(super) fn answer_mutation(
        &mut self,
        id: u64,
        answer: Answer,
        record: Option<Lsn>,
        waits_for_others: bool,
    ) {
        let mutation = answer.mutation;
        match self.gate.hold(id, answer, record, waits_for_others) {
            Some(answer) => self.send(answer),
            None => {
                if let Some((session, sequence)) = mutation
                    && let Some(session) = self.sessions.get_mut(session)
                {
                    session.unanswered.insert(sequence, id);
                }
            }
        }
    }
}

/// Stops the process: the engine answered a command with the outcome of another kind. The command is in the journal
/// already, so no error could be true.
pub(super) fn unexpected_outcome(outcome: &Outcome) -> ! {
    panic!("the engine answered {outcome:?} to another command");
}
